"""Tickets, retries, digests and bars, with an engine whose every batch a test lets through, or fails, by hand."""

import socket
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

import kvcompile
from kvcompile import Cache, Descriptors, HandshakeError, Request, TransferError
from kvcompile.engines import LocalEngine, digests
from kvcompile.engines.digests import Responder
from tests.peer import CANARY, copies, rank, whole
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


def given_up(engine: Slow, descriptors: Descriptors, kind: str = "write", **how: object) -> None:
    """Leave a transfer while its first batch is under way."""
    ticket = getattr(engine, f"{kind}_async")("peer", descriptors, **how)
    eventually(lambda: engine.at_once == 1)
    with pytest.raises(TransferError, match="may still land"):
        ticket.wait(0)


def test_bars_hold_what_is_under_way() -> None:
    """Of three batches of four, the first is under way: rows 0-3, at 100, 101, 110, 120; later ones are never sent."""
    engine = Slow(max_descriptors=4)
    dst = np.array([110, 100, 101, 120, 200, 210, 220, 230, 240, 250])
    given_up(engine, copies(np.arange(10), dst, [5, 1, 2, 4, 9, 9, 9, 9, 9, 9], [0, 2, 3, 10], "abc"))
    assert engine.barred("peer") == ((100, 103), (110, 115), (120, 124))
    assert engine.barred("other") == engine.barred() == ()
    for at, size, touched in [
        (90, 11, ((100, 103),)),
        (102, 1, ((100, 103),)),
        (114, 7, ((110, 115), (120, 124))),
        (0, 1000, ((100, 103), (110, 115), (120, 124))),
    ]:
        one = copies([1, 2], [5000, at], [1, size], [0, 1, 2], "xy")
        with pytest.raises(TransferError, match=r"1 descriptor\(s\) touch dst bytes") as caught:
            engine.write("peer", one)
        assert caught.value.barred == touched
        assert caught.value.requests == ("x", "y")
        assert f"[{touched[0][0]:#x}, {touched[0][1]:#x})" in str(caught.value)
        assert "'a', 'b', 'c'" in str(caught.value)
        assert "an attempt whose caller gave up waiting" in str(caught.value)
    free = copies([1] * 6, [99, 103, 109, 115, 124, 200], [1, 7, 1, 5, 50, 3])
    ticket = engine.write_async("peer", free)  # waits for its turn, but is not refused
    also = engine.write_async("other", copies([1], [100], [3]))
    over(engine)
    ticket.wait(20)
    also.wait(20)


def test_bars_are_lifted_when_the_attempt_is_over() -> None:
    engine = Slow(max_descriptors=4)
    given_up(engine, five_requests())
    over(engine)
    assert engine.barred("peer") == ()
    engine.write("peer", five_requests())


