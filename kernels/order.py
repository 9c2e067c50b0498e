"""Sort by (src - dst, src): the order in which everything that can merge is a neighbour. A radix sort, linear and stable."""

import numpy as np

from kvcompile._jit import jit

__all__ = ["RADIX", "SCRATCH", "sort", "sorted_already"]

RADIX = 11  # bits a pass: the counts stay in the first-level cache
# Rows of the scratch array that `sort` needs: two permutations and the counts of a pass.
SCRATCH = 3


@jit
def sorted_already(delta, src):
    """Return whether keys are in order."""
    for i in range(1, len(src)):
        if delta[i] < delta[i - 1] or (delta[i] == delta[i - 1] and src[i] < src[i - 1]):
            return False
    return True


@jit
def sort(delta, src, scratch):
    """Return the permutation that sorts by (delta, src), as a view of ``scratch``.

    Parameters
    ----------
    delta, src : int64 arrays [n]
    scratch : int64 array [SCRATCH, at least max(n, 2**RADIX)]
    """
    order, other, counts = scratch[0, : len(src)], scratch[1, : len(src)], scratch[2, : 1 << RADIX]
    for i in range(len(order)):
        order[i] = i
    for key in (src, delta):
        least, most = key[0], key[0]
        for value in key:
            least, most = min(least, value), max(most, value)
        for shift in range(0, 63, RADIX):
            if (most - least) >> shift == 0:
                break
            counts[:] = 0
            for value in key:
                counts[((value - least) >> shift) & ((1 << RADIX) - 1)] += 1
            total = np.int64(0)
            for digit in range(len(counts)):
                counts[digit], total = total, total + counts[digit]
            for i in order:
                digit = ((key[i] - least) >> shift) & ((1 << RADIX) - 1)
                other[counts[digit]] = i
                counts[digit] += 1
            order, other = other, order
    return order
