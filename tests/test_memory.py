"""The memory of results: used again once nothing refers to it, never while something does; and ``out=``."""

import gc
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

import kvcompile
from kvcompile import Descriptors, Field, Request, arena
from tests import replay
from tests.helpers import one_region

FIELD = Field.hnd("k", heads=1, tokens=1, cell_nbytes=16)
PLAN = kvcompile.compile(
    one_region(FIELD, base=2**40, stride=24, blocks=20_000), one_region(FIELD, base=2**50, stride=24, blocks=20_000)
)


def request(start: int, blocks: int) -> list[Request]:
    ids = list(range(start, start + blocks))
    return [Request("r", [ids], [ids])]


def expected(start: int, blocks: int) -> list[tuple[int, int, int]]:
    return [(2**40 + block * 24, 2**50 + block * 24, 16) for block in range(start, start + blocks)]


def place(built: Descriptors) -> int:
    return built.src.ctypes.data


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """Begin and end with no memory to use again."""
    gc.collect()
    arena.clear()
    yield
    gc.collect()
    arena.clear()


def test_a_result_that_is_held_is_never_overwritten() -> None:
    held = [PLAN.build(request(start, 500)) for start in range(0, 5000, 500)]
    assert len({place(built) for built in held}) == 10
    for number, built in enumerate(held):
        assert replay.triples(built) == expected(500 * number, 500)


@pytest.mark.parametrize(
    "keep",
    [
        lambda built: list(built.batches(max_descriptors=64)),
        lambda built: built.src[10:20],
        lambda built: [built.length[-1:]],
        lambda built: memoryview(built.dst),
        lambda built: built.src.view(np.int64)[::7],
        lambda built: iter(built.batches(max_descriptors=7)),
    ],
)
def test_what_is_held_of_a_dropped_result_is_never_overwritten(keep: object) -> None:
    """A batch, a view, a buffer: each keeps all the memory that it is a part of."""
    built = PLAN.build(request(0, 500))
    columns = {
        name: (getattr(built, name).ctypes.data, getattr(built, name).tolist()) for name in ("src", "dst", "length")
    }
    kept = keep(built)
    del built
    gc.collect()
    later = [PLAN.build(request(9000, 500)) for _ in range(3)]
    begins = {place(one) for one in later}
    assert columns["src"][0] not in begins
    if isinstance(kept, list) and isinstance(kept[0], Descriptors):
        assert [triple for batch in kept for triple in replay.triples(batch)] == expected(0, 500)
    elif isinstance(kept, memoryview):
        assert kept.tolist() == columns["dst"][1]
    elif isinstance(kept, Iterator):
        assert [triple for batch in kept for triple in replay.triples(batch)] == expected(0, 500)
    kept = None
    gc.collect()
    assert place(PLAN.build(request(0, 500))) == columns["src"][0]


def test_dropped_memory_is_used_again() -> None:
    places = set()
    for start in range(0, 5000, 500):
        built = PLAN.build(request(start, 500))
        assert replay.triples(built) == expected(start, 500)
        places.add(place(built))
        del built
    assert len(places) == 1


def test_larger_memory_serves_a_smaller_result() -> None:
    large = place(PLAN.build(request(0, 4000)))
    small = PLAN.build(request(7, 3))
    assert place(small) == large
    assert replay.triples(small) == expected(7, 3)


@pytest.mark.parametrize("blocks", [400, 5000])
def test_what_is_kept_is_bounded(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "MAX_NBYTES", 3 * 8 * 2 * blocks)
    held = [PLAN.build(request(0, blocks)) for _ in range(8)]
    held.clear()
    gc.collect()
    PLAN.build(request(0, blocks))
    assert 0 < sum(memory.nbytes for memory in (*arena._few, *arena._many)) <= 3 * 8 * 2 * blocks


def test_thousands_of_results_in_flight() -> None:
    """Memory for later is looked through at every build: of many that are held, few are kept, and none is lost."""
    held = [PLAN.build(request(number % 5000, 1 + number % 7)) for number in range(3000)]
    assert max(len(arena._few), len(arena._many)) <= arena.MAX_ARRAYS
    for number, built in enumerate(held):
        assert replay.triples(built) == expected(number % 5000, 1 + number % 7)
    held.clear()
    gc.collect()
    assert place(PLAN.build(request(0, 7))) in {memory.ctypes.data for memory in arena._few}


def test_a_result_holds_no_more_than_it_needs() -> None:
    """Memory of its own size where none is at hand; else that of few before it, never of many."""
    held = [PLAN.build(request(0, blocks)) for blocks in (3, 500, 9000, 40)]
    assert [len(built._memory) for built in held] == [3 * blocks for blocks in (3, 500, 9000, 40)]  # type: ignore[arg-type]
    del held[1:3]
    gc.collect()
    assert len(PLAN.build(request(7, 5))._memory) == 3 * 500  # type: ignore[arg-type]
    assert replay.triples(PLAN.build(request(7, 600))) == expected(7, 600)


def test_results_of_many_threads_are_apart() -> None:
    """Held ones stay whole while others come and go beside them."""
    faults: list[str] = []

    def work(number: int) -> None:
        held = PLAN.build(request(number * 1000, 300))
        for turn in range(60):
            start, blocks = number * 1000 + turn, 100 + 7 * turn
            built = PLAN.build(request(start, blocks))
            part = next(built.batches(max_descriptors=50))
            del built
            if replay.triples(part) != expected(start, 50):
                faults.append(f"thread {number}, turn {turn}")
        if replay.triples(held) != expected(number * 1000, 300):
            faults.append(f"thread {number}, held")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert faults == []


def test_nothing_refers_to_a_result_in_a_circle() -> None:
    """Else its memory would wait for the collector."""
    built = PLAN.build(request(0, 10))
    column = weakref.ref(built.src)
    del built
    assert column() is None


def test_out_is_overwritten_and_returned() -> None:
    out = PLAN.build(request(0, 100))
    at = place(out)
    again = PLAN.build(request(50, 80), out=out)
    assert again is out
    assert place(out) == at
    assert replay.triples(out) == expected(50, 80)
    assert out.spans.tolist() == [0, 80]


def test_out_grows_and_says_what_this_build_says() -> None:
    out = PLAN.build([*request(0, 3), Request("bad", [[1, 2]], [[99_999, 4]])])
    assert out.failed.keys() == {"bad"}
    PLAN.build(request(10, 5000), out=out)
    assert replay.triples(out) == expected(10, 5000)
    assert (out.failed, out.uncovered, out.requests) == ({}, {}, ("r",))
    large = place(out)
    PLAN.build([Request("s", [[1]], [[2]])], out=out)
    assert (place(out), len(out), out.requests) == (large, 1, ("s",))
    PLAN.build([], out=out)
    assert (len(out), out.spans.tolist(), out.requests) == (0, [0], ())


def test_a_view_of_what_out_outgrew_is_left_alone() -> None:
    out = PLAN.build(request(0, 10))
    batch = next(out.batches(max_descriptors=10))
    PLAN.build(request(500, 5000), out=out)
    PLAN.build(request(900, 10))
    assert replay.triples(batch) == expected(0, 10)


@pytest.mark.parametrize("out", [next(PLAN.build(request(0, 4)).batches()), "memory", 7, PLAN])
def test_what_is_no_result_of_build_is_refused_as_out(out: object) -> None:
    with pytest.raises(ValueError, match="out is"):
        PLAN.build(request(0, 1), out=out)
