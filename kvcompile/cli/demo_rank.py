"""One rank of the demo: its engine, its memory, and the things it is asked to do; in a process of its own or not."""

import os
import queue
import struct
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

import kvcompile
from kvcompile import Cache, KVCompileError, Plan, Request, engines
from kvcompile.cli.demo_values import CANARY, UNUSED, Arena, Load, Wrong
from kvcompile.cli.geometries import MODELS, Serving, cache, regions

__all__ = ["Checked", "Loads", "Opened", "Peers", "Rank", "Rate", "Sent", "Spec", "Verify", "decode", "encode"]

WRITE_TIMEOUT = 120.0
"""Seconds for `WRITE_DESCRIPTORS` descriptors; a peer that does not move in this time is given up."""

WRITE_DESCRIPTORS = 10_000
"""Descriptors between two steps of the progress bar."""


class Spec(msgspec.Struct, frozen=True):
    """What a rank is: enough to lay out its memory."""

    side: str
    tp_rank: int
    model: str
    layers: int
    tp_size: int
    order: str
    block_size: int
    num_blocks: list[int]
    engine: str


class Opened(msgspec.Struct, frozen=True):
    """Where a rank is reached, its cache as bytes, and the size of its memory."""

    session: str
    cache: bytes
    nbytes: int


class Peers(msgspec.Struct, frozen=True):
    """The other side: who, and how the sender of a head is chosen."""

    ranks: list[Opened]
    election: str


class Rate(msgspec.Struct, frozen=True):
    """What one rank sends for a token, to all peers: descriptors if none merge, bytes; and bytes of state a request."""

    descriptors: float
    nbytes: float
    state_nbytes: float


class Loads(msgspec.Struct, frozen=True):
    """The requests to move."""

    loads: list[Load]


class Verify(msgspec.Struct, frozen=True):
    """The requests that were moved, the src side's block sizes, and a byte to flip first (for tests)."""

    loads: list[Load]
    src_block_sizes: list[int]
    corrupt: int | None


class Sent(msgspec.Struct, frozen=True):
    """What one rank sent to one other, in seconds and bytes."""

    slices: int
    descriptors: int
    nbytes: int
    build: float
    transfer: float


class Checked(msgspec.Struct, frozen=True):
    """What a dst rank found: bytes that should have moved, bytes that differ, the first of them."""

    moved: int
    wrong: int
    first: Wrong | None


