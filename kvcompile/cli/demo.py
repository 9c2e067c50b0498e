"""`kvcompile demo`: move KV caches between prefill and decode ranks over a real engine, and check every byte."""

import time
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvcompile.cli import demo_report as report
from kvcompile.cli.demo_loads import SIDES, Options, Size, fit, make_loads, nbytes, num_blocks
from kvcompile.cli.demo_rank import Checked, Loads, Opened, Peers, Rate, Sent, Spec, Verify
from kvcompile.cli.demo_team import Inline, Processes
from kvcompile.cli.demo_values import Load
from kvcompile.cli.geometries import MODELS

__all__ = ["run"]


@dataclass
class Bar:
    """One bar of progress, started anew for each phase."""

    progress: Progress
    task: Any = None
    starts: list[tuple[str, float]] = field(default_factory=list)

    def start(self, phase: str, what: str = "", total: float | None = None) -> None:
        if self.task is not None:
            self.progress.remove_task(self.task)
        self.task = self.progress.add_task(f"{phase} {what}", total=total)
        self.starts.append((phase, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """Return how long each phase took; the last one ends now."""
        stops = [start for _, start in self.starts[1:]] + [time.perf_counter()]
        return {phase: stop - start for (phase, start), stop in zip(self.starts, stops, strict=True)}

    def __call__(self, done: int) -> None:
        self.progress.advance(self.task, done)


def run(options: Options, console: Console) -> int:
    """Run the demo; return the exit code: 0 if every byte is right, else 1.

    Raises
    ------
    KVCompileError
        It does not fit, or a rank failed or died; all processes are ended then, too.
    """
    size = fit(options)
    specs = _specs(options, size)
    src, dst = _names("src", options), _names("dst", options)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = Bar(progress)
        bar.start("starting")
        with (Inline if options.engine == "local" else Processes)(list(specs), bar) as team:
            memory = nbytes(options, size.layers, size.tokens, size.states)
            bar.start("filling", f"{report.in_bytes(memory)} of {len(specs)} ranks", memory)
            opened: dict[str, Opened] = team.ask("open", specs, Opened)

            bar.start("compiling", "(the kernels too, if this is the first run)")
            peers = Peers([opened[name] for name in dst], options.election)
            rates: dict[str, Rate] = team.ask("compile", dict.fromkeys(src, peers), Rate)
            loads = make_loads(options, size, sum(rate.descriptors for rate in rates.values()))

            bar.start("writing", "the requests' values")
            team.ask("write", dict.fromkeys(src, Loads(loads)), None)

            bar.start("moving", "", sum(_expected(rate, loads, options) for rate in rates.values()))
            sent: dict[str, list[Sent]] = team.ask("send", dict.fromkeys(src, Loads(loads)), list[Sent])

            checked = sum(opened[name].nbytes for name in dst)
            bar.start("checking", report.in_bytes(checked), checked)
            sizes = [options.src.block_size] * len(MODELS[options.model].groups())
            asked = {name: Verify(loads, sizes, None if name != dst[0] else options.corrupt) for name in dst}
            found: dict[str, Checked] = team.ask("check", asked, Checked)
            seconds = bar.seconds()
    console.print(report.table(options, size, list(sent.values())))
    report.summary(console, loads, [row for rows in sent.values() for row in rows], seconds)
    return report.verdict(console, sent, found, checked)


def _names(side: str, options: Options) -> list[str]:
    return [f"{SIDES[side]} rank {rank}" for rank in range(options.sides()[side].tp_size)]


def _specs(options: Options, size: Size) -> dict[str, Spec]:
    """Say what each rank is, by name."""
    specs = {}
    for side, serving in options.sides().items():
        blocks = num_blocks(MODELS[options.model], serving, size.tokens, size.states)
        shape = (options.model, size.layers, serving.tp_size, serving.order, serving.block_size, blocks, options.engine)
        for rank, name in enumerate(_names(side, options)):
            specs[name] = Spec(side, rank, *shape)
    return specs


def _expected(rate: Rate, loads: list[Load], options: Options) -> float:
    """Return about how many bytes one src rank will send, for the bar."""
    groups = MODELS[options.model].groups()
    tokens = sum(
        len(blocks) * options.dst.block_size
        for load in loads
        for group, blocks in zip(groups, load.dst_blocks, strict=True)
        if group != "state"
    )
    return rate.nbytes * tokens + rate.state_nbytes * len(loads)
