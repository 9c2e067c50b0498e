"""The calls of an engine: write and read, at once or with a ticket, with a deadline, and whose fault it was.

How a batch moves is not said here.
"""

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from kvcompile.descriptors import Descriptors
from kvcompile.engines.attempts import Bars, Kind, Ticket, Transfer, snapshot
from kvcompile.errors import HandshakeError, TransferError

__all__ = ["Ask", "Transfers"]

Ask = Callable[[str], Any]


class Transfers(ABC):
    """What callers do with an engine once memory is registered; `Engine` carries it out."""

    def __init__(self) -> None:
        self._bars = Bars()

    def write(
        self,
        session: str,
        descriptors: Descriptors,
        timeout: float | None = None,
        *,
        retries: int = 0,
        digest: str | None = None,
        ask: Ask | None = None,
    ) -> None:
        """Copy from this engine's memory (src) into a peer's (dst), and return when all bytes are there.

        With ``retries``, ``digest`` or ``ask``, nothing is sent, at the first attempt as at any later one, before the
        peer has shown that its memory is still what the descriptors were compiled for. Without, nobody asks: after a
        failure, or where a peer may have restarted, give one of them.

        Bytes of an attempt that timed out or failed may still land, and what they are is read from src then. So the dst
        bytes that were under way are *barred*, also if a retry of the same call succeeds: other calls that touch them
        are refused, until the attempt is known to be over, the peer's memory is seen, or given, with another digest,
        or `lift` is called. Src is to be left as it is as long.

        Parameters
        ----------
        session : str
            The peer's `session`.
        descriptors : Descriptors
        timeout : float, optional
            Seconds the caller is willing to wait, retries included. What is under way then may still land.
        retries : int
            How often to send again what has not certainly arrived, after a failure.
        digest : str, optional
            The ``digest`` that the peer's memory has to have; by default that of the cache the plan was compiled for.
        ask : callable, optional
            Given the session, return the peer's current digest, or several, in seconds: transport of the caller's. By
            default the peer is asked itself: see `serve_digests`.

        Raises
        ------
        TransferError
            ``.requests``: the ids with descriptors in a batch that failed or was not sent. A failed batch is partly
            applied. ``.complete``: the ids whose bytes have certainly arrived. ``.barred``: where nothing was sent
            because dst bytes are barred, which.
        HandshakeError
            The peer did not say its digest, or another one; nothing (of a retry: nothing more) was sent. ``.requests``
            and ``.complete`` as above.
        """
        self._conclude(self._begin("write", session, descriptors, timeout, retries, digest, ask, timeout is None))

    def read(
        self,
        session: str,
        descriptors: Descriptors,
        timeout: float | None = None,
        *,
        retries: int = 0,
        digest: str | None = None,
        ask: Ask | None = None,
    ) -> None:
        """Copy from a peer's memory (src) into this engine's (dst), and return when all bytes are there.

        Parameters and errors as for `write`; a timeout leaves this side's dst bytes barred, for reads from any peer,
        until the attempt is known to be over.
        """
        self._conclude(self._begin("read", session, descriptors, timeout, retries, digest, ask, timeout is None))

    def write_async(
        self,
        session: str,
        descriptors: Descriptors,
        timeout: float | None = None,
        *,
        retries: int = 0,
        digest: str | None = None,
        ask: Ask | None = None,
    ) -> Ticket:
        """Start what `write` does, and return at once.

        Parameters
        ----------
        session, descriptors, retries, digest, ask
            As for `write`. Src memory is to be left as it is until the transfer is over; the descriptors are copied.
        timeout : float, optional
            Seconds from now after which `Ticket.wait` gives up, unless it is told to earlier.
        """
        return Ticket(self._begin("write", session, descriptors, timeout, retries, digest, ask, False), self._conclude)

    def read_async(
        self,
        session: str,
        descriptors: Descriptors,
        timeout: float | None = None,
        *,
        retries: int = 0,
        digest: str | None = None,
        ask: Ask | None = None,
    ) -> Ticket:
        """Start what `read` does, and return at once; see `write_async`."""
        return Ticket(self._begin("read", session, descriptors, timeout, retries, digest, ask, False), self._conclude)

    def barred(self, session: str | None = None) -> tuple[tuple[int, int], ...]:
        """Return the dst addresses, as half-open ranges, on which bytes of failed attempts may still land.

        Parameters
        ----------
        session : str, optional
            In this peer's memory; without it, in this engine's own (of reads).
        """
        return self._bars.of(session or "")

    def lift(self, session: str | None = None) -> None:
        """Declare every attempt over whose dst is a peer's memory, or this engine's own: its bars are lifted.

        For a caller that knows more than the transport says: that its connection is gone, or all has come.
        """
        self._bars.forget(session or "")

    @abstractmethod
    def _carry(self, transfer: Transfer, retries: int, ask: Ask | None) -> None:
        """Carry a transfer out, raise nothing, and `end` it."""

    @abstractmethod
    def _ask(self, session: str) -> tuple[str, ...]:
        """Ask a peer for its digests, unless the caller brings a way of their own."""

    def _begin(
        self,
        kind: Kind,
        session: str,
        descriptors: Descriptors,
        timeout: float | None,
        retries: int,
        digest: str | None,
        ask: Ask | None,
        here: bool,
    ) -> Transfer:
        """Check the arguments of a transfer and carry it out: in this thread, or in one of its own."""
        _check_timeout(timeout)
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise ValueError(f"retries is {retries!r}, expected a number from 0 on")
        if retries or digest is not None or ask is not None:
            digest = _expected(kind, descriptors) if digest is None else digest
            ask = self._ask if ask is None else ask
        transfer = Transfer(kind, session, descriptors if here else snapshot(descriptors), timeout, digest)
        if not len(descriptors):
            transfer.end()
            return transfer
        if ask is None:
            self._bars.refuse(transfer)  # at once; who asks may see that the memory is registered anew
        if here:
            self._carry(transfer, retries, ask)
        else:
            # The engines' calls cannot be interrupted, so it is the caller who leaves. A daemon, for a frozen peer
            # must not keep the process from ending.
            args = (transfer, retries, ask)
            threading.Thread(target=self._carry, args=args, name=f"kvcompile-{kind}", daemon=True).start()
        return transfer

    def _conclude(self, transfer: Transfer, timeout: float | None = None) -> None:
        """Wait for a transfer, and raise what went wrong; give it up when the time is over."""
        _check_timeout(timeout)
        if not transfer.over and not transfer.wait(_seconds(transfer, timeout)):
            with transfer.lock:
                given_up = not transfer.over
                if given_up and not transfer.left:
                    transfer.left = True
                    transfer.bar = self._bars.add(transfer, "an attempt whose caller gave up waiting")
            if given_up:
                seconds = transfer.timeout if timeout is None else timeout
                if transfer.asking:
                    raise transfer.error(HandshakeError, f"no answer from the peer in {seconds} s, nothing is sent")
                raise transfer.error(TransferError, f"not over after {seconds} s; what is under way may still land")
        fault = transfer.fault
        if fault is None and transfer.moved < len(transfer.descriptors):
            fault = TransferError("given up before; the rest was not sent")
        if isinstance(fault, TransferError) and not fault.barred:
            raise transfer.error(TransferError, str(fault)) from fault
        if isinstance(fault, HandshakeError):
            raise transfer.error(HandshakeError, str(fault)) from fault
        if fault is not None:
            raise fault


def _seconds(transfer: Transfer, timeout: float | None) -> float | None:
    """Return how long a caller waits at most."""
    if transfer.deadline is None or transfer.left:
        return timeout
    left = max(0.0, transfer.deadline - time.monotonic())
    return left if timeout is None else min(left, timeout)


def _check_timeout(timeout: float | None) -> None:
    if timeout is not None and not 0 <= timeout < math.inf:
        raise ValueError(f"timeout is {timeout!r}, expected seconds from 0 on, or None")


def _expected(kind: Kind, descriptors: Descriptors) -> str:
    """Return the digest of the peer's cache that descriptors were compiled for."""
    if descriptors.digests is None:
        raise ValueError("digest is None, expected that of the peer's cache: these descriptors were made by hand")
    return descriptors.digests[kind == "write"]
