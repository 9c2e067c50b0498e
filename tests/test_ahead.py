"""Batches made ready ahead: in order, the first at once, the next while one is under way; and no call too large."""

import subprocess
import sys
import threading

import numpy as np
import pytest

from kvcompile.engines import MooncakeEngine
from kvcompile.engines.ahead import ahead
from tests.peer import copies


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


def test_one_batch_needs_no_thread() -> None:
    assert list(ahead([1], lambda _: threading.get_ident())) == [threading.get_ident()]


def test_all_share_one_thread() -> None:
    """However many there are at a time, and whether or not they are followed to the end."""
    several = [ahead(range(9), lambda _: threading.get_ident()) for _ in range(4)]
    threads = {batches: {next(batches), next(batches), next(batches)} for batches in several}
    assert len(set.union(*threads.values()) - {threading.get_ident()}) == 1
    several[0].close()
    assert len(list(several[1])) == 6


def test_a_forked_process_has_a_thread_of_its_own() -> None:
    assert list(ahead(range(3), str)) == ["0", "1", "2"]
    code = """
import os
from kvcompile.engines.ahead import ahead
list(ahead(range(3), str))
if child := os.fork():
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    os._exit(len(list(ahead(range(3), str))))
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert made.stdout.strip() == "3"


def test_what_goes_wrong_reaches_the_caller() -> None:
    def convert(number: int) -> int:
        if number == 2:
            raise ValueError("the third")
        return number

    batches = ahead(range(9), convert)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(ValueError, match="the third"):
        next(batches)


class _Notes:
    """Stands for an engine, and notes what each call is given."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def batch_transfer_sync_write(self, session: str, src: list[int], dst: list[int], length: list[int]) -> int:
        assert len(src) == len(dst) == len(length)
        self.calls.append(length)
        return 0


@pytest.mark.parametrize(
    ("most", "most_nbytes", "calls"),
    [
        (10, 100, [10]),
        (10, None, [10]),
        (None, None, [10]),
        (None, 100, [10]),
        (9, 100, [9, 1]),
        (5, 100, [5, 5]),
        (10, 99, [9, 1]),
        (100, 49, [4, 4, 2]),
        (3, 40, [3, 3, 3, 1]),
        (10, 5, [1] * 10),
    ],
)
def test_no_call_goes_beyond_a_limit(most: int | None, most_nbytes: int | None, calls: list[int]) -> None:
    """Whether all that there is makes one call, or does not by a descriptor or a byte."""
    notes = _Notes()
    engine = MooncakeEngine.wrap(notes, "127.0.0.1:1", max_descriptors=most, max_nbytes=most_nbytes)
    engine.write("127.0.0.1:2", copies(np.arange(10), np.arange(10), 10))
    assert [len(call) for call in notes.calls] == calls
