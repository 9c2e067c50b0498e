"""Every builder: strides against the tensor that its order describes, bytes against the source, and head resharding."""

import itertools
import math

import numpy as np
import pytest

import kvcompile
from kvcompile import Cache, Group, LayoutError, Region, Request, fields
from kvcompile.fields import Arrangement, Part
from tests import oracle, replay
from tests.moves import check_moves

ORDERS = (
    *("hnd", "nhd", "LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"),
    *("LPBNHC", "LPBHNC", "PLBNHC", "LBHPNC", "LBNHPC", "LPHBNC", "HLBPNC"),
)


def small(kind: str, order: str, tokens: int = 4, dcp_sharded: bool = False) -> Arrangement:
    """An arrangement of each kind that has heads, with cells of a few bytes."""
    sizes = {"heads": 4, "tokens": tokens, "order": order, "dcp_sharded": dcp_sharded}
    match kind:
        case "bf16":
            return fields.dense(k_nbytes=4, **sizes)
        case "unequal K and V":
            return fields.dense(k_nbytes=3, v_nbytes=2, **sizes)
        case "K alone":
            return fields.dense(k_nbytes=4, v_nbytes=0, **sizes)
        case "scales by token and head":
            return fields.dense(k_nbytes=2, scales="token_head", scale_nbytes=1, **sizes)
        case "scales by token":
            return fields.dense(k_nbytes=2, scales="token", scale_nbytes=1, **sizes)
        case "scales by head":
            return fields.dense(k_nbytes=2, scales="head", scale_nbytes=1, **sizes)
        case "nvfp4":
            return fields.nvfp4(head_dim=16, **sizes)
        case "padded":
            return fields.dense(k_nbytes=3, align=64, **sizes)
        case "padded nvfp4":
            return fields.nvfp4(head_dim=16, align=256, part_align=8, **sizes)
        case "a head's block as one cell":
            return fields.dense(k_nbytes=4 * tokens, tokens_per_cell=tokens, **{**sizes, "dcp_sharded": False})
    raise AssertionError(kind)


KINDS = (
    *("bf16", "unequal K and V", "K alone", "scales by token and head", "scales by token", "scales by head"),
    *("nvfp4", "padded", "padded nvfp4", "a head's block as one cell"),
)


@pytest.mark.parametrize("order", ORDERS)
def test_strides_are_those_of_the_tensor(order: str) -> None:
    """The law at every index: a cell lies where NumPy has it in an array of the order's shape."""
    letters = fields.arrangement.ordered(order)
    counts = {"L": 2, "B": 3, "P": 2, "H": 2, "N": 4, "C": 4}
    shape = [counts[letter] for letter in letters]
    strides = np.cumprod([1, *shape[:0:-1]])[::-1]
    regions = small("bf16", order).regions(layers=["a", "b"], base=1000, num_blocks=3, tp_rank=1, tp_size=2)
    assert {(r.layer, f.name) for r in regions for f in r.fields} == set(itertools.product("ab", "kv"))
    for region in regions:
        for field in region.fields:
            for block, head, token in np.ndindex(3, 2, 4):
                index = {"L": "ab".index(region.layer), "B": block, "P": "kv".index(field.name), "H": head, "N": token}
                expected = 1000 + sum(strides[letters.index(letter)] * i for letter, i in index.items())
                at = region.base + block * region.block_stride + field.offset
                assert at + head * field.head_stride + token * field.token_stride == expected


def cache_of(arrangement: Arrangement, rank: int, size: int, blocks: int = 6, base: int = 4096) -> Cache:
    regions = arrangement.regions(layers=["a"], base=base, num_blocks=blocks, tp_rank=rank, tp_size=size)
    return Cache(regions, [Group(arrangement.parts[0].tokens)], tp_rank=rank, tp_size=size)


SIZES = ((2, 2), (1, 2), (4, 1), (2, 3), (3, 8))


