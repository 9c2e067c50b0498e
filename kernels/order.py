"""Sort by (src - dst, src): the order in which all that can merge are neighbours. A radix sort, linear and stable."""

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
    for turn in range(2):
        key = src if turn == 0 else delta
        least, most = key[0], key[0]
        for i in range(len(key)):
            least, most = min(least, key[i]), max(most, key[i])
        shift = 0
        while shift < 63 and (most - least) >> shift != 0:
            sort_digit(key, least, shift, order, other, counts)
            order, other = other, order
            shift += RADIX
    return order


@jit
def sort_digit(key, least, shift, order, other, counts):
    """Sort a permutation stably by one digit of ``key - least`` into ``other``."""
    for digit in range(len(counts)):
        counts[digit] = 0
    for i in range(len(key)):
        counts[((key[i] - least) >> shift) & ((1 << RADIX) - 1)] += 1
    total = 0
    for digit in range(len(counts)):
        begin = total
        total += counts[digit]
        counts[digit] = begin
    for k in range(len(order)):
        digit = ((key[order[k]] - least) >> shift) & ((1 << RADIX) - 1)
        other[counts[digit]] = order[k]
        counts[digit] += 1
