"""Let rows run over padding where that saves descriptors: never over a byte that any field takes.

A gap is bridged only if it is the same on both sides and, at every block, no field of any region of either cache lies
in it. Behind the last row of a block the gap up to the next block is a *tail*: copied between consecutive blocks of a
run, but not after its last one.
"""

import numpy as np
import numpy.typing as npt

from kvcompile import overlap
from kvcompile.cache import Cache
from kvcompile.table import by_diagonal

__all__ = ["bridge"]

Pieces = npt.NDArray[np.void]


def bridge(pieces: Pieces, src: Cache, dst: Cache, src_group: int, dst_group: int) -> Pieces:
    """Join pieces over free gaps, and give rows the tails that may be copied along.

    Parameters
    ----------
    pieces : structured array [n] of `table.JOINED`
        Of one kind (groups, buffers, strides), with absolute origins.
    """
    pieces, _, alike = by_diagonal(pieces)
    counts = src.bound(src_group) or 1, dst.bound(dst_group) or 1
    rows: list[np.void] = []
    first_of_line = 0  # the first row of the current diagonal
    for number in range(len(pieces) + 1):
        piece = pieces[number].copy() if number < len(pieces) else None
        if rows and (piece is None or not alike[number]):
            _give_tail(rows[first_of_line:], src, dst, counts)
        if piece is None:
            break
        if rows and alike[number]:
            gap = int(piece["src_origin"]) - int(rows[-1]["src_origin"]) - int(rows[-1]["length"])
            if gap >= 0 and (gap == 0 or _free(rows[-1], gap, src, dst, counts)):
                rows[-1]["length"] += np.uint64(gap) + piece["length"]
                rows[-1]["owner"] = -1 - number
                continue
        else:
            first_of_line = len(rows)
        rows.append(piece)
    return np.array(rows, pieces.dtype)


def _give_tail(rows: list[np.void], src: Cache, dst: Cache, counts: tuple[int, int]) -> None:
    """Give the last row of a diagonal the gap up to the first row in the next block."""
    first, last = rows[0], rows[-1]
    stride = int(first["src_stride"])
    if stride != first["dst_stride"] or first["src_step"] != 1 or first["dst_step"] != 1:
        return
    gap = stride + int(first["src_origin"]) - int(last["src_origin"]) - int(last["length"])
    if gap > 0 and _free(last, gap, src, dst, (counts[0] - 1, counts[1] - 1)):
        last["tail"] = gap


def _free(row: np.void, gap: int, src: Cache, dst: Cache, counts: tuple[int, int]) -> bool:
    """Return whether no field of either cache takes a byte of the gap behind a row, at any block."""
    for cache, side, count in ((src, "src", counts[0]), (dst, "dst", counts[1])):
        if count < 1:
            continue
        start, stride = int(row[f"{side}_origin"]) + int(row["length"]), int(row[f"{side}_stride"])
        end = start + (count - 1) * stride + gap
        near = [region for region in cache.regions if cache.span(region)[0] < end and start < cache.span(region)[1]]
        if any(region.block_stride * region.kernel_blocks != stride and region.num_blocks > 1 for region in near):
            return False  # other strides have no common residue: leave the gap alone
        here = overlap.pieces(np.zeros(1, np.int64), np.array([gap], np.int64), stride, count)
        if near and overlap.meet(here, cache.payload(near, start, stride)):
            return False
    return True
