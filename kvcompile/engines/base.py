"""What every engine does alike: registration, batches, deadlines, and saying which requests a failure touches.

It moves nothing itself: an engine below it moves one batch.
"""

import contextlib
import math
import secrets
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from kvcompile.cache import Cache
from kvcompile.descriptors import Descriptors
from kvcompile.errors import TransferError
from kvcompile.layout import Buffer

__all__ = ["Engine", "outside"]

Addresses = npt.NDArray[np.uint64]


class Engine(ABC):
    """Registered memory of one process, and the transfers between it and its peers.

    Safe to use from many threads. Calls to one peer take turns: a transport has one queue for each peer, and two
    batches that fit alone may not fit together.

    Attributes
    ----------
    session : str
        What peers call this engine.
    """

    session: str

    def __init__(self, max_descriptors: int | None, max_nbytes: int | None) -> None:
        for name, limit in (("max_descriptors", max_descriptors), ("max_nbytes", max_nbytes)):
            if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
                raise ValueError(f"{name} is {limit!r}, expected a positive integer or None")
        self._limits = {"max_descriptors": max_descriptors, "max_nbytes": max_nbytes}
        self._idle = threading.Condition()
        self._flights = 0
        self._buffers: tuple[Buffer, ...] = ()
        self._turns: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def register(self, cache: Cache) -> Cache:
        """Register the buffers of a cache, each once, so that peers can reach them.

        Returns
        -------
        Cache
            The same cache with a new random ``instance``: a peer that sees another digest than before knows that this
            memory is not the memory it knew.

        Raises
        ------
        TransferError
            The engine refused a buffer, or one overlaps what is registered without being part of it; nothing of this
            cache stays registered then.
        """
        with self._idle:
            known = self._buffers
            try:
                for buffer in (chunk for whole in cache.buffers for chunk in whole.chunks):
                    if not _within(buffer, self._buffers):
                        self._register(buffer)
                        self._buffers = (*self._buffers, buffer)
            except TransferError:
                for buffer in self._buffers[len(known) :]:
                    self._unregister(buffer)
                self._buffers = known
                raise
        return msgspec.structs.replace(cache, instance=secrets.token_hex(16))

    def unregister(self) -> None:
        """Unregister all that `register` registered, after the transfers under way have ended.

        Raises
        ------
        TransferError
            The engine refused; the other buffers are unregistered all the same.
        """
        with self._idle:
            buffers, self._buffers = self._buffers, ()
            self._idle.wait_for(lambda: not self._flights)
            faults = []
            for buffer in buffers:
                try:
                    self._unregister(buffer)
                except TransferError as error:
                    faults.append(str(error))
        if faults:
            raise TransferError("; ".join(faults))

    def write(self, session: str, descriptors: Descriptors, timeout: float | None = None) -> None:
        """Copy from this engine's memory (src) into a peer's (dst), and return when all bytes are there.

        Parameters
        ----------
        session : str
            The peer's `session`.
        descriptors : Descriptors
        timeout : float, optional
            Seconds the caller is willing to wait. Bytes may still land after it.

        Raises
        ------
        TransferError
            ``.requests``: the ids with descriptors in a batch that failed or was not sent. A failed batch is partly
            applied and its rest may land later, so their dst blocks are not to be reused before the attempt is known
            to be over. ``.complete``: the ids whose bytes have certainly arrived.
        """
        self._transfer("write", session, descriptors, timeout)

    def read(self, session: str, descriptors: Descriptors, timeout: float | None = None) -> None:
        """Copy from a peer's memory (src) into this engine's (dst), and return when all bytes are there.

        Parameters and errors as for `write`; a timeout leaves this side's dst blocks unsafe.
        """
        self._transfer("read", session, descriptors, timeout)

    @abstractmethod
    def _register(self, buffer: Buffer) -> None:
        """Make a buffer reachable; TransferError if that is refused."""

    @abstractmethod
    def _unregister(self, buffer: Buffer) -> None:
        """Undo `_register`; TransferError if that is refused."""

    @abstractmethod
    def _check(self, kind: str, session: str, descriptors: Descriptors) -> None:
        """Raise TransferError for what can be known to be wrong before a byte moves."""

    @abstractmethod
    def _move(self, kind: str, session: str, batch: Descriptors) -> None:
        """Move one batch, which keeps to the limits, without the GIL; TransferError if that failed."""

    @contextlib.contextmanager
    def _flight(self, session: str) -> Iterator[None]:
        """Hold the memory that a transfer with a peer uses: `unregister` waits for the end."""
        with self._idle:
            self._flights += 1
        try:
            yield
        finally:
            with self._idle:
                self._flights -= 1
                self._idle.notify_all()

    def _transfer(self, kind: str, session: str, descriptors: Descriptors, timeout: float | None) -> None:
        if timeout is not None and not 0 <= timeout < math.inf:
            raise ValueError(f"timeout is {timeout!r}, expected seconds from 0 on, or None")
        if not len(descriptors):
            return
        attempt = _Attempt(descriptors)
        if timeout is None:
            self._carry(kind, session, attempt)
        else:
            # The engines' calls cannot be interrupted, so it is the caller who leaves. A daemon, for a frozen peer
            # must not keep the process from ending.
            args = (kind, session, attempt)
            threading.Thread(target=self._carry, args=args, name=f"kvcompile-{kind}", daemon=True).start()
            if not attempt.over.wait(timeout):
                attempt.left = True
                raise attempt.error(
                    f"{kind} with {session}: not over after {timeout} s; what is under way may still land"
                )
        if isinstance(attempt.fault, TransferError):
            raise attempt.error(f"{kind} with {session}: {attempt.fault}") from attempt.fault
        if attempt.fault is not None:
            raise attempt.fault

    def _carry(self, kind: str, session: str, attempt: "_Attempt") -> None:
        """Move batch after batch until all is there, one fails, or the caller has left."""
        try:
            with self._turn(session), self._flight(session):
                self._check(kind, session, attempt.descriptors)
                for batch in attempt.descriptors.batches(**self._limits):
                    if attempt.left:
                        break
                    self._move(kind, session, batch)
                    attempt.moved += len(batch)
        except Exception as fault:  # raised again where the caller is
            attempt.fault = fault
        finally:
            attempt.over.set()

    def _turn(self, session: str) -> threading.Lock:
        with self._idle:
            return self._turns[session]


