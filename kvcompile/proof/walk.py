"""What the tables of all src ranks write into one group of one dst rank, held against the labels, range by range.

Block ids are abstract: rows are followed at the first and the second id of either side, which decide all others, since
addresses are linear in the id; and through two periods, which decide all others likewise. Only what lies beside a block
also needs the last id. It names nothing: what it finds are numbers of tensors, heads and cells.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvcompile.proof import labels
from kvcompile.proof.faults import (
    ANOTHER_BLOCK,
    DUPLICATED,
    MISPLACED,
    MISSING,
    NEGATIVE,
    NO_GROUP,
    NOBODY,
    NOT_HELD,
    OTHER_BYTES,
    TWICE,
    Faults,
)
from kvcompile.proof.labels import Int64, Segments, UInt64, expand
from kvcompile.proof.padding import strays, tails
from kvcompile.proof.pieces import Pieces, Receiver, Side, Table
from kvcompile.proof.shared import shared
from kvcompile.proof.sweep import sweep

__all__ = ["walk"]

HITS = 1 << 20
"""Byte ranges looked at in one go: what bounds the memory of a proof."""


class _Ranges(NamedTuple):
    """Parts of pieces that lie in one segment of dst and, in model order, in one unit of src."""

    piece: Int64
    part: Int64  # segment of dst
    theirs: Int64  # field of src, -1 for none
    cell: Int64  # of the model
    byte: Int64  # in that cell
    start: Int64  # in the stream: bytes from the start of the block, along the cells of a head
    stop: Int64
    src: UInt64


class _Walk(Receiver):
    """The walk itself: `run` first, then what it calls, in order."""

    def run(self) -> list[Faults]:
        """Find what is wrong with all that this group receives."""
        src_ids = self.src_ids()
        ids = self.dst.ids(self.rank, self.group)
        for number, block in enumerate(ids):
            if not number or block != ids[number - 1] or np.any(src_ids[:, number] != src_ids[:, number - 1]):
                self.follow(src_ids[:, number], block, neighbours_alone=number == 2)
        if np.any(self.column["tail"] > 0):
            tails(self)
        names = ("src_stride", "dst_stride", "src_inner", "dst_inner", "tail")
        strange = np.flatnonzero(np.min([self.column[name] for name in names], axis=0, initial=0) < 0)
        self.report(MISPLACED, NEGATIVE, self.sender[strange], *self.nearest(self.column["dst_origin"][strange], 0))
        return self.faults

    def follow(self, src_ids: Int64, block: int, neighbours_alone: bool) -> None:
        """Follow all rows at one id of either side, if asked only where they leave their own block."""
        parts = self.parts.at(block).disjoint()  # what overlaps is reported as shared
        pieces = self.pieces(src_ids, block)
        first = np.searchsorted(parts.end, pieces.dst, "right")
        hits = np.maximum(np.searchsorted(parts.start, pieces.dst + pieces.length, "left") - first, 0)
        labelled = np.zeros(len(hits), np.uint64)
        written = [(np.empty(0, np.int64),) * 3]
        for piece, number in _chunks(hits):
            part = first[piece] + number
            lo = np.maximum(pieces.dst[piece], parts.start[part])
            hi = np.minimum(pieces.dst[piece] + pieces.length[piece], parts.end[part])
            np.add.at(labelled, piece, hi - lo)
            if neighbours_alone:
                continue
            ranges = self.ranges(pieces, parts, piece, part, lo, hi)
            self.compare(pieces, parts, ranges, src_ids)
            written.append(self.written(pieces, parts, ranges))
        loose = np.flatnonzero((labelled < pieces.length) & pieces.first)
        if len(loose):
            strays(self, pieces, parts, loose, first, hits, src_ids, block)
        if self.dst.blocks[self.rank][self.group] and not neighbours_alone:
            self.cover(*(np.concatenate(columns) for columns in zip(*written, strict=True)))

    def ranges(self, pieces: Pieces, parts: Segments, piece: Int64, part: Int64, lo: UInt64, hi: UInt64) -> _Ranges:
        """Cut spans of dst's segments where src is not contiguous."""
        of, src = self.dst.fields, self.src.fields
        field, size = parts.field[part], of.nbytes[parts.field[part]]
        theirs = self.holder[self.sender[pieces.row[piece]], of.tensor[field]]
        cell = labels.model_cell(of, field, pieces.dst_position[piece], parts.cell[part])
        # Src's units begin at multiples of their size in the model; what src does not hold stays whole.
        unit = np.where(theirs < 0, of.rows[field], src.unit[theirs]) if len(src.rank) else of.rows[field]
        before = np.where(theirs < 0, 0, cell % unit)
        begin = before * size + (lo - parts.start[part]).astype(np.int64)
        end = begin + (hi - lo).astype(np.int64)
        grid = unit * size
        item, number = expand((end - 1) // grid - begin // grid + 1)
        number += begin[item] // grid[item]
        start = np.maximum(begin[item], number * grid[item])
        stop = np.minimum(end[item], (number + 1) * grid[item])
        skipped = (start - begin[item]).astype(np.uint64)
        back = parts.cell[part[item]] * size[item] - before[item] * size[item]  # from the grid's zero to the block's
        return _Ranges(
            piece[item],
            part[item],
            theirs[item],
            (cell - before)[item] + start // size[item],
            start % size[item],
            start + back,
            stop + back,
            pieces.src[piece[item]] + (lo[item] - pieces.dst[piece[item]]) + skipped,
        )

    def compare(self, pieces: Pieces, parts: Segments, ranges: _Ranges, src_ids: Int64) -> None:
        """Report the ranges that do not come from where src keeps the same bytes."""
        of, src = self.dst.fields, self.src.fields
        row, theirs = pieces.row[ranges.piece], ranges.theirs
        field, head = parts.field[ranges.part], parts.head[ranges.part]
        if len(src.rank):
            position, cell, held = labels.local_cell(src, theirs, ranges.cell)
            held &= (theirs >= 0) & (src.first_head[theirs] <= head)
            held &= head < src.first_head[theirs] + src.heads[theirs]
            block = (src.group[theirs] == self.column["src_group"][row]) & (
                position == pieces.src_position[ranges.piece]
            )
            place = labels.address(src, theirs, src_ids[row], head, cell) + ranges.byte.astype(np.uint64)
            why = np.select([~held, ~block, place != ranges.src], [NOT_HELD, ANOTHER_BLOCK, OTHER_BYTES], -1)
        else:
            why = np.full(len(row), NOT_HELD)
        bad = np.flatnonzero(why >= 0)
        tensor, size = of.tensor[field[bad]], of.nbytes[field[bad]]
        cells = ranges.start[bad] // size, -(-ranges.stop[bad] // size)
        self.report(MISPLACED, why[bad], self.sender[row[bad]], tensor, head[bad], *cells)

    def written(self, pieces: Pieces, parts: Segments, ranges: _Ranges) -> tuple[Int64, Int64, Int64]:
        """Return what ranges cover: number of (block position, share, stream), and bytes from start to stop of it.

        A row of part k of n writes in the k-th n-th of all periods; the shares are what such parts are made of.
        """
        field, row = parts.field[ranges.part], pieces.row[ranges.piece]
        stream = self.stream[field] + parts.head[ranges.part] - self.dst.fields.first_head[field]
        item, share = expand(self.shares[1][row] - self.shares[0][row])
        share += self.shares[0][row[item]]
        key = (pieces.dst_position[ranges.piece[item]] * self.shares[2] + share) * self.streams + stream[item]
        return key, ranges.start[item], ranges.stop[item]

    def cover(self, key: Int64, start: Int64, stop: Int64) -> None:
        """Report what of the group's blocks in the window is written not at all, or more than once."""
        of = self.dst.fields
        field = np.repeat(self.fields, of.heads[self.fields])
        head = np.arange(len(field)) - self.stream[field] + of.first_head[field]
        nbytes = (of.rows * of.nbytes)[field]
        key, start, stop, depth = sweep(key, start, stop, np.tile(nbytes, self.window * self.shares[2]))
        at = key % max(1, len(field))
        size = of.nbytes[field[at]]
        place = (of.tensor[field[at]], head[at], start // size, -(-stop // size))
        for kind, why, chosen in ((MISSING, NOBODY, depth == 0), (DUPLICATED, TWICE, depth > 1)):
            self.report(kind, why, -1, *(column[chosen] for column in place))


def walk(src: Side, dst: Side, rank: int, tables: dict[int, Table], holder: Int64) -> list[Faults]:
    """Find what is wrong with all that a dst rank receives.

    Parameters
    ----------
    tables : dict
        Src rank -> rows of `table.TABLE` that it writes to this rank; at least one item.
    holder : int64 array [src ranks, tensors]
        Index into src's fields, -1 for none.
    """
    table = np.concatenate(list(tables.values()))
    sender = np.repeat(np.array(list(tables), np.int64), [len(rows) for rows in tables.values()])
    group = table["dst_group"]
    groups = len(dst.blocks[rank])
    faults = shared(dst.fields, rank)
    for number in range(groups):
        mine = np.flatnonzero(group == number)
        faults += _Walk(src, dst, rank, number, table[mine], sender[mine], holder).run()
    lost = sender[(group < 0) | (group >= groups)]
    nowhere = (np.zeros(len(lost), np.int64) for _ in range(3))
    return [*faults, Faults.make(MISPLACED, NO_GROUP, lost, np.full(len(lost), -1), *nowhere)]


def _chunks(hits: Int64) -> Iterator[tuple[Int64, Int64]]:
    """Yield `labels.expand` of hits, a bounded number at a time unless a single item has more."""
    ends = np.cumsum(hits)
    start = 0
    while start < len(hits):
        most = (ends[start - 1] if start else 0) + HITS
        stop = max(start + 1, int(np.searchsorted(ends, most, "right")))
        item, number = expand(hits[start:stop])
        if len(item):
            yield item + start, number
        start = stop
