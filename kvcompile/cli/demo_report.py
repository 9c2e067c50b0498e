"""What the demo prints. All numbers were measured in the run."""

from itertools import pairwise

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvcompile.cli.demo_loads import Options, Size
from kvcompile.cli.demo_rank import Checked, Sent
from kvcompile.cli.demo_values import Load, Wrong
from kvcompile.cli.geometries import MODELS

__all__ = ["in_bytes", "summary", "table", "verdict"]


def table(options: Options, size: Size, sent: list[list[Sent]]) -> Table:
    """Return the table of rank pairs; those that share nothing are only counted."""
    layers = f"{size.layers} of {len(MODELS[options.model].layers)} layers"
    sides = [f"TP{s.tp_size} {s.order.upper()} blocks of {s.block_size}" for s in options.sides().values()]
    made = Table(title=f"{options.model}, {layers}: {' → '.join(sides)}, {options.election}")
    made.add_column("ranks")
    for name in ("slices", "descriptors", "bytes", "build", "transfer", "GB/s"):
        made.add_column(name, justify="right")
    idle = 0
    for rank, rows in enumerate(sent):
        for peer, row in enumerate(rows):
            if not row.slices:
                idle += 1
                continue
            speed = f"{row.nbytes / row.transfer / 1e9:.3f}" if row.nbytes else ""
            counts = (f"{row.slices:,}", f"{row.descriptors:,}", in_bytes(row.nbytes))
            made.add_row(f"{rank} → {peer}", *counts, f"{row.build * 1e3:.2f} ms", f"{row.transfer:.2f} s", speed)
    if idle:
        made.caption = f"{idle} more rank pairs have nothing to send"
    return made


def summary(console: Console, loads: list[Load], rows: list[Sent], seconds: dict[str, float]) -> None:
    """Say how much was moved, and where the time went."""
    blocks = sum(len(ids) for load in loads for ids in load.dst_blocks)
    runs = sum(1 + sum(b != a + 1 for a, b in pairwise(ids)) for load in loads for ids in load.dst_blocks)
    console.print(
        f"moved: {len(loads)} requests, {blocks:,} dst blocks in {runs:,} runs, "
        f"{in_bytes(sum(row.nbytes for row in rows))} in {sum(row.descriptors for row in rows):,} descriptors"
    )
    phases = ", ".join(f"{phase} {each:.1f}" for phase, each in seconds.items())
    console.print(f"time: {sum(seconds.values()):.1f} s ({phases})")


def verdict(console: Console, sent: dict[str, list[Sent]], found: dict[str, Checked], checked: int) -> int:
    """Say what the check found; return the exit code."""
    moved = sum(answer.moved for answer in found.values())
    wrong = sum(answer.wrong for answer in found.values())
    handed = sum(row.nbytes for rows in sent.values() for row in rows)
    counts = (
        f"{in_bytes(checked)} of dst memory: {in_bytes(moved)} moved, {in_bytes(checked - moved)} to stay untouched"
    )
    if wrong:
        name, first = next((name, answer.first) for name, answer in found.items() if answer.first is not None)
        console.print(f"[bold red]{wrong:,} wrong byte(s)[/bold red] in {counts}")
        console.print(f"the first: {escape(_place(name, first))}", highlight=False)
        return 1
    if handed != moved:
        console.print(f"[bold red]{handed:,} bytes were sent where {moved:,} had to move[/bold red]")
        return 1
    console.print(f"[bold green]every byte is right[/bold green]: checked all {counts}")
    return 0


def in_bytes(nbytes: float) -> str:
    """Return a size for people."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


def _place(name: str, wrong: Wrong) -> str:
    whose = "no request (must stay untouched)" if wrong.request is None else f"request {wrong.request}"
    return (
        f"{name}, layer {wrong.layer}, field {wrong.field}, head {wrong.head}, token {wrong.token}, byte {wrong.byte}, "
        f"{whose}, block {wrong.block}: got {wrong.got:#04x}, expected {wrong.expected:#04x}"
    )
