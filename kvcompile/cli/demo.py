"""`kvcompile demo`: move KV caches between prefill and decode ranks over a real engine, and check every byte."""

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvcompile import KVCompileError
from kvcompile.cli.demo_rank import Checked, Loads, Opened, Peers, Sent, Spec, Verify
from kvcompile.cli.demo_team import Inline, Processes, Team
from kvcompile.cli.demo_values import Load, Wrong
from kvcompile.cli.geometries import MODELS, Model, Serving, regions

__all__ = ["Options", "run"]

PROCESS_NBYTES = 200 << 20
"""Of one process before its memory: 174 MB measured with numba and Mooncake, and some room for buffers."""

DESCRIPTORS_PER_GIB = 100_000
"""Descriptors moved at most for each GiB of memory: on TCP one costs 25 to 60 us, however small."""

MIN_BLOCKS = 4
"""Blocks of a request, on average: fewer show nothing of fragmentation."""

MAX_RUN = 8
"""Neighbouring blocks at most that the made-up allocator hands out together."""

SIDES = {"src": "prefill", "dst": "decode"}


@dataclass(frozen=True)
class Options:
    """What the user chose."""

    model: str
    src: Serving
    dst: Serving
    election: str
    engine: str
    gib: float
    requests: int
    seed: int
    corrupt: int | None = None


@dataclass(frozen=True)
class Size:
    """How much of the model fits: layers, and tokens and states that each side has memory for."""

    layers: int
    tokens: int
    states: int


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

    def seconds(self) -> str:
        """Say how long each phase took; the last one ends now."""
        stops = [start for _, start in self.starts[1:]] + [time.perf_counter()]
        return ", ".join(f"{phase} {stop - start:.1f} s" for (phase, start), stop in zip(self.starts, stops, strict=True))

    def __call__(self, done: int) -> None:
        self.progress.advance(self.task, done)


def run(options: Options, console: Console) -> int:
    """Run the demo; return the exit code: 0 if every byte is right, else 1."""
    started = time.perf_counter()
    size = fit(options)
    model = MODELS[options.model]
    specs = _specs(options, size)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = Bar(progress)
        bar.start("starting")
        with (Inline if options.engine == "local" else Processes)(list(specs), bar) as team:
            memory = _memory(options, size)
            bar.start("filling", f"{_bytes(memory)} of {len(specs)} ranks", memory)
            opened: dict[str, Opened] = team.ask("open", specs, Opened)
            bar.start("compiling")
            rate = _compile(options, opened, team)
            loads = make_loads(options, model, size, rate)
            bar.start("writing", "the requests' values")
            team.ask("write", dict.fromkeys(_names("src", options), Loads(loads)), None)
            bar.start("moving")
            moving = time.perf_counter()
            sent: dict[str, list[Sent]] = {}
            import os
            W=int(os.environ.get("W","8"))
            names=_names("src", options)
            for i in range(0,len(names),W):
                sent.update(team.ask("send", dict.fromkeys(names[i:i+W], Loads(loads)), list[Sent]))
            wall = time.perf_counter() - moving
            checked = sum(opened[name].nbytes for name in _names("dst", options))
            bar.start("checking", _bytes(checked), checked)
            found = _check(options, model, loads, team)
            seconds = bar.seconds()
    rows = [row for answers in sent.values() for row in answers]
    console.print(_table(options, size, sent))
    console.print(
        f"[bold]{len(loads)} requests[/bold], {sum(_lengths(loads, options))} tokens in {_blocks(loads)}; "
        f"moved {_bytes(sum(row.nbytes for row in rows))} in {sum(row.descriptors for row in rows):,} descriptors in {wall:.1f} s"
    )
    console.print(f"{time.perf_counter() - started:.1f} s in all: {seconds}")
    return _verdict(found, checked, console)


