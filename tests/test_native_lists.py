"""What an engine makes of a batch of which it knows what arrived: the lists, what is sent again, what is barred."""

import numpy as np
import pytest

from kvcompile import Descriptors, TransferError
from kvcompile.engines.attempts import BatchError
from tests.peer import copies
from tests.test_attempts import DIGEST, answers, eventually
from tests.test_engines import Slow, five_requests


class Knowing(Slow):
    """Fails the rows of the src addresses given, each as often as said, and knows which have arrived."""

    def __init__(self, failures: dict[int, int], max_descriptors: int = 4) -> None:
        super().__init__(max_descriptors)
        self.failures = failures
        self.rows: list[list[int]] = []

    def _move(self, kind: str, session: str, batch: Descriptors) -> None:
        assert self.go.acquire(timeout=30)
        self.rows.append(batch.src.tolist())
        arrived = np.array([not self.failures.get(row, 0) for row in self.rows[-1]])
        for row in self.rows[-1]:
            self.failures[row] = max(0, self.failures.get(row, 0) - 1)
        if not arrived.all():
            raise BatchError("a batch failed", arrived)


@pytest.mark.parametrize("timeout", [None, 20.0])
@pytest.mark.parametrize(
    ("bad", "requests", "complete", "counts"),
    [
        ([0], "abde", "c", "3 of 10"),  # the second batch was not sent, and with it b, d, e
        ([4], "bde", "ac", "7 of 10"),
        ([6, 7], "bde", "ac", "6 of 10"),
        ([5, 6], "bde", "ac", "6 of 10"),
        ([7], "de", "abc", "7 of 10"),
        ([8], "d", "abce", "9 of 10"),
        ([9], "e", "abcd", "9 of 10"),
        ([8, 9], "de", "abc", "8 of 10"),
    ],
)
def test_lists_are_exact(bad: list[int], requests: str, complete: str, counts: str, timeout: float | None) -> None:
    engine = Knowing(dict.fromkeys(bad, 1))
    engine.go.release(9)
    with pytest.raises(TransferError, match=f"{counts} descriptors arrived, {len(requests)} req") as caught:
        engine.write("peer", five_requests(), timeout)
    assert caught.value.requests == tuple(requests)
    assert caught.value.complete == tuple(complete)


def test_a_retry_sends_what_has_not_arrived() -> None:
    engine = Knowing({1: 1, 3: 2, 6: 1, 9: 1})
    engine.go.release(99)
    given = five_requests()
    engine.write("peer", given, retries=4, digest=DIGEST, ask=answers(DIGEST))
    assert engine.rows == [[0, 1, 2, 3], [1, 3, 4, 5], [3, 6, 7, 8], [6, 9], [9]]
    assert given.src.tolist() == list(range(10)), "the caller's own descriptors are as they were"


def test_lists_after_retries() -> None:
    engine = Knowing({1: 1, 3: 9, 5: 1, 6: 9})
    engine.go.release(99)
    with pytest.raises(TransferError, match="4 of 10 descriptors arrived") as caught:
        engine.write("peer", five_requests(), retries=1, digest=DIGEST, ask=answers(DIGEST))
    assert engine.rows == [[0, 1, 2, 3], [1, 3, 4, 5]]
    assert (caught.value.requests, caught.value.complete) == (tuple("abde"), ("c",))
    engine = Knowing({1: 1, 3: 1, 6: 9, 8: 9})
    engine.go.release(99)
    with pytest.raises(TransferError, match="8 of 10 descriptors arrived") as caught:
        engine.write("peer", five_requests(), retries=1, digest=DIGEST, ask=answers(DIGEST))
    assert engine.rows == [[0, 1, 2, 3], [1, 3, 4, 5], [6, 7, 8, 9]]
    assert (caught.value.requests, caught.value.complete) == (("b", "d"), ("a", "c", "e"))


def test_only_what_has_not_arrived_is_barred() -> None:
    """Dst addresses are the rows' numbers, a byte each."""
    engine = Knowing({1: 1, 3: 1})
    engine.go.release(9)
    with pytest.raises(TransferError):
        engine.write("peer", five_requests())
    assert engine.barred("peer") == ((1, 2), (3, 4))
    engine.write("peer", copies([20], [2], 1))
    with pytest.raises(TransferError, match="barred") as caught:
        engine.write("peer", copies([20], [3], 1))
    assert caught.value.barred == ((3, 4),)


def test_a_bar_shrinks_when_the_batch_is_over() -> None:
    """The caller left while the batch was under way; what came of it is known later."""
    engine = Knowing({2: 1})
    ticket = engine.write_async("peer", five_requests())
    with pytest.raises(TransferError, match="not over") as caught:
        ticket.wait(0.05)
    assert caught.value.requests == tuple("abde")
    assert engine.barred("peer") == ((0, 4),)
    engine.go.release(9)
    eventually(lambda: not engine._flights)
    assert engine.barred("peer") == ((2, 3),)
    with pytest.raises(TransferError, match="3 of 10 descriptors arrived") as caught:
        ticket.wait()
    assert (caught.value.requests, caught.value.complete) == (tuple("abde"), ("c",))
    assert engine.rows == [[0, 1, 2, 3]]
    engine.lift("peer")
    assert engine.barred("peer") == ()
