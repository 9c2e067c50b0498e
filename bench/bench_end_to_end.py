"""From id lists to bytes at a peer over TCP loopback, beside the raw engine called with lists made before."""

import statistics
import time
from collections.abc import Callable

import numpy as np

import kvcompile
from bench import peer
from bench.figures import Figure
from bench.timing import interval
from kvcompile import KVCompileError
from kvcompile.engines import MooncakeEngine

__all__ = ["end_to_end"]

MIB = 1 << 20
ROOM = 160 * MIB
CALL = 1000  # descriptors that one raw call may have without running into the queue's limit
LOADS = {  # name -> (blocks, blocks in a run, layers)
    "4 large": (64, 16, 1),
    "1,000": (100, 1, 10),
    "100,000": (1000, 1, 100),
}


def end_to_end(seconds: float) -> list[Figure]:
    """Move 1, 8 and 64 MiB as few large, 1,000 and 100,000 small descriptors; 20 interleaved pairs and more.

    As many as fit into the seconds given, for of few that take a millisecond the median is a matter of luck; 3 if in
    haste.
    """
    found = []
    try:
        with peer.quiet(), peer.started(ROOM) as other:
            memory = np.random.default_rng(0).integers(1, 255, ROOM, np.uint8)
            for mib in (1, 8, 64):
                for name, (blocks, run, layers) in LOADS.items():
                    case = f"{mib} MiB, {name} descriptors"
                    found += _one(case, other, memory, mib * MIB, blocks, run, layers, seconds)
    except KVCompileError as error:
        print(f"end to end is not measured: {error}")
    return found


def _one(
    case: str, other: peer.Peer, memory: np.ndarray, total: int, blocks: int, run: int, layers: int, seconds: float
) -> list[Figure]:
    nbytes = total // (blocks * layers)
    pairs = 20 if seconds >= 1 else 3
    ours = MooncakeEngine("127.0.0.1")
    raw = ours._engine  # two engines can differ by a third, as their threads happen to lie on the cores
    src, dst = (
        ours.register(peer.cache(memory.ctypes.data, blocks, layers, nbytes)),
        other.cache(blocks, layers, nbytes),
    )
    plan, requests = kvcompile.compile(src, dst), [peer.request(blocks, run)]
    built = plan.build(requests)
    lists = [column.tolist() for column in (built.src, built.dst, built.length)]

    def by_hand() -> None:
        for at in range(0, len(built), CALL):
            if raw.batch_transfer_sync_write(other.session, *(column[at : at + CALL] for column in lists)):
                raise SystemExit(f"{case}: the raw engine failed")

    def by_us() -> None:
        ours.write(other.session, plan.build(requests))

    by_hand()
    digest = other.digest()
    by_us()
    if other.digest() != digest:
        raise SystemExit(f"{case}: the two leave different bytes")
    took: dict[Callable[[], None], list[float]] = {by_us: [], by_hand: []}
    until = time.perf_counter() + seconds
    while len(took[by_us]) < pairs or time.perf_counter() < until:
        for function in (by_us, by_hand) if len(took[by_us]) % 2 else (by_hand, by_us):
            began = time.perf_counter()
            function()
            took[function].append(time.perf_counter() - began)
    ratios = [a / b for a, b in zip(took[by_us], took[by_hand], strict=True)]
    low, high = interval(ratios)
    section = "End to end over TCP loopback: build and write, beside the raw engine with lists made before"
    figures = [
        Figure(section, case, "descriptors", len(built)),
        Figure(section, case, "ours", statistics.median(took[by_us]) * 1e3, "ms"),
        Figure(section, case, "raw", statistics.median(took[by_hand]) * 1e3, "ms"),
        Figure(section, case, "ours / raw", statistics.median(ratios), most=1.15),
        Figure(section, case, "from", low),
        Figure(section, case, "to", high),
        Figure(section, case, "pairs", len(ratios)),
    ]
    if len(built) > 2 * CALL:  # an engine of its own: it is of no use afterwards
        spoilt = peer.raw_engine()
        spoilt.register_memory(memory.ctypes.data, memory.nbytes)
        figures.append(
            Figure(section, case, "raw in one call answers", spoilt.batch_transfer_sync_write(other.session, *lists))
        )
    ours.unregister()
    return figures