def fit(options: Options) -> Size:
    """Choose layers and tokens such that all processes together stay within the memory allowed.

    Raises
    ------
    KVCompileError
        Not even the fewest layers fit.
    """
    model = MODELS[options.model]
    ranks = options.src.tp_size + options.dst.tp_size
    processes = 1 if options.engine == "local" else ranks + 1
    budget = int(options.gib * 2**30) - processes * PROCESS_NBYTES
    step = math.lcm(options.src.block_size, options.dst.block_size)
    least = options.requests * MIN_BLOCKS * max(options.src.block_size, options.dst.block_size)
    states = 2 * options.requests + 1 if "state" in model.groups() else 0
    fewest = next(n for n in range(1, len(model.layers) + 1) if len({k.group for k in model.layers[:n]}) == len(model.groups()))
    for layers in range(len(model.layers), fewest - 1, -1):
        fixed = _side_nbytes(options, model, layers, 0, states)
        tokens = (budget - fixed) // (_side_nbytes(options, model, layers, step, 0) // step) // step * step
        if tokens >= max(least, step):
            return Size(layers, tokens, states)
    raise KVCompileError(
        f"--gib is {options.gib:g}, of which {processes} processes take {_bytes(processes * PROCESS_NBYTES)} before any KV: "
        f"too little for {options.requests} requests on {fewest} layer(s); raise --gib, or lower --requests or the TP sizes"
    )


