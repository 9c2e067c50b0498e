"""Run the benchmarks: ``python -m bench``. Tables beside their targets, JSON, a comparison, a picture.

Not a test: nothing is asserted about time, but builders that are compared must agree on every byte.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

import kvcompile
from bench import (
    bench_build,
    bench_compile,
    bench_end_to_end,
    bench_growth,
    bench_handover,
    bench_minimal,
    bench_native,
    figures,
)

PARTS: dict[str, Callable[[float], list[figures.Figure]]] = {
    "build": bench_build.throughput,
    "small": bench_build.small,
    "sort": bench_build.sorting,
    "minimal": bench_minimal.minimal,
    "growth": bench_growth.growth,
    "memory": bench_growth.memory,
    "compile": bench_compile.compiling,
    "handover": bench_handover.handover,
    "native": bench_native.native,
    "stalls": bench_handover.stalls,
    "end-to-end": bench_end_to_end.end_to_end,
    "start": bench_compile.start,  # last: the cold start keeps a core busy with the compiler
}


def main() -> None:
    """Measure the parts asked for, print and write."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each measured case (default 2)")
    parser.add_argument("--json", type=Path, default=Path("bench/results.json"), help="where to write the figures")
    parser.add_argument("--compare", type=Path, metavar="OLD.JSON", help="print what changed since an older run")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the figures (needs the extra `bench`)")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE.md", help="write the tables into this file, between its marks"
    )
    options = parser.parse_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    console = Console(width=200)  # also when piped into a file
    kvcompile.warmup()
    about, found = figures.machine(), list[figures.Figure]()
    console.print(about, highlight=False)
    for name in options.parts or PARTS:
        began = time.perf_counter()
        here = PARTS[name](options.seconds)
        found += here
        figures.show(console, here)
        console.print(f"{name}: {time.perf_counter() - began:.0f} s\n", highlight=False)
    missed = [figure for figure in found if figure.met is False]
    console.print(
        f"{sum(figure.met is True for figure in found)} targets met, {len(missed)} missed; {figures.machine()}"
    )
    for figure in missed:
        console.print(f"  {figure.section}, {figure.case}: {figure.target}, got {figure.value:.3g}", highlight=False)
    if options.compare:
        figures.compare(console, found, options.compare)
    figures.save(options.json, found, about)
    console.print(f"written to {options.json}", highlight=False)
    if options.markdown:
        figures.write_markdown(options.markdown, found, about)
        console.print(f"written to {options.markdown}", highlight=False)
    if options.picture:
        from bench import picture  # noqa: PLC0415 (matplotlib is an extra)

        picture.draw(found, about, options.picture)
        console.print(f"drawn to {options.picture}", highlight=False)


if __name__ == "__main__":
    main()
