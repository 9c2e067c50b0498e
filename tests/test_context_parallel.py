"""Decode context parallelism: tokens dealt out to ranks, on either side, over replicated and head-sharded fields."""

import itertools

import pytest

import kvcompile
from kvcompile import Cache, Field, Group, LayoutError, Region, Request, models
from tests import replay
from tests.moves import check_moves


def cache_of(
    field: Field,
    *,
    rank: int,
    size: int,
    dcp: int,
    interleave: int,
    kernel_blocks: int = 1,
    base: int = 0,
    blocks: int = 72,
) -> Cache:
    block_size = kernel_blocks * field.tokens * dcp
    stride = 4 * field.tokens * field.cell_nbytes
    region = Region("a", 0, base, stride, blocks, (field,), kernel_blocks)
    return Cache([region], [Group(block_size)], tp_rank=rank, tp_size=size, dcp_size=dcp, dcp_interleave=interleave)


def test_case_32_two_ranks_to_one() -> None:
    """vllm#34975: src TP2 dcp 2, interleave 16, kernel block 16 (32 tokens a block id); dst TP1, blocks of 16."""
    latent = {"heads": 1, "tokens": 16, "cell_nbytes": 1152, "replicated": True}
    src = [
        cache_of(Field.hnd("latent", dcp_sharded=True, **latent), rank=rank, size=2, dcp=2, interleave=16)
        for rank in (0, 1)
    ]
    dst = cache_of(Field.hnd("latent", **latent), rank=0, size=1, dcp=1, interleave=1, base=1 << 30)
    request = Request("r", [[4]], [[10, 11]], [0], [0])
    stride = 4 * 16 * 1152
    found = [replay.triples(kvcompile.compile(cache, dst).build([request])) for cache in src]
    assert found == [
        [(4 * stride, (1 << 30) + 10 * stride, 16 * 1152)],
        [(4 * stride, (1 << 30) + 11 * stride, 16 * 1152)],
    ]


def test_case_33_one_token_in_eight() -> None:
    """sglang#35186: dst dcp 8, interleave 1, 576 bytes a token: token t on rank t%8, src t*576, dst (t//8)*576."""
    field = {"heads": 1, "cell_nbytes": 576, "replicated": True}
    src = cache_of(Field.hnd("latent", tokens=64, **field), rank=0, size=1, dcp=1, interleave=1)
    for rank in range(8):
        sharded = Field.hnd("latent", tokens=8, dcp_sharded=True, **field)
        dst = cache_of(sharded, rank=rank, size=8, dcp=8, interleave=1, base=1 << 30)
        plan = kvcompile.compile(src, dst)
        found = replay.triples(plan.build([Request("r", [[0]], [[0]])]))
        assert found == [(t * 576, (1 << 30) + t // 8 * 576, 576) for t in range(rank, 64, 8)]
        assert "merge" in plan.explain()


SIDES = [(1, 1, 1), (2, 2, 1), (2, 2, 2), (4, 2, 4), (4, 4, 1), (8, 4, 2), (3, 3, 1)]
"""TP size, dcp size, interleave."""


@pytest.mark.parametrize(("src_side", "dst_side"), list(itertools.product(SIDES, SIDES[::2])))
def test_replicated_fields(src_side: tuple[int, int, int], dst_side: tuple[int, int, int]) -> None:
    """Any sizes and interleaves move into any others; each dst byte comes from one rank that has its token."""

    def side(tp_size: int, dcp: int, interleave: int, tokens: int, base: int) -> list[Cache]:
        sharded = {"replicated": True, "dcp_sharded": dcp > 1, "cell_nbytes": 3}
        field = Field.hnd("latent", heads=1, tokens=tokens, **sharded)
        return [
            cache_of(field, rank=rank, size=tp_size, dcp=dcp, interleave=interleave, kernel_blocks=2, base=base)
            for rank in range(tp_size)
        ]

    srcs, dsts = side(*src_side, 4, 4096), side(*dst_side, 2, 1 << 20)
    src_size, dst_size = (caches[0].groups[0].block_size for caches in (srcs, dsts))
    tokens = 3 * src_size
    dst_blocks = list(range(35, 35 - -(-tokens // dst_size), -1))
    moved = check_moves(srcs, dsts, [Request("r", [[5, 6, 2]], [dst_blocks], [0], [0], tokens)])
    copies = dst_side[0] // dst_side[1]  # ranks that hold the same tokens
    covered = min(tokens, len(dst_blocks) * dst_size)
    assert moved == covered * 3 * copies


@pytest.mark.parametrize("election", ["nearest", "balanced", "striped"])
def test_head_sharded_fields(election: str) -> None:
    """Two heads on eight ranks, each token of a head on one of two or four of them; to and from other sizes."""

    def side(tp_size: int, dcp: int, interleave: int, base: int) -> list[Cache]:
        made = []
        for rank in range(tp_size):
            nhd = {"heads": 2, "local_heads": max(1, 2 // tp_size), "dcp_sharded": dcp > 1}
            field = Field.nhd("kv", tokens=4, cell_nbytes=3, **nhd)
            made.append(cache_of(field, rank=rank, size=tp_size, dcp=dcp, interleave=interleave, base=base))
        return made

    sides = [(8, 2, 2), (8, 4, 1), (4, 2, 4), (2, 1, 1), (1, 1, 1), (8, 1, 1)]
    for number, (src_side, dst_side) in enumerate(itertools.product(sides, sides)):
        if number % 2 and election != "nearest":
            continue
        srcs, dsts = side(*src_side, 4096), side(*dst_side, 1 << 20)
        src_size, dst_size = (caches[0].groups[0].block_size for caches in (srcs, dsts))
        tokens = 2 * max(src_size, dst_size)
        src_blocks = [(7 * n) % 24 for n in range(tokens // src_size)]
        dst_blocks = [(5 * n + 3) % 24 for n in range(tokens // dst_size)]
        moved = check_moves(srcs, dsts, [Request("r", [src_blocks], [dst_blocks], [0], [0])], election)
        heads = sum(len(range(*dst.shard(dst.regions[0].fields[0]))) for dst in dsts)
        assert moved == tokens * 3 * heads // dst_side[1]


def test_what_is_refused() -> None:
    latent = {"heads": 1, "tokens": 4, "cell_nbytes": 3, "replicated": True}
    with pytest.raises(LayoutError, match="dcp_size is 2, expected a divisor of tp_size 3"):
        cache_of(Field.hnd("a", dcp_sharded=True, **latent), rank=0, size=3, dcp=2, interleave=1)
    with pytest.raises(LayoutError, match="multiple of dcp_interleave 8"):
        cache_of(Field.hnd("a", dcp_sharded=True, **latent), rank=0, size=2, dcp=2, interleave=8)
    with pytest.raises(LayoutError, match="tokens_per_cell"):
        Field.hnd("a", dcp_sharded=True, tokens_per_cell=2, **latent)


def test_groups_of_a_hybrid_model() -> None:
    """Attention is dealt out, windows and state are not; a block id of attention stands for all ranks' tokens."""
    layers = [
        models.Layer("a", (models.Attention(2, 8),)),
        models.Layer("b", (models.Attention(2, 8, window=32),)),
    ]
    gpt = models.caches(layers, tp_size=4, dcp_size=2, dcp_interleave=4, block_size=8)
    assert [(group.block_size, group.null_block) for group in gpt[0].groups] == [(16, None), (8, 0)]
    assert [{field.dcp_sharded for field in region.fields} for region in gpt[0].regions] == [{True}, {False}]
