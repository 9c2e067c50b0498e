"""Tickets, retries and digests, with an engine whose every batch a test lets through, or fails, by hand."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

import kvcompile
from kvcompile import Descriptors, HandshakeError, Request, TransferError
from kvcompile.engines import LocalEngine
from tests.peer import CANARY, rank, whole
from tests.test_engines import Slow, five_requests

DIGEST = "0" * 63 + "1"
OTHER = "0" * 63 + "2"


def answers(*given: object) -> Callable[[str], object]:
    """Make an ask that gives one answer after another, the last again and again."""
    left = list(given)

    def ask(session: str) -> object:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ask


def eventually(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def over(engine: Slow) -> None:
    engine.go.release(100)
    eventually(lambda: not engine._flights)


class Failing(Slow):
    """Fails the batches of the numbers given, counted over all attempts; ``lingering`` of them slowly."""

    def __init__(self, *numbers: int) -> None:
        super().__init__(max_descriptors=4)
        self.numbers = set(numbers)
        self.count = 0
        self.rows: list[int] = []
        self.go.release(1000)

    def _move(self, kind: str, session: str, batch: Descriptors) -> None:
        self.count += 1
        if self.count - 1 in self.numbers:
            raise TransferError("a batch failed")
        super()._move(kind, session, batch)
        self.rows += batch.src.tolist()


def test_ticket() -> None:
    engine = Slow(max_descriptors=4)
    ticket = engine.write_async("peer", five_requests())
    assert not ticket.done()
    engine.go.release(3)
    ticket.wait(20)
    assert ticket.done()
    ticket.wait()
    ticket.wait(0)
    assert [moved[2] for moved in engine.moved] == [4, 4, 2]
    ticket = engine.read_async("peer", five_requests())
    engine.go.release(3)
    ticket.wait()
    assert engine.moved[-1][0] == "read"


def test_ticket_raises_at_every_wait() -> None:
    engine = Failing(1)
    ticket = engine.write_async("peer", five_requests())
    for _ in range(2):
        with pytest.raises(TransferError, match="a batch failed") as caught:
            ticket.wait(20)
        assert (caught.value.requests, caught.value.complete) == (("b", "d", "e"), ("a", "c"))
    assert ticket.done()


def test_ticket_given_up_sends_no_more() -> None:
    engine = Slow(max_descriptors=4)
    engine.go.release(1)
    ticket = engine.write_async("peer", five_requests())
    eventually(lambda: len(engine.moved) == 1)
    with pytest.raises(TransferError, match=r"not over after 0\.1 s") as caught:
        ticket.wait(0.1)
    assert (caught.value.requests, caught.value.complete) == (("b", "d", "e"), ("a", "c"))
    assert ticket.done()
    over(engine)
    with pytest.raises(TransferError, match="given up before") as caught:
        ticket.wait()
    assert (caught.value.requests, caught.value.complete) == (("d", "e"), ("a", "b", "c"))  # the second batch came
    assert [moved[2] for moved in engine.moved] == [4, 4]


def test_ticket_given_up_for_nothing() -> None:
    """The last batch was under way when the caller gave up, and arrived: a second look finds that all is there."""
    engine = Slow()
    ticket = engine.write_async("peer", five_requests())
    with pytest.raises(TransferError):
        ticket.wait(0.05)
    over(engine)
    ticket.wait()
    assert engine.barred("peer") == ()


def test_deadline_of_a_ticket() -> None:
    engine = Slow()
    ticket = engine.write_async("peer", five_requests(), 0.1)
    with pytest.raises(TransferError, match=r"not over after 0\.1 s"):
        ticket.wait()
    over(engine)
    with pytest.raises(ValueError, match="timeout"):
        ticket.wait(-1)


def test_a_wait_may_be_shorter_than_the_deadline() -> None:
    engine = Slow()
    ticket = engine.write_async("peer", five_requests(), 30)
    started = time.monotonic()
    with pytest.raises(TransferError, match=r"not over after 0\.1 s"):
        ticket.wait(0.1)
    assert time.monotonic() - started < 10
    over(engine)


def test_who_gave_up_may_wait_for_the_end() -> None:
    """Past the deadline as well: what was under way is let through, and is there."""
    engine = Slow()
    ticket = engine.write_async("peer", five_requests(), 0.05)
    with pytest.raises(TransferError, match="not over"):
        ticket.wait()
    threading.Timer(0.2, engine.go.release).start()
    ticket.wait()
    assert [moved[2] for moved in engine.moved] == [10]


def test_many_threads_wait_for_one_ticket() -> None:
    engine = Slow()
    ticket = engine.write_async("peer", five_requests())
    threads = [threading.Thread(target=ticket.wait, args=seconds, daemon=True) for seconds in ((), (20,), (), (20,))]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    assert all(thread.is_alive() for thread in threads)
    engine.go.release()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_descriptors_may_be_built_into_while_under_way() -> None:
    src, dst = rank(1 << 20), rank(1 << 30)
    plan = kvcompile.compile(src, dst)
    built = plan.build([Request("a", [[1, 3]], [[2, 5]])])
    wanted = built.dst.tolist()
    seen: list[int] = []
    engine = Slow(max_descriptors=1)
    engine._move = lambda kind, session, batch: (engine.go.acquire(timeout=20), seen.extend(batch.dst.tolist()))  # type: ignore[method-assign,assignment,return-value,func-returns-value]
    ticket = engine.write_async("peer", built)
    plan.build([Request("b", [[7, 9]], [[8, 11]])], out=built)
    engine.go.release(100)
    ticket.wait(20)
    assert seen == wanted


def test_retry_sends_only_what_has_not_arrived() -> None:
    engine = Failing(1, 2)
    engine.write("peer", five_requests(), retries=2, digest=DIGEST, ask=answers(DIGEST))
    assert engine.rows == list(range(10))
    assert [moved[2] for moved in engine.moved] == [4, 4, 2]


def test_retries_run_out() -> None:
    engine = Failing(1, 2, 3)
    with pytest.raises(TransferError, match="a batch failed") as caught:
        engine.write("peer", five_requests(), retries=2, digest=DIGEST, ask=answers(DIGEST))
    assert (caught.value.requests, caught.value.complete) == (("b", "d", "e"), ("a", "c"))
    assert engine.rows == [0, 1, 2, 3]


@pytest.mark.parametrize("timeout", [None, 20.0])
@pytest.mark.parametrize("answer", [OTHER, (), None, OSError("no route"), HandshakeError("no answer"), 7, [7], b"x"])
def test_another_digest_or_none_sends_nothing(answer: object, timeout: float | None) -> None:
    engine = Failing()
    with pytest.raises(HandshakeError) as caught:
        engine.write("peer", five_requests(), timeout, digest=DIGEST, ask=answers(answer))
    assert (caught.value.requests, caught.value.complete) == (tuple("abde"), ("c",))
    assert engine.count == 0
    engine = Failing(1)
    with pytest.raises(HandshakeError) as caught:
        engine.write("peer", five_requests(), timeout, retries=3, digest=DIGEST, ask=answers(DIGEST, answer))
    assert (caught.value.requests, caught.value.complete) == (("b", "d", "e"), ("a", "c"))
    assert engine.rows == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "answer", [DIGEST, DIGEST.upper() + "\n", bytes.fromhex(DIGEST), DIGEST.encode(), [OTHER, DIGEST]]
)
def test_kinds_of_answers(answer: object) -> None:
    engine = Failing()
    engine.write("peer", five_requests(), digest=DIGEST, ask=answers(answer))
    assert len(engine.rows) == 10


def test_no_answer_in_time() -> None:
    engine, go = Failing(), threading.Event()
    with pytest.raises(HandshakeError, match=r"no answer from the peer in 0\.1 s"):
        engine.write("peer", five_requests(), 0.1, digest=DIGEST, ask=lambda _: go.wait(20) and DIGEST)
    go.set()
    over(engine)
    assert engine.count == 0
    assert engine.barred("peer") == ()


def test_digest_comes_from_the_plan() -> None:
    asked = []

    def ask(session: str) -> str:
        asked.append(session)
        return dst.digest

    src, dst = rank(1 << 20, tp=(0, 2)), Slow().register(rank(1 << 30))
    built = kvcompile.compile(src, dst).build([Request("a", [[1, 3]], [[2, 5]])])
    assert built.digests == (src.digest, dst.digest)
    Failing().write("peer", built, ask=ask)
    Failing().write("peer", next(built.batches(1)), retries=1, ask=ask)
    assert asked == ["peer"] * 2
    back = kvcompile.compile(dst, src).build([Request("a", [[1, 3]], [[2, 5]])])
    Failing().read("peer", back, ask=ask)
    with pytest.raises(HandshakeError):
        Failing().write("peer", back, ask=ask)
    with pytest.raises(ValueError, match="digest is None"):
        Failing().write("peer", five_requests(), retries=1)


@pytest.mark.parametrize("retries", [-1, True, 1.0, None])
def test_retries_must_make_sense(retries: object) -> None:
    with pytest.raises(ValueError, match="retries"):
        Slow().write("peer", five_requests(), retries=retries)  # type: ignore[arg-type]


def test_a_neighbours_memory_is_held_as_well() -> None:
    """Its owner cannot unregister it while something is copied there."""
    moves, go = threading.Event(), threading.Event()

    class Held(LocalEngine):
        def _move(self, kind: str, session: str, batch: Descriptors) -> None:
            moves.set()
            assert go.wait(30)
            super()._move(kind, session, batch)

    a, b = Held(), LocalEngine()
    src, dst = np.arange(4096).astype(np.uint8), np.full(4096, CANARY, np.uint8)
    built = kvcompile.compile(a.register(whole(src)), b.register(whole(dst))).build([Request("all", [[0]], [[0]])])
    ticket = a.write_async(b.session, built)
    assert moves.wait(10)
    thread = threading.Thread(target=b.unregister)
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive()
    go.set()
    thread.join(10)
    assert not thread.is_alive()
    ticket.wait(10)
    np.testing.assert_array_equal(dst, src)
    a.unregister()


def test_local_engine_asks_its_neighbour() -> None:
    a, b = LocalEngine(), LocalEngine()
    src, dst = np.arange(4096).astype(np.uint8), np.full(4096, CANARY, np.uint8)
    mine, theirs = a.register(whole(src)), b.register(whole(dst))
    built = kvcompile.compile(mine, theirs).build([Request("all", [[0]], [[0]])])
    a.write(b.session, built, retries=1)
    np.testing.assert_array_equal(dst, src)
    dst[:] = CANARY
    b.unregister()
    b.register(whole(dst))
    with pytest.raises(HandshakeError, match="the peer's memory has digest"):
        a.write(b.session, built, retries=1)
    ticket = a.write_async(b.session, built, ask=answers(theirs.digest))
    ticket.wait(20)
    a.unregister()
    b.unregister()
