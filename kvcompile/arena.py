"""Memory of descriptors, used again once nothing refers to it: the page faults of fresh memory cost more than a build.

A column handed out is a view, and it and every view of it, in any thread, count among the references of the memory
behind it: a batch still in flight is never overwritten. When the last one is gone, the memory can be taken again.
(CPython counts references exactly as long as it has its global lock.)
"""

import threading
from bisect import bisect_left, bisect_right
from operator import attrgetter
from sys import getrefcount

import numpy as np
import numpy.typing as npt

__all__ = ["MAX_NBYTES", "columns", "spare", "take"]

UInt64 = npt.NDArray[np.uint64]
Columns = tuple[UInt64, UInt64, UInt64]

MAX_NBYTES = 64 << 20
"""What is kept for later, at most; what is more goes back to the system once nothing refers to it."""

# Ascending in size; searched and counted without a Python loop, so that every build runs the same lines.
_kept: list[UInt64] = []
_lock = threading.Lock()


def _references(arrays: list[UInt64]) -> list[int]:
    return list(map(getrefcount, arrays))


_NOTHING = np.empty(0, np.uint64)
_UNUSED = _references([np.empty(0, np.uint64)])[0]


def take(size: int) -> UInt64:
    """Return memory for three columns of ``size`` items at least, with whatever it held before."""
    with _lock:
        counts, enough = _references(_kept), bisect_left(_kept, 3 * size, key=len)
        if _UNUSED in counts[enough:]:
            array = _kept[counts.index(_UNUSED, enough)]
        else:
            array = np.empty(3 * size, np.uint64)
            _kept.insert(enough, array)
            while len(_kept) > 1 and sum(map(attrgetter("nbytes"), _kept)) > MAX_NBYTES:
                _kept.pop(0)
        return array


def spare(most: int) -> UInt64:
    """Return the largest memory of up to ``most`` items a column that is there and unused; an empty array: none is."""
    with _lock:
        stop = bisect_right(_kept, 3 * most, key=len)
        counts = _references(_kept)[:stop]
        counts.reverse()
        return _kept[stop - 1 - counts.index(_UNUSED)] if _UNUSED in counts else _NOTHING


def columns(array: UInt64, size: int) -> Columns:
    """Return the first ``size`` items of each third of an array."""
    third = len(array) // 3
    return array[:size], array[third : third + size], array[2 * third : 2 * third + size]
