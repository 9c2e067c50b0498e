"""From descriptors to the engine: cost of arguments, size of a call, time to the first call, stalls."""

import array
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import kvcompile
from bench import baseline, bench_native, peer, shapes
from bench.figures import Figure
from bench.timing import medians_ms
from kvcompile import KVCompileError, Request
from kvcompile.engines import MooncakeEngine
from kvcompile.engines.mooncake import BATCH_DESCRIPTORS

__all__ = ["handover", "stalls"]

SIZES = (250, 500, 1000, 1500)
MOVED = 12_000  # descriptors moved for each size of a call
NAP_S = 2e-4


def handover(seconds: float) -> list[Figure]:
    """Arguments by kind, calls by size, and the time from id lists to the first call of the engine."""
    try:
        with peer.quiet():
            return [*_arguments(seconds), *_calls(), *_first_call(seconds)]
    except KVCompileError as error:
        print(f"hand-over is not measured: {error}")
        return []


def _arguments(seconds: float) -> list[Figure]:
    """Conversion alone, under the GIL: one length too many makes Mooncake refuse the call once it has the arguments."""
    engine, found = peer.raw_engine(), []
    section = "Arguments of one call, conversion alone"
    for count in (*SIZES, 192_512):
        src, length = np.arange(count, dtype=np.uint64) + np.uint64(2**44), np.full(count, 4096, np.uint64)

        def call(a: Any, b: Any, c: Any) -> int:
            return engine.batch_transfer_sync_write("127.0.0.1:1", a, b, c)  # type: ignore[no-any-return]

        def arrays(src: np.ndarray = src, length: np.ndarray = length) -> int:
            columns = [array.array("Q", column.tobytes()) for column in (src, src, length)]
            columns[2].append(1)
            return call(*columns)

        def constant(src: np.ndarray = src, count: int = count) -> int:
            return call(src.tolist(), src.tolist(), [4096] * (count + 1))

        functions: dict[str, Callable[[], object]] = {
            "lists": lambda s=src, n=length: call(s.tolist(), s.tolist(), [*n.tolist(), 1]),
            "one constant for equal lengths": constant,
            "array.array": arrays,
            "memoryview": lambda s=src, n=length: call(*map(memoryview, (s, s, np.append(n, np.uint64(1))))),
            "numpy": lambda s=src, n=length: call(s, s, np.append(n, np.uint64(1))),
        }
        calls = max(1, 20_000 // count)
        medians = medians_ms({name: (function, calls) for name, function in functions.items()}, seconds / 4)
        found += [
            Figure(section, f"{count:,} descriptors", name, took * 1e6 / count, "ns each")
            for name, took in medians.items()
        ]
    return found


def _calls() -> list[Figure]:
    """The size of a call: wire and conversion together, on TCP."""
    found = []
    with peer.started(1 << 22) as other:
        memory = np.ones(1 << 22, np.uint8)
        for size in SIZES:
            engine = MooncakeEngine("127.0.0.1", max_descriptors=size)
            src = engine.register(peer.cache(memory.ctypes.data, MOVED // 60, 60, 64))
            built = kvcompile.compile(src, other.cache(MOVED // 60, 60, 64)).build([peer.request(MOVED // 60)])
            engine.write(other.session, built)
            took = []
            for _ in range(3):
                began = time.perf_counter()
                engine.write(other.session, built)
                took.append(time.perf_counter() - began)
            engine.unregister()
            case = f"calls of {size:,}" + (" (K, what MooncakeEngine takes)" if size == BATCH_DESCRIPTORS else "")
            found.append(
                Figure(
                    "Size of a call: 12,000 descriptors of 64 bytes over TCP",
                    case,
                    "time",
                    statistics.median(took) / MOVED * 1e6,
                    "us each",
                )
            )
    return found


class _Notes:
    """Stands for an engine: notes when it is called, and says that all went well."""

    def __init__(self) -> None:
        self.calls: list[float] = []

    def register_memory(self, base: int, nbytes: int) -> int:
        return 0

    def batch_transfer_sync_write(self, *arguments: object) -> int:
        self.calls.append(time.perf_counter())
        return 0


def _first_call(seconds: float) -> list[Figure]:
    src, dst = (shapes.gqa(94, 4, 4096, base, 1, 4) for base in (shapes.SRC_BASE, shapes.DST_BASE))
    plan, found = kvcompile.compile(src, dst), []
    for name, run in (("scattered", 1), ("runs of 8", 8), ("contiguous", 2048)):
        requests = [Request("request", [shapes.ids(2048, run, 1)], [shapes.ids(2048, run, 2)])]
        notes = _Notes()
        engine, took, total = MooncakeEngine.wrap(notes, "127.0.0.1:1"), [], []
        engine.register(src)
        engine._owned = True  # so that addresses are checked as for an engine of one's own
        until = time.perf_counter() + seconds
        while len(took) < 10 or time.perf_counter() < until:
            notes.calls.clear()
            began = time.perf_counter()
            engine.write("127.0.0.1:2", plan.build(requests))
            total.append(time.perf_counter() - began)
            took.append(notes.calls[0] - began)
        section = "From id lists to the engine's first call: 94 layers, 2,048 blocks"
        found.append(Figure(section, name, "descriptors", len(plan.build(requests))))
        found.append(Figure(section, name, "first call", statistics.median(took) * 1e3, "ms", most=2.0))
        found.append(Figure(section, name, "calls", len(notes.calls)))
        found.append(Figure(section, name, "all converted (no wire)", statistics.median(total) * 1e3, "ms"))
    return found


def stalls(seconds: float) -> list[Figure]:
    """How late a thread wakes under ``sys.setswitchinterval(1e-4)`` while the first works (192,512 descriptors)."""
    src, dst = (shapes.gqa(94, 4, 4096, base, 1, 4) for base in (shapes.SRC_BASE, shapes.DST_BASE))
    plan = kvcompile.compile(src, dst)
    requests = [Request("request", [shapes.ids(2048, 1, 1)], [shapes.ids(2048, 1, 2)])]
    spans, built = baseline.spans(src, dst), plan.build(requests)
    work: dict[str, Callable[[], object]] = {
        "idle": lambda: time.sleep(0.01),
        "pure Python": lambda: sum(number for number in range(50_000)),
        "kvcompile: build": lambda: plan.build(requests),
        "connectors today: build": lambda: baseline.build(spans, requests[0].src_blocks, requests[0].dst_blocks),
    }
    try:
        with peer.quiet():
            official, past = bench_native.without_wire()
    except KVCompileError as error:
        print(f"stalls of the hand-over are not measured: {error}")
    else:
        work["kvcompile: hand-over"] = lambda: official.write("127.0.0.1:2", built)
        work["kvcompile: native hand-over"] = lambda: past.write("127.0.0.1:2", built)
        work["one call of lists: hand-over"] = lambda: official._engine.batch_transfer_sync_write(
            "127.0.0.1:2", built.src.tolist(), built.dst.tolist(), built.length.tolist()
        )
    before, found = sys.getswitchinterval(), []
    sys.setswitchinterval(1e-4)
    try:
        with peer.quiet():
            for name, function in work.items():
                late = _lateness(function, seconds)
                section = "A second thread wakes late by"
                for metric, value in (("median", 0.5), ("p99", 0.99), ("longest", 1.0)):
                    found.append(Figure(section, name, metric, float(np.quantile(late, value)) * 1e3, "ms"))
                found.append(Figure(section, name, "samples", len(late)))
    finally:
        sys.setswitchinterval(before)
    return found


def _lateness(function: Callable[[], object], seconds: float) -> list[float]:
    """Do something over and over; return by how much a thread that naps woke late, each time, in seconds."""
    late: list[float] = []
    over = threading.Event()

    def naps() -> None:
        while not over.is_set():
            began = time.perf_counter()
            time.sleep(NAP_S)
            late.append(time.perf_counter() - began - NAP_S)

    function()
    thread = threading.Thread(target=naps)
    thread.start()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        function()
    over.set()
    thread.join()
    return late