@pytest.mark.parametrize("kind", KINDS)
def test_head_resharding(kind: str) -> None:
    """Heads move between any TP sizes and orders, also padded and in NVFP4, which connectors refuse."""
    # Where parts differ in heads or in cells, they lie outside that axis.
    axis = {"scales by token": "H", "scales by head": "N"}.get(kind, "C")
    orders = [order for order in ORDERS if _parts_outside(axis, order)]
    for number, (src_size, dst_size) in enumerate(SIZES):
        src_order, dst_order = orders[2 * number % len(orders)], orders[(3 * number + 1) % len(orders)]
        srcs = [cache_of(small(kind, src_order), rank, src_size) for rank in range(src_size)]
        dsts = [cache_of(small(kind, dst_order), rank, dst_size, base=1 << 20) for rank in range(dst_size)]
        moved = check_moves(srcs, dsts, [Request("r", [[3, 4, 1]], [[0, 5, 2]])])
        assert moved == sum(3 * payload(dst.regions, dst) for dst in dsts)


def _parts_outside(axis: str, order: str) -> bool:
    letters = fields.arrangement.ordered(order)
    return letters.index("P") < letters.index(axis)


def payload(regions: tuple[Region, ...], cache: Cache) -> int:
    """Bytes of one kernel block, padding apart."""
    heads = {field.name: len(oracle.shard(field, cache)) for region in regions for field in region.fields}
    return sum(heads[f.name] * f.cells * f.cell_nbytes for region in regions for f in region.fields)


@pytest.mark.parametrize("kind", ["bf16", "nvfp4", "scales by token and head", "padded"])
def test_other_block_sizes(kind: str) -> None:
    srcs = [cache_of(small(kind, "hnd", 4), rank, 2) for rank in range(2)]
    dsts = [cache_of(small(kind, "LBNHC", 6), rank, 4, base=1 << 20) for rank in range(4)]
    check_moves(srcs, dsts, [Request("r", [[5, 4, 1]], [[0, 2]], [0], [0])])


def test_nvfp4_bytes() -> None:
    """vLLM 0.33.0, ``nvfp4_kv_cache_full_dim``: D/2 + D/16; MiniMax-M3's pages are [pages, 2*heads, 128, 72]."""
    for order in ("hnd", "nhd", "LBHPNC"):
        assert fields.nvfp4(heads=4, tokens=128, head_dim=128, order=order).block_nbytes() == 2 * 4 * 128 * 72
    (region,) = fields.nvfp4(heads=4, tokens=128, head_dim=128).regions(layers=[0], base=0, num_blocks=2)
    data, scale = 4 * 128 * 64, 4 * 128 * 8
    assert [field.offset for field in region.fields] == [0, data, data + scale, 2 * data + scale]
    (region,) = fields.nvfp4(heads=4, tokens=128, head_dim=128, order="LBHPNC").regions(
        layers=[0], base=0, num_blocks=2
    )
    assert [(f.offset, f.head_stride, f.token_stride) for f in region.fields] == [
        (0, 18432, 64),
        (8192, 18432, 8),
        (9216, 18432, 64),
        (17408, 18432, 8),
    ]
    with pytest.raises(LayoutError, match="multiple of 16"):
        fields.nvfp4(heads=4, tokens=128, head_dim=72)


def test_fp8_bytes() -> None:
    """vLLM 0.33.0, ``TritonAttentionBackend.customize_spec``: (128 + 4) bytes for K and as many for V."""
    made = fields.dense(heads=8, tokens=16, k_nbytes=128, scales="token_head", order="LBHNC")
    (region,) = made.regions(layers=[0], base=0, num_blocks=1)
    assert made.block_nbytes() == 8 * 16 * 264
    assert [(f.name, f.offset) for f in region.fields] == [("k", 0), ("k_scale", 128), ("v", 132), ("v_scale", 260)]
    assert fields.dense(heads=8, tokens=16, k_nbytes=128, scales="tensor").block_nbytes() == 8 * 16 * 256
    assert fields.dense(heads=8, tokens=16, k_nbytes=128, scales="token").block_nbytes() == 16 * (8 * 256 + 8)
    assert fields.dense(heads=8, tokens=16, k_nbytes=128, scales="head").block_nbytes() == 8 * (16 * 256 + 8)
    with pytest.raises(LayoutError, match="scales is 'row'"):
        fields.dense(heads=8, tokens=16, k_nbytes=128, scales="row")


