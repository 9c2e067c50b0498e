"""Deployments proved, changed plans caught, and what a proof of 64 x 64 ranks costs, for `make soak`."""

import time
from collections import Counter
from collections.abc import Callable

import kvcompile
from kvcompile import prove
from kvcompile.models import Attention, Layer, caches
from tests import mutations

EXAMPLES, MUTANTS, ROUNDS = 100, 40, 6
RANKS, LAYERS, HEADS = 64, 94, 8


def soak(say: Callable[[str], None]) -> dict[str, int | float]:
    """Run both; return the figures. AssertionError for a plan that is not exact, or a mutant the judge alone caught."""
    total: Counter[str] = Counter()
    for number in range(ROUNDS):
        fate = mutations.random_deployments(EXAMPLES, MUTANTS, seed=number + 1)
        total.update(fate)
        say(f"round {number + 1} of {ROUNDS}: {mutations.figures(fate)}")
    compiled, proved = ranks(say)
    return {
        "deployments proved": total["deployments"] + 1,
        "mutations caught": total["caught"],
        "mutations shown equivalent by the byte oracle": total["equivalent"],
        "faults of the proof": 0,
        f"{RANKS} x {RANKS} ranks compiled, s": compiled,
        f"{RANKS} x {RANKS} ranks proved, s": proved,
    }


def ranks(say: Callable[[str], None]) -> tuple[float, float]:
    """Compile and prove 64 x 64 ranks of 94 layers and 8 heads; return the seconds of a core that each took."""
    layers = [Layer(f"layers.{number}", (Attention(HEADS, 128),)) for number in range(LAYERS)]
    src, dst = caches(layers, tp_size=RANKS), caches(layers, tp_size=RANKS, order="nhd", num_blocks=512)
    kvcompile.warmup()
    start = time.process_time()
    plans = {(i, j): kvcompile.compile(a, b) for i, a in enumerate(src) for j, b in enumerate(dst)}
    compiled = time.process_time()
    proof = prove(src, dst, plans)
    done = time.process_time()
    assert proof.exact, str(proof)
    took = compiled - start, done - compiled
    say(f"{len(plans):,} pairs of ranks compiled in {took[0]:.2f} s, proved in {took[1]:.2f} s: {proof}")
    return round(took[0], 2), round(took[1], 2)
