"""What is done with finished descriptors: cut them, copy their bytes. Columns are int64 views of uint64 arrays."""

import numpy as np

from kvcompile._jit import jit, move

__all__ = ["copy", "cut", "cut_count"]


@jit
def cut_count(length, spans, most, cut_spans):
    """Write the spans that remain after cutting every descriptor at ``most`` bytes; return the number of descriptors."""
    total = 0
    for r in range(len(spans) - 1):
        cut_spans[r] = total
        for i in range(spans[r], spans[r + 1]):
            total += (length[i] - 1) // most + 1
    cut_spans[len(spans) - 1] = total
    return total


@jit
def cut(src, dst, length, most, cut_src, cut_dst, cut_length):
    """Write descriptors cut into pieces of ``most`` bytes, the last of each the rest."""
    at = 0
    for i in range(len(src)):
        done = np.int64(0)
        while done < length[i]:
            cut_src[at], cut_dst[at] = src[i] + done, dst[i] + done
            cut_length[at] = min(most, length[i] - done)
            done += cut_length[at]
            at += 1


@jit
def copy(src, dst, length):
    """Copy the bytes of every descriptor: int64 views of uint64 arrays; addresses of this process."""
    for i in range(len(src)):
        move(dst[i], src[i], length[i])
