"""How many descriptors: vLLM's rule, ours, the fewest there can be, and what the NIC makes of them."""

import random

import numpy as np

import kvcompile
from bench import baseline, loads, shapes
from bench.figures import Figure
from kvcompile import Request

__all__ = ["minimal"]

SLICE = 64 << 10  # bytes of one request of a NIC: Mooncake's MC_SLICE_SIZE


def minimal(seconds: float) -> list[Figure]:
    """Counts, of the cases as they come and with their block pairs out of order (preempted, resumed, evicted)."""
    found, section = [], "Descriptors"
    for case in [*shapes.cases(), *loads.loads()]:
        plan, before = kvcompile.compile(case.src, case.dst), list[int]()
        for name, request in ((case.name, case.request), (case.name + ", shuffled", _shuffled(case.request))):
            theirs = baseline.build(baseline.spans(case.src, case.dst), request.src_blocks, request.dst_blocks)
            ours, fewest = plan.build([request]), plan.build([request], sort=True)
            counts = {
                "vLLM's rule": len(theirs[0]),
                "ours": len(ours),
                "sort=True (the minimum)": len(fewest),
                "NIC requests, vLLM's rule": sum(-(-length // SLICE) for length in theirs[2]),
                "NIC requests, minimum": int(np.sum((fewest.length + np.uint64(SLICE - 1)) // np.uint64(SLICE))),
            }
            if list(counts.values()) != before:  # where nothing merges, the order does not matter
                found += [Figure(section, name, metric, value) for metric, value in counts.items()]
            before = list(counts.values())
    return found


def _shuffled(request: Request) -> Request:
    """The same pairs in chunks of 32 blocks, the chunks in another order, each backwards."""
    sides: list[list[list[int]]] = [[], []]
    for src, dst in zip(request.src_blocks, request.dst_blocks, strict=True):
        starts = list(range(0, len(src), 32))
        random.Random(0).shuffle(starts)
        for side, ids in zip(sides, (src, dst), strict=True):
            side.append([block for start in starts for block in ids[start : start + 32][::-1]])
    return Request(request.id, *sides)
