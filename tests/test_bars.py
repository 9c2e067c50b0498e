"""Bars: what is under way when an attempt ends badly is refused to other calls, until it cannot land any more."""

import numpy as np
import pytest

import kvcompile
from kvcompile import Descriptors, HandshakeError, Request, TransferError
from tests.peer import copies, rank
from tests.test_attempts import DIGEST, OTHER, Failing, answers, eventually, over
from tests.test_engines import Slow, five_requests


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
