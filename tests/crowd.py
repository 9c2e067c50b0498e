"""Many threads on shared plans and one engine, and many builds in one process: what they give, and what they keep."""

import gc
import os
import threading
import time
from typing import NamedTuple

import numpy as np

import kvcompile
from kvcompile import Descriptors, Plan, Request
from tests.faults import PATIENCE, World, theirs, world
from tests.peer import CANARY, rank

THREADS = 8
VARIANTS = 12
BLOCKS = 28
"""Dst blocks of each thread: 8 * 28 of the world's 256, and two of the next sixteen."""

Result = tuple[bytes, bytes, bytes, bytes, dict[object, str], dict[object, list[tuple[int, int]]]]


class Figures(NamedTuple):
    """What a crowd did."""

    builds: int
    transfers: int
    nbytes: int


def lists_of(thread: int, variant: int) -> list[Request]:
    """Make one thread's requests: its own dst blocks in runs, any src blocks; one of four is refused."""
    rng = np.random.default_rng([thread, variant])
    dst = (thread * BLOCKS + rng.permutation(BLOCKS // 4)[:, None] * 4 + np.arange(4)).ravel().tolist()
    src = (rng.permutation(64)[: BLOCKS // 4, None] * 4 + np.arange(4)).ravel().tolist()
    cut = int(rng.integers(1, BLOCKS))
    return [
        Request("a", [src[:cut]], [dst[:cut]]),
        Request("bad", [[0]], [[10_000 + variant]]),
        Request("prefix", [src], [dst[cut:]]),
        Request(
            "partly", [src[:1]], [[224 + 2 * thread, 225 + 2 * thread]], src_first=[1], dst_first=[0], num_tokens=5
        ),
    ]


def result(built: Descriptors) -> Result:
    """Everything a build says, in a form that compares."""
    columns = (built.src.tobytes(), built.dst.tobytes(), built.length.tobytes(), built.spans.tobytes())
    return (*columns, {name: str(error) for name, error in built.failed.items()}, dict(built.uncovered))


def crowd(seconds: float) -> Figures:
    """Have threads build and write for so long, each build compared with one thread's, each write byte by byte."""
    with world() as here, theirs(here) as other:
        plans = [kvcompile.compile(here.cache, other.cache), kvcompile.compile(here.cache, other.cache)]
        alone = {
            (thread, variant): [result(plan.build(lists_of(thread, variant))) for plan in plans]
            for thread in range(THREADS)
            for variant in range(VARIANTS)
        }
        end = time.monotonic() + seconds
        counts = [[0, 0, 0] for _ in range(THREADS)]
        faults: list[BaseException] = []

        def work(thread: int) -> None:
            kept: Descriptors | None = None
            turn = 0
            try:
                while time.monotonic() < end and not faults:
                    for _ in range(10):
                        turn += 1
                        variant = (turn * 7 + thread) % VARIANTS
                        requests = lists_of(thread, variant)
                        kept = plans[turn % 2].build(requests, out=kept if turn % 3 else None)
                        assert result(kept) == alone[thread, variant][turn % 2]
                        counts[thread][0] += 1
                    how = {"retries": turn % 4 // 3}
                    if turn // 10 % 2:
                        here.engine.write(other.session, kept, PATIENCE, **how)
                    else:
                        here.engine.write_async(other.session, kept, **how).wait(PATIENCE)
                    counts[thread][1] += 1
                    counts[thread][2] += kept.nbytes
                    _compare(here, other.address, kept)
            except BaseException as fault:
                faults.append(fault)

        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + 2 * PATIENCE)
        if faults:
            raise faults[0]
        assert not any(thread.is_alive() for thread in threads)
        assert (here.memory == CANARY).all(), "bytes outside the blocks of all threads"
        assert here.engine.barred(other.session) == ()
        assert not here.engine._flights
        return Figures(*np.sum(counts, axis=0).tolist())


def leak(builds: int) -> int:
    """Build so often, in every way, and return by how many bytes the process grew meanwhile."""
    dst = rank(1 << 40, layers=8, blocks=512, cell=256)
    plans = [
        kvcompile.compile(rank(1 << 30, layers=8, blocks=512, cell=256, tp=tp), dst) for tp in ((0, 1), (0, 2), (1, 2))
    ]
    _builds(plans, 200)
    before = resident()
    _builds(plans, builds)
    return resident() - before


def resident() -> int:
    """Return the bytes of memory that this process has, RSS."""
    gc.collect()
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _builds(plans: list[Plan], count: int) -> None:
    rng = np.random.default_rng(1)
    out: Descriptors | None = None
    for turn in range(count):
        size = int(rng.integers(1, 200))
        ids = rng.permutation(512)[:size]
        given = ids.tolist() if turn % 2 else ids
        requests = [
            Request(("r", turn), [given], [given]),
            Request("bad", [[1]], [[-1]]),
            Request("x", [[1]], [[1, 2]]),
        ]
        plan = plans[turn % 3]
        out = plan.build(requests, sort=turn % 5 == 0, max_length=1000 if turn % 7 == 0 else None, out=out)
        if turn % 4 == 0:
            out = None
        kvcompile.build_all(plans, [requests[:1]] * 3)


def _compare(here: World, there: int, built: Descriptors) -> None:
    """Look at every byte that a write has to have written, and wipe it."""
    base = here.source.ctypes.data
    columns = (built.src.tolist(), built.dst.tolist(), built.length.tolist())
    for src, dst, length in zip(*columns, strict=True):
        piece = here.memory[dst - there : dst - there + length]
        assert piece.tobytes() == here.source[src - base : src - base + length].tobytes(), f"wrong bytes at {dst:#x}"
        piece[:] = CANARY
