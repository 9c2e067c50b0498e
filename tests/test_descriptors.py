"""The result of a build: memory that is reused, cuts, batches, spans, sums (section 6)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcompile
from kvcompile import Descriptors, Field, LayoutError, Plan, Request
from tests import replay
from tests.helpers import one_region
from tests.lists import PLAIN, A, B

SPLIT = kvcompile.compile(
    one_region(Field.hnd("k", heads=4, tokens=4, cell_nbytes=8), base=A, stride=128, blocks=4_096),
    one_region(Field.hnd("k", heads=4, tokens=4, cell_nbytes=8), base=B, stride=64, blocks=4_096, tp=(1, 2)),
)
"""Two heads of four: 64 bytes of each block of 128, which never merge."""


def scattered(count: int, name: str = "r", first: int = 0) -> Request:
    """A request of ``count`` blocks."""
    return Request(name, [list(range(0, 2 * count, 2))], [list(range(first, first + count))])


def same(one: Descriptors, other: Descriptors) -> bool:
    return replay.triples(one) == replay.triples(other) and one.spans.tolist() == other.spans.tolist()


def addresses(found: Descriptors) -> list[int]:
    """Where the three columns begin in memory."""
    return [column.__array_interface__["data"][0] for column in (found.src, found.dst, found.length)]


def test_an_empty_batch() -> None:
    built = PLAIN.build([])
    assert (len(built), built.nbytes, built.failed, built.uncovered) == (0, 0, {}, {})
    assert built.spans.tolist() == [0]
    assert built.src.dtype == built.dst.dtype == built.length.dtype == np.uint64
    assert list(built.batches(max_descriptors=1)) == []


def test_a_plan_of_nothing() -> None:
    """Caches that share no layer: a plan all the same."""
    field = Field.hnd("k", heads=1, tokens=4, cell_nbytes=8)
    plan = kvcompile.compile(one_region(field, stride=32, layer="a"), one_region(field, stride=32, layer="b"))
    assert isinstance(plan, Plan)
    built = plan.build([Request("r", [[1]], [[1]]), Request("bad", [[64]], [[2]])])
    assert len(built) == 0
    assert set(built.failed) == {"bad"}
    assert built.spans.tolist() == [0, 0, 0]


def test_spans_and_sums() -> None:
    built = SPLIT.build([scattered(3, "a"), scattered(0, "b"), Request("bad", [[1]], [[-1]]), scattered(2, "c", 9)])
    assert built.spans.tolist() == [0, 3, 3, 3, 5]
    assert built.nbytes == 5 * 64
    assert isinstance(built.nbytes, int)
    assert len(built) == 5
    assert all(column.flags.c_contiguous for column in (built.src, built.dst, built.length))


def test_a_generator_of_requests() -> None:
    assert same(
        SPLIT.build(scattered(3, str(n), 3 * n) for n in range(2)),
        SPLIT.build([scattered(3, "0"), scattered(3, "1", 3)]),
    )


def test_nbytes_of_more_than_32_bits() -> None:
    """2**32 and more bytes in one descriptor, and their sum."""
    field = Field.hnd("k", heads=1, tokens=16, cell_nbytes=2**16)
    src, dst = (one_region(field, base=base, stride=2**20, blocks=2**14) for base in (A, B))
    ids = list(range(6_000))
    built = kvcompile.compile(src, dst).build([Request("r", [ids], [ids])])
    assert built.length.tolist() == [6_000 * 2**20]
    assert built.nbytes == 6_000 * 2**20 > 2**32


# out=


def test_out_is_reused() -> None:
    """The same memory where it is large enough, also after a smaller result; the same values as without."""
    first = SPLIT.build([scattered(100)])
    place = addresses(first)
    for count in (50, 1, 0, 100):
        again = SPLIT.build([scattered(count)], out=first)
        assert same(again, SPLIT.build([scattered(count)]))
        if count:
            assert addresses(again) == place
        first = again


def test_out_grows() -> None:
    small = SPLIT.build([scattered(2)])
    grown = SPLIT.build([scattered(1_000)], out=small)
    assert same(grown, SPLIT.build([scattered(1_000)]))
    again = SPLIT.build([scattered(900)], out=grown)
    assert addresses(again) == addresses(grown)


def test_out_of_another_plan() -> None:
    built = PLAIN.build([Request("bad", [[1]], [[99]]), Request("r", [[1, 3]], [[2, 4]])])
    again = SPLIT.build([scattered(1)], out=built)
    assert same(again, SPLIT.build([scattered(1)]))
    assert (again.failed, again.uncovered) == ({}, {})


def test_out_with_max_length() -> None:
    """Cutting makes more descriptors than were merged."""
    ids = list(range(20))
    out = PLAIN.build([Request("r", [ids], [ids])])
    cut = PLAIN.build([Request("r", [ids], [ids])], max_length=7, out=out)
    assert replay.triples(cut) == replay.cut([(A, B, 640)], 7)


# max_length


@pytest.mark.parametrize("most", [1, 7, 32, 63, 64, 65, 640, 641, 2**63, 2**64 - 1])
def test_max_length(most: int) -> None:
    ids = list(range(20))
    batch = [Request("a", [ids], [ids])]
    expected = replay.cut([(A, B, 640)], most)
    built = PLAIN.build(batch, max_length=most)
    assert replay.triples(built) == expected
    assert 0 not in built.length
    assert built.spans.tolist() == [0, len(expected)]


# batches


@settings(max_examples=200)
@given(st.data())
def test_batches(data: st.DataObject) -> None:
    """Views in order, each as full as the limits allow; a descriptor above ``max_nbytes`` stands alone."""
    sizes = data.draw(st.lists(st.integers(0, 12), max_size=5))
    requests, at = [], 0
    for number, size in enumerate(sizes):
        ids = []
        while len(ids) < size and at < 18:
            run = data.draw(st.integers(1, 3))
            ids += list(range(at, min(at + run, 20)))
            at += run + 1
        requests.append(Request(number, [ids], [ids]))
    built = PLAIN.build(requests)
    assert built.failed == {}
    most = data.draw(st.one_of(st.none(), st.integers(1, 5)))
    most_nbytes = data.draw(st.one_of(st.none(), st.integers(1, 200)))
    parts = list(built.batches(max_descriptors=most, max_nbytes=most_nbytes))
    assert [triple for part in parts for triple in replay.triples(part)] == replay.triples(built)
    at = 0
    for part, after in zip(parts, [*parts[1:], None][: len(parts)], strict=True):
        assert isinstance(part, Descriptors)
        assert len(part) > 0
        assert np.shares_memory(part.src, built.src)
        assert np.shares_memory(part.dst, built.dst)
        assert np.shares_memory(part.length, built.length)
        assert part.nbytes == sum(part.length.tolist())
        assert part.spans.tolist() == [min(max(span - at, 0), len(part)) for span in built.spans.tolist()]
        assert part.spans.dtype == np.int64
        at += len(part)
        assert most is None or len(part) <= most
        assert most_nbytes is None or part.nbytes <= most_nbytes or len(part) == 1
        if after is not None:  # one more would have been too many
            full = len(part) == most
            assert full or (most_nbytes is not None and part.nbytes + int(after.length[0]) > most_nbytes)


def test_batches_of_large_descriptors() -> None:
    """Sums of lengths beyond 2**63 are compared, not wrapped."""
    field = Field.hnd("k", heads=1, tokens=1, cell_nbytes=2**61)
    src = one_region(field, stride=2**61, blocks=3)
    built = kvcompile.compile(src, src).build([Request("r", [[2, 0, 1]], [[0, 1, 2]])], max_length=2**60)
    assert len(built) == 6
    assert [len(part) for part in built.batches(max_nbytes=2**61)] == [2, 2, 2]
    assert [len(part) for part in built.batches(max_nbytes=2**64 - 1)] == [6]
    assert [len(part) for part in built.batches()] == [6]


# Arguments that make no sense


@pytest.mark.parametrize("bad", [0, -1, 1.5, "1", True])
def test_limits_that_make_no_sense(bad: object) -> None:
    built = PLAIN.build([Request("r", [[1]], [[2]])])
    with pytest.raises(ValueError, match="max_length"):
        PLAIN.build([Request("r", [[1]], [[2]])], max_length=bad)
    with pytest.raises(ValueError, match="max_descriptors"):
        list(built.batches(max_descriptors=bad))
    with pytest.raises(ValueError, match="max_nbytes"):
        list(built.batches(max_nbytes=bad))


@pytest.mark.parametrize("bad", [3, "out", np.zeros(5, np.uint64), (1, 2, 3)])
def test_out_that_is_no_result(bad: object) -> None:
    with pytest.raises(ValueError, match="out"):
        PLAIN.build([Request("r", [[1]], [[2]])], out=bad)


def test_tables_that_are_none() -> None:
    for bad in (np.zeros(3), PLAIN.table.tolist(), None):
        with pytest.raises(ValueError, match="table"):
            PLAIN.with_table(bad)


def test_two_caches_are_needed() -> None:
    cache = one_region(Field.hnd("k", heads=1, tokens=4, cell_nbytes=8), stride=32)
    for pair in ((cache, None), (None, cache), (cache, cache.to_bytes())):
        with pytest.raises((ValueError, TypeError)):
            kvcompile.compile(*pair)


# What two caches must agree in


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"heads": 4}, ["2", "4"]),
        ({"cell_nbytes": 16}, ["8", "16"]),
        ({"name": "kv"}, ["'k'", "kv"]),
    ],
)
def test_fields_that_differ(change: dict[str, object], words: list[str]) -> None:
    options = {"heads": 2, "tokens": 4, "cell_nbytes": 8}
    other = {"name": "k", **options, **change}
    src = one_region(Field.hnd("k", **options), stride=256, layer="layers.3")
    dst = one_region(Field.hnd(other.pop("name"), **other), stride=256, layer="layers.3")
    for pair in ((src, dst), (dst, src)):
        with pytest.raises(LayoutError) as caught:
            kvcompile.compile(*pair)
        assert all(word in str(caught.value) for word in ["layers.3", *words])


def test_a_field_more_on_one_side() -> None:
    """Its bytes would be missing, silently."""
    k, v = (Field.hnd(name, heads=2, tokens=4, cell_nbytes=8, offset=offset) for name, offset in (("k", 0), ("v", 64)))
    one, two = one_region([k], stride=128), one_region([k, v], stride=128)
    for pair in ((one, two), (two, one)):
        with pytest.raises(LayoutError, match="'v'"):
            kvcompile.compile(*pair)


def test_rows_and_kinds_of_state() -> None:
    def state(rows: int) -> object:
        return one_region(Field.hnd("s", heads=2, tokens=rows, cell_nbytes=8), stride=64, block_size=4, state=True)

    with pytest.raises(LayoutError, match=r"(?=.*2)(?=.*3)"):
        kvcompile.compile(state(2), state(3))
    tokens = one_region(Field.hnd("s", heads=2, tokens=4, cell_nbytes=8), stride=64)
    with pytest.raises(LayoutError, match="state"):
        kvcompile.compile(state(4), tokens)
    with pytest.raises(LayoutError, match="state"):
        kvcompile.compile(tokens, state(4))
