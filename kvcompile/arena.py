"""Memory of descriptors, used again once nothing refers to it: the page faults of fresh memory cost more than a build.

A column handed out is a view, and it and every view of it, in any thread, count among the references of the memory
behind it: a batch still in flight is never overwritten. When the last one is gone, the memory can be taken again.
(CPython counts references exactly as long as it has its global lock.)
"""

import threading
from bisect import bisect_left, insort
from sys import getrefcount

import numpy as np
import numpy.typing as npt

__all__ = ["FEW", "MAX_ARRAYS", "MAX_NBYTES", "clear", "columns", "spare", "take"]

UInt64 = npt.NDArray[np.uint64]
Columns = tuple[UInt64, UInt64, UInt64]

FEW = 4096
"""Up to so many descriptors are few: they have memory of their own, so that none holds much more than it needs."""

MAX_NBYTES = 64 << 20
"""What is kept of either kind, at most; what is more goes back to the system once nothing refers to it."""

MAX_ARRAYS = 32
"""How many are kept of either kind: they are looked through at every build."""

_few: list[UInt64] = []  # ascending in size, as is the other
_many: list[UInt64] = []
_lock = threading.Lock()

_NOTHING = np.empty(0, np.uint64)


def _references(kept: list[UInt64], at: int) -> int:
    return getrefcount(kept[at])


_UNUSED = _references([np.empty(0, np.uint64)], 0)


def take(size: int) -> UInt64:
    """Return memory for three columns of ``size`` items at least, with whatever it held before."""
    kept = _few if size <= FEW else _many
    with _lock:
        for at in range(bisect_left(kept, 3 * size, key=len), len(kept)):
            if _references(kept, at) == _UNUSED:
                return kept[at]
        array = np.empty(3 * size, np.uint64)
        insort(kept, array, key=len)
        while len(kept) > MAX_ARRAYS or (len(kept) > 1 and sum([one.nbytes for one in kept]) > MAX_NBYTES):
            kept.pop(0)
        return array


def spare() -> UInt64:
    """Return the largest memory for few that is there and unused; an empty array: none is."""
    with _lock:
        for at in range(len(_few) - 1, -1, -1):
            if _references(_few, at) == _UNUSED:
                return _few[at]
        return _NOTHING


def columns(array: UInt64, size: int) -> Columns:
    """Return the first ``size`` items of each third of an array."""
    third = len(array) // 3
    return array[:size], array[third : third + size], array[2 * third : 2 * third + size]


def clear() -> None:
    """Keep nothing of what was kept."""
    with _lock:
        _few.clear()
        _many.clear()
