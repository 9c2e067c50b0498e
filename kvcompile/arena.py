"""Memory of descriptors, used again once nothing refers to it: the page faults of fresh memory cost more than a build.

A column handed out keeps its lease alive, and so does every view of it, in any thread: a batch still in flight is
never overwritten. When the last one is gone, the memory can be taken again.
"""

import threading
from bisect import bisect_left, insort
from operator import attrgetter

import numpy as np
import numpy.typing as npt

__all__ = ["MAX_NBYTES", "take"]

UInt64 = npt.NDArray[np.uint64]
Columns = tuple[UInt64, UInt64, UInt64]

MAX_NBYTES = 64 << 20
"""What is kept for later, at most; more goes back to the system."""

# Ascending in size; searched and summed without a Python loop, so that every build runs the same lines.
_free: list[UInt64] = []
_lock = threading.RLock()  # a lease may end while its own thread holds the lock


class _Lease:
    """What NumPy takes the array from, and so keeps as the base of it and of all its views."""

    def __init__(self, memory: UInt64) -> None:
        self.memory = memory
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        with _lock:
            insort(_free, self.memory, key=len)
            while len(_free) > 1 and sum(map(attrgetter("nbytes"), _free)) > MAX_NBYTES:
                _free.pop(0)


def take(size: int) -> Columns:
    """Return three uint64 columns of at least ``size`` items, alike in size, with whatever they held before."""
    with _lock:
        index = bisect_left(_free, 3 * size, key=len)
        memory = _free.pop(index) if index < len(_free) else None
    if memory is None or len(memory) < 3 * size:  # a lease that ended meanwhile may have moved the others
        memory = np.empty(3 * size, np.uint64)
    array = np.asarray(_Lease(memory))
    third = len(array) // 3
    return array[:third], array[third : 2 * third], array[2 * third :]
