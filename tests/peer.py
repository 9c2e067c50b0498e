"""Another process with memory and a Mooncake engine, for tests: started and ended by `Peer`, asked over a pipe."""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvcompile import Buffer, Cache, Descriptors, Field, Group, Region, TransferError
from kvcompile.engines import Engine, MooncakeEngine

CANARY = 0xFD
WAIT = 60.0


def rank(
    base: int,
    *,
    heads: int = 4,
    tp: tuple[int, int] = (0, 1),
    layers: int = 3,
    blocks: int = 32,
    tokens: int = 4,
    cell: int = 64,
    gap: int = 512,
) -> Cache:
    """Make a small cache of keys and values, head first, one buffer a layer, with gaps between the layers."""
    local = max(1, heads // tp[1])
    half = local * tokens * cell
    sizes = {"heads": heads, "tokens": tokens, "cell_nbytes": cell}
    fields = (Field.hnd("k", **sizes), Field.hnd("v", offset=half, **sizes))
    size = blocks * 2 * half
    starts = [base + gap + layer * (size + gap) for layer in range(layers)]
    regions = [Region(f"layer{i}", 0, start, 2 * half, blocks, fields) for i, start in enumerate(starts)]
    return Cache(regions, [Group(tokens)], [Buffer(start, size) for start in starts], tp_rank=tp[0], tp_size=tp[1])


def span(cache: Cache) -> int:
    """Return the bytes from before the first buffer to behind the last, gaps of 512 included."""
    return cache.buffers[-1].end - cache.buffers[0].base + 1024


def whole(memory: np.ndarray) -> Cache:
    """Make a cache whose one buffer is all of a piece of memory."""
    nbytes = memory.nbytes
    field = Field.hnd("kv", heads=1, tokens=1, cell_nbytes=nbytes)
    return Cache([Region("all", 0, memory.ctypes.data, nbytes, 1, [field])], [Group(1)])


def copies(src: Any, dst: Any, length: Any, spans: Any = None, requests: Any = None) -> Descriptors:
    """Make descriptors by hand, of one request unless said otherwise."""
    wide = [np.asarray(column, np.uint64) for column in (src, dst, length)]
    columns = [np.ascontiguousarray(column) for column in np.broadcast_arrays(*wide)]
    edges = np.array([0, len(columns[0])] if spans is None else spans, np.int64)
    return Descriptors(*columns, edges, ("request",) if requests is None else tuple(requests))


class Peer:
    """A process that holds `memory` bytes, all CANARY, and serves what `_serve` knows."""

    def __init__(self, nbytes: int, shape: dict[str, Any] | None, **where: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, nbytes, shape), kwargs=where, daemon=True)
        self.process.start()
        theirs.close()
        self.session, self.address, cache = self._answer()
        self.cache = Cache.from_bytes(cache)

    def renew(self) -> None:
        """Have it unregister its memory and register it again: same addresses, another digest."""
        self.cache = Cache.from_bytes(self.ask("renew"))

    def ask(self, what: str, *arguments: Any) -> Any:
        self.pipe.send((what, *arguments))
        return self._answer()

    def memory(self) -> np.ndarray:
        """Return a copy of its memory."""
        return np.frombuffer(self.ask("memory"), np.uint8)

    def signal(self, number: signal.Signals) -> None:
        """Send it and wait till it has been obeyed: some threads of a process still run when ``kill`` is back."""
        os.kill(self.process.pid, number)
        obeyed = {signal.SIGSTOP: os.WSTOPPED, signal.SIGCONT: os.WCONTINUED, signal.SIGKILL: os.WEXITED}
        os.waitid(os.P_PID, self.process.pid, obeyed[number] | os.WNOWAIT)

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)
        self.process.close()
        self.pipe.close()

    def _answer(self) -> Any:
        if not self.pipe.poll(WAIT):
            raise TimeoutError(f"no answer from the peer in {WAIT} s")
        return self.pipe.recv()


@contextmanager
def peer(nbytes: int, shape: dict[str, Any] | None = None, **where: Any) -> Iterator[Peer]:
    """Start a peer, with a cache of `rank(**shape)` or one buffer over its whole memory; end it on every path.

    Parameters
    ----------
    nbytes, shape
    **where
        ``file``: that its memory is mapped from, as it is, so that others see it whatever becomes of the process;
        ``address``: where; ``ports``: (least, most) of Mooncake's session.
    """
    started = Peer(nbytes, shape, **where)
    try:
        yield started
    finally:
        started.end()


def mapped(file: str, nbytes: int, address: int | None = None) -> np.ndarray:
    """Map a file, shared, at an address that must be free."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    fixed_noreplace, shared, read_write = 0x100000, 1, 3
    handle = os.open(file, os.O_RDWR)
    got = libc.mmap(address, nbytes, read_write, shared | (fixed_noreplace if address else 0), handle, 0)
    os.close(handle)
    if got in (None, 2**64 - 1) or address not in (None, got):
        raise OSError(ctypes.get_errno(), f"mmap of {nbytes} bytes at {address} gave {got}")
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(got))


def _serve(
    pipe: Connection,
    nbytes: int,
    shape: dict[str, Any] | None,
    *,
    file: str | None = None,
    address: int | None = None,
    ports: tuple[int, int] | None = None,
) -> None:
    if ports is not None:
        os.environ["MC_MIN_PRC_PORT"], os.environ["MC_MAX_PRC_PORT"] = map(str, ports)
    memory = np.full(nbytes, CANARY, np.uint8) if file is None else mapped(file, nbytes, address)
    engine: Engine = MooncakeEngine("127.0.0.1")
    layout = whole(memory) if shape is None else rank(memory.ctypes.data, **shape)
    cache = engine.register(layout)
    engine.serve_digests()
    pipe.send((engine.session, memory.ctypes.data, cache.to_bytes()))
    while True:
        try:
            what, *arguments = pipe.recv()
        except EOFError:
            return
        if what == "memory":
            pipe.send(memory.tobytes())
        elif what == "clear":
            memory[:] = CANARY
            pipe.send(None)
        elif what == "unregister":
            engine.unregister()
            pipe.send(None)
        elif what == "renew":
            engine.unregister()
            pipe.send(engine.register(layout).to_bytes())
        elif what == "write":
            session, columns = arguments
            try:
                pipe.send(engine.write(session, copies(*columns)))
            except TransferError as error:
                pipe.send(str(error))
