"""What the grids are made of on a device: launch shapes, parts of an array, and a scan. No kernel of a build here.

Scans are blockwise, in shared memory, over several launches: no thread block ever waits for another one. Every thread
of a block has to reach every `scan_block`.
"""

from typing import Any

import numpy as np
from numba import config, cuda, int64

from kvcompile.kernels import item

THREADS = 32 if config.ENABLE_CUDASIM else 256
"""Threads in a block. The simulator runs each as a thread of Python; small blocks let few items span several."""

combine = cuda.jit(device=True)(item.combine)


def launch(kernel: Any, items: int, stream: Any, *args: Any) -> None:
    """Run a kernel on a stream with at least ``items`` threads; on nothing, do nothing."""
    if items:
        kernel[blocks(items), THREADS, stream](*args)


def blocks(items: int) -> int:
    """Return how many thread blocks `launch` starts."""
    return -(-items // THREADS)


@cuda.jit(device=True)
def here():
    """Return which item this thread is for, in 64 bits."""
    return np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x


@cuda.jit(device=True, inline="always")
def part(words, number):
    """Return a part of an array in which word k says where part k begins."""
    return words[words[number] : words[number + 1]]


@cuda.jit(device=True)
def scan_block(value, largest):
    """Scan one number of each thread of the block.

    Parameters
    ----------
    value : int64
    largest : int64
        Not 0: the scan takes the largest number, else the sum.

    Returns
    -------
    before, all : int64
        Over the threads before this one (0, or -1 for the largest of none), and over all.
    """
    shared = cuda.shared.array(THREADS, int64)
    t = cuda.threadIdx.x
    shared[t] = value
    cuda.syncthreads()
    step = 1
    while step < THREADS:
        other = shared[t - step] if t >= step else shared[t]
        cuda.syncthreads()
        if t >= step:
            shared[t] = combine(shared[t], other, largest)
        cuda.syncthreads()
        step *= 2
    before = shared[t - 1] if t > 0 else np.int64(-1 if largest != 0 else 0)
    total = shared[THREADS - 1]
    cuda.syncthreads()  # the next scan uses the same memory
    return before, total


@cuda.jit
def scan(work, number, size, largest):
    """Scan a part in place, in one thread block: each of ``size`` items becomes what is before it, the next one all.

    Parameters
    ----------
    work : int64 array
    number, size : int64
        Which part, and how many items of it; it has room for one more.
    largest : int64
        As for `scan_block`.
    """
    values, t = part(work, number), np.int64(cuda.threadIdx.x)
    nothing = np.int64(-1 if largest != 0 else 0)
    carry = nothing
    for start in range(0, size, THREADS):
        value = values[start + t] if start + t < size else nothing
        before, total = scan_block(value, largest)
        if start + t < size:
            values[start + t] = combine(carry, before, largest)
        carry = combine(carry, total, largest)
    if t == 0:
        values[size] = carry
