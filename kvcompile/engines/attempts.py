"""Transfers under way and what is left of those that failed: the dst bytes on which late bytes may still land.

It moves nothing; an engine tells it what was handed over and what has arrived.
"""

import threading
import time
from collections.abc import Callable, Hashable, Iterable
from itertools import pairwise
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvcompile import arena
from kvcompile.descriptors import Descriptors
from kvcompile.errors import HandshakeError, TransferError

__all__ = ["Bars", "BatchError", "Ticket", "Transfer", "rest", "snapshot"]

UInt64 = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]
Kind = Literal["write", "read"]
_Error = TypeVar("_Error", TransferError, HandshakeError)

SHOWN = 3
"""Ranges that a message lists; the error holds all."""


class BatchError(TransferError):
    """A batch that failed, of which the transport says which rows have certainly arrived all the same."""

    def __init__(self, message: str, arrived: Bools) -> None:
        super().__init__(message)
        self.arrived = arrived


class Transfer:
    """One call of write or read, its retries included.

    Rows ``[0, moved)`` have certainly arrived, ``[moved, sent)`` are with the transport, the others were never sent.

    Attributes
    ----------
    descriptors : Descriptors
        Without the rows that arrived although their batch failed.
    digest : str or None
        Of the cache that the peer's memory has to be; None where nobody asks.
    left : bool
        The caller has given up: nothing more may be sent.
    over : bool
        Nothing moves any more, as far as the transport has said.
    """

    moved = 0
    sent = 0
    asking = False
    left = False
    over = False
    bar: "_Bar | None" = None  # of what was under way when the caller left
    fault: Exception | None = None

    def __init__(
        self, kind: Kind, session: str, descriptors: Descriptors, timeout: float | None, digest: str | None
    ) -> None:
        self.kind: Kind = kind
        self.session = session
        self.descriptors = descriptors
        self.timeout = timeout
        self.deadline = None if timeout is None else time.monotonic() + timeout
        self.digest = digest
        self.total = len(descriptors)
        self.lock = threading.Lock()
        self._under_way = threading.Lock()  # held until the end; an Event would cost 4 us, this 0.3
        self._under_way.acquire()

    @property
    def place(self) -> str:
        """Whose memory dst is: the peer's session, "" for this process."""
        return self.session if self.kind == "write" else ""

    @property
    def memory(self) -> str | None:
        """Digest of the peer's memory that the descriptors are for, as far as it is known."""
        if self.digest is None and self.descriptors.digests is not None:
            return self.descriptors.digests[self.kind == "write"]
        return self.digest

    def start(self, rows: int) -> bool:
        """Note that so many more rows go to the transport, unless the caller has left."""
        with self.lock:
            if not self.left:
                self.sent = self.moved + rows
            return not self.left

    def end(self) -> None:
        """Say that it is over, once."""
        self.over = True
        self._under_way.release()

    def wait(self, seconds: float | None) -> bool:
        """Wait until it is over, or so long; return whether it is."""
        if self._under_way.acquire(timeout=-1 if seconds is None else seconds):
            self._under_way.release()
        return self.over

    def leave_out(self, arrived: Bools) -> None:
        """Take rows of those with the transport off the list, for they have arrived."""
        keep = np.ones(len(self.descriptors), bool)
        keep[self.moved : self.sent] = ~arrived
        self.descriptors = _only(self.descriptors, keep)
        self.sent -= int(np.count_nonzero(arrived))

    def error(self, kind: type[_Error], what: str, **more: tuple[tuple[int, int], ...]) -> _Error:
        """Make the error that names the incomplete requests: those with a row past the last that arrived."""
        rows, moved = self.descriptors, self.moved
        requests, complete = [], []
        for request, (first, last) in zip(rows.requests, pairwise(rows.spans), strict=True):
            if last > max(first, moved):
                requests.append(request)
            elif request not in rows.failed:
                complete.append(request)
        arrived = self.total - len(rows) + moved
        counts = f"{arrived} of {self.total} descriptors arrived, {len(requests)} request(s) may be incomplete"
        return kind(f"{self.kind} with {self.session}: {what} ({counts})", requests, complete, **more)


class Ticket:
    """A transfer that goes on while its caller does something else. Made by `write_async` and `read_async`."""

    def __init__(self, transfer: Transfer, conclude: Callable[[Transfer, float | None], None]) -> None:
        self._transfer = transfer
        self._conclude = conclude

    def done(self) -> bool:
        """Say whether `wait` would return, or raise, at once."""
        return self._transfer.over or self._transfer.left

    def wait(self, timeout: float | None = None) -> None:
        """Return when all bytes are there.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait, from now. Who waits in vain gives the transfer up, as `write` does: nothing more of it is
            sent, and a later `wait` tells how it ended. To look without giving up, use `done`.

        Raises
        ------
        TransferError, HandshakeError
            As `Engine.write`.
        """
        self._conclude(self._transfer, timeout)


class _Bar(NamedTuple):
    """Bytes of one attempt: disjoint ranges of dst addresses, ascending, as first and last byte."""

    transfer: Transfer
    place: str
    digest: str | None  # what the memory was then
    first: UInt64
    last: UInt64
    requests: tuple[Hashable, ...]
    why: str


