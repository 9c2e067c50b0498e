"""The Mooncake Transfer Engine, through its official Python interface or, where that is wanted, past it (`native`).

It retries nothing: blind retries corrupt.
"""

import importlib
import json
import os
import threading
from collections.abc import Iterable
from typing import Any

from kvcompile.descriptors import Descriptors
from kvcompile.engines import native as past
from kvcompile.engines.ahead import ahead
from kvcompile.engines.base import Engine
from kvcompile.engines.digests import Responder
from kvcompile.errors import KVCompileError, TransferError
from kvcompile.layout import Buffer

__all__ = ["BATCH_DESCRIPTORS", "BATCH_NBYTES", "MooncakeEngine"]

BATCH_DESCRIPTORS = 1000
"""Descriptors of one call. Mooncake's TCP transport queues 1,024 transfers to a peer, and 1,024 more that wait for a
place; one too many fails the call *and every later call to that peer*, until the engine is made anew (measured with
0.3.13.post1: still so after 78 s). The next batch comes while the last one drains, so one takes less than the half.
Smaller batches cost round trips (500 took twice as long for each descriptor), 1,500 and 2,000 gained nothing."""

BATCH_NBYTES = 1 << 30
"""Bytes of one call. Mooncake gives a call 30 s and a second for each GiB: even 1 Gbit/s moves this in 9 s."""

ALREADY_REGISTERED = -7
"""What ``register_memory`` answers for memory that overlaps what is registered (``ERR_ADDRESS_OVERLAPPED``)."""

PROTOCOLS = ("tcp", "rdma")

_environment = threading.Lock()


class MooncakeEngine(Engine):
    """Move bytes with the Mooncake Transfer Engine.

    It listens on all interfaces without authentication: whoever reaches its port can read and write what is registered.

    Parameters
    ----------
    host : str
        Name or address by which peers reach this machine, without a port: the engine chooses that.
    protocol : "tcp" or "rdma"
        Mooncake itself takes any word, and falls back to TCP without one.
    device : str
        Names of the RDMA devices to use, comma-separated; all by default.
    max_descriptors, max_nbytes : int or None
        Limits of one call; None for no limit. Raise the first only where the transport is not TCP, or together with
        MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER and MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER.
    native : "off", "auto" or "require"
        Whether to call Mooncake's C++ methods rather than its Python interface, with a fifteenth of the time under the
        GIL, and failures that name just the requests that failed. A bet on the build of Mooncake that is installed:
        "auto" makes it where that build is known, the transport is TCP, and a trial in a child process went well (once
        a machine, seconds); "require" says why not.

    Raises
    ------
    KVCompileError
        Mooncake is not installed, cannot start, or has not the transport that was asked for; or ``native`` is required
        and something is against it.
    """

    def __init__(
        self,
        host: str,
        protocol: str = "tcp",
        device: str = "",
        *,
        max_descriptors: int | None = BATCH_DESCRIPTORS,
        max_nbytes: int | None = BATCH_NBYTES,
        native: past.Choice = "off",
    ) -> None:
        if not isinstance(host, str) or not host or host.count(":") == 1:
            raise ValueError(f"host is {host!r}, expected a name or an address without a port")
        if protocol not in PROTOCOLS:
            raise ValueError(f"protocol is {protocol!r}, expected one of {PROTOCOLS}")
        if not isinstance(device, str) or (device and protocol == "tcp"):
            raise ValueError(
                f"device is {device!r}, expected names of RDMA devices with protocol 'rdma', '' with 'tcp'"
            )
        super().__init__(max_descriptors, max_nbytes)
        self._engine = _start(host, protocol, device)
        self.session = f"{host}:{self._engine.get_rpc_port()}"
        self._owned = True
        self._theirs: set[Buffer] = set()
        self._responder: Responder | None = None
        self._native = past.find(self._engine, native, lambda: protocol == "tcp")

    @classmethod
    def wrap(
        cls,
        transfer_engine: Any,
        session: str,
        *,
        max_descriptors: int | None = BATCH_DESCRIPTORS,
        max_nbytes: int | None = BATCH_NBYTES,
        native: past.Choice = "off",
    ) -> "MooncakeEngine":
        """Use a running engine that somebody else owns.

        What its owner registered is used as it is and never unregistered; which memory that is, Mooncake does not tell,
        so local addresses are left unchecked here. The owner's own transfers share the queue to a peer: where both send
        at a time, give a smaller ``max_descriptors``.

        Parameters
        ----------
        transfer_engine : mooncake.engine.TransferEngine
            Initialized.
        session : str
            ``host:port`` by which peers reach it.
        max_descriptors, max_nbytes, native
            As for the class; an engine that found RDMA devices counts as one that uses them.
        """
        if not isinstance(session, str) or ":" not in session:
            raise ValueError(f"session is {session!r}, expected 'host:port'")
        engine = cls.__new__(cls)
        Engine.__init__(engine, max_descriptors, max_nbytes)
        engine._engine = transfer_engine
        engine.session = session
        engine._owned = False
        engine._theirs = set()
        engine._responder = None
        engine._native = past.find(transfer_engine, native, lambda: not _devices(transfer_engine))
        return engine

    def serve_digests(self) -> None:
        """Tell peers that retry which caches are registered here now: at the session's port, for UDP, until the end.

        Raises
        ------
        KVCompileError
            The port is taken: peers need an ``ask`` of their own then.
        """
        with self._idle:
            if self._responder is None:
                self._responder = Responder(self.session, lambda: self._digests)

    def _register(self, buffer: Buffer) -> None:
        code = self._engine.register_memory(buffer.base, buffer.nbytes)
        if code == ALREADY_REGISTERED and not self._owned:
            self._theirs.add(buffer)
        elif code:
            raise TransferError(f"register: Mooncake answered {code} for {buffer}, expected 0")

    def _unregister(self, buffer: Buffer) -> None:
        if buffer in self._theirs:
            self._theirs.remove(buffer)
            return
        code = self._engine.unregister_memory(buffer.base)
        if code:
            raise TransferError(f"unregister: Mooncake answered {code} for {buffer}, expected 0")

    def _check(self, kind: str, session: str, descriptors: Descriptors) -> None:
        # On TCP Mooncake takes any local address; the peer's are checked at the peer.
        if not self._owned:
            return
        side = "src" if kind == "write" else "dst"
        address = getattr(descriptors, side)
        row = self._outside(address, descriptors.length)
        if row >= 0:
            raise TransferError(
                f"descriptor {row}: {side} is {int(descriptors.length[row])} bytes at {int(address[row]):#x}, "
                f"expected them inside one registered buffer of this engine"
            )

    def _ready(self, descriptors: Descriptors) -> Iterable[Any]:
        if self._native is not None:
            return super()._ready(descriptors)
        most, most_nbytes = self._limits
        if most is not None and len(descriptors) <= most:  # one call, as most are
            lists = _Lists(descriptors)
            if most_nbytes is None or sum(lists.length) <= most_nbytes:
                return (lists,)
        return ahead(descriptors._batches(most, most_nbytes), _Lists)

    def _move(self, kind: str, session: str, batch: Any) -> None:
        try:
            if self._native is not None:
                self._native.move(kind, session, batch)
                return
            src, dst, length = batch.src, batch.dst, batch.length
            if kind == "write":
                code = self._engine.batch_transfer_sync_write(session, src, dst, length)
            else:
                code = self._engine.batch_transfer_sync_read(session, dst, src, length)
        except RuntimeError as error:  # a C++ exception
            raise TransferError(f"Mooncake failed at what the peer answered: {error}") from error
        if code:
            raise TransferError(
                f"Mooncake answered {code} for {len(batch)} descriptors: the peer is unreachable, has not registered "
                "that memory, or its queue was full; some of them may have been copied, or still be"
            )


