"""The commands and their options. What they do is imported when they run."""

import time
from collections.abc import Callable
from enum import Enum
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)


class Order(str, Enum):
    """Memory order of a block."""

    hnd = "hnd"
    nhd = "nhd"


class Election(str, Enum):
    """Who sends a head that several ranks hold."""

    nearest = "nearest"
    balanced = "balanced"


class Engine(str, Enum):
    """What moves the bytes."""

    mooncake = "mooncake"
    local = "local"


@app.callback()
def kvcompile() -> None:
    """Compile two KV-cache layouts into descriptors for an RDMA engine."""


@app.command()
def warmup() -> None:
    """Compile the kernels into the cache on disk, so that no process waits for a compiler later."""
    from kvcompile import warmup as compile_kernels  # noqa: PLC0415

    started = time.perf_counter()
    compile_kernels()
    Console().print(f"kernels ready in {time.perf_counter() - started:.2f} s")


@app.command()
def bench(
    seconds: Annotated[float, typer.Option(min=0.01, help="Time for each measured case.")] = 0.5,
) -> None:
    """Time descriptor builds on this machine; the whole set of benchmarks is `make bench` in a checkout."""
    from kvcompile import warmup as compile_kernels  # noqa: PLC0415
    from kvcompile.cli.bench import run  # noqa: PLC0415

    compile_kernels()
    Console().print(run(seconds))


@app.command()
def demo(
    model: Annotated[
        str, typer.Option(help="qwen3-235b-a22b, llama-3.3-70b, deepseek-v3 or kimi-k3-like.")
    ] = "qwen3-235b-a22b",
    src_tp: Annotated[int, typer.Option(min=1, max=64, help="Tensor-parallel size of the prefill side.")] = 8,
    dst_tp: Annotated[int, typer.Option(min=1, max=64, help="Tensor-parallel size of the decode side.")] = 2,
    src_order: Annotated[Order, typer.Option(help="Memory order of the prefill side.")] = Order.hnd,
    dst_order: Annotated[Order, typer.Option(help="Memory order of the decode side.")] = Order.hnd,
    src_block: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prefill block; the model's usual by default.")
    ] = None,
    dst_block: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a decode block; the model's usual by default.")
    ] = None,
    election: Annotated[
        Election, typer.Option(help="Which of several ranks that hold a head sends it.")
    ] = Election.nearest,
    engine: Annotated[
        Engine, typer.Option(help="mooncake: processes over loopback; local: one process.")
    ] = Engine.mooncake,
    gib: Annotated[float, typer.Option(min=0.1, help="GiB of memory, all processes together.")] = 4.0,
    requests: Annotated[int, typer.Option(min=1, help="Requests to move.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the requests' lengths and blocks.")] = 0,
    corrupt: Annotated[int | None, typer.Option(hidden=True, help="Flip a bit of this byte of decode rank 0.")] = None,
) -> None:
    """Move KV caches between prefill and decode ranks over a real engine, and check every byte."""
    from kvcompile import KVCompileError  # noqa: PLC0415
    from kvcompile.cli.demo import run  # noqa: PLC0415
    from kvcompile.cli.demo_loads import Options  # noqa: PLC0415
    from kvcompile.cli.geometries import MODELS, Serving  # noqa: PLC0415

    console = Console()
    if model not in MODELS:
        raise typer.BadParameter(f"is {model!r}, expected one of {', '.join(MODELS)}", param_hint="--model")
    usual = MODELS[model].block_size
    src = Serving(src_tp, src_order.value, src_block or usual)
    dst = Serving(dst_tp, dst_order.value, dst_block or usual)
    try:
        code = run(Options(model, src, dst, election.value, engine.value, gib, requests, seed, corrupt), console)
    except (KVCompileError, ValueError) as error:
        Console(stderr=True).print(f"[bold red]demo:[/bold red] {escape(str(error))}", highlight=False)
        code = 1
    raise typer.Exit(code)


@app.command()
def families(
    configs: Annotated[
        list[str],
        typer.Argument(help="config.json files; with settings as in 'config.json kv_dtype=nvfp4 order=LBHPNC'."),
    ],
    lines: Annotated[bool, typer.Option(help="The files are lists: on each line a config.json and settings.")] = False,
    write: Annotated[str | None, typer.Option(help="Write the tables to this file.")] = None,
) -> None:
    """Prove each model in deployments of many kinds, and move it byte for byte with the local engine."""
    from pathlib import Path  # noqa: PLC0415

    from kvcompile import KVCompileError  # noqa: PLC0415
    from kvcompile.cli.families import CELLS, check, document, line, rows_of  # noqa: PLC0415

    console = Console()
    results, wrong = {}, 0
    try:
        rows = [] if lines else rows_of(configs)
        for path in map(Path, configs if lines else []):
            rows += rows_of(path.read_text().splitlines(), path.parent)
        for row in rows:
            with console.status(row.name):
                found = {cell: check(row, cell) for cell in CELLS}
            results[row.name] = row, found
            wrong += sum(not result.right for result in found.values())
            console.print(escape(line(row, found, [])), soft_wrap=True, highlight=False)
    except (KVCompileError, OSError) as error:
        Console(stderr=True).print(f"[bold red]families:[/bold red] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None
    if write:
        Path(write).write_text(document(results, "make families" if lines else "kvcompile families"))
    console.print(f"{len(results)} models in {len(CELLS)} deployments each: {wrong} wrong")
    raise typer.Exit(int(wrong > 0))


Spec = Annotated[str, typer.Argument(help="A deployment: a TOML file as in examples/, or a model's config.json.")]
Src = Annotated[str, typer.Option(help="Settings of the prefill side: 'tp_size=8 order=nhd block_size=16'.")]
Dst = Annotated[str, typer.Option(help="Settings of the decode side.")]
Options = Annotated[str, typer.Option("--plan", help="Settings of the plans: 'election=balanced'.")]


@app.command()
def prove(spec: Spec, src: Src = "", dst: Dst = "", options: Options = "") -> None:
    """Prove that every byte of every decode rank is written once, from its own place; exit code 1 where it is not."""
    from kvcompile.cli.prove import run  # noqa: PLC0415

    raise typer.Exit(_deployment("prove", spec, {"src": src, "dst": dst, "plan": options}, run))


@app.command()
def plan(
    spec: Spec,
    src: Src = "",
    dst: Dst = "",
    options: Options = "",
    explain: Annotated[
        bool, typer.Option("--explain", help="Say of every plan what merges, and why the rest cannot.")
    ] = False,
) -> None:
    """Show who sends what to whom, with bytes and descriptors a block."""
    from kvcompile.cli.plan import run  # noqa: PLC0415

    settings = {"src": src, "dst": dst, "plan": options}
    raise typer.Exit(_deployment("plan", spec, settings, lambda found, console: run(found, console, explain)))


def _deployment(command: str, spec: str, settings: dict[str, str], run: Callable[..., int]) -> int:
    """Run a command on a file; say what is wrong with it and return 2 where it is no deployment."""
    from kvcompile import KVCompileError  # noqa: PLC0415
    from kvcompile.spec import read  # noqa: PLC0415

    console = Console()
    try:
        return run(read(spec, settings), console if console.is_terminal else Console(width=160))
    except KVCompileError as error:
        wrong = f"[bold red]{command}:[/bold red] {escape(str(error))}"
        Console(stderr=True).print(wrong, highlight=False, soft_wrap=True)
        return 2
