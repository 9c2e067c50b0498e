"""`kvcompile prove`: the proof of a deployment in a TOML file, and who sends what to whom. It moves nothing."""

import time

from rich.console import Console
from rich.markup import escape

from kvcompile import prove
from kvcompile.cli.plan import compile_all, table
from kvcompile.spec import Deployment

__all__ = ["run"]


def run(deployment: Deployment, console: Console) -> int:
    """Print the table and the proof; return the exit code: 0 if every byte is right, else 1.

    Replicas of src (``dp_size``) are proved one by one: a request lies on one of them.
    """
    started = time.perf_counter()
    plans = compile_all(deployment, console)
    compiled = time.perf_counter()
    replicas = sorted({cache.dp_rank for cache in deployment.src})
    dsts, proofs = range(len(deployment.dst)), {}
    with console.status("proving"):
        for replica in replicas:
            ranks = [number for number, cache in enumerate(deployment.src) if cache.dp_rank == replica]
            own = {(place, peer): plans[number, peer] for place, number in enumerate(ranks) for peer in dsts}
            proofs[replica] = prove([deployment.src[number] for number in ranks], deployment.dst, own)
    proved = time.perf_counter()
    console.print(table(deployment, plans), soft_wrap=True)
    for replica, proof in proofs.items():
        who = f"src replica {replica}: " if len(replicas) > 1 else ""
        color = "green" if proof.exact else "bold red"
        console.print(f"[{color}]{who}{escape(str(proof))}[/]", highlight=False, soft_wrap=True)
    console.print(f"compiled in {compiled - started:.2f} s, proved in {proved - compiled:.2f} s", highlight=False)
    return 0 if all(proof.exact for proof in proofs.values()) else 1
