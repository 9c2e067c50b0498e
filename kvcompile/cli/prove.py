"""`kvcompile prove`: the proof of a deployment in a TOML file, and who sends what to whom. It moves nothing."""

import time

from rich.console import Console
from rich.markup import escape

from kvcompile import prove
from kvcompile.cli.plan import compile_all, table
from kvcompile.spec import Deployment

__all__ = ["run"]


def run(deployment: Deployment, console: Console) -> int:
    """Print the table and the proof; return the exit code: 0 if every byte is right, else 1."""
    started = time.perf_counter()
    plans = compile_all(deployment, console)
    compiled = time.perf_counter()
    with console.status("proving"):
        proof = prove(deployment.src, deployment.dst, plans)
    proved = time.perf_counter()
    console.print(table(deployment, plans), soft_wrap=True)
    console.print(f"[{'green' if proof.exact else 'bold red'}]{escape(str(proof))}[/]", highlight=False, soft_wrap=True)
    console.print(f"compiled in {compiled - started:.2f} s, proved in {proved - compiled:.2f} s", highlight=False)
    return 0 if proof.exact else 1
