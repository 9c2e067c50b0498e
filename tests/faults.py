"""Faults of the real engine between real processes: each makes one happen, checks what came of it, and recovers.

A scenario returns what it saw in a few words, and raises AssertionError where a promise was broken. The peer's memory
is a file that both processes map, so that every byte of it can be looked at while the peer is frozen, or dead.
"""

import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np

import kvcompile
from kvcompile import Cache, Descriptors, HandshakeError, Request, TransferError
from kvcompile.engines import MooncakeEngine
from tests.peer import CANARY, Peer, mapped, peer, rank

SHAPE: dict[str, Any] = {"heads": 4, "layers": 12, "blocks": 256, "tokens": 4, "cell": 256}
"""8 KiB a block and layer on the dst side, two pieces of 2 KiB from each of two src ranks."""
NBYTES = 12 * (256 * 8192 + 512) + 512 + 4096
NAMES = tuple("abcdefgh")
BLOCKS = 30
PATIENCE = 60.0
"""Seconds for what takes a blink on an idle machine."""


class World:
    """This process with an engine and the cache of one src rank, and a file that is to be the peer's memory."""

    def __init__(self, folder: str, *, file: str = "memory", **limits: Any) -> None:
        self.engine = MooncakeEngine("127.0.0.1", **limits)
        rng = np.random.default_rng(3)
        self.source = rng.integers(0, 250, NBYTES // 2 + 4096, np.uint8)
        self.cache = self.engine.register(rank(self.source.ctypes.data, tp=(0, 2), **SHAPE))
        self.file = os.path.join(folder, file)
        np.full(NBYTES, CANARY, np.uint8).tofile(self.file)
        self.memory = mapped(self.file, NBYTES)
        # Runs of five, in an order of their own on each side.
        runs = [rng.permutation(50)[: len(NAMES) * BLOCKS // 5] for _ in range(2)]
        ids = [(side[:, None] * 5 + np.arange(5)).reshape(len(NAMES), BLOCKS).tolist() for side in runs]
        self.requests = [Request(name, [src], [dst]) for name, src, dst in zip(NAMES, *ids, strict=True)]

    def build(self, dst: Cache) -> Descriptors:
        built = kvcompile.compile(self.cache, dst).build(self.requests)
        assert not built.failed
        assert not built.uncovered
        return built

    def meet(self, other: Peer) -> None:
        """Have a connection before the fault: to a frozen stranger Mooncake sends nothing at all, for a minute."""
        one = self.build(other.cache)
        self.engine.write(other.session, next(one.batches(max_descriptors=1)), PATIENCE)
        self.clear()

    def clear(self) -> None:
        self.memory[:] = CANARY

    def check(self, other: Peer, built: Descriptors, complete: tuple[Any, ...], allowed: tuple[Any, ...] = ()) -> int:
        """Compare every byte: right for complete requests, right or untouched for allowed ones, untouched elsewhere.

        Returns the number of bytes that were written.
        """
        memory, here = self.memory.copy(), self.source.ctypes.data
        expected = np.full(NBYTES, CANARY, np.uint8)
        maybe = np.zeros(NBYTES, bool)
        for name, (first, last) in zip(built.requests, pairwise(built.spans.tolist()), strict=True):
            if name not in complete and name not in allowed:
                continue
            columns = (built.src[first:last], built.dst[first:last], built.length[first:last])
            for src, dst, length in zip(*(column.tolist() for column in columns), strict=True):
                at = slice(dst - other.address, dst - other.address + length)
                expected[at] = self.source[src - here : src - here + length]
                maybe[at] = name not in complete
        wrong = (memory != expected) & ~(maybe & (memory == CANARY))
        assert not wrong.any(), f"{wrong.sum()} wrong bytes, first at {int(np.argmax(wrong))}"
        return int((memory != CANARY).sum())

    def landed(self) -> int:
        return int((self.memory != CANARY).sum())

    def until_landed(self, more_than: int = 0) -> None:
        """Wait until bytes are in the peer's memory."""
        until(lambda: self.landed() > more_than)


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline, f"waited {PATIENCE} s"
        time.sleep(0.002)


@contextmanager
def world(**limits: Any) -> Iterator[World]:
    """Make a world in a folder of its own. What its engine still holds when it ends goes with the process."""
    with tempfile.TemporaryDirectory(prefix="kvcompile-") as folder:
        yield World(folder, **limits)


@contextmanager
def theirs(here: World, **where: Any) -> Iterator[Peer]:
    with peer(NBYTES, SHAPE, file=here.file, **where) as started:
        yield started


def failure(call: Callable[[], Any], kind: type[Exception] = TransferError) -> Any:
    """Return the error that a call must end with."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}, and it succeeded")


def split(error: Any) -> None:
    """Every request is on one of the two lists of an error, in order."""
    assert sorted(error.requests + error.complete) == list(NAMES)
    assert list(error.requests) == sorted(error.requests)


def anew(here: World) -> str:
    """The safe end of a fault: a new peer, a new handshake, everything sent again, every byte compared."""
    here.clear()
    with theirs(here) as other:
        built = here.build(other.cache)
        here.engine.write(other.session, built, timeout=PATIENCE, retries=2)
        here.check(other, built, NAMES)
    return "sent anew: right"


def killed_before() -> str:
    with world() as here:
        with theirs(here) as other:
            built = here.build(other.cache)
            _kill(other)
            error = failure(lambda: here.engine.write(other.session, built, timeout=PATIENCE))
            assert (error.requests, error.complete) == (NAMES, ())
            refused = failure(lambda: here.engine.write(other.session, built, PATIENCE, retries=2), HandshakeError)
            assert (refused.requests, refused.complete) == (NAMES, ())
            assert here.landed() == 0
        return f"TransferError; retry: HandshakeError; {anew(here)}"


def killed_during() -> str:
    with world() as here:
        with theirs(here) as other:
            built = here.build(other.cache)
            ticket = here.engine.write_async(other.session, built)
            here.until_landed()
            _kill(other)
            error = failure(lambda: ticket.wait(PATIENCE))
            split(error)
            assert error.requests
            landed = here.check(other, built, error.complete, error.requests)
            refused = failure(lambda: here.engine.write(other.session, built, PATIENCE, retries=2), HandshakeError)
            assert refused.requests == NAMES
            assert here.landed() == landed
        share = f"{landed / built.nbytes:.0%} of the bytes there, {len(error.complete)} of 8 requests complete"
        return f"TransferError, {share}; retry: HandshakeError; {anew(here)}"


def killed_after() -> str:
    with world() as here:
        with theirs(here) as other:
            built = here.build(other.cache)
            here.engine.write(other.session, built, timeout=PATIENCE)
            _kill(other)
            error = failure(lambda: here.engine.write(other.session, built, timeout=PATIENCE))
            assert (error.requests, error.complete) == (NAMES, ())
            here.check(other, built, NAMES)
        return f"first write right, second: TransferError; {anew(here)}"


def frozen_and_thawed() -> str:
    """It thaws while the transport still waits: late bytes land, the attempt is over, and the bars are lifted."""
    with world() as here, theirs(here) as other:
        built = here.build(other.cache)
        here.meet(other)
        other.signal(signal.SIGSTOP)
        started = time.monotonic()
        error = failure(lambda: here.engine.write(other.session, built, timeout=1))
        waited = time.monotonic() - started
        assert waited < 10
        assert (error.requests, error.complete) == (NAMES, ())
        assert here.landed() == 0
        _barred(here, other, built)
        started = time.monotonic()
        asked = failure(lambda: here.engine.write(other.session, built, timeout=1), TransferError)
        assert asked.barred
        other.signal(signal.SIGCONT)
        here.until_landed()
        until(lambda: not here.engine.barred(other.session))
        late = here.check(other, built, (), NAMES)
        assert late == int(built.length[:1000].sum())  # the first batch, wholly; nothing after it was sent
        here.engine.write(other.session, built, timeout=PATIENCE, retries=1)
        here.check(other, built, NAMES)
        return (
            f"TransferError after {waited:.1f} s of 1 s; {late} late bytes; barred till they had landed; retry: right"
        )


def frozen_beyond_the_transport() -> str:
    """Mooncake gives up first (after 5 s here), and bytes land even after that: barred until another digest."""
    with _mooncake_timeout(5), world() as here, theirs(here) as other:
        built = here.build(other.cache)
        here.meet(other)
        other.signal(signal.SIGSTOP)
        error = failure(lambda: here.engine.write(other.session, built))
        assert "the peer is unreachable" in str(error)
        assert error.requests == NAMES
        assert here.landed() == 0
        asked = failure(lambda: here.engine.write(other.session, built, 2, retries=1), HandshakeError)
        assert "no answer" in str(asked)
        other.signal(signal.SIGCONT)
        here.until_landed()
        time.sleep(1)
        late = here.check(other, built, (), NAMES)
        _barred(here, other, built)  # Mooncake said failed: nobody knows that it is over
        refused = failure(lambda: here.engine.write(other.session, built, PATIENCE, retries=1))
        assert refused.barred
        other.renew()
        here.clear()
        old = built
        built = here.build(other.cache)
        free = rank(here.source.ctypes.data, tp=(0, 2), **SHAPE)
        spare = kvcompile.compile(free, other.cache).build([Request("spare", [[251]], [[251]])])
        assert here.engine.barred(other.session)
        here.engine.write(other.session, spare, PATIENCE, retries=1)  # touches no barred byte, and sees the new digest
        assert not here.engine.barred(other.session)
        here.clear()
        assert failure(lambda: here.engine.write(other.session, old, PATIENCE, retries=1), HandshakeError)
        assert here.landed() == 0
        here.engine.write(other.session, built, PATIENCE, retries=1)
        here.check(other, built, NAMES)
        return f"TransferError; {late} late bytes after Mooncake's own -1; barred till registered anew; then right"


def frozen_and_retried() -> str:
    """Frozen half-way, thawed when the transport has given up: the retry succeeds, and the bytes stay barred."""
    with _mooncake_timeout(5), world() as here, theirs(here) as other:
        built = here.build(other.cache)
        ticket = here.engine.write_async(other.session, built, retries=3)
        here.until_landed()
        other.signal(signal.SIGSTOP)
        until(lambda: bool(here.engine.barred(other.session)))
        other.signal(signal.SIGCONT)
        ticket.wait(PATIENCE)
        here.check(other, built, NAMES)
        count = len(here.engine.barred(other.session))
        _barred(here, other, built)
        return f"retry after thawing: right; {count} ranges stay barred"


def unregistered_under_way() -> str:
    with world() as here, theirs(here) as other:
        built = here.build(other.cache)
        ticket = here.engine.write_async(other.session, built)
        here.until_landed()
        other.ask("unregister")
        error = failure(lambda: ticket.wait(PATIENCE))
        split(error)
        assert error.requests
        landed = here.check(other, built, error.complete, error.requests)
        refused = failure(lambda: here.engine.write(other.session, built, PATIENCE, retries=2), HandshakeError)
        assert "digest none" in str(refused)
        other.renew()
        refused = failure(lambda: here.engine.write(other.session, built, PATIENCE, retries=2), HandshakeError)
        assert re.search(f"digest {other.cache.digest}, expected {built.digests[1]}", str(refused))
        # Mooncake goes on with the failed batch, once a second, and the peer takes it now that the addresses are
        # registered again. Nobody can call that back; it is why the failed requests' blocks are not safe.
        time.sleep(1.5)
        late = here.check(other, built, error.complete, error.requests) - landed
        built = here.build(other.cache)
        here.engine.write(other.session, built, PATIENCE, retries=2)
        here.check(other, built, NAMES)
        share = f"{landed / built.nbytes:.0%} there, {late} bytes later"
        return f"TransferError, {share}; two retries refused by digest; new plan: right"


def queue_limit() -> str:
    """All descriptors in one call: the transport's queue overflows, and stays so for this engine."""
    with world(max_descriptors=None) as here, theirs(here) as other:
        built = here.build(other.cache)
        assert len(built) > 2048
        error = failure(lambda: here.engine.write(other.session, built, PATIENCE, retries=1))
        split(error)
        assert error.requests
        time.sleep(1)
        landed = here.check(other, built, error.complete, NAMES)
        fresh = MooncakeEngine("127.0.0.1")
        fresh.register(here.cache)
        fresh.write(other.session, built, PATIENCE, retries=1)
        here.check(other, built, NAMES)
        return f"{len(built)} in one call: TransferError, {landed / built.nbytes:.0%} there; another engine: right"


def hundred_thousand() -> str:
    with world() as here, theirs(here) as other:
        built = here.build(other.cache)
        size = int(built.nbytes) // 100_000 // 8 * 8
        small = kvcompile.compile(here.cache, other.cache).build(here.requests, max_length=size)
        assert len(small) >= 100_000
        started = time.monotonic()
        here.engine.write(other.session, small, retries=1)
        seconds = time.monotonic() - started
        here.check(other, built, NAMES)
        return f"{len(small)} descriptors of {size} bytes in one call: right, {seconds:.1f} s"


def registration_refused() -> str:
    with world() as here, theirs(here) as other:
        engine = MooncakeEngine("127.0.0.1")
        layout = rank(here.source.ctypes.data, tp=(0, 2), **SHAPE)
        rival = layout.buffers[5]
        assert engine._engine.register_memory(rival.base, rival.nbytes) == 0
        error = failure(lambda: engine.register(layout))
        assert "Mooncake answered -7" in str(error)
        built = here.build(other.cache)
        refused = failure(lambda: engine.write(other.session, built, PATIENCE))
        assert "descriptor 0: src" in str(refused)
        assert (refused.requests, refused.complete) == (NAMES, ())
        assert here.landed() == 0
        assert engine._engine.unregister_memory(rival.base) == 0
        engine.register(layout)
        engine.write(other.session, built, PATIENCE, retries=1)
        here.check(other, built, NAMES)
        return "TransferError, nothing stays registered, nothing sent; registered again: right"


FAULTS: dict[str, Callable[[], str]] = {
    "peer killed before": killed_before,
    "peer killed during": killed_during,
    "peer killed after": killed_after,
    "peer frozen, thawed in time": frozen_and_thawed,
    "peer frozen beyond the transport's timeout": frozen_beyond_the_transport,
    "peer frozen half-way, retried": frozen_and_retried,
    "memory unregistered under way": unregistered_under_way,
    "queue limit reached": queue_limit,
    "100,000 descriptors in one call": hundred_thousand,
    "registration refused": registration_refused,
}


def _kill(other: Peer) -> None:
    other.signal(signal.SIGKILL)
    other.process.join(PATIENCE)


def _barred(here: World, other: Peer, built: Descriptors) -> None:
    """Writes that touch barred bytes are refused, whole, and say where; one byte is enough."""
    before = here.landed()
    ranges = here.engine.barred(other.session)
    assert ranges
    start, stop = ranges[-1]
    base = here.cache.buffers[0].base
    for at in (start, stop - 1):
        one = Descriptors(*(np.array([value], np.uint64) for value in (base, at, 1)), np.array([0, 1]), ("other",))
        error = failure(lambda one=one: here.engine.write(other.session, one, PATIENCE))
        assert error.barred == ((start, stop),)
        assert f"[{start:#x}, {stop:#x})" in str(error)
        assert "may still land" in str(error)
        assert error.requests == ("other",)
    assert here.landed() == before


@contextmanager
def _mooncake_timeout(seconds: int) -> Iterator[None]:
    """Engines made inside give a call so many seconds; Mooncake takes no less than five."""
    before = os.environ.get("MC_TRANSFER_TIMEOUT")
    os.environ["MC_TRANSFER_TIMEOUT"] = str(seconds)
    try:
        yield
    finally:
        os.environ.pop("MC_TRANSFER_TIMEOUT")
        if before is not None:
            os.environ["MC_TRANSFER_TIMEOUT"] = before
