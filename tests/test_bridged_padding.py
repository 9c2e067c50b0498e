"""`bridge_padding`: descriptors run over gaps that are alike on both sides and that no field lies in, and no others."""

import kvcompile
from kvcompile import Cache, Field, Group, Plan, Region, Request
from tests import replay
from tests.helpers import Triple, emitted

A, B = 0, 1 << 20


def row(
    base: int, *places: tuple[int, int], stride: int = 100, blocks: int = 16, extra: tuple[Region, ...] = ()
) -> Cache:
    """A packed row of layers at (offset, bytes)."""
    regions = [
        Region(
            f"layer.{number}", 0, base + offset, stride, blocks, (Field.hnd("kv", heads=1, tokens=4, cell_nbytes=n),)
        )
        for number, (offset, n) in enumerate(places)
    ]
    groups = [Group(4), Group(4)] if extra else [Group(4)]
    return Cache([*regions, *extra], groups)


def bridged(src: Cache, dst: Cache) -> Plan:
    return kvcompile.compile(src, dst, bridge_padding=True)


def run(src: Cache, dst: Cache, ids: list[int]) -> tuple[list[Triple], list[Triple]]:
    """Descriptors without and with bridging, of equal ids on both sides."""
    return emitted(kvcompile.compile(src, dst), ids, ids), emitted(bridged(src, dst), ids, ids)


def test_equal_gaps_and_tails() -> None:
    """Two layers with four bytes between them: one descriptor a run, which ends at the last block's payload."""
    places = (8, 5), (32, 5)  # 20 bytes each: [8, 28) and [32, 52)
    plain, joined = run(row(A, *places), row(B, *places), [3, 4, 5, 9])
    assert len(plain) == 8
    assert joined == [(308, B + 308, 200 + 44), (908, B + 908, 44)]


def test_a_gap_that_differs_stays() -> None:
    plain, joined = run(row(A, (0, 5), (24, 5)), row(B, (0, 5), (32, 5)), [3])
    assert joined == plain == [(300, B + 300, 20), (324, B + 332, 20)]


def test_a_field_in_the_gap_on_either_side_stays() -> None:
    """A layer of another group that one side holds lies in the gap: it is not copied over."""
    places = (0, 5), (24, 5)
    for side in (0, 1):
        base = (A, B)[side]
        between = Region("other", 1, base + 20, 100, 16, (Field.hnd("kv", heads=1, tokens=4, cell_nbytes=1),))
        caches = [row(A, *places), row(B, *places)]
        caches[side] = row(base, *places, extra=(between,))
        lists = [[3, 4]], [[3, 4]]
        lists[side].append([])
        built = bridged(*caches).build([Request("r", *lists)])
        assert not built.failed
        # From the second layer on, the free bytes up to the next block's first layer are bridged all the same.
        assert replay.triples(built) == [(300, B + 300, 20), (324, B + 324, 96), (424, B + 424, 20)]


def test_the_last_block_of_a_run_stops_at_its_payload() -> None:
    places = ((0, 5),)  # 20 bytes, then 80 free
    plain, joined = run(row(A, *places), row(B, *places), [2, 3, 4, 8, 9])
    assert plain == [(100 * n, B + 100 * n, 20) for n in (2, 3, 4, 8, 9)]
    assert joined == [(200, B + 200, 220), (800, B + 800, 120)]


def test_other_strides_have_no_tail() -> None:
    """Gaps inside the row are bridged, the ones between blocks are not the same."""
    places = (0, 5), (24, 5)
    src, dst = row(A, *places), row(B, *places, stride=120)
    assert emitted(bridged(src, dst), [2, 3], [5, 6]) == [(200, B + 600, 44), (300, B + 720, 44)]


def test_bytes_of_fields_are_the_same() -> None:
    """What is copied besides is padding on both sides: no byte of a field but its own."""
    places = (4, 3), (20, 2), (40, 9)
    src, dst = row(A, *places), row(B, *places)
    ids = [1, 2, 3, 7, 6, 10]
    plain, joined = run(src, dst, ids)
    assert set(replay.moved(plain)) <= set(replay.moved(joined))
    payload = {
        cache_base + region.base - base + block * 100 + byte
        for cache_base, base, cache in ((0, 0, src),)
        for region in cache.regions
        for block in range(16)
        for byte in range(4 * region.fields[0].cell_nbytes)
    }
    more = {source for source, _ in set(replay.moved(joined)) - set(replay.moved(plain))}
    assert more
    assert not more & payload
    assert len(joined) == 4


def test_heads_of_another_rank_are_not_padding() -> None:
    """TP2 to TP1: the gap between a rank's heads on dst holds the other rank's; nothing is bridged over it."""
    field = Field.nhd("kv", heads=2, local_heads=2, tokens=4, cell_nbytes=4)
    dst = Cache([Region("a", 0, B, 64, 8, (field,))], [Group(4)])
    for rank in (0, 1):
        own = Field.nhd("kv", heads=2, local_heads=2, tokens=4, cell_nbytes=4)  # padded beyond its one head
        src = Cache([Region("a", 0, A, 64, 8, (own,))], [Group(4)], tp_rank=rank, tp_size=2)
        found = emitted(bridged(src, dst), [1, 2], [1, 2])
        assert found == [(64 * b + 8 * t, B + 64 * b + 8 * t + 4 * rank, 4) for b in (1, 2) for t in range(4)]
