"""What is written beside the fields of a block: padding may go to padding, and nothing else. It compares no fields."""

import numpy as np

from kvcompile.proof import labels
from kvcompile.proof.faults import MISPLACED, NO_FIELD, OVERWRITES
from kvcompile.proof.labels import Bool, Int64, Segments, UInt64, expand
from kvcompile.proof.pieces import Pieces, Receiver, Side

__all__ = ["strays", "tails"]


def strays(
    to: Receiver, pieces: Pieces, parts: Segments, loose: Int64, first: Int64, hits: Int64, src_ids: Int64, block: int
) -> None:
    """Look at what is written beside this block's fields: only padding may go to padding."""
    item, number = expand(hits[loose] + 1)
    piece = loose[item]
    part = first[piece] + number
    lo, hi = pieces.dst[piece], pieces.dst[piece] + pieces.length[piece]
    if len(parts.start):
        lo = np.where(number > 0, parts.end[np.maximum(part - 1, 0)], lo)
        hi = np.where(number < hits[piece], parts.start[np.minimum(part, len(parts.start) - 1)], hi)
    piece, lo, hi = piece[lo < hi], lo[lo < hi], hi[lo < hi]
    row = pieces.row[piece]
    away = lo - pieces.dst[piece]
    _against(to, to.dst, to.rank, OVERWRITES, row, lo, hi, np.full(len(row), to.group), np.full(len(row), block))
    for rank in np.unique(to.sender[row]).tolist():
        mine = np.flatnonzero(to.sender[row] == rank)
        start = pieces.src[piece[mine]] + away[mine]
        groups = to.column["src_group"][row[mine]]
        _against(to, to.src, rank, NO_FIELD, row[mine], start, start + (hi - lo)[mine], groups, src_ids[row[mine]])


def tails(to: Receiver) -> None:
    """Look at the padding that rows may copy along: wherever another copy may follow, it must be free of fields."""
    column = to.column
    row = np.flatnonzero((column["tail"] > 0) & (column["count"] == 1))
    sender, length = to.sender[row], column["length"][row]
    skip = length + column["tail"][row].astype(np.uint64)
    follows = _follows(to, row, skip)
    for rank in [None, *np.unique(sender).tolist()]:
        side, name, why = (to.dst, "dst", OVERWRITES) if rank is None else (to.src, "src", NO_FIELD)
        at = to.rank if rank is None else rank
        mine = np.arange(len(row)) if rank is None else np.flatnonzero(sender == rank)
        group = column[f"{name}_group"][row]
        last = np.array([side.ids(at, number)[2] for number in group[mine].tolist()], np.int64)
        for block in (np.zeros_like(last), np.ones_like(last), last - 1, last):
            # Behind the last block nothing follows, unless in the block itself.
            some = np.flatnonzero((block >= 0) & ((block < last) | (follows[mine] & (block == last))))
            these = mine[some]
            start = to.origin(name, row[these], block[some], np.zeros_like(some))
            room = np.maximum(labels.room(side.caches[at], start), length[these])
            stop = start + np.minimum(skip[these], room)
            _against(to, side, at, why, row[these], start + length[these], stop, group[these], block[some])


def _follows(to: Receiver, row: Int64, skip: UInt64) -> Bool:
    """Return whether another row begins in the same block, on both sides, ``skip`` bytes behind each row's begin."""
    same = [to.sender, *(to.column[name] for name in ("src_group", "src_phase", "dst_phase"))]
    begins = [to.column["src_origin"], to.column["dst_origin"]]
    starts = set(zip(*(column.tolist() for column in (*same, *begins)), strict=True))
    wanted = [column[row] for column in same] + [column[row] + skip for column in begins]
    found = [place in starts for place in zip(*(column.tolist() for column in wanted), strict=True)]
    return np.array(found, bool)


def _against(
    to: Receiver, side: Side, rank: int, why: int, row: Int64, lo: UInt64, hi: UInt64, group: Int64, block: Int64
) -> None:
    """Report the spans that meet fields of a rank, blocks of equal ids in other groups of their overlay aside."""
    of = side.fields
    parts = labels.segments(of, np.flatnonzero((of.rank == rank) & (of.blocks > 0)))
    overlays = np.array([*side.caches[rank].overlays, -1], np.int64)
    known = np.where((group >= 0) & (group < len(overlays) - 1), group, -1)

    def met(some: Segments, spans: Int64) -> tuple[Int64, Int64]:
        theirs = of.group[some.field]

        def apart(here: slice) -> Bool:
            mine = known[spans[here], None]
            overlaid: Bool = (overlays[mine] == overlays[theirs]) & (mine != theirs)
            return overlaid

        return labels.touches(of, some, lo[spans], hi[spans], block[spans], apart)

    some = met(labels.joined(of, parts), np.arange(len(lo)))[0]
    span, part = met(parts, some)
    to.report(MISPLACED, why, to.sender[row[some[span]]], *to.cells(parts, part, of))
