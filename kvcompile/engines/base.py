"""What every engine does alike: registration, batches, deadlines, retries, and saying which requests a failure touches.

It moves nothing itself: an engine below it moves one batch.
"""

import secrets
import threading
import time
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvcompile import backend
from kvcompile.cache import Cache
from kvcompile.descriptors import Descriptors
from kvcompile.engines import digests
from kvcompile.engines.attempts import BatchError, Transfer, rest
from kvcompile.engines.transfers import Ask, Transfers
from kvcompile.errors import HandshakeError, TransferError
from kvcompile.layout import Buffer

__all__ = ["Engine", "spans_of"]

Addresses = npt.NDArray[np.uint64]

PAUSE_S = 0.1
"""Seconds before a retry."""


class Engine(Transfers):
    """Registered memory of one process, and the transfers between it and its peers.

    Safe to use from many threads. Calls to one peer take turns: a transport has one queue for each peer, and two
    batches that fit alone may not fit together.

    Attributes
    ----------
    session : str
        What peers call this engine.
    """

    session: str

    lingers: ClassVar[bool] = True
    """Whether bytes of a batch that failed may still land. Mooncake reports a batch at its first failure and goes on:
    within milliseconds, or, where the peer refuses some, once a second (seen 5 s after the report)."""

    def __init__(self, max_descriptors: int | None, max_nbytes: int | None) -> None:
        for name, limit in (("max_descriptors", max_descriptors), ("max_nbytes", max_nbytes)):
            if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
                raise ValueError(f"{name} is {limit!r}, expected a positive integer or None")
        super().__init__()
        self._limits = max_descriptors, max_nbytes
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)  # no flights
        self._flights = 0
        self._buffers: tuple[Buffer, ...] = ()
        self._spans: tuple[tuple[Buffer, ...], Addresses, Addresses] = ((), *spans_of(()))
        self._digests: list[str] = []
        self._turns: dict[str, threading.Lock] = {}

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
        mine = msgspec.structs.replace(cache, instance=secrets.token_hex(16))
        self._digests = [*self._digests, mine.digest]
        return mine

    def unregister(self) -> None:
        """Unregister all that `register` registered, after the transfers under way have ended.

        Raises
        ------
        TransferError
            The engine refused; the other buffers are unregistered all the same.
        """
        with self._idle:
            buffers, self._buffers = self._buffers, ()
            self._digests = []
            self._idle.wait_for(lambda: not self._flights)
            faults = []
            for buffer in buffers:
                try:
                    self._unregister(buffer)
                except TransferError as error:
                    faults.append(str(error))
        if faults:
            raise TransferError("; ".join(faults))

    def serve_digests(self) -> None:
        """Let peers that retry ask which caches are registered here."""

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
    def _move(self, kind: str, session: str, batch: Any) -> None:
        """Move one batch, which keeps to the limits, without the GIL; TransferError if that failed.

        BatchError where it is known which rows have arrived.
        """

    def _ready(self, descriptors: Descriptors) -> Iterable[Any]:
        """Return the batches of a transfer within the limits, or what `_move` takes in place of each."""
        return descriptors._batches(*self._limits)

    def _held(self, session: str) -> "tuple[Engine, ...]":
        """Return the engines whose registered memory a transfer with a peer uses; TransferError if there is none."""
        return (self,)

    def _carry(self, transfer: Transfer, retries: int, ask: Ask | None) -> None:
        """Move batch after batch, and again what a failure left, until all is there or the caller has left."""
        held: list[Engine] = []
        try:
            for engine in self._held(transfer.session):  # `unregister` waits for the end
                with engine._lock:
                    engine._flights += 1
                held.append(engine)
            turn = self._turns.get(transfer.session) or self._turns.setdefault(transfer.session, threading.Lock())
            with turn:
                self._check(transfer.kind, transfer.session, transfer.descriptors)
                for attempt in range(retries + 1):
                    if attempt:
                        time.sleep(PAUSE_S)
                    if ask is not None:
                        self._verify(transfer, ask)
                    self._bars.refuse(transfer)  # again: another may have timed out while this one waited for its turn
                    try:
                        transfer.fault = None
                        self._send(transfer)
                        break
                    except TransferError as error:
                        transfer.fault = error
                        self._failed(transfer, error)
                        if transfer.left:
                            break
        except Exception as fault:  # raised again where the caller is
            transfer.fault = fault
        finally:
            for engine in held:
                with engine._lock:
                    engine._flights -= 1
                    if not engine._flights:
                        engine._idle.notify_all()
            with transfer.lock:
                transfer.end()
                if transfer.bar is not None and transfer.moved >= transfer.sent:
                    self._bars.lift(transfer.bar)

    def _send(self, transfer: Transfer) -> None:
        """Move what has not certainly arrived, until the caller has left."""
        for batch in self._ready(rest(transfer.descriptors, transfer.moved)):
            if not transfer.start(len(batch)):
                return
            self._move(transfer.kind, transfer.session, batch)
            transfer.moved += len(batch)

    def _failed(self, transfer: Transfer, error: TransferError) -> None:
        """Note that a batch failed, which does not mean that the transport has stopped sending it."""
        with transfer.lock:
            if isinstance(error, BatchError):
                transfer.leave_out(error.arrived)
                if transfer.bar is not None:  # it stands for the whole batch
                    self._bars.lift(transfer.bar)
                    transfer.bar = self._bars.add(transfer, transfer.bar.why)
            if self.lingers and not transfer.left:
                self._bars.add(transfer, "a batch that failed, of which the transport may still send the rest")
            if not (self.lingers and transfer.left):
                transfer.sent = transfer.moved

    def _verify(self, transfer: Transfer, ask: Ask) -> None:
        """Ask the peer for its digests; HandshakeError unless the one that this transfer needs is among them."""
        transfer.asking = True
        try:
            current = digests.normal(ask(transfer.session))
        except HandshakeError:
            raise
        except Exception as error:
            raise HandshakeError(f"no answer: ask failed with {error!r}") from error
        finally:
            transfer.asking = False
        self._bars.renewed(transfer.session, current)
        if transfer.digest not in current:
            raise HandshakeError(
                f"the peer's memory has digest {', '.join(current) or 'none'}, expected {transfer.digest}: it is not "
                "what the descriptors were compiled for, nothing is sent"
            ) from transfer.fault

    def _ask(self, session: str) -> tuple[str, ...]:
        """Ask a peer for its digests, unless the caller brings a way of their own."""
        return digests.ask(session)

    def _outside(self, address: Addresses, length: Addresses) -> int:
        """Return the first row that lies in no single buffer that is registered here, -1 if there is none."""
        buffers = self._buffers  # looked at once: another thread may register meanwhile
        of, base, nbytes = self._spans
        if of is not buffers:  # sorted once, not at every transfer
            of, base, nbytes = self._spans = buffers, *spans_of(buffers)
        return backend.outside(address, length, base, nbytes)


def spans_of(buffers: tuple[Buffer, ...]) -> tuple[Addresses, Addresses]:
    """Return base and bytes of disjoint buffers in order of address, uint64 [buffers] each."""
    spans = sorted((buffer.base, buffer.nbytes) for buffer in buffers)
    base, nbytes = np.array(spans, np.uint64).reshape(-1, 2).T.copy()
    return base, nbytes


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