class Rank:
    """One tensor-parallel rank of one side; ``progress`` is called with the bytes done since the last call."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        self.progress = progress
        self.peers: list[str] = []
        self.plans: list[Plan] = []

    def open(self, spec: Spec) -> Opened:
        """Start the engine, allocate the memory, register it; the dst side is filled with CANARY."""
        model, serving = MODELS[spec.model], Serving(spec.tp_size, spec.order, spec.block_size)
        shape = (model, serving, spec.tp_rank, spec.layers, spec.num_blocks)
        nbytes = sum(region.block_stride * region.num_blocks for region in regions(*shape))
        self.engine = engines.LocalEngine() if spec.engine == "local" else engines.MooncakeEngine("127.0.0.1")
        if spec.side == "src":  # the first run on a machine compiles the kernels: meanwhile memory is filled
            threading.Thread(target=kvcompile.warmup, daemon=True).start()
        self.arena = Arena(nbytes, spec.layers, self.progress)
        self.cache = self.engine.register(cache(*shape, self.arena.place))
        self.arena.fill(CANARY if spec.side == "dst" else UNUSED)
        return Opened(self.engine.session, self.cache.to_bytes(), len(self.arena.memory))

    def compile(self, peers: Peers) -> Rate:
        """Compile a plan for each peer; return what a token costs at most."""
        kvcompile.warmup()
        self.peers = [peer.session for peer in peers.ranks]
        caches = [Cache.from_bytes(peer.cache) for peer in peers.ranks]
        self.plans = [kvcompile.compile(self.cache, cache, election=peers.election) for cache in caches]
        descriptors = nbytes = state_nbytes = 0.0
        for row in (row for plan in self.plans for row in plan.table):
            group = self.cache.groups[row["src_group"]]
            if group.state:
                state_nbytes += int(row["count"]) * int(row["length"])
            else:
                slices = int(row["count"]) / (int(row["src_step"]) * group.block_size)
                descriptors += slices
                nbytes += slices * int(row["length"])
        return Rate(descriptors, nbytes, state_nbytes)

    def write(self, loads: Loads) -> None:
        """Write the requests' values into this rank's memory."""
        self.arena.write(self.cache, loads.loads)

    def send(self, loads: Loads) -> list[Sent]:
        """Build and write, peer by peer."""
        first = [0] * len(self.cache.groups)
        requests = [Request(x.number, x.src_blocks, x.dst_blocks, first, x.dst_first) for x in loads.loads]
        return [self._send(session, plan, requests) for session, plan in zip(self.peers, self.plans, strict=True)]

    def check(self, verify: Verify) -> Checked:
        """Check every byte of this rank's memory."""
        if verify.corrupt is not None:
            self.arena.memory[verify.corrupt % len(self.arena.memory)] ^= 1
        return Checked(*self.arena.check(self.cache, verify.loads, verify.src_block_sizes))

    def _send(self, session: str, plan: Plan, requests: list[Request]) -> Sent:
        started = time.perf_counter()
        descriptors = plan.build(requests)
        built = time.perf_counter()
        for error in descriptors.failed.values():
            raise error
        for part in descriptors.batches(max_descriptors=WRITE_DESCRIPTORS):
            self.engine.write(session, part, timeout=WRITE_TIMEOUT)
            self.progress(part.nbytes)
        done = time.perf_counter()
        return Sent(int(plan.table["count"].sum()), len(descriptors), descriptors.nbytes, built - started, done - built)


PARAMETERS = {"open": Spec, "compile": Peers, "write": Loads, "send": Loads, "check": Verify}


def encode(*message: Any) -> bytes:
    """Return a message as a frame: its length, then msgpack."""
    body = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(body)) + body


def decode(frame: bytes | bytearray) -> tuple[list[Any], int] | None:
    """Return the first message of some bytes and where the next one starts, None if it is not whole yet."""
    if len(frame) < 4 or len(frame) < (stop := 4 + struct.unpack_from("<I", frame)[0]):
        return None
    return msgspec.msgpack.decode(memoryview(frame)[4:stop]), stop


def _listen(messages: "queue.SimpleQueue[list[Any]]") -> None:
    """Read what the demo asks; end this process at once when the demo is gone."""
    frame = bytearray()
    while data := os.read(0, 1 << 20):
        frame += data
        while message := decode(frame):
            messages.put(message[0])
            del frame[: message[1]]
    os._exit(0)


class _Reporter:
    """Tell the demo of progress, some times a second."""

    def __init__(self, sink: BinaryIO) -> None:
        self.sink = sink
        self.nbytes = 0
        self.at = 0.0

    def __call__(self, nbytes: int) -> None:
        self.nbytes += nbytes
        if time.monotonic() > self.at + 0.2:
            self.send("progress", self.nbytes)

    def send(self, *message: Any) -> None:
        self.sink.write(encode(*message))
        self.nbytes, self.at = 0, time.monotonic()


def main() -> None:
    """Serve one rank over stdin and stdout, whatever else prints there goes to stderr."""
    sink = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    messages: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(messages,), daemon=True).start()
    report = _Reporter(sink)
    rank = Rank(report)
    while True:
        method, parameter = messages.get()
        try:
            result = getattr(rank, method)(msgspec.convert(parameter, PARAMETERS[method]))
        except KVCompileError as error:
            report.send("error", str(error))
        except Exception:  # a fault of the demo itself: the demo shows where
            report.send("error", traceback.format_exc())
        else:
            report.send("result", report.nbytes, result)


if __name__ == "__main__":
    main()
