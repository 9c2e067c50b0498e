"""Which rows of a table may merge: the lanes. It knows the table alone.

Two rows *touch* if, with block ids 0, 1, 2, ..., one ends on both sides where the other begins in the same or the next
period. A lane is a connected component of that. Only rows of one lane ever merge. (A row with a bridged tail ends
after it. A row of several pieces, ``count`` above 1, was made of pieces that no other can touch, and is a lane alone.)
"""

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["lanes", "number"]

Int64 = npt.NDArray[np.int64]
Table = npt.NDArray[np.void]


def lanes(table: Table, src_buffer: Int64, dst_buffer: Int64) -> Int64:
    """Return the lane of each row, int64 [rows]: lanes are numbered in the order of their first rows.

    Parameters
    ----------
    table : structured array [rows] of `lowering.TABLE`
    src_buffer, dst_buffer : int64 arrays [rows]
        The buffer that holds each row.
    """
    same = ("src_group", "dst_group", "src_stride", "dst_stride", "src_step", "dst_step")
    kind, _ = number([*(table[name] for name in same), src_buffer, dst_buffer], len(table))
    kind = np.where(table["count"] == 1, kind, -1 - np.arange(len(table)))  # its own kind: touches nothing
    begin: list[npt.NDArray[Any]] = [kind]
    end: list[npt.NDArray[Any]] = [kind]
    turn: list[npt.NDArray[Any]] = [kind]
    for side in ("src", "dst"):
        stride = table[f"{side}_stride"].astype(np.uint64)
        first = table[f"{side}_origin"] + table[f"{side}_phase"].astype(np.uint64) * stride
        begin.append(first)
        end.append(first + table["length"] + table["tail"].astype(np.uint64))
        turn.append(first + table[f"{side}_step"].astype(np.uint64) * stride)
    edges = np.concatenate([_meet(end, begin), _meet(end, turn)], axis=1)
    return _components(len(table), *edges)


def _meet(ends: list[npt.NDArray[Any]], begins: list[npt.NDArray[Any]]) -> Int64:
    """Return edges, int64 [2, n], that connect every row to all rows that begin where it ends."""
    size = len(ends[0])
    place, _ = number([np.concatenate([a, b]) for a, b in zip(ends, begins, strict=True)], 2 * size)
    ended, begun = place[:size], place[size:]
    order = np.argsort(begun, kind="stable")
    sorted_begun = begun[order]
    at = np.searchsorted(sorted_begun, ended)
    hit = np.flatnonzero((at < size) & (sorted_begun[np.minimum(at, size - 1)] == ended)) if size else at
    # Rows that begin at one place hang together only if some row ends there.
    reached = np.zeros(2 * size, bool)
    reached[ended[hit]] = True
    twins = np.flatnonzero((sorted_begun[1:] == sorted_begun[:-1]) & reached[sorted_begun[1:]])
    return np.concatenate([[hit, order[at[hit]]], [order[twins], order[twins + 1]]], axis=1)


def _components(size: int, a: Int64, b: Int64) -> Int64:
    """Number the connected components of a graph in the order of their least members."""
    least = np.arange(size)
    while True:
        before = least.copy()
        low = np.minimum(least[a], least[b])
        np.minimum.at(least, a, low)
        np.minimum.at(least, b, low)
        np.minimum.at(least, before, least)  # a member that learned of a lower one tells its old representative
        least = least[least]
        if np.array_equal(least, before):
            return np.unique(least, return_inverse=True)[1].reshape(-1)


def number(keys: list[npt.NDArray[Any]], size: int) -> tuple[Int64, Int64]:
    """Number equal key tuples; return each item's number and each number's first item."""
    if not size:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    order = np.lexsort(keys)
    opens = np.zeros(size, bool)
    opens[0] = True
    for key in keys:
        ordered = key[order]
        opens[1:] |= ordered[1:] != ordered[:-1]
    number = np.empty(size, np.int64)
    number[order] = np.cumsum(opens) - 1
    return number, order[opens]