class Bars:
    """The dst bytes of attempts that failed, until each is over or the peer's memory is registered anew."""

    def __init__(self) -> None:
        self._bars: list[_Bar] = []
        self._lock = threading.Lock()

    def add(self, transfer: Transfer, why: str) -> "_Bar | None":
        """Bar the rows of a transfer that are with the transport, and return the bar; None if there are none."""
        rows = slice(transfer.moved, transfer.sent)
        whole = transfer.descriptors
        spans = np.clip(whole.spans, rows.start, rows.stop)
        requests = tuple(name for name, size in zip(whole.requests, np.diff(spans), strict=True) if size)
        first, last = _joined(whole.dst[rows], whole.length[rows])
        if not len(first):
            return None
        bar = _Bar(transfer, transfer.place, transfer.memory, first, last, requests, why)
        with self._lock:
            self._bars.append(bar)
        return bar

    def lift(self, over: _Bar) -> None:
        """Forget an attempt that is known to be over."""
        with self._lock:
            self._bars = [bar for bar in self._bars if bar is not over]

    def renewed(self, place: str, digests: Iterable[str]) -> None:
        """Forget what was barred in memory that a peer no longer has, given the digests that it has now."""
        now = {None, *digests}
        if len(now) == 1:
            return  # nothing is registered: late bytes are refused, but only a new registration says so for good
        with self._lock:
            self._bars = [bar for bar in self._bars if bar.place != place or bar.digest in now]

    def forget(self, place: str) -> None:
        """Forget all bars of a place."""
        with self._lock:
            self._bars = [bar for bar in self._bars if bar.place != place]

    def of(self, place: str) -> tuple[tuple[int, int], ...]:
        """Return the barred ranges of one place, half-open, ascending for each attempt."""
        with self._lock:
            bars = [bar for bar in self._bars if bar.place == place]
        return tuple(pair for bar in bars for pair in _pairs(bar, slice(None)))

    def refuse(self, transfer: Transfer) -> None:
        """Raise TransferError if what is left of a transfer touches bytes that *another* one may still write."""
        if not self._bars:
            return
        with self._lock:
            bars = [bar for bar in self._bars if bar.place == transfer.place and bar.transfer is not transfer]
        if transfer.kind == "write" and transfer.memory is not None:
            # A plan for memory with another digest: its handshake came after it was registered anew.
            bars = [bar for bar in bars if bar.digest in (None, transfer.memory)]
        if not bars:
            return
        tail = rest(transfer.descriptors, transfer.moved)
        # A zero length touches nothing, and has no last byte.
        some = tail.length > 0
        first, length = tail.dst[some], tail.length[some]
        last = first + (length - np.uint64(1))
        for bar in bars:
            low, high = np.searchsorted(bar.last, first), np.searchsorted(bar.first, last, side="right")
            touched = np.flatnonzero(low < high)
            if len(touched):
                hit = np.zeros(len(bar.first) + 1, np.int64)
                np.add.at(hit, low[touched], 1)
                np.add.at(hit, high[touched], -1)
                ranges = _pairs(bar, np.cumsum(hit[:-1]) > 0)
                shown = ", ".join(f"[{start:#x}, {stop:#x})" for start, stop in ranges[:SHOWN])
                more = f" and {len(ranges) - SHOWN} more" if len(ranges) > SHOWN else ""
                raise transfer.error(
                    TransferError,
                    f"{len(touched)} descriptor(s) touch dst bytes {shown}{more}, barred: {bar.why}, for request(s) "
                    f"{_names(bar.requests)}; its bytes may still land until it is known to be over or the peer's "
                    "memory is registered anew",
                    barred=ranges,
                )


def rest(descriptors: Descriptors, first: int) -> Descriptors:
    """Return the rows from ``first`` on, without copying."""
    if not first:
        return descriptors
    spans = np.maximum(descriptors.spans, first) - first
    columns = descriptors.src[first:], descriptors.dst[first:], descriptors.length[first:]
    return Descriptors(*columns, spans, descriptors.requests, descriptors.failed)


def _only(descriptors: Descriptors, keep: Bools) -> Descriptors:
    """Return a copy with some of the rows."""
    spans = np.append(0, np.cumsum(keep))[descriptors.spans]
    columns = descriptors.src[keep], descriptors.dst[keep], descriptors.length[keep]
    copy = Descriptors(*columns, spans, descriptors.requests, descriptors.failed)
    copy._caches = descriptors._caches
    return copy


def snapshot(descriptors: Descriptors) -> Descriptors:
    """Return a copy that outlives what the caller does with the original, `Plan.build` into it included."""
    size = len(descriptors)
    src, dst, length = arena.columns(arena.take(size), size)
    src[:], dst[:], length[:] = descriptors.src, descriptors.dst, descriptors.length
    spans, failed = descriptors.spans.copy(), dict(descriptors.failed)
    copy = Descriptors(src, dst, length, spans, descriptors.requests, failed)
    copy._caches = descriptors._caches
    return copy


def _joined(start: UInt64, length: UInt64) -> tuple[UInt64, UInt64]:
    """Return the bytes of all rows as disjoint ranges, ascending: the first and the last byte of each."""
    order = np.argsort(start[length > 0], kind="stable")
    first, size = start[length > 0][order], length[length > 0][order]
    last = np.maximum.accumulate(first + (size - np.uint64(1)))
    opens = np.ones(len(first), bool)
    # Ranges that touch are joined as well; a last byte of 2**64-1 has nothing behind it.
    opens[1:] = (first[1:] > last[:-1]) & (first[1:] - last[:-1] > 1)
    return first[opens], last[np.append(opens[1:], True)] if len(first) else last


def _pairs(bar: _Bar, which: "slice | npt.NDArray[np.bool_]") -> tuple[tuple[int, int], ...]:
    return tuple((a, b + 1) for a, b in zip(bar.first[which].tolist(), bar.last[which].tolist(), strict=True))


def _names(requests: tuple[Hashable, ...]) -> str:
    shown = ", ".join(f"{request!r:.60}" for request in requests[:SHOWN])
    return shown + (f" and {len(requests) - SHOWN} more" if len(requests) > SHOWN else "")