def test_latent_bytes() -> None:
    """DeepSeek-V3.2: 1,152 and, in vLLM 0.33.0, 656 and 132 bytes a token; all keys of a block before its scales."""
    assert fields.latent(tokens=64, cell_nbytes=1152).block_nbytes() == 73728
    assert fields.latent(tokens=64, cell_nbytes=fields.FP8_DS_MLA_NBYTES).block_nbytes() == 64 * 656
    (region,) = fields.indexer(tokens=64, head_dim=128).regions(layers=[0], base=0, num_blocks=2)
    assert region.block_stride == 64 * 132
    assert [(f.name, f.offset, f.token_stride) for f in region.fields] == [
        ("indexer", 0, 128),
        ("indexer_scale", 8192, 4),
    ]


def test_compressed_bytes() -> None:
    """DeepSeek-V4 in vLLM 0.33.0: 584 bytes a cell of 4 or 128 tokens, pages of 256 tokens padded to 576."""
    for per_cell, cells, page in ((4, 64, 37440), (128, 2, 1728), (1, 256, 149760)):
        (region,) = fields.compressed(tokens=256, tokens_per_cell=per_cell).regions(layers=[0], base=0, num_blocks=3)
        assert region.block_stride == page
        assert [(f.cells, f.cell_nbytes, f.offset) for f in region.fields] == [(cells, 576, 0), (cells, 8, cells * 576)]


def test_compressed_cells_move() -> None:
    """Cells of four tokens, between blocks of 8 and of 12 tokens; other tokens a cell on the two sides are refused."""
    srcs, dsts = (
        [cache_of(fields.compressed(tokens=n, tokens_per_cell=4, cell_nbytes=5, scale_nbytes=1), 0, 1, base=base)]
        for n, base in ((8, 4096), (12, 1 << 20))
    )
    check_moves(srcs, dsts, [Request("r", [[5, 4, 1]], [[0, 2]], [0], [0])])
    other = cache_of(fields.compressed(tokens=8, tokens_per_cell=8, cell_nbytes=5, scale_nbytes=1), 0, 1)
    with pytest.raises(LayoutError, match="tokens_per_cell is 4 on src and 8 on dst"):
        kvcompile.compile(srcs[0], other)


def test_indexer_beside_a_latent() -> None:
    """Other cell size, other kernel blocks, whole on every rank: exactly one rank sends each."""

    def caches(size: int, latent_tokens: int, indexer_tokens: int, base: int) -> list[Cache]:
        made = []
        for rank in range(size):
            common = {"layers": ["a"], "tp_rank": rank, "tp_size": size}
            latent = fields.latent(tokens=latent_tokens, cell_nbytes=9).regions(
                base=base, num_blocks=48 // latent_tokens, kernel_blocks=8 // latent_tokens, **common
            )
            indexer = fields.indexer(tokens=indexer_tokens, head_dim=4, scale_nbytes=1).regions(
                base=base + 1000, num_blocks=48 // indexer_tokens, kernel_blocks=8 // indexer_tokens, **common
            )
            made.append(Cache([*latent, *indexer], [Group(8)], tp_rank=rank, tp_size=size))
        return made

    check_moves(caches(4, 8, 2, 4096), caches(2, 1, 4, 1 << 20), [Request("r", [[3, 4, 1]], [[0, 5, 2]])])


STATES = {
    "mamba1": lambda order: fields.mamba1(channels=8, state_size=3, kernel=4, order=order),
    "mamba2": lambda order: fields.mamba2(heads=8, head_dim=2, groups=2, state_size=3, kernel=4, order=order),
    "gdn": lambda order: fields.gdn(k_heads=4, v_heads=8, k_dim=2, v_dim=1, kernel=4, order=order),
    "kda": lambda order: fields.kda(heads=8, head_dim=2, kernel=4, order=order),
    "linear": lambda order: fields.linear(heads=8, head_dim=2),
}


