"""Time `plan.build` beside the two things it is bounded by, in one run: filling three arrays, and `bench.baseline`.

    python -m bench.bench_build [--seconds S] [--json FILE]

Prints a table of medians and writes all of it as JSON.  Not a test: nothing is asserted about time, but the
two builders must agree on every descriptor.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np
from rich.console import Console
from rich.table import Table

import kvcompile
from bench import baseline, shapes

MANY = 100_000  # above so many descriptors the floor is writing them; below, not doing the work of (b)
MOST_TIMES_FILL, LEAST_TIMES_BASELINE = 3.0, 100.0


class Timing(NamedTuple):
    """Medians of one case, in milliseconds."""

    name: str
    descriptors: int
    compile_ms: float
    fill_ms: float
    baseline_ms: float
    vllm_ms: float
    fresh_ms: float
    build_ms: float

    @property
    def times_fill(self) -> float:
        return self.build_ms / self.fill_ms

    @property
    def times_faster(self) -> float:
        return self.baseline_ms / self.build_ms

    @property
    def target(self) -> str:
        """Say what this case has to reach, and whether it did."""
        if self.descriptors > MANY:
            return f"<= {MOST_TIMES_FILL:g} x (a): {'met' if self.times_fill <= MOST_TIMES_FILL else 'MISSED'}"
        return f">= {LEAST_TIMES_BASELINE:g} x (b): {'met' if self.times_faster >= LEAST_TIMES_BASELINE else 'MISSED'}"


def machine() -> str:
    """Name the processor and the versions that decide the figures."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = f"{len(lines)} x {lines[0]}" if lines else model
    versions = f"Python {platform.python_version()}, numpy {np.__version__}, numba {numba.__version__}"
    return f"{model}, {platform.system()}; {versions}"


def medians_ms(functions: dict[str, tuple[Callable[[], object], int]], seconds: float) -> dict[str, float]:
    """Return the median time of some functions in milliseconds.

    In each round every function is called a number of times of its own, so that what else the machine does falls on
    all of them alike; five rounds at least.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    until = time.perf_counter() + seconds
    rounds = 0
    while rounds < 5 or time.perf_counter() < until:
        rounds += 1
        for name, (function, calls) in functions.items():
            for _ in range(calls):
                start = time.perf_counter()
                function()
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) * 1e3 for name, found in times.items()}


def same(descriptors: kvcompile.Descriptors, lists: tuple[list[int], list[int], list[int]]) -> bool:
    """Tell whether both builders made the same copies, in whatever order."""
    columns = (descriptors.src, descriptors.dst, descriptors.length)
    ours = np.stack(columns)[:, np.argsort(descriptors.src)]
    theirs = np.array(lists, dtype=np.uint64)
    return np.array_equal(ours, theirs[:, np.argsort(theirs[0])])


def measure(case: shapes.Case, seconds: float) -> Timing:
    """Time one case, after one call of each that warms it up and is compared."""
    plan = kvcompile.compile(case.src, case.dst)
    spans = baseline.spans(case.src, case.dst)
    requests, src_ids, dst_ids = [case.request], case.request.src_blocks[0], case.request.dst_blocks[0]
    out = plan.build(requests)
    if out.failed or len(out) != case.descriptors or not same(out, baseline.build(spans, src_ids, dst_ids)):
        raise SystemExit(f"{case.name}: the two builders disagree ({len(out)} descriptors, failed: {out.failed})")
    columns = [np.empty(len(out), np.uint64) for _ in range(3)]

    def fill() -> None:
        for column in columns:
            column.fill(7)

    medians = medians_ms(
        {
            "compile_ms": (lambda: kvcompile.compile(case.src, case.dst), 1),
            "baseline_ms": (lambda: baseline.build(spans, src_ids, dst_ids), 1),
            "fresh_ms": (lambda: plan.build(requests), 10),
            "fill_ms": (fill, 40),
            "build_ms": (lambda: plan.build(requests, out=out), 40),
        },
        seconds,
    )
    return Timing(case.name, len(out), vllm_ms=case.vllm_ms, **medians)


def show(timings: list[Timing]) -> None:
    """Print the table."""
    table = Table(title="block ids (Python lists) to descriptors, medians in ms", caption=machine())
    table.add_column("case")
    headings = ("descriptors", "compile once", "(a) fill", "(b) baseline", "vLLM*", "build, fresh", "build, out=")
    for heading in (*headings, "x (a)", "(b) / build", "target"):
        table.add_column(heading, justify="right")
    for t in timings:
        numbers = (t.compile_ms, t.fill_ms, t.baseline_ms, t.vllm_ms, t.fresh_ms, t.build_ms)
        cells = [f"{number:.4f}" if number < 0.01 else f"{number:.3g}" for number in numbers]
        table.add_row(t.name, f"{t.descriptors:,}", *cells, f"{t.times_fill:.2f}", f"{t.times_faster:,.0f}", t.target)
    # Wide enough for the whole table, also when piped into a file.
    console = Console(width=180)
    console.print(table)
    console.print("* vLLM 0.33.0's own builder, measured earlier on a machine of this kind; not part of this run")


def main() -> None:
    """Measure all cases, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="time spent on each case (default 3)")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results.json", help="where to write")
    options = parser.parse_args()
    kvcompile.warmup()
    timings = [measure(case, options.seconds) for case in shapes.cases()]
    show(timings)
    rows = [{**t._asdict(), "times_fill": t.times_fill, "times_faster": t.times_faster} for t in timings]
    options.json.write_text(json.dumps({"machine": machine(), "cases": rows}, indent=1) + "\n")
    print("written to", options.json.name)


if __name__ == "__main__":
    main()
