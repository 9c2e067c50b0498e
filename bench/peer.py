"""A process with memory and a Mooncake engine, for the benchmarks that move bytes; and engines without kvcompile."""

import contextlib
import importlib
import multiprocessing
import os
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from bench import shapes
from kvcompile import Buffer, Cache, Field, Group, KVCompileError, Region, Request
from kvcompile.engines import MooncakeEngine

os.environ.setdefault("GLOG_minloglevel", "3")  # read when Mooncake is loaded: refused calls are measured too

__all__ = ["Peer", "cache", "quiet", "raw_engine", "request", "started"]


def cache(base: int, blocks: int, layers: int, nbytes: int) -> Cache:
    """Make ``layers`` layers of blocks of ``nbytes``, twice as many as are moved, in one buffer."""
    field = Field.hnd("kv", heads=1, tokens=1, cell_nbytes=nbytes)
    span = 2 * (blocks + 1) * nbytes
    regions = [Region(n, 0, base + n * span, nbytes, span // nbytes, [field]) for n in range(layers)]
    return Cache(regions, [Group(1)], [Buffer(base, span * layers)])


def request(blocks: int, run: int = 1) -> Request:
    """Make a request of ``blocks`` blocks in runs of ``run``."""
    return Request("request", [shapes.ids(blocks, run, 1)], [shapes.ids(blocks, run, 2)])


def raw_engine() -> Any:
    """Start Mooncake's engine as anybody would; KVCompileError without it."""
    try:
        engine = importlib.import_module("mooncake.engine").TransferEngine()
    except ImportError as error:
        raise KVCompileError(f"Mooncake cannot be imported: {error}") from error
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise KVCompileError("Mooncake could not start")
    return engine


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what Mooncake writes to stderr off the terminal."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


class Peer:
    """The other process: its session, and its memory as a cache."""

    def __init__(self, nbytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, nbytes), daemon=True)
        self.process.start()
        theirs.close()
        if not self.pipe.poll(60):
            raise SystemExit("the peer did not start within 60 s")
        self.session, self.address = self.pipe.recv()

    def cache(self, blocks: int, layers: int, nbytes: int) -> Cache:
        """Describe the peer's memory as `cache` does."""
        return cache(self.address, blocks, layers, nbytes)

    def digest(self) -> bytes:
        """Return a hash of all its memory."""
        self.pipe.send("digest")
        return self.pipe.recv()  # type: ignore[no-any-return]


@contextlib.contextmanager
def started(nbytes: int) -> Iterator[Peer]:
    """Start a peer with so much memory, and end it."""
    one = Peer(nbytes)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.join(10)


def _serve(pipe: Connection, nbytes: int) -> None:
    import hashlib  # noqa: PLC0415

    memory = np.zeros(nbytes, np.uint8)
    engine = MooncakeEngine("127.0.0.1")
    engine.register(cache(memory.ctypes.data, nbytes // 4 - 1, 1, 2))
    pipe.send((engine.session, memory.ctypes.data))
    with contextlib.suppress(EOFError):
        while pipe.recv():
            pipe.send(hashlib.sha256(memory).digest())
