"""How often each byte of some streams is covered: a sweep over the ends of ranges. It knows no fields and no ranks."""

import numpy as np
import numpy.typing as npt

__all__ = ["sweep"]

Int64 = npt.NDArray[np.int64]


def sweep(key: Int64, start: Int64, stop: Int64, nbytes: Int64) -> tuple[Int64, Int64, Int64, Int64]:
    """Find the ranges of streams that are not covered exactly once.

    Parameters
    ----------
    key, start, stop : int64 arrays [n]
        What covers: bytes [start, stop) of stream ``key``.
    nbytes : int64 array [streams]
        Size of each stream.

    Returns
    -------
    key, start, stop, depth : int64 arrays [m]
        How often each such range is covered: 0, or 2 and more.
    """
    streams = np.arange(len(nbytes), dtype=np.int64)
    ends = np.concatenate([start, stop, np.zeros_like(nbytes), nbytes])
    keys = np.concatenate([key, key, streams, streams])
    delta = np.zeros(len(ends), np.int64)
    delta[: len(start)] = 1
    delta[len(start) : 2 * len(start)] = -1
    order = np.lexsort([ends, keys])
    keys, ends, depth = keys[order], ends[order], np.cumsum(delta[order])
    found = np.flatnonzero((keys[:-1] == keys[1:]) & (ends[:-1] < ends[1:]) & (depth[:-1] != 1))
    return keys[found], ends[found], ends[found + 1], depth[found]
