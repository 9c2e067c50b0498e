"""`kvcompile plan`: who sends what to whom in a deployment of a TOML file. It compiles, and proves nothing."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvcompile import Plan, compile
from kvcompile.explain import amount, figures
from kvcompile.proof.contents import Sent, contents
from kvcompile.spec import Deployment

__all__ = ["Plans", "compile_all", "run", "table"]

Plans = dict[tuple[int, int], Plan]


def compile_all(deployment: Deployment, console: Console) -> Plans:
    """Compile every pair of ranks."""
    plans = {}
    options = dict(deployment.options)
    with console.status("compiling"):
        for number, src in enumerate(deployment.src):
            for peer, dst in enumerate(deployment.dst):
                if "layers" in deployment.options:  # those of other stages are unknown to these two
                    held = {region.layer for cache in (src, dst) for region in cache.regions}
                    options["layers"] = held.intersection(deployment.options["layers"])
                plans[number, peer] = compile(src, dst, **options)
    return plans


def run(deployment: Deployment, console: Console, explained: bool) -> int:
    """Print the table, and each distinct explanation if asked; return the exit code."""
    plans = compile_all(deployment, console)
    console.print(table(deployment, plans), soft_wrap=True)
    if explained:
        texts: dict[str, list[str]] = {}
        for (number, peer), plan in plans.items():
            if len(plan.table):
                pair = f"{deployment.src_names[number]} to {deployment.dst_names[peer]}"
                texts.setdefault(plan.explain(), []).append(pair)
        for text, pairs in texts.items():
            more = f" and {len(pairs) - 3} more" if len(pairs) > 3 else ""
            console.print(
                f"\n[bold]{', '.join(pairs[:3])}{more}[/bold]: {escape(text)}", highlight=False, soft_wrap=True
            )
    return 0


def table(deployment: Deployment, plans: Plans) -> Table:
    """Make the table: a line for each pair of ranks and groups between which something is sent."""
    shown = Table(title=f"{len(deployment.src)} src ranks to {len(deployment.dst)} dst ranks", title_justify="left")
    for name in ("src", "dst", "what"):
        shown.add_column(name, overflow="fold")
    for name in ("slices", "bytes a dst block", "descriptors a dst block", "lanes that merge"):
        shown.add_column(name, justify="right")
    for (number, peer), plan in plans.items():
        sent = contents(deployment.src[number], deployment.dst[peer], plan) if len(plan.table) else []
        for of in figures(plan._program):
            if of.rows:
                what = [each for each in sent if (each.src_group, each.dst_group) == (of.src_group, of.dst_group)]
                shown.add_row(
                    deployment.src_names[number],
                    deployment.dst_names[peer],
                    escape("\n".join(map(_what, what))),
                    f"{of.rows:,}",
                    amount(of.nbytes),
                    amount(of.descriptors),
                    f"{of.merging:,} of {of.lanes:,}",
                )
    return shown


def _what(sent: Sent) -> str:
    """Say what layers send: fields with equal heads together."""
    by_heads: dict[tuple[tuple[int, int], ...], list[str]] = {}
    for field, heads in sent.heads:
        by_heads.setdefault(heads, []).append(field)
    parts = [
        f"{' '.join(fields)} heads {' '.join(f'[{a}, {b})' for a, b in heads)}" for heads, fields in by_heads.items()
    ]
    layers = f"{len(sent.layers)} layers from {sent.layers[0]}" if len(sent.layers) > 1 else f"{sent.layers[0]}"
    return f"{layers}: {', '.join(parts)}"
