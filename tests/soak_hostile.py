"""A hundred thousand mutated handshakes and files, for `make soak`."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

from kvcompile import spec
from tests import hostile

HANDSHAKES, FILES, ROUNDS = 100_000, 20_000, 10
LARGEST = 1024
"""Layers of all ranks that a file may ask for here: what a deployment costs is its size."""


def soak(say: Callable[[str], None]) -> dict[str, int]:
    """Offer them; return the figures. What is no KVCompileError comes out, an AssertionError for a stray descriptor."""
    seen: Counter[str] = Counter()
    read: Counter[str] = Counter()
    for number in range(ROUNDS):
        seen.update(hostile.handshakes(Random(number + 1), HANDSHAKES // ROUNDS))
        say(f"handshakes: {hostile.figures(seen)}")
    largest, spec.MAX_REGIONS = spec.MAX_REGIONS, LARGEST
    try:
        for number in range(ROUNDS):
            read.update(hostile.files(Random(number + 1), FILES // ROUNDS, Path(__file__).parent.parent / "examples"))
    finally:
        spec.MAX_REGIONS = largest
    say(f"files: {hostile.figures(read)}")
    return {
        "hostile inputs tried": seen["inputs"] + read["inputs"],
        "of them reached the validators": seen["reached the validators"] + read["reached the validators"],
        "of them valid, compiled and built": seen["accepted"],
        "descriptors outside the declared buffers": 0,
    }