class _Lists:
    """The columns of a batch as lists.

    They cost no more than array.array or memoryview for a batch of this size (0.2 us a descriptor for the three
    columns, conversion included), NumPy arrays 2.5 times as much (`make bench`).
    """

    __slots__ = ("dst", "length", "src")

    def __init__(self, batch: Descriptors) -> None:
        self.src, self.dst, self.length = batch.src.tolist(), batch.dst.tolist(), batch.length.tolist()

    def __len__(self) -> int:
        return len(self.length)


def _start(host: str, protocol: str, device: str) -> Any:
    """Start an engine whose transport is the one asked for: Mooncake goes by the hardware it finds, not by the word."""
    try:
        module = importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise KVCompileError(
            f"Mooncake cannot be imported ({error}): install the extra, pip install 'kvcompile[mooncake]', and its "
            "system libraries, apt-get install libibverbs1 ibverbs-providers libnuma1 libcurl4"
        ) from error
    engine = module.TransferEngine()
    with _environment:
        forced = "MC_FORCE_TCP" in os.environ
        if forced and protocol == "rdma":
            raise KVCompileError("protocol is 'rdma', but MC_FORCE_TCP is set, which makes Mooncake use TCP")
        if protocol == "tcp":
            os.environ["MC_FORCE_TCP"] = "1"
        try:
            code = engine.initialize(host, "P2PHANDSHAKE", protocol, device)
        finally:
            if not forced:
                os.environ.pop("MC_FORCE_TCP", None)
    if code:
        raise KVCompileError(
            f"Mooncake could not start on {host!r} with protocol {protocol!r}: it answered {code}, expected 0"
        )
    if protocol == "rdma":
        _require_devices(engine, device)
    return engine


def _require_devices(engine: Any, device: str) -> None:
    found = _devices(engine)
    missing = {name.strip() for name in device.split(",") if name.strip()} - found
    if missing or not found:
        raise KVCompileError(
            f"protocol is 'rdma' with device {device!r}, but Mooncake found the devices {sorted(found)} on this "
            "machine: without one it silently uses TCP"
        )


def _devices(engine: Any) -> set[str]:
    """Return the names of the RDMA devices that an engine found."""
    topology = json.loads(engine.get_local_topology())
    return {name for groups in topology.values() for names in groups for name in names}
