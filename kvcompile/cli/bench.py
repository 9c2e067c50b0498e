"""A quick look at this machine: block id lists to descriptors, beside filling three arrays of that size.

The benchmarks themselves (what connectors do today, vLLM, hand-over, stalls, memory, end to end) need a checkout:
``make bench`` there.
"""

import random
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from rich.table import Table

from kvcompile import Cache, Field, Group, Region, Request, compile

__all__ = ["run"]

LAYERS, HEADS, TOKENS, CELL = 94, 4, 16, 512  # Qwen3-235B-A22B, BF16
ROOM = 4096


class Row(NamedTuple):
    """One measured case, in milliseconds."""

    name: str
    descriptors: int
    build: float
    fill: float


def run(seconds: float) -> Table:
    """Measure, and return the table."""
    table = Table(title=f"{LAYERS} layers, block id lists to descriptors: medians", title_justify="left")
    for heading in ("case", "descriptors", "build [ms]", "three arrays filled [ms]"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for row in _rows(seconds):
        table.add_row(row.name, f"{row.descriptors:,}", f"{row.build:.3f}", f"{row.fill:.4f}")
    return table


def _rows(seconds: float) -> list[Row]:
    found = []
    for name, blocks, length, sizes in (
        ("16 blocks, scattered", 16, 1, (4, 4)),
        ("2,048 blocks, contiguous", 2048, 2048, (4, 4)),
        ("2,048 blocks, runs of 8", 2048, 8, (4, 4)),
        ("2,048 blocks, scattered", 2048, 1, (4, 4)),
        ("2,048 blocks, TP4 to TP1, scattered", 2048, 1, (4, 1)),
    ):
        plan = compile(_cache(1 << 44, 1, sizes[0]), _cache(1 << 45, 1 % sizes[1], sizes[1]))
        requests = [Request("request", [_ids(blocks, length, 1)], [_ids(blocks, length, 2)])]
        count = len(plan.build(requests))
        columns = [np.empty(count, np.uint64) for _ in range(3)]
        build = _median_ms(lambda p=plan, r=requests: p.build(r), seconds)  # type: ignore[misc]
        fill = _median_ms(lambda c=columns: [column.fill(7) for column in c], seconds / 2)  # type: ignore[misc]
        found.append(Row(name, count, build, fill))
    return found


def _cache(base: int, rank: int, size: int) -> Cache:
    nbytes = HEADS // size * TOKENS * CELL
    field = Field.hnd("kv", heads=HEADS, tokens=TOKENS, cell_nbytes=CELL)
    regions = [Region(layer, 0, base + (layer << 34), nbytes, ROOM, [field]) for layer in range(LAYERS)]
    return Cache(regions, [Group(TOKENS)], tp_rank=rank, tp_size=size)


def _ids(blocks: int, length: int, seed: int) -> list[int]:
    """Draw distinct block ids in runs of ``length``, the runs in random order."""
    starts = [(length + 1) * slot for slot in range(blocks // length)]
    random.Random(seed).shuffle(starts)
    return [start + i for start in starts for i in range(length)]


def _median_ms(function: Callable[[], object], seconds: float) -> float:
    function()
    took: list[float] = []
    until = time.perf_counter() + seconds
    while len(took) < 20 or time.perf_counter() < until:
        began = time.perf_counter()
        function()
        took.append(time.perf_counter() - began)
    return statistics.median(took) * 1e3
