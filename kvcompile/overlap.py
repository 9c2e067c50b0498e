"""Which bytes a region's payload takes, and whether two cells ever share one. It knows no ranks and raises no errors.

A region's payload is the same set of intervals at every kernel block, ``stride`` apart. Cut at multiples of the
stride, an interval becomes a *piece*: a rectangle, residue [lo, hi) by level [first, last), where the level counts
whole strides. The law of this file: two pieces share a byte iff their rectangles intersect. That holds for padding,
for interleaved fields and for strides far above the block's own (head-major storage) alike, and needs no walk over
blocks.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

__all__ = ["collide", "crosses", "fold", "intervals", "meet", "pieces"]

Int64 = npt.NDArray[np.int64]


def fold(
    head_stride: int, heads: int, token_stride: int, tokens: int, nbytes: int
) -> tuple[list[tuple[int, int]], int]:
    """Fold the axes of a field that are contiguous into its cell.

    Returns
    -------
    axes : list of (stride, count)
        What is left to walk, at most two, count > 1.
    nbytes : int
        Contiguous bytes at each place.
    """
    axes: list[tuple[int, int]] = []
    for stride, count in sorted([(head_stride, heads), (token_stride, tokens)]):
        if count > 1 and stride == nbytes and not axes:
            nbytes *= count
        elif count > 1:
            axes.append((stride, count))
    return axes, nbytes


def intervals(offset: int, axes: list[tuple[int, int]]) -> Int64:
    """Return the starts of all intervals of a folded field, int64 [product of counts], in bytes."""
    starts = np.array([offset], np.int64)
    for stride, count in axes:
        starts = np.add.outer(starts, np.arange(count, dtype=np.int64) * stride).ravel()
    return starts


def pieces(start: Int64, nbytes: Int64, stride: int, count: int) -> Int64:
    """Return the rectangles of intervals repeated ``count`` times, ``stride`` bytes apart.

    Returns
    -------
    int64 array [m, 4]
        lo, hi (bytes, within one stride), first, last (levels). An interval that crosses a multiple of the stride makes
        two, one that covers whole strides three. A stride of 0 stands for none: all in level 0.
    """
    if stride == 0:
        level = np.zeros_like(start)
        return np.stack([start, start + nbytes, level, level + count], axis=1)
    (level, lo), (end_level, hi) = np.divmod(start, stride), np.divmod(start + nbytes, stride)
    here = np.where(end_level == level, hi, stride)
    head = np.stack([lo, here, level, level + count], axis=1)
    body = np.stack([np.zeros_like(lo), np.full_like(lo, stride), level + 1, end_level - 1 + count], axis=1)
    tail = np.stack([np.zeros_like(lo), hi, end_level, end_level + count], axis=1)
    return np.concatenate([head, body[end_level > level + 1], tail[(end_level > level) & (hi > 0)]])


def collide(rectangles: Int64) -> bool:
    """Return whether any two of the rectangles (int64 [m, 4]: lo, hi, first, last) intersect."""
    rectangles = rectangles[np.argsort(rectangles[:, 0], kind="stable")]
    lo, hi = rectangles[:, 0], rectangles[:, 1]
    if np.all(lo[1:] >= np.maximum.accumulate(hi)[:-1]):
        return False
    # Residues overlap: sweep them, keeping the live rectangles ordered by level. Live ones are disjoint in level (else
    # the sweep would have ended), so only the two neighbours of a new one can meet it.
    live: list[tuple[int, int]] = []  # (first, last)
    ends: list[tuple[int, int, int]] = []  # (hi, first, last), descending in hi
    for lo_, hi_, first, last in rectangles.tolist():
        while ends and -ends[-1][0] <= lo_:
            _, first_, last_ = ends.pop()
            del live[bisect_left(live, (first_, last_))]
        at = bisect_left(live, (first, last))
        if (at < len(live) and live[at][0] < last) or (at and live[at - 1][1] > first):
            return True
        live.insert(at, (first, last))
        insort(ends, (-hi_, first, last))
    return False


def crosses(rectangle: Iterable[int], others: Int64) -> npt.NDArray[np.bool_]:
    """Return which of ``others`` (int64 [n, 4]) a rectangle intersects."""
    lo, hi, first, last = rectangle
    found: npt.NDArray[np.bool_] = (
        (lo < others[:, 1]) & (others[:, 0] < hi) & (first < others[:, 3]) & (others[:, 2] < last)
    )
    return found


def meet(a: Int64, b: Int64) -> bool:
    """Return whether any rectangle of ``a`` intersects any of ``b`` (int64 [n, 4] each; O(len(a) * len(b)))."""
    return any(bool(np.any(crosses(rectangle, b))) for rectangle in a.tolist())
