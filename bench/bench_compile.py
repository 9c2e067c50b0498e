"""What a peer costs once: compiling, and starting up."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import kvcompile
from bench import shapes
from bench.figures import Figure
from kvcompile import Cache, Field
from kvcompile import shapes as kept

__all__ = ["compiling", "start"]

FIRST_PLAN = """
import json, sys, time
began = time.perf_counter()
import kvcompile
imported = time.perf_counter()
from bench import shapes
from kvcompile import Request
src, dst = (shapes.gqa(94, 4, 4096, base, 1, 4) for base in (shapes.SRC_BASE, shapes.DST_BASE))
received = kvcompile.Cache.from_bytes(dst.to_bytes())
ready = time.perf_counter()
plan = kvcompile.compile(src, received)
compiled = time.perf_counter()
plan.build([Request("r", [list(range(16))], [list(range(16))])])
built = time.perf_counter()
json.dump([imported - began, compiled - ready, built - compiled, built - imported], sys.stdout)
"""


def _layers(layers: int, field: Callable[[int], Field], base: int, rank: int, size: int) -> Cache:
    one = field(max(1, 8 // size))
    return shapes.cache(layers, one, max(1, 8 // size) * one.tokens * one.cell_nbytes, 64, base, rank, size)


def _nhd(tokens: int) -> Callable[[int], Field]:
    return lambda local: Field.nhd("kv", heads=8, local_heads=local, tokens=tokens, cell_nbytes=512)


def _hnd(tokens: int) -> Callable[[int], Field]:
    return lambda _: Field.hnd("kv", heads=8, tokens=tokens, cell_nbytes=512)


def compiling(seconds: float) -> list[Figure]:
    """A new shape, and a new peer of a known one."""
    src_base, dst_base = shapes.SRC_BASE, shapes.DST_BASE
    cases = {
        "94 layers, 8 heads, NHD, 16 tokens, TP1 to TP2": (
            _layers(94, _nhd(16), src_base, 0, 1),
            _layers(94, _nhd(16), dst_base, 1, 2),
            5.0,
        ),
        "94 layers, 8 heads, 768 tokens, HND to NHD": (
            _layers(94, _hnd(768), src_base, 0, 1),
            _layers(94, _nhd(768), dst_base, 0, 1),
            50.0,
        ),
        "94 layers, equal": (*(shapes.gqa(94, 4, 4096, base, 1, 4) for base in (src_base, dst_base)), None),
    }
    found, section = [], "compile"
    for name, (src, dst, most) in cases.items():
        packed = dst.to_bytes()
        took: dict[str, list[float]] = {"decode cache": [], "new shape": [], "known shape": []}
        for _ in range(max(5, int(seconds * 10))):
            kept._kept.clear()
            for what in ("new shape", "known shape"):
                began = time.perf_counter()
                peer = Cache.from_bytes(packed)
                received = time.perf_counter()
                plan = kvcompile.compile(src, peer)
                took[what].append(time.perf_counter() - received)
                took["decode cache"].append(received - began)
        limits = {"new shape": most}
        found.append(Figure(section, name, "rows", len(plan.table)))
        found.append(Figure(section, name, "table", plan.table.nbytes / 2**20, "MiB", most=4.0 if most == 50 else None))
        found += [
            Figure(section, name, what, statistics.median(values) * 1e3, "ms", most=limits.get(what))
            for what, values in took.items()
        ]
    return found


def start(seconds: float) -> list[Figure]:
    """New processes: with the kernels' cache warm, and without any."""
    found, section = [], "Start-up of a process"
    kvcompile.warmup()
    warm = [_process({}) for _ in range(max(5, int(seconds)))]
    with tempfile.TemporaryDirectory() as folder:
        cold = [_process({"NUMBA_CACHE_DIR": folder})]
    for name, runs in (("warm", warm), ("cold", cold)):
        columns = list(zip(*runs, strict=True))
        targets = ({"most": 0.4}, {}, {}, {"most": 0.5}) if name == "warm" else ({},) * 4
        for metric, values, target in zip(
            ("import", "first compile", "first build", "first plan after import"), columns, targets, strict=True
        ):
            found.append(Figure(section, name, metric, statistics.median(values), "s", **target))
    return found


def _process(environment: dict[str, str]) -> list[float]:
    result = subprocess.run(
        [sys.executable, "-c", FIRST_PLAN],
        env={**os.environ, **environment},
        capture_output=True,
        check=True,
        timeout=300,
    )
    return json.loads(result.stdout)  # type: ignore[no-any-return]
