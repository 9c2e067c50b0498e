"""cases.md, continued: which blocks pair, layers, width, merging and batches."""

import array

import numpy as np
import pytest

import kvcompile
from kvcompile import Buffer, Cache, Field, Group, LayoutError, Region, Request
from tests import replay
from tests.helpers import emitted, one_region

A, B = 2**40, 2**50


def cache(base: int, *, null: int | None = None, block_size: int = 16, blocks: int = 64, nbytes: int = 64) -> Cache:
    """Make one layer whose blocks take ``nbytes`` bytes, packed."""
    field = Field.hnd("k", heads=1, tokens=block_size, cell_nbytes=nbytes // block_size)
    return one_region(field, base=base, stride=nbytes, blocks=blocks, null=null)


def paired(plan: kvcompile.Plan, request: Request) -> list[tuple[int, int]]:
    """Return the (src id, dst id) pairs of a request, in order; ids must not make runs."""
    built = plan.build([request])
    assert built.failed == {}
    return [
        ((src - A) // 64, (dst - B) // 64) for src, dst, length in replay.triples(built) for _ in range(length // 64)
    ]


# Which blocks pair


@pytest.mark.parametrize(
    ("src", "dst", "pairs", "uncovered"),
    [
        ([0, 0, 0, 0, 0, 6, 7], [4, 5], [(6, 4), (7, 5)], {}),
        ([0, 6, 7], [3, 4, 5], [(6, 4), (7, 5)], {"r": [(0, 0)]}),
        ([6, 7], [0, 5], [(7, 5)], {}),
    ],
)
def test_case_24_nulls_are_dropped_after_alignment(
    src: list[int], dst: list[int], pairs: list[tuple[int, int]], uncovered: dict[str, list[tuple[int, int]]]
) -> None:
    built = kvcompile.compile(cache(A, null=0), cache(B, null=0)).build([Request("r", [src], [dst])])
    assert sorted(replay.moved(replay.triples(built))) == sorted(
        (A + a * 64 + byte, B + b * 64 + byte) for a, b in pairs for byte in range(64)
    )
    assert built.uncovered == uncovered


def test_case_25_positions_pair_not_counts() -> None:
    plan = kvcompile.compile(cache(A, block_size=64), cache(B, block_size=64))
    built = plan.build([Request("r", [list(range(32))], [[50, 60]], [0], [31])])
    assert replay.triples(built) == [(A + 31 * 64, B + 50 * 64, 64)]
    assert built.uncovered == {"r": [(0, 32)]}


def test_case_26_a_prefix_hit_trims_the_head() -> None:
    plan = kvcompile.compile(cache(A), cache(B))
    assert replay.triples(plan.build([Request("r", [[10, 11, 12, 13]], [[7, 8]])])) == [(A + 12 * 64, B + 7 * 64, 128)]


def test_case_27_counts() -> None:
    plan = kvcompile.compile(cache(A), cache(B))
    assert paired(plan, Request("r", [[3, 9, 5]], [[1]])) == [(5, 1)]
    assert paired(plan, Request("r", [[3, 9, 5]], [[]])) == []
    built = plan.build([Request("short", [[]], [[1, 2]]), Request("good", [[3]], [[4]])])
    assert list(built.failed) == ["short"]
    assert built.spans.tolist() == [0, 0, 1]
    assert replay.triples(built) == [(A + 3 * 64, B + 4 * 64, 64)]


def test_case_28_the_same_dst_block_twice() -> None:
    plan = kvcompile.compile(cache(A), cache(B))
    batch = [Request("a", [[1, 2]], [[5, 6]]), Request("b", [[3]], [[6]]), Request("c", [[4]], [[9]])]
    built = plan.build(batch)
    assert set(built.failed) == {"a", "b"}
    assert replay.triples(built) == [(A + 4 * 64, B + 9 * 64, 64)]


# Layers


def stage(base: int, layers: range) -> Cache:
    """Make a stage with a K and a V region for each layer."""
    k, v = (Field.hnd(name, heads=1, tokens=16, cell_nbytes=4) for name in "kv")
    regions = []
    for number in layers:
        place = base + number * 2**20
        regions += [
            Region(f"layer.{number}", 0, place, 64, 8, [k]),
            Region(f"layer.{number}", 0, place + 2**16, 64, 8, [v]),
        ]
    return Cache(regions, [Group(16)])


def test_case_29_pipeline_stages() -> None:
    src = stage(A, range(4, 8))
    whole, empty = (kvcompile.compile(src, stage(B, layers)) for layers in (range(8), range(8, 16)))
    found = emitted(whole, [2], [3])
    places = [number * 2**20 + half for number in range(4, 8) for half in (0, 2**16)]
    assert found == [(A + place + 128, B + place + 192, 64) for place in places]
    assert len(empty.table) == 0
    built = empty.build([Request("r", [[2]], [[3]])])
    assert (len(built), built.failed, built.spans.tolist()) == (0, {}, [0, 0])


def test_case_31_fifteen_layers_as_seven_and_eight() -> None:
    dst, found = stage(B, range(15)), []
    for layers in (range(7), range(7, 15)):
        src = stage(A, layers)
        assert len(src.buffers) == 2 * len(layers)
        found += emitted(kvcompile.compile(src, dst), [1], [2])
    places = [number * 2**20 + half for number in range(15) for half in (0, 2**16)]
    assert len(places) == 30
    assert found == [(A + place + 64, B + place + 128, 64) for place in places]


# Width


@pytest.mark.parametrize("make", [list, lambda ids: np.array(ids, np.int32), lambda ids: array.array("i", ids)])
def test_case_34_products_of_64_bits(make: object) -> None:
    """65,536 x 32,768 = 2**31; 1,000,000 x 16,384."""
    for block, nbytes in ((65_536, 32_768), (1_000_000, 16_384)):
        src, dst = (cache(base, blocks=block + 1, nbytes=nbytes) for base in (A, B))
        found = emitted(kvcompile.compile(src, dst), make([block]), make([block]))
        assert found == [(A + block * nbytes, B + block * nbytes, nbytes)]
    assert 65_536 * 32_768 == 2**31


def test_case_35_addresses_with_bit_63() -> None:
    field = Field.hnd("k", heads=1, tokens=16, cell_nbytes=256)
    src = one_region(field, base=0xFF00000000000000, stride=4_096)
    plan = kvcompile.compile(src, one_region(field, base=B, stride=4_096))
    assert emitted(plan, [3], [1]) == [(0xFF00000000003000, B + 4_096, 4_096)]
    back = kvcompile.compile(one_region(field, base=B, stride=4_096), src)
    assert emitted(back, [1], [3]) == [(B + 4_096, 0xFF00000000003000, 4_096)]
    assert int(plan.table["src_origin"][0]) == 0xFF00000000000000


def test_case_37_other_cell_bytes() -> None:
    src = one_region(Field.hnd("k", heads=2, tokens=16, cell_nbytes=1_024), stride=32_768, layer="layers.7")
    dst = one_region(Field.hnd("k", heads=2, tokens=16, cell_nbytes=512), stride=16_384, layer="layers.7")
    with pytest.raises(LayoutError) as caught:
        kvcompile.compile(src, dst)
    for word in ("layers.7", "'k'", "1024", "512"):
        assert word in str(caught.value)


# Merging and batches


def test_case_38_descending_ids_do_not_merge() -> None:
    plan = kvcompile.compile(cache(A), cache(B))
    ids = [5, 4, 3, 2, 1], [1, 2, 3, 4, 5]
    assert emitted(plan, *ids) == [(A + a * 64, B + b * 64, 64) for a, b in zip(*ids, strict=True)]
    ids = [5, 4, 3], [15, 14, 13]
    assert emitted(plan, *ids) == [(A + a * 64, B + b * 64, 64) for a, b in zip(*ids, strict=True)]


def test_case_39_batches() -> None:
    """Order and sum kept, no zero length; a descriptor above the limit stands alone; ``max_length`` cuts it."""
    nbytes = 2**20
    src, dst = (cache(base, blocks=20_000, nbytes=nbytes) for base in (A, B))
    plan = kvcompile.compile(src, dst)
    long = list(range(2_000, 4_000))
    built = plan.build(
        [Request("small", [list(range(0, 1_000, 2))], [list(range(500))]), Request("long", [long], [long])]
    )
    assert built.length.tolist() == [nbytes] * 500 + [2_000 * nbytes]
    parts = list(built.batches(max_descriptors=4_096, max_nbytes=2**30))
    assert [triple for part in parts for triple in replay.triples(part)] == replay.triples(built)
    assert [len(part) for part in parts] == [500, 1]
    assert sum(part.nbytes for part in parts) == built.nbytes
    cut = plan.build([Request("long", [long], [long])], max_length=2**30)
    assert cut.length.tolist() == [2**30, 2_000 * nbytes - 2**30]
    assert cut.src.tolist() == [A + 2_000 * nbytes, A + 2_000 * nbytes + 2**30]
    many = plan.build([Request("many", [list(range(0, 20_000, 2))], [list(range(10_000))])])
    assert [len(part) for part in many.batches(max_descriptors=4_096)] == [4_096, 4_096, 1_808]
    assert [len(part) for part in many.batches(max_descriptors=4_096, max_nbytes=2**30)] == [1_024] * 9 + [784]


def test_case_40_touching_regions_registered_apart() -> None:
    """Two layers that touch in memory on both sides: never one descriptor over the edge."""
    k = Field.hnd("k", heads=1, tokens=16, cell_nbytes=4)

    def touching(base: int, blocks: int, *, together: bool) -> Cache:
        span = 64 * blocks
        regions = [Region("0", 0, base, 64, blocks, [k]), Region("1", 0, base + span, 64, blocks, [k])]
        return Cache(regions, [Group(16)], [Buffer(base, 2 * span)] if together else None)

    for blocks in (4, 1):
        ids = list(range(blocks))
        span = 64 * blocks
        for src_together, dst_together in ((False, False), (True, False), (False, True)):
            src, dst = touching(A, blocks, together=src_together), touching(B, blocks, together=dst_together)
            found = emitted(kvcompile.compile(src, dst), ids, ids)
            assert found == [(A, B, span), (A + span, B + span, span)]
    one = kvcompile.compile(touching(A, 1, together=True), touching(B, 1, together=True))
    assert emitted(one, [0], [0]) == [(A, B, 128)]
