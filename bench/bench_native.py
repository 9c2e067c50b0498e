"""The native hand-over beside the official one: time under the GIL, time and CPU of a transfer over TCP."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types

import kvcompile
from bench import peer, shapes
from bench.figures import Figure
from kvcompile import Descriptors, KVCompileError, Request
from kvcompile.engines import MooncakeEngine

__all__ = ["native", "without_wire"]

NOWHERE = "127.0.0.1:2"
BLOCKS, LAYERS = 200, 60  # of what is moved: 12,000 descriptors of 64 bytes


def native(seconds: float) -> list[Figure]:
    """Measure both ways of handing over; nothing where the native one is not to be had."""
    try:
        with peer.quiet():
            return [*_under_the_gil(seconds), *_over_tcp(seconds)]
    except KVCompileError as error:
        print(f"the native hand-over is not measured: {error}")
        return []


def _handed_over() -> Descriptors:
    """Make 192,512 scattered descriptors: 94 layers, 2,048 blocks."""
    src, dst = (shapes.gqa(94, 4, 4096, base, 1, 4) for base in (shapes.SRC_BASE, shapes.DST_BASE))
    request = Request("request", [shapes.ids(2048, 1, 1)], [shapes.ids(2048, 1, 2)])
    return kvcompile.compile(src, dst).build([request])


def without_wire() -> tuple[MooncakeEngine, MooncakeEngine]:
    """Make an engine for each way of handing over, official and native, that does all but move; see `_Converts`."""
    raw = peer.raw_engine()
    official = MooncakeEngine.wrap(_Converts(raw), "127.0.0.1:1")
    past = MooncakeEngine.wrap(raw, "127.0.0.1:1", native="require")
    if past._native is not None:
        kinds = types.int64(*[types.int64] * 3, types.CPointer(types.int64))
        succeed, complete = numba.cfunc(kinds)(_succeed), numba.cfunc(kinds)(_complete)
        past._native._functions = np.full_like(past._native._functions, succeed.address)
        past._native._segments[NOWHERE] = 1
        past._native._functions[past._native._records.BATCH_STATUS] = complete.address
    return official, past


class _Converts:
    """A real engine that takes its arguments and then moves nothing: one length too many."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def batch_transfer_sync_write(self, session: str, src: list[int], dst: list[int], length: list[int]) -> int:
        length.append(1)
        self.engine.batch_transfer_sync_write(session, src, dst, length)
        return 0


def _succeed(out: Any, engine: Any, batch: Any, state: Any) -> int:
    """Stands for all methods: a segment, a batch, a status that the memory already holds."""
    return 1


def _complete(out: Any, engine: Any, batch: Any, state: Any) -> int:
    """Stands for the status of a batch: completed."""
    state[0] = 4
    return 0


def _under_the_gil(seconds: float) -> list[Figure]:
    """CPU time of all threads without a wire: nearly all of it under the GIL, but for writing the native records."""
    built, (official, past) = _handed_over(), without_wire()
    section = f"Handing over {len(built):,} descriptors, without a wire"
    took = _rounds(
        {"official": lambda: official.write(NOWHERE, built), "native": lambda: past.write(NOWHERE, built)},
        seconds,
        time.process_time,
    )
    ratio = took["official"] / took["native"]
    return [
        Figure(section, "official", "CPU under the GIL", took["official"] * 1e3, "ms"),
        Figure(section, "native", "CPU under the GIL", took["native"] * 1e3, "ms"),
        Figure(section, "official / native", "ratio", ratio, least=10, more_is_better=True),
    ]


def _over_tcp(seconds: float) -> list[Figure]:
    """Over TCP to another process: Mooncake's own calls ask for the state all the time, the native ones sleep."""
    section, count = "12,000 descriptors of 64 bytes over TCP, calls of 1,000", BLOCKS * LAYERS
    memory, found = np.ones(1 << 22, np.uint8), []
    with peer.started(1 << 22) as other:
        calls: dict[str, Callable[[], object]] = {}
        for name, choice in (("official", "off"), ("native", "require")):
            engine = MooncakeEngine("127.0.0.1", native=choice)  # type: ignore[arg-type]
            src = engine.register(peer.cache(memory.ctypes.data, BLOCKS, LAYERS, 64))
            built = kvcompile.compile(src, other.cache(BLOCKS, LAYERS, 64)).build([peer.request(BLOCKS)])
            calls[name] = lambda engine=engine, built=built: engine.write(other.session, built)  # type: ignore[misc]
        wall = _rounds(calls, seconds, time.perf_counter)
        cpu = _rounds(calls, seconds, time.process_time)
    for name in calls:
        found.append(Figure(section, name, "time", wall[name] / count * 1e6, "us each"))
        found.append(Figure(section, name, "CPU of this process", cpu[name] / count * 1e6, "us each"))
    return found


def _rounds(calls: dict[str, Callable[[], object]], seconds: float, clock: Callable[[], float]) -> dict[str, float]:
    """Return the median time of each call by a clock; interleaved, five rounds at least."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    until = time.perf_counter() + seconds
    while min(map(len, took.values())) < 5 or time.perf_counter() < until:
        for name, call in calls.items():
            began = clock()
            call()
            took[name].append(clock() - began)
    return {name: statistics.median(times) for name, times in took.items()}
