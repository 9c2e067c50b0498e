"""How much the demo moves: what of a model fits into the memory allowed, and made-up requests for it."""

import math
import random
from collections import Counter
from dataclasses import dataclass, replace

from kvcompile import KVCompileError
from kvcompile.cli.demo_values import Load
from kvcompile.cli.geometries import MODELS, Kind, Model, Serving, regions

__all__ = ["SIDES", "Options", "Size", "fit", "make_loads", "nbytes", "num_blocks"]

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

    def sides(self) -> dict[str, Serving]:
        """Return how each side serves, by "src" and "dst"."""
        return {"src": self.src, "dst": self.dst}


@dataclass(frozen=True)
class Size:
    """How much of the model fits: layers, and tokens and states that each side has memory for."""

    layers: int
    tokens: int
    states: int


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
    fewest = next(
        n for n in range(1, len(model.layers) + 1) if len({k.group for k in model.layers[:n]}) == len(model.groups())
    )
    for layers in range(len(model.layers), fewest - 1, -1):
        fixed = nbytes(options, layers, 0, states)
        tokens = (budget - fixed) // (nbytes(options, layers, step, 0) // step) // step * step
        if tokens >= max(least, step):
            return Size(layers, tokens, states)
    raise KVCompileError(
        f"--gib is {options.gib:g}, and {processes} process(es) take {processes * PROCESS_NBYTES / 2**30:.2f} of it "
        f"before any KV: too little for {options.requests} requests on {fewest} layer(s); raise --gib, or lower "
        "--requests or the TP sizes"
    )


def make_loads(options: Options, size: Size, rate: float) -> list[Load]:
    """Make up requests of uneven lengths whose blocks lie in short runs; every third one hits a prefix on the dst side.

    Parameters
    ----------
    rate : float
        Descriptors a token at most, over all rank pairs; limits how many tokens are moved on a slow engine.
    """
    model = MODELS[options.model]
    chance = random.Random(options.seed)
    widest = max(options.src.block_size, options.dst.block_size)
    tokens = min(size.tokens * 85 // 100, size.tokens - options.requests * widest)
    if options.engine != "local" and rate:
        tokens = min(tokens, max(int(options.gib * DESCRIPTORS_PER_GIB / rate), options.requests * widest))
    weights = [chance.uniform(0.5, 1.5) for _ in range(options.requests)]
    ids = {side: _allocator(chance, size.tokens // serving.block_size) for side, serving in options.sides().items()}
    states = {side: chance.sample(range(size.states), size.states) for side in SIDES}
    loads = []
    for number, weight in enumerate(weights):
        length = max(1, int(tokens * weight / sum(weights)))
        blocks: dict[str, list[list[int]]] = {"src": [], "dst": []}
        for group in model.groups():
            for side, serving in options.sides().items():
                count = -(-length // serving.block_size)
                blocks[side].append(
                    [states[side].pop()] if group == "state" else [ids[side].pop() for _ in range(count)]
                )
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


def num_blocks(model: Model, serving: Serving, tokens: int, states: int) -> list[int]:
    """Return the blocks of each group."""
    return [states if group == "state" else tokens // serving.block_size for group in model.groups()]


def nbytes(options: Options, layers: int, tokens: int, states: int) -> int:
    """Return the bytes of all ranks of both sides."""
    kinds = Counter(MODELS[options.model].layers[:layers])
    return sum(count * _layer_nbytes(options, kind, tokens, states) for kind, count in kinds.items())


def _layer_nbytes(options: Options, kind: Kind, tokens: int, states: int) -> int:
    model = replace(MODELS[options.model], layers=(kind,))
    total = 0
    for serving in options.sides().values():
        (blocks,) = num_blocks(model, serving, tokens, states)
        for rank in range(serving.tp_size):
            (region,) = regions(model, serving, rank, 1, [1])
            total += region.block_stride * region.num_blocks * blocks
    return total
