"""Fold pieces that repeat at even distances on both sides into one row. It knows pieces alone."""

import numpy as np
import numpy.typing as npt

from kvcompile.lanes import lanes

__all__ = ["fold"]

Int64 = npt.NDArray[np.int64]
Pieces = npt.NDArray[np.void]


def fold(pieces: Pieces) -> Pieces:
    """Fold pieces of one field that no other piece can touch, alike in all but their addresses, evenly apart.

    Without it NHD head slices make a row a token, and blocks of 768 tokens laid from HND to NHD a row a cell.

    Parameters
    ----------
    pieces : structured array [n] of `table.JOINED`
        Of one cluster: nothing else can touch them.
    """
    if len(pieces) < 2:
        return pieces
    lane = lanes(pieces, pieces["src_buffer"], pieces["dst_buffer"])
    alone = (np.bincount(lane)[lane] == 1) & (pieces["tail"] == 0) & ~_meets_itself(pieces)
    if np.count_nonzero(alone) < 2:
        return pieces
    same = [name for name in pieces.dtype.names or () if name not in ("src_origin", "dst_origin")]
    varying = [pieces[name] for name in same if np.any(pieces[name] != pieces[name][0])]
    # Heads may be the outer or the inner axis of a side: take the order that makes fewer rows.
    attempts = []
    for inner, outer in (("src_origin", "dst_origin"), ("dst_origin", "src_origin")):
        order = np.lexsort([pieces[outer], pieces[inner], *varying])
        order = order[alone[order]]
        attempts.append(_progressions(pieces[order], [column[order] for column in varying]))
    folded = min(attempts, key=len)
    return np.concatenate([pieces[~alone], folded])


def _meets_itself(pieces: Pieces) -> npt.NDArray[np.bool_]:
    """Return which pieces may touch themselves at some other block: a length that is a multiple of both strides."""
    length = pieces["length"].astype(np.int64)
    src, dst = pieces["src_stride"], pieces["dst_stride"]
    meets: npt.NDArray[np.bool_] = (length % np.maximum(src, 1) == 0) & (length % np.maximum(dst, 1) == 0)
    return meets & (src > 0) & (dst > 0)


def _progressions(pieces: Pieces, varying: list[npt.NDArray[np.generic]]) -> Pieces:
    """Fold neighbours with equal distances, from the first piece on, as far as each progression goes."""
    src_step = np.diff(pieces["src_origin"].astype(np.int64))
    dst_step = np.diff(pieces["dst_origin"].astype(np.int64))
    usable = (src_step > 0) & (dst_step > 0)
    for column in varying:
        usable &= column[1:] == column[:-1]
    turns = np.flatnonzero((np.diff(src_step) != 0) | (np.diff(dst_step) != 0) | ~usable[1:] | ~usable[:-1]) + 1
    starts, counts = [], []
    at = 0  # first piece not yet in a row
    # Between two turns all distances are equal: n of them make a row of n + 1 pieces, if its first is still free.
    for begin, end in zip([0, *turns.tolist()], [*turns.tolist(), len(src_step)], strict=True):
        begin = max(begin, at)  # noqa: PLW2901
        if begin >= end or not usable[begin]:
            continue
        starts += [*range(at, begin), begin]
        counts += [1] * (begin - at) + [end - begin + 1]
        at = end + 1
    starts += range(at, len(pieces))
    counts += [1] * (len(pieces) - at)
    rows = pieces[starts]
    rows["count"] = counts
    many = np.flatnonzero(rows["count"] > 1)
    rows["src_inner"][many] = src_step[np.array(starts, np.int64)[many]]
    rows["dst_inner"][many] = dst_step[np.array(starts, np.int64)[many]]
    return rows