class _Attempt:
    """One transfer under way: how many descriptors have certainly arrived, and what went wrong."""

    def __init__(self, descriptors: Descriptors) -> None:
        self.descriptors = descriptors
        self.moved = 0
        self.left = False
        self.fault: Exception | None = None
        self.over = threading.Event()

    def error(self, what: str) -> TransferError:
        """Make the error that names the incomplete requests: those with a descriptor past the last that arrived."""
        moved, total = self.moved, len(self.descriptors)
        requests, complete = [], []
        for request, (first, last) in zip(self.descriptors.requests, pairwise(self.descriptors.spans), strict=True):
            if last > max(first, moved):
                requests.append(request)
            elif request not in self.descriptors.failed:
                complete.append(request)
        counts = f"{moved} of {total} descriptors arrived, {len(requests)} request(s) may be incomplete"
        return TransferError(f"{what} ({counts})", requests, complete)


def outside(buffers: tuple[Buffer, ...], address: Addresses, length: Addresses) -> int:
    """Return the first row that lies in no single buffer, -1 if there is none.

    Parameters
    ----------
    buffers : tuple of Buffer
        Disjoint.
    address, length : uint64 arrays [n]
    """
    spans = sorted((buffer.base, buffer.end) for buffer in buffers)
    # An empty span below all others catches what starts below them.
    base = np.array([0] + [start for start, _ in spans], np.uint64)
    end = np.array([0] + [stop for _, stop in spans], np.uint64)
    last = end[np.searchsorted(base[1:], address, side="right")]
    wrong = (address > last) | (length > last - address)
    return int(np.argmax(wrong)) if wrong.any() else -1


def _within(buffer: Buffer, known: tuple[Buffer, ...]) -> bool:
    """Whether a buffer is part of a registered one; TransferError if it overlaps one otherwise."""
    for other in known:
        if other.base <= buffer.base and buffer.end <= other.end:
            return True
        if other.base < buffer.end and buffer.base < other.end:
            raise TransferError(
                f"register: {buffer} overlaps {other}, expected it apart from, or inside, what is registered"
            )
    return False