@pytest.mark.parametrize("lingers", [True, False])
def test_a_failure_after_the_caller_left_is_not_the_end(lingers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake says failed, and bytes land after it; the local engine's loop has ended when it says so."""
    monkeypatch.setattr(Slow, "lingers", lingers)
    engine = Slow(max_descriptors=4)
    engine.bad = {0}
    given_up(engine, five_requests())
    over(engine)
    assert engine.barred("peer") == (((0, 4),) if lingers else ())


def test_another_digest_lifts_bars() -> None:
    engine = Slow(max_descriptors=4)
    engine.bad = {0}
    given_up(engine, five_requests(), digest=DIGEST, ask=answers(DIGEST))
    over(engine)
    engine.bad = set()
    elsewhere = copies([1], [50], [1])
    for answer in (DIGEST, [OTHER, DIGEST], ()):
        try:
            engine.write("peer", elsewhere, digest=DIGEST, ask=answers(answer))
        except HandshakeError:
            assert answer == ()
        assert engine.barred("peer") == ((0, 4),)
    with pytest.raises(HandshakeError):
        engine.write("other", elsewhere, digest=DIGEST, ask=answers(OTHER))
    assert engine.barred("peer") == ((0, 4),)
    with pytest.raises(HandshakeError):
        engine.write("peer", elsewhere, digest=DIGEST, ask=answers(OTHER))
    assert engine.barred("peer") == ()
    engine.write("peer", five_requests())


def test_bars_without_a_digest_wait_for_the_end() -> None:
    engine = Slow(max_descriptors=4)
    engine.bad = {0}
    given_up(engine, five_requests())
    over(engine)
    engine.write("peer", copies([1], [50], [1]), digest=OTHER, ask=answers(OTHER))
    assert engine.barred("peer") == ((0, 4),)


def test_failures_bar_also_when_a_retry_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Failing(1)
    engine.write("peer", five_requests(), retries=1, digest=DIGEST, ask=answers(DIGEST))
    assert engine.rows == list(range(10))
    assert engine.barred("peer") == ((4, 8),)
    for how in ({}, {"retries": 1, "digest": DIGEST, "ask": answers(DIGEST)}):
        with pytest.raises(TransferError, match="a batch that failed, of which the transport may still send") as caught:
            engine.write("peer", five_requests(), **how)
        assert caught.value.barred == ((4, 8),)
    engine.lift("other")
    engine.lift()
    assert engine.barred("peer") == ((4, 8),)
    engine.lift("peer")
    engine.write("peer", five_requests())
    monkeypatch.setattr(Failing, "lingers", False)
    engine = Failing(1)
    engine.write("peer", five_requests(), retries=1, digest=DIGEST, ask=answers(DIGEST))
    assert engine.barred("peer") == ()


def test_a_plan_for_another_digest_is_not_barred() -> None:
    """After a new handshake. A plan for the memory of the failed attempt, or for no known one, is refused."""
    src, first, second = rank(1 << 20), Slow().register(rank(1 << 30)), Slow().register(rank(1 << 30))
    old, new = (kvcompile.compile(src, dst).build([Request("a", [[1, 3]], [[2, 5]])]) for dst in (first, second))
    engine = Failing(0)
    with pytest.raises(TransferError, match="a batch failed"):
        engine.write("peer", old)
    for again in (old, copies(old.src, old.dst, old.length)):
        with pytest.raises(TransferError, match="barred"):
            engine.write("peer", again)
    engine.write("peer", new)
    with pytest.raises(TransferError, match="barred"):
        engine.write("peer", old)


def test_who_waited_for_a_turn_is_refused_too() -> None:
    """The attempt before it times out while it waits: it looks again when its turn comes."""
    engine = Slow(max_descriptors=4)
    engine.bad = {0}
    first = engine.write_async("peer", five_requests())
    eventually(lambda: engine.at_once == 1)
    second = engine.write_async("peer", copies([77], [2], [1]))
    with pytest.raises(TransferError):
        first.wait(0)
    over(engine)
    with pytest.raises(TransferError, match="barred") as caught:
        second.wait(20)
    assert caught.value.barred == ((0, 4),)
    assert not engine.moved


def test_reads_bar_this_side() -> None:
    engine = Slow(max_descriptors=4)
    given_up(engine, five_requests(), "read")
    assert engine.barred() == ((0, 4),)
    assert engine.barred("peer") == ()
    with pytest.raises(TransferError, match="barred"):
        engine.read("other", copies([1], [3], [1]))
    over(engine)


def test_bars_at_the_end_of_the_address_space() -> None:
    engine = Slow()
    top = 2**64 - 8
    given_up(engine, copies([1, 2], [top, 0], [8, 8]))
    assert engine.barred("peer") == ((0, 8), (top, 2**64))
    for at, size in ((2**64 - 1, 1), (7, 1), (top - 1, 2)):
        with pytest.raises(TransferError, match="barred"):
            engine.write("peer", copies([1], [at], [size]))
    over(engine)


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


@pytest.fixture
def port() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_exchange(port: str) -> None:
    now = [DIGEST]
    responder = Responder(port, lambda: now)
    try:
        assert digests.ask(port) == (DIGEST,)
        now[:] = [DIGEST, OTHER]
        assert digests.ask(port) == (DIGEST, OTHER)
        now[:] = []
        assert digests.ask(port) == ()
        now[:] = [DIGEST] * 2000  # the newest, as many as a datagram takes
        assert len(digests.ask(port)) == 900
        host, number = port.split(":")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as wire:
            for noise in (b"", b"\xff" * 100, b"x" * 60_000, Cache([], []).to_bytes()):
                wire.sendto(noise, (host, int(number)))
        assert digests.ask(port)  # still there
        with pytest.raises(kvcompile.KVCompileError, match="cannot be taken"):
            Responder(port, list)
    finally:
        responder.close()
    with pytest.raises(HandshakeError, match="no answer"):
        digests.ask(port, 0.5)
    Responder(port, list).close()  # the port was given back


def test_silence_and_lies_are_no_answer(port: str) -> None:
    """A responder that repeats an earlier answer, or sends noise, is not believed: the nonce differs."""
    host, number = port.split(":")
    old = digests._Answer(b"0" * 16, [DIGEST])
    stop = threading.Event()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as wire:
        wire.bind((host, int(number)))
        wire.settimeout(0.1)

        def lie() -> None:
            while not stop.is_set():
                try:
                    _, sender = wire.recvfrom(1000)
                except TimeoutError:
                    continue
                for noise in (kvcompile.handshake.pack(old), b"noise", b""):
                    wire.sendto(noise, sender)

        thread = threading.Thread(target=lie)
        thread.start()
        try:
            with pytest.raises(HandshakeError, match="no answer"):
                digests.ask(port, 0.5)
        finally:
            stop.set()
            thread.join()


@pytest.mark.parametrize("session", ["", "nowhere", "127.0.0.1:many", "127.0.0.1:99999"])
def test_sessions_that_are_none(session: str) -> None:
    with pytest.raises(HandshakeError, match="no answer"):
        digests.ask(session, 0.2)
