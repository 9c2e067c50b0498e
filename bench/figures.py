"""What the benchmarks print: figures beside their targets, as tables, as JSON, and held against an older run's JSON."""

import json
import os
import platform
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np
from rich.console import Console
from rich.table import Table

__all__ = ["Figure", "compare", "load", "machine", "save", "show", "write_markdown"]

MARKS = ("<!-- figures: written by the benchmarks -->", "<!-- end of figures -->")
NOTABLE = 1.25  # ratios of two runs closer to 1 than this are what a shared machine does by itself


class Figure(NamedTuple):
    """One measured value: a row and a column of its section's table.

    ``most`` or ``least``: the target, if there is one. ``more_is_better``: which way a change is good.
    """

    section: str
    case: str
    metric: str
    value: float
    unit: str = ""
    most: float | None = None
    least: float | None = None
    more_is_better: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the target is reached, None without one."""
        if self.most is None and self.least is None:
            return None
        return (self.most is None or self.value <= self.most) and (self.least is None or self.value >= self.least)

    @property
    def target(self) -> str:
        """The target in words, and whether it was reached."""
        bounds = [f"{sign} {bound:g}" for sign, bound in ((">=", self.least), ("<=", self.most)) if bound is not None]
        return f"{self.metric} {' and '.join(bounds)}: {'met' if self.met else 'MISSED'}" if bounds else ""


def machine() -> str:
    """Name the processor, the load, and the versions that decide the figures."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = f"{len(lines)} x {lines[0]}" if lines else model
    versions = f"Python {platform.python_version()}, numpy {np.__version__}, numba {numba.__version__}"
    return f"{model}, {platform.system()}; {versions}; load {os.getloadavg()[0]:.1f}"


class Grid(NamedTuple):
    """The figures of one section as text: a row a case, a column a metric, targets last."""

    title: str
    headings: list[str]
    rows: list[list[str]]


def grids(figures: Iterable[Figure]) -> list[Grid]:
    """Lay figures out, a grid for each section."""
    sections: dict[str, list[Figure]] = {}
    for figure in figures:
        sections.setdefault(figure.section, []).append(figure)
    found = []
    for section, members in sections.items():
        columns = list(dict.fromkeys((figure.metric, figure.unit) for figure in members))
        targets = any(figure.target for figure in members)
        headings = ["case", *(f"{metric} [{unit}]" if unit else metric for metric, unit in columns)]
        rows = []
        for case in dict.fromkeys(figure.case for figure in members):
            row = {(f.metric, f.unit): f for f in members if f.case == case}
            cells = [_number(row[column].value) if column in row else "" for column in columns]
            aims = ["; ".join(f.target for f in row.values() if f.target)] if targets else []
            rows.append([case, *cells, *aims])
        found.append(Grid(section, [*headings, "target"] if targets else headings, rows))
    return found


def show(console: Console, figures: Iterable[Figure]) -> None:
    """Print a table for each section."""
    for grid in grids(figures):
        table = Table(title=grid.title, title_justify="left")
        for heading in grid.headings:
            table.add_column(heading, justify="left" if heading in ("case", "target") else "right")
        for row in grid.rows:
            table.add_row(*row)
        console.print(table)


def write_markdown(path: Path, figures: Iterable[Figure], about: str) -> None:
    """Put the tables into a Markdown file, between the lines that `MARKS` are; SystemExit if it has none."""
    before, begin, rest = path.read_text().partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not begin or not end:
        raise SystemExit(f"{path} has no lines {MARKS[0]} and {MARKS[1]} to write between")
    lines = [begin, "", f"Measured {date.today().isoformat()} on {about}.", ""]
    for grid in grids(figures):
        lines += [f"### {grid.title}", ""]
        aligned = ["---" if heading in ("case", "target") else "---:" for heading in grid.headings]
        lines += ["| " + " | ".join(row) + " |" for row in (grid.headings, aligned, *grid.rows)]
        lines.append("")
    path.write_text(before + "\n".join(lines) + end + after)


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def save(path: Path, figures: Iterable[Figure], about: str) -> None:
    """Write a run as JSON."""
    path.write_text(json.dumps({"machine": about, "figures": [f._asdict() for f in figures]}, indent=1) + "\n")


def load(path: Path) -> tuple[str, list[Figure]]:
    """Read a run: its machine, and its figures."""
    found = json.loads(path.read_text())
    return found["machine"], [Figure(**figure) for figure in found["figures"]]


def compare(console: Console, figures: Iterable[Figure], old: Path) -> int:
    """Print what changed notably since an older run; return how many figures became worse."""
    about, before = load(old)
    known = {figure[:3]: figure.value for figure in before}
    table = Table(title=f"against {old.name} ({about})", title_justify="left")
    for heading in ("section", "case", "metric", "old", "new", "new / old", ""):
        table.add_column(heading)
    same, worse = 0, 0
    for figure in figures:
        was = known.get(figure[:3])
        if not was or not figure.value:
            continue
        ratio = figure.value / was
        if 1 / NOTABLE < ratio < NOTABLE:
            same += 1
            continue
        bad = (ratio > 1) != figure.more_is_better
        worse += bad
        verdict = "[red]worse[/red]" if bad else "[green]better[/green]"
        table.add_row(*figure[:3], _number(was), _number(figure.value), f"{ratio:.2f}", verdict)
    console.print(table)
    console.print(f"{same} figures within a factor of {NOTABLE:g} of what they were, {worse} worse")
    return worse