def state_caches(kind: str, order: str, size: int, base: int, align: int = 1) -> list[Cache]:
    made = []
    for rank in range(size):
        regions = fields.stack(
            STATES[kind](order), layers=["a"], base=base, num_blocks=4, tp_rank=rank, tp_size=size, align=align
        )
        made.append(Cache(regions, [Group(16, state=True)], tp_rank=rank, tp_size=size))
    return made


@pytest.mark.parametrize("order", ["row_first", "dim_first"])
@pytest.mark.parametrize("kind", STATES)
def test_state_moves(kind: str, order: str) -> None:
    """Convolution cut by projection and temporal state by heads; B and C replicated on more ranks than groups."""
    for src_size, dst_size in ((2, 2), (1, 4), (4, 2), (2, 8), (8, 4), (2, 3)):
        if (src_size, dst_size) == (2, 3) and kind == "gdn":
            continue  # four key heads on three ranks are not half of eight value heads: engines refuse that
        srcs = state_caches(kind, order, src_size, 4096)
        dsts = state_caches(kind, order, dst_size, 1 << 20, align=64)
        moved = check_moves(srcs, dsts, [Request("r", [[3]], [[1]])])
        assert moved == sum(payload(dst.regions, dst) for dst in dsts)


def test_case_19_projections_are_cut_apart() -> None:
    """cases.md 19: 3 rows BF16, Q=K=256 and V=512 columns on a src rank; TP2 to TP4, an odd dst rank."""
    conv = [
        fields.conv(
            [
                fields.Projection("conv_q", 4, 128),
                fields.Projection("conv_k", 4, 128),
                fields.Projection("conv_v", 8, 128),
            ],
            rows=3,
            order="dim_first",
        )
    ]
    src, dst = (
        Cache(
            fields.stack(conv, layers=["a"], base=base, num_blocks=2, tp_rank=rank, tp_size=size),
            [Group(1, state=True)],
            tp_rank=rank,
            tp_size=size,
        )
        for rank, size, base in ((0, 2, 0), (1, 4, 1 << 20))
    )
    built = kvcompile.compile(src, dst).build([Request("r", [[0]], [[0]])])
    assert replay.triples(built) == [
        (768, 1 << 20, 768),
        (2304, (1 << 20) + 768, 768),
        (4608, (1 << 20) + 1536, 1536),
    ]


def test_conv_orders_move_into_each_other_by_channel() -> None:
    projections = [fields.Projection("conv_x", 4, 2), fields.Projection("conv_b", 2, 3)]
    src, dst = (
        Cache(
            fields.stack(
                [fields.conv(projections, rows=3, order=order, by_channel=True)], layers=["a"], base=base, num_blocks=2
            ),
            [Group(1, state=True)],
        )
        for order, base in (("row_first", 0), ("dim_first", 4096))
    )
    check_moves([src], [dst], [Request("r", [[1]], [[0]])])
    by_head = [
        Cache(
            fields.stack([fields.conv(projections, rows=3, order=order)], layers=["a"], base=0, num_blocks=2),
            [Group(1, state=True)],
        )
        for order in ("row_first", "dim_first")
    ]
    with pytest.raises(LayoutError, match=r"layer 'a', field 'conv_x': .* on src and .* on dst"):
        kvcompile.compile(*by_head)


@pytest.mark.parametrize("order", ["LBNCH", "LBCHN", "BHCN"])
def test_heads_inside_a_cell_are_refused(order: str) -> None:
    with pytest.raises(LayoutError, match=r"inside a cell.*cannot be cut"):
        fields.dense(heads=4, tokens=4, k_nbytes=4, order=order)


@pytest.mark.parametrize("order", ["", "hdn", "LBHNCX", "LLBHNC", 3])
def test_orders_that_are_none(order: object) -> None:
    if order == "":  # no letter at all: every one is where it usually is
        assert fields.arrangement.ordered(order) == "LBHNPC"
        return
    with pytest.raises(LayoutError, match="order is"):
        fields.dense(heads=4, tokens=4, k_nbytes=4, order=order)


