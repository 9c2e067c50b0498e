"""What the grids are made of on a device: launch shapes, and scans. No kernel of a build here.

Scans are blockwise, in shared memory, over several launches: no thread block ever waits for another one. Every thread
of a block has to reach every `scan_block`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import config, cuda, int64

from kvcompile.kernels import item
from kvcompile.kernels.cuda_memory import part

THREADS = 32 if config.ENABLE_CUDASIM else 256
"""Threads in a block. The simulator runs each as a thread of Python; small blocks let few items span several."""

WIDE = 32 if config.ENABLE_CUDASIM else 1024
"""Threads in a block that works alone, on what is too little for many."""

ALONE = {} if config.ENABLE_CUDASIM else {"launch_bounds": WIDE}
"""How a kernel for wide blocks is compiled: with no more registers than so many threads can have."""

Run = Callable[..., None]
"""How a kernel is enqueued on the caller's stream: run(kernel, blocks, threads, *integers)."""

combine = cuda.jit(device=True)(item.combine)


def launch(run: Run, kernel: Any, items: int, *args: int) -> None:
    """Run a kernel with at least ``items`` threads; on nothing, do nothing."""
    if items:
        run(kernel, blocks(items), THREADS, *args)


def blocks(items: int) -> int:
    """Return how many thread blocks `launch` starts."""
    return -(-items // THREADS)


@cuda.jit(device=True)
def here():
    """Return which item this thread is for, in 64 bits."""
    return np.int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x


@cuda.jit(device=True)
def threads():
    """Return how many threads there are, in 64 bits."""
    return np.int64(cuda.gridDim.x) * cuda.blockDim.x


@cuda.jit(device=True)
def scan_block(shared, value, largest):
    """Scan one number of each thread of the block.

    Parameters
    ----------
    shared : int64 array [2, threads of a block], shared
        Two rows, so that a step writes what no other thread of the same step reads.
    value : int64
    largest : int64
        Not 0: the scan takes the largest number, else the sum.

    Returns
    -------
    before, all : int64
        Over the threads before this one (0, or -1 for the largest of none), and over all.
    """
    t, size = cuda.threadIdx.x, cuda.blockDim.x
    now, step = 0, 1
    shared[0, t] = value
    cuda.syncthreads()
    while step < size:
        if t >= step:
            value = combine(shared[now, t - step], value, largest)
        now = 1 - now
        shared[now, t] = value
        cuda.syncthreads()
        step *= 2
    before = shared[now, t - 1] if t > 0 else np.int64(-1 if largest != 0 else 0)
    total = shared[now, size - 1]
    cuda.syncthreads()  # the next scan uses the same memory
    return before, total


@cuda.jit(**ALONE)
def scan(work, number, size, largest):
    """Scan a part in place, in one thread block: each of ``size`` items becomes what is before it, the next one all.

    Parameters
    ----------
    work : int64
        Where the parts are.
    number, size : int64
        Which part, and how many items of it; it has room for one more.
    largest : int64
        As for `scan_block`.
    """
    shared = cuda.shared.array((2, WIDE), int64)
    values, t = part(work, number), np.int64(cuda.threadIdx.x)
    nothing = np.int64(-1 if largest != 0 else 0)
    carry = nothing
    for start in range(0, size, WIDE):
        value = values[start + t] if start + t < size else nothing
        before, total = scan_block(shared, value, largest)
        if start + t < size:
            values[start + t] = combine(carry, before, largest)
        carry = combine(carry, total, largest)
    if t == 0:
        values[size] = carry
