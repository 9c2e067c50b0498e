"""Batches made ready ahead: in order, the first at once, the next while one is under way, and none too many."""

import threading

import pytest

from kvcompile.engines.ahead import ahead


def test_order_and_ends() -> None:
    for count in (0, 1, 2, 3, 7):
        assert list(ahead(range(count), lambda number: number * 10)) == [number * 10 for number in range(count)]


def test_the_first_leaves_before_the_last_is_made() -> None:
    """And the one behind is made while the caller is busy: it waits for that here."""
    made = [threading.Event() for _ in range(5)]

    def convert(number: int) -> int:
        made[number].set()
        return number

    for number in ahead(range(5), convert):
        if number < 4:
            assert made[number + 1].wait(10), "nobody made the next one meanwhile"
        assert not any(event.is_set() for event in made[number + 2 :]), "more than one was made ahead"


def test_one_batch_costs_no_thread() -> None:
    before = threading.active_count()
    for _ in ahead([1], lambda _: threading.get_ident()):
        assert threading.active_count() == before


def test_what_goes_wrong_reaches_the_caller() -> None:
    def convert(number: int) -> int:
        if number == 2:
            raise ValueError("the third")
        return number

    batches = ahead(range(9), convert)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(ValueError, match="the third"):
        next(batches)


def test_a_caller_who_leaves_ends_the_thread() -> None:
    before = threading.active_count()
    batches = ahead(range(9), lambda number: number)
    assert next(batches) == 0
    assert next(batches) == 1
    batches.close()
    assert threading.active_count() == before