def test_a_rank_s_heads_in_one_cell_move_at_equal_tp_only() -> None:
    """A layout that cannot be cut: whole ranks move, and other TP sizes are refused by what the two sides hold."""

    def caches(size: int) -> list[Cache]:
        return [
            cache_of(fields.whole("kv", tp_size=size, tokens=4, cell_nbytes=32 // size), r, size) for r in range(size)
        ]

    check_moves(caches(2), caches(2), [Request("r", [[1]], [[2]])])
    with pytest.raises(LayoutError, match=r"layer .a., field .kv.: heads is 2 on src and 4 on dst .*cannot be cut"):
        kvcompile.compile(caches(2)[0], caches(4)[0])


def test_parts_with_other_heads_cannot_share_a_cell() -> None:
    with pytest.raises(LayoutError, match=r"heads outside parts.*k 4, k_scale 1, v 4, v_scale 1"):
        cache_of(small("scales by token", "LBHNC"), 0, 1)


def test_packed_rows_and_overlaid_groups() -> None:
    """Two groups share rows of memory: blocks of all layers, at equal ids; a layer's block is a stretch of the row."""
    dense, latent = small("bf16", "BLHNC"), fields.latent(tokens=4, cell_nbytes=9, order="BLNC")

    def cache(base: int, row: int) -> Cache:
        a = dense.regions(layers=["a", "b"], base=base, num_blocks=6, group=0, block_stride=row)
        c = latent.regions(layers=["c", "d", "e"], base=base, num_blocks=6, group=1, block_stride=row)
        return Cache(a + c, [Group(4), Group(4, null_block=0)])

    src, dst = cache(4096, 256), cache(1 << 20, 300)
    assert src.overlays == (0, 0)
    request = Request("r", [[1, 2], [0, 4, 3]], [[5, 4], [0, 1, 2]])
    check_moves([src], [dst], [request])
    failed = kvcompile.compile(src, dst).build([Request("r", [[1, 2], [4]], [[5, 4], [4]])]).failed
    assert list(failed) == ["r"]


def test_draft_layers_have_heads_of_their_own() -> None:
    """cases.md 7: H=8, TP8 to TP4, a sharded draft beside a latent: two src ranks a dst rank, one the latent."""

    def caches(size: int, base: int) -> list[Cache]:
        made = []
        for rank in range(size):
            common = {"num_blocks": 4, "tp_rank": rank, "tp_size": size}
            main = fields.latent(tokens=16, cell_nbytes=1152).regions(layers=["main"], base=base, **common)
            draft = fields.dense(heads=8, tokens=16, k_nbytes=256).regions(
                layers=["draft"], base=base + 18432 * 4, **common
            )
            made.append(Cache([*main, *draft], [Group(16)], tp_rank=rank, tp_size=size))
        return made

    srcs, dsts = caches(8, 0), caches(4, 1 << 30)
    moved = [[kvcompile.compile(src, dst).build([Request("r", [[0]], [[0]])]).nbytes for src in srcs] for dst in dsts]
    for rank, sizes in enumerate(moved):
        expected = [0] * 8
        expected[2 * rank], expected[2 * rank + 1] = 8192 + 18432, 8192
        assert sizes == expected


def test_stack_takes_blocks_with_layers_and_blocks_outermost() -> None:
    with pytest.raises(LayoutError, match="L and B outermost"):
        fields.stack([small("bf16", "LHBNC")], layers=["a"], base=0, num_blocks=2)


def test_part_knows_its_cells() -> None:
    part = Part("compressed", 1, 256, 576, True, False, 4)
    assert (part.cells, part.local_heads(3, 8)) == (64, 1)
    assert math.prod(part[1:4]) == 256 * 576
    assert repr(Arrangement([part], "LBNC")) == "Arrangement(compressed; LBHNPC)"
