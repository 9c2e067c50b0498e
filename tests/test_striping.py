"""``election="striped"``: all paired holders share the periods of a request's overlap, cut before nulls are dropped."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcompile
from kvcompile import Cache, Field, Group, Region, Request
from kvcompile.engines import LocalEngine
from tests import replay
from tests.helpers import emitted, one_region

A, B = 2**40, 2**50


def mla(base: int, rank: int, size: int, *, block: int = 64, blocks: int = 128, null: int | None = None) -> Cache:
    """Make one rank of DeepSeek-V3: three of its layers, 576 values in BF16 a token, whole on every rank."""
    field = Field.hnd("latent", heads=1, tokens=block, cell_nbytes=1152, replicated=True)
    regions = [Region(n, 0, base + n * 2**30, block * 1152, blocks, [field]) for n in range(3)]
    return Cache(regions, [Group(block, null)], tp_rank=rank, tp_size=size)


def blocks_sent(rank: int, request: Request, **how: int | None) -> list[int]:
    """Return the dst blocks of layer 0 that a rank of eight sends to TP1."""
    plan = kvcompile.compile(mla(A, rank, 8, **how), mla(B, 0, 1, **how), election="striped", layers=[0])
    built = plan.build([request])
    assert built.failed == {}
    nbytes = 1152 * (how.get("block") or 64)
    return sorted(
        (dst - B + at) // nbytes for _, dst, length in replay.triples(built) for at in range(0, length, nbytes)
    )


def test_eight_ranks_send_an_eighth_each() -> None:
    """DeepSeek-V3 MLA, TP8 to TP1."""
    request = Request("r", [list(range(64))], [list(range(40, 104))])
    assert [blocks_sent(rank, request) for rank in range(8)] == [
        list(range(40 + 8 * rank, 48 + 8 * rank)) for rank in range(8)
    ]


def test_what_eight_does_not_divide() -> None:
    """Eleven blocks: holder k takes [k*11//8, (k+1)*11//8). Fewer blocks than holders: some send nothing."""
    request = Request("r", [list(range(11))], [list(range(11))])
    sent = [blocks_sent(rank, request) for rank in range(8)]
    assert sent == [[0], [1], [2, 3], [4], [5], [6, 7], [8], [9, 10]]
    assert [blocks_sent(rank, Request("r", [[5, 6]], [[1, 2]])) for rank in range(8)] == [[]] * 3 + [[1]] + [[]] * 3 + [
        [2]
    ]
    assert [blocks_sent(rank, Request("r", [[5, 6]], [[]])) for rank in range(8)] == [[]] * 8


def test_the_overlap_is_cut_not_the_lists() -> None:
    """A prefix hit: only what both sides give is shared out; with positions likewise."""
    tail = Request("r", [list(range(100))], [list(range(16))])
    by_position = Request("r", [list(range(50))], [list(range(30))], [10], [34])  # src [10, 60), dst [34, 64)
    for rank in range(8):
        assert blocks_sent(rank, tail) == [2 * rank, 2 * rank + 1]
        assert blocks_sent(rank, by_position) == list(range(rank * 26 // 8, (rank + 1) * 26 // 8))


def test_nulls_are_dropped_after_the_cut() -> None:
    """A window's nulls stand in the overlap, so that both sides cut alike whatever is null."""
    src = [0] * 8 + list(range(1, 9))
    request = Request("r", [src], [list(range(20, 36))])
    sent = [blocks_sent(rank, request, null=0) for rank in range(8)]
    assert sent == [[]] * 4 + [[28, 29], [30, 31], [32, 33], [34, 35]]


def test_blocks_of_other_sizes_are_shared_out_by_period() -> None:
    """16 tokens into 64: a period is one dst block; the overlap touches five of them, the first one in part."""
    found = []
    for rank in range(8):
        plan = kvcompile.compile(mla(A, rank, 8, block=16), mla(B, 0, 1, block=64), election="striped", layers=[0])
        found.append(emitted(plan, list(range(18)), list(range(5)), src_first=[2], dst_first=[0]))
    small = 16 * 1152
    assert found == [
        [],
        [(A, B + 2 * small, 2 * small)],  # period 0, from its third quarter
        [],
        [(A + 2 * small, B + 4 * small, 4 * small)],
        [(A + 6 * small, B + 8 * small, 4 * small)],
        [],
        [(A + 10 * small, B + 12 * small, 4 * small)],
        [(A + 14 * small, B + 16 * small, 4 * small)],
    ]


SHARES = [
    # heads, src size, dst size, dst rank, replicated -> {src rank: (heads, part, parts)}
    (1, 8, 2, 1, True, {4: (0, 0, 4), 5: (0, 1, 4), 6: (0, 2, 4), 7: (0, 3, 4)}),  # the paired ones
    (1, 2, 8, 3, True, {0: (0, 0, 1)}),
    (1, 3, 2, 0, True, {0: (0, 0, 2), 1: (0, 1, 2)}),
    (1, 3, 2, 1, True, {2: (0, 0, 1)}),
    (4, 8, 8, 5, False, {5: (2, 0, 1)}),
    (1, 8, 2, 0, False, {0: (0, 0, 4), 1: (0, 1, 4), 2: (0, 2, 4), 3: (0, 3, 4)}),
    (2, 6, 4, 1, False, {2: (0, 0, 1)}),  # holders 0, 1, 2 of head 0; paired with dst rank 1: 2
    # Head 2 is with ranks 4 and 5, neither of which is paired with dst rank 2: then all its holders share.
    (4, 8, 3, 2, False, {4: (2, 0, 2), 5: (2, 1, 2), 6: (3, 0, 2), 7: (3, 1, 2)}),
]


@pytest.mark.parametrize(("heads", "src_size", "dst_size", "dst_rank", "replicated", "expected"), SHARES)
def test_who_takes_which_part(
    heads: int, src_size: int, dst_size: int, dst_rank: int, replicated: bool, expected: dict[int, tuple[int, int, int]]
) -> None:
    field = Field.hnd("kv", heads=heads, tokens=1, cell_nbytes=16, replicated=replicated)
    dst, found = one_region(field, base=B, stride=16 * heads, tp=(dst_rank, dst_size)), {}
    for rank in range(src_size):
        src = one_region(field, base=A, stride=16 * heads, tp=(rank, src_size))
        for row in kvcompile.compile(src, dst, election="striped").table:
            first = 0 if replicated else rank * heads // src_size
            found[rank] = (first + int(row["src_origin"] - A) // 16, int(row["part"]), int(row["parts"]))
    assert found == expected


def mixed(base: int, rank: int, size: int, memory_blocks: int = 16) -> Cache:
    """MLA beside a draft layer whose eight heads tensor parallelism divides, and one of four heads with replicas."""
    regions = [
        Region(
            "mla", 0, base, 64, memory_blocks, [Field.hnd("latent", heads=1, tokens=4, cell_nbytes=16, replicated=True)]
        )
    ]
    for number, heads in enumerate((8, 4)):
        local = max(1, heads // size)
        field = Field.hnd("kv", heads=heads, tokens=4, cell_nbytes=4)
        regions.append(Region(f"gqa.{heads}", 0, base + (1 + number) * 2**16, local * 16, memory_blocks, [field]))
    return Cache(regions, [Group(4)], tp_rank=rank, tp_size=size)


@pytest.mark.parametrize(("src_size", "dst_size"), [(8, 1), (8, 2), (4, 8), (8, 4), (2, 2)])
def test_proved_with_head_sharded_fields_beside(src_size: int, dst_size: int) -> None:
    srcs = [mixed(A + (rank << 30), rank, src_size) for rank in range(src_size)]
    dsts = [mixed(B + (rank << 30), rank, dst_size) for rank in range(dst_size)]
    plans = {
        (i, j): kvcompile.compile(src, dst, election="striped")
        for i, src in enumerate(srcs)
        for j, dst in enumerate(dsts)
    }
    proof = kvcompile.prove(srcs, dsts, plans)
    assert proof.exact, str(proof)
    if (src_size, dst_size) == (8, 1):
        lost = {pair: plan for pair, plan in plans.items() if pair != (3, 0)}
        lost[3, 0] = plans[3, 0].with_table(plans[3, 0].table[:0])
        broken = kvcompile.prove(srcs, dsts, lost)
        assert {finding.layer for finding in broken.missing} == {"mla", "gqa.8", "gqa.4"}


def test_moved_from_eight_ranks() -> None:
    """Real bytes: each of eight engines writes its eighth; together they are the whole, and nothing else changes."""
    field = Field.hnd("latent", heads=1, tokens=16, cell_nbytes=64, replicated=True)
    content = np.random.default_rng(0).integers(1, 255, (2, 40, 1024), np.uint8)
    copies, target = [content.copy() for _ in range(8)], np.zeros((2, 64, 1024), np.uint8)

    def described(memory: np.ndarray, rank: int, size: int) -> Cache:
        regions = [Region(n, 0, memory[n].ctypes.data, 1024, memory.shape[1], [field]) for n in (0, 1)]
        return Cache(regions, [Group(16)], tp_rank=rank, tp_size=size)

    decode = LocalEngine()
    dst = decode.register(described(target, 0, 1))
    src_ids, dst_ids = list(range(3, 30)), list(range(20, 47))
    sent = []
    for rank in range(8):
        prefill = LocalEngine()
        src = prefill.register(described(copies[rank], rank, 8))
        built = kvcompile.compile(src, dst, election="striped").build([Request("r", [src_ids], [dst_ids])])
        prefill.write(decode.session, built)
        sent.append(built.nbytes)
    assert sent == [2 * 1024 * ((rank + 1) * 27 // 8 - rank * 27 // 8) for rank in range(8)]
    np.testing.assert_array_equal(target[:, dst_ids], content[:, src_ids])
    assert not np.delete(target, dst_ids, axis=1).any()


@settings(max_examples=40)
@given(st.data())
def test_parts_add_up(data: st.DataObject) -> None:
    """Whatever the sizes, the shares of all src ranks are the blocks of one that sends alone, each once."""
    src_size, dst_size = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    dst_rank = data.draw(st.integers(0, dst_size - 1))
    blocks = data.draw(st.sampled_from([(16, 16), (16, 32), (48, 32)]))
    count = data.draw(st.integers(0, 20))
    starts = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    lists = [data.draw(st.permutations(range(1, count + 1))) for _ in range(2)]
    if count > 2:
        lists[0][data.draw(st.integers(0, count - 1))] = 0
    request = Request("r", lists[:1], lists[1:], starts[:1], starts[1:])
    dst = mla(B, dst_rank, dst_size, block=blocks[1])
    moved: dict[str, list[tuple[int, int]]] = {}
    for election in ("striped", "nearest"):
        plans = [
            kvcompile.compile(mla(A, rank, src_size, block=blocks[0], null=0), dst, election=election)
            for rank in range(src_size)
        ]
        found = [triple for plan in plans for triple in replay.triples(plan.build([request], max_length=1152))]
        moved[election] = sorted(found)
    assert moved["striped"] == moved["nearest"]