def make_loads(options: Options, model: Model, size: Size, rate: float) -> list[Load]:
    """Make up requests of uneven lengths whose blocks lie in short runs; every third one hits a prefix on the dst side.

    Parameters
    ----------
    rate : float
        Descriptors a token at most, over all rank pairs; limits how many tokens are moved on a slow engine.
    """
    chance = random.Random(options.seed)
    widest = max(options.src.block_size, options.dst.block_size)
    tokens = min(size.tokens * 85 // 100, size.tokens - options.requests * widest)
    if options.engine != "local" and rate:
        tokens = min(tokens, max(int(options.gib * DESCRIPTORS_PER_GIB / rate), options.requests * widest))
    weights = [chance.uniform(0.5, 1.5) for _ in range(options.requests)]
    ids = {side: _allocator(chance, size.tokens // serving.block_size) for side, serving in _sides(options).items()}
    states = {side: chance.sample(range(size.states), size.states) for side in SIDES}
    loads = []
    for number, weight in enumerate(weights):
        length = max(1, int(tokens * weight / sum(weights)))
        blocks: dict[str, list[list[int]]] = {"src": [], "dst": []}
        for group in model.groups():
            for side, serving in _sides(options).items():
                count = -(-length // serving.block_size)
                blocks[side].append([states[side].pop()] if group == "state" else [ids[side].pop() for _ in range(count)])
        first = []
        for group, found in zip(model.groups(), blocks["dst"], strict=True):
            first.append(len(found) // 3 if number % 3 == 2 and group != "state" else 0)
        cut = [found[skip:] for found, skip in zip(blocks["dst"], first, strict=True)]
        loads.append(Load(number, blocks["src"], cut, first))
    return loads


def _allocator(chance: random.Random, blocks: int) -> list[int]:
    """All block ids in runs of random lengths, in random order."""
    runs, start = [], 0
    while start < blocks:
        stop = min(blocks, start + chance.randint(1, MAX_RUN))
        runs.append(range(start, stop))
        start = stop
    chance.shuffle(runs)
    return [block for run in runs for block in reversed(run)]  # taken from the end


def _sides(options: Options) -> dict[str, Serving]:
    return {"src": options.src, "dst": options.dst}


def _names(side: str, options: Options) -> list[str]:
    return [f"{SIDES[side]} rank {rank}" for rank in range(_sides(options)[side].tp_size)]


def _num_blocks(model: Model, serving: Serving, tokens: int, states: int) -> list[int]:
    return [states if group == "state" else tokens // serving.block_size for group in model.groups()]


def _specs(options: Options, size: Size) -> dict[str, Spec]:
    model = MODELS[options.model]
    specs = {}
    for side, serving in _sides(options).items():
        blocks = _num_blocks(model, serving, size.tokens, size.states)
        shape = (options.model, size.layers, serving.tp_size, serving.order, serving.block_size, blocks, options.engine)
        for rank, name in enumerate(_names(side, options)):
            specs[name] = Spec(side, rank, *shape)
    return specs


def _side_nbytes(options: Options, model: Model, layers: int, tokens: int, states: int) -> int:
    """Bytes of all ranks of both sides."""
    total = 0
    for serving in _sides(options).values():
        ones = regions(model, serving, 0, layers, [1] * len(model.groups()))
        blocks = _num_blocks(model, serving, tokens, states)
        # Ranks differ where TP does not divide the heads: the first is not always the largest.
        for rank in range(serving.tp_size):
            ones = regions(model, serving, rank, layers, [1] * len(model.groups()))
            total += sum(region.block_stride * region.num_blocks * blocks[region.group] for region in ones)
    return total


def _memory(options: Options, size: Size) -> int:
    return _side_nbytes(options, MODELS[options.model], size.layers, size.tokens, size.states)


def _compile(options: Options, opened: dict[str, Opened], team: Team) -> float:
    """Give each src rank the caches of the dst ranks; return descriptors a token at most, over all pairs."""
    peers = Peers([opened[name] for name in _names("dst", options)], options.election)
    rates: dict[str, list[float]] = team.ask("compile", dict.fromkeys(_names("src", options), peers), list[float])
    return sum(sum(each) for each in rates.values())


def _check(options: Options, model: Model, loads: list[Load], team: Team) -> dict[str, Checked]:
    sizes = [options.src.block_size] * len(model.groups())
    names = _names("dst", options)
    verify = {name: Verify(loads, sizes, None if place else options.corrupt) for place, name in enumerate(names)}
    found: dict[str, Checked] = team.ask("check", verify, Checked)
    return found


def _table(options: Options, size: Size, sent: dict[str, list[Sent]]) -> Table:
    model = MODELS[options.model]
    src, dst = (f"TP{s.tp_size} {s.order.upper()} blocks of {s.block_size}" for s in _sides(options).values())
    table = Table(title=f"{options.model}, {size.layers} of {len(model.layers)} layers: {src} → {dst}, {options.election}")
    table.add_column("ranks")
    for name in ("slices", "descriptors", "bytes", "build", "transfer", "GB/s"):
        table.add_column(name, justify="right")
    idle = 0
    for rank, answers in enumerate(sent.values()):
        for peer, row in enumerate(answers):
            if not row.slices:
                idle += 1
                continue
            rate = f"{row.nbytes / row.transfer / 1e9:.2f}" if row.transfer else ""
            numbers = (f"{row.slices:,}", f"{row.descriptors:,}", _bytes(row.nbytes))
            table.add_row(f"{rank} → {peer}", *numbers, f"{row.build * 1e3:.2f} ms", f"{row.transfer:.2f} s", rate)
    if idle:
        table.caption = f"{idle} more pairs of ranks have nothing to send to each other"
    return table


def _lengths(loads: list[Load], options: Options) -> list[int]:
    return [max(len(ids) for ids in load.src_blocks) * options.src.block_size for load in loads]


def _blocks(loads: list[Load]) -> str:
    runs = blocks = 0
    for load in loads:
        for ids in load.dst_blocks:
            blocks += len(ids)
            runs += sum(1 for a, b in zip([None, *ids], ids, strict=False) if a is None or b != a + 1)
    return f"{blocks:,} dst blocks, {runs:,} runs"


def _verdict(found: dict[str, Checked], checked: int, console: Console) -> int:
    moved = sum(answer.moved for answer in found.values())
    wrong = sum(answer.wrong for answer in found.values())
    counts = f"all {_bytes(checked)} of dst memory checked: {_bytes(moved)} that moved, {_bytes(checked - moved)} left untouched"
    if not wrong:
        console.print(f"[bold green]every byte is right[/bold green]: {counts}")
        return 0
    name, first = next((name, answer.first) for name, answer in found.items() if answer.first is not None)
    console.print(f"[bold red]{wrong:,} wrong byte(s)[/bold red] ({counts}). The first: {escape(_place(name, first))}")
    return 1


def _place(name: str, wrong: Wrong) -> str:
    whose = f"request {wrong.request}" if wrong.request is not None else "no request (must stay untouched)"
    return (
        f"{name}, layer {wrong.layer}, field {wrong.field}, head {wrong.head}, token {wrong.token}, byte {wrong.byte}, {whose}, "
        f"block {wrong.block}: got {wrong.got:#04x}, expected {wrong.expected:#04x}"
    )


def _bytes(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


Progressed = Callable[[int], None]
