"""One group of one dst rank, the rows that are sent to it, and the copies that they stand for. It judges nothing."""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcompile.cache import Cache
from kvcompile.proof import labels
from kvcompile.proof.faults import CROSSES, MISPLACED, Faults
from kvcompile.proof.labels import Bool, Fields, Int64, Segments, Tensor, UInt64, expand

__all__ = ["Pieces", "Receiver", "Side", "Table"]

Table = npt.NDArray[np.void]


class Side(NamedTuple):
    """One side of a deployment."""

    caches: Sequence[Cache]
    fields: Fields
    blocks: list[list[int]]  # per rank and group, how many ids there are
    sizes: dict[int, set[int]]  # tensor -> cells of a block, over all ranks

    @classmethod
    def of(cls, caches: Sequence[Cache], tensors: dict[Tensor, int]) -> "Side":
        """Look at the caches of a side; ``tensors`` numbers what both sides hold, and grows."""
        fields = labels.fields(caches, tensors)
        sizes: dict[int, set[int]] = {}
        for tensor, size in set(zip(fields.tensor.tolist(), (fields.rows * fields.places).tolist(), strict=True)):
            sizes.setdefault(tensor, set()).add(size)
        return cls(caches, fields, [labels.blocks(cache) for cache in caches], sizes)

    def ids(self, rank: int, group: int) -> tuple[int, int, int]:
        """Return the three ids of a group to look at; a group without regions has no last one."""
        last = max(0, self.blocks[rank][group] - 1) if 0 <= group < len(self.blocks[rank]) else 0
        return 0, min(1, last), last


class Pieces(NamedTuple):
    """What rows write at one id of either side: ``count`` copies for each row and period in the window."""

    row: Int64
    first: Bool  # of its row
    src_position: Int64
    dst_position: Int64
    src: UInt64
    dst: UInt64
    length: UInt64


class Receiver:
    """One group of one dst rank, and what is sent to it.

    Parameters
    ----------
    table : structured array [n] of `table.TABLE`
        The rows of all plans for this rank that name this group.
    sender : int64 array [n]
        The src rank of each row.
    holder : int64 array [src ranks, tensors]
        Index into src's fields, -1 for none.
    """

    def __init__(self, src: Side, dst: Side, rank: int, group: int, table: Table, sender: Int64, holder: Int64) -> None:
        self.src, self.dst, self.rank, self.group = src, dst, rank, group
        self.sender, self.holder = sender, holder
        self.column = {name: np.ascontiguousarray(table[name]) for name in table.dtype.names or ()}
        of = dst.fields
        self.fields = np.flatnonzero((of.rank == rank) & (of.group == group))
        self.parts = labels.segments(of, self.fields)
        # Each head of each field is a stream of bytes along its cells; the streams of a group are numbered.
        heads = of.heads[self.fields]
        self.stream = np.zeros(len(of.rank), np.int64)
        self.stream[self.fields] = np.cumsum(heads) - heads
        self.streams = int(heads.sum())
        self.shares = _shares(table["part"], table["parts"])
        ours = zip(of.tensor[self.fields].tolist(), (of.rows * of.places)[self.fields].tolist(), strict=True)
        periods = [lcm(size, other) // size for tensor, size in set(ours) for other in src.sizes.get(tensor, ())]
        self.window = 2 * max(periods, default=1)
        self.faults: list[Faults] = []

    def src_ids(self) -> Int64:
        """Return the three ids at which each row is followed on src, int64 [rows, 3]."""
        groups, number = labels.distinct(self.sender, self.column["src_group"])
        return np.array([self.src.ids(*group) for group in groups], np.int64).reshape(-1, 3)[number]

    def report(self, kind: int, why: int | Int64, src: int | Int64, *place: Int64) -> None:
        """Keep faults of one kind at ``place``: tensor, head, first and last cell of a block."""
        if len(place[0]):
            self.faults.append(Faults.make(kind, why, src, *place))

    def pieces(self, src_ids: Int64, block: int) -> Pieces:
        """Run the rows through the window; what crosses an edge of a buffer is reported, and cut off on dst."""
        window, phase, step = self.window, self.column["dst_phase"], self.column["dst_step"]
        # A step below one never leaves its block: two periods show it.
        counts = np.where(step > 0, -((phase - window) // np.maximum(step, 1)), 2)
        row, period = expand(np.where((phase >= 0) & (phase < window), counts, 0))
        position = phase[row] + period * np.clip(step, -window, window)[row]
        row, period, position = (column[position >= 0] for column in (row, period, position))
        # More copies than the block has bytes can only repeat themselves or miss.
        copy, inner = expand(np.clip(self.column["count"], 0, int(self.parts.nbytes.sum()) + 1)[row])
        row, period, position = row[copy], period[copy], position[copy]
        src, dst = self.origin("src", row, src_ids[row], inner), self.origin("dst", row, np.int64(block), inner)
        length = self.column["length"][row]
        room = self.room(row, src, dst)
        over = np.flatnonzero((np.minimum(*room) < length) & (period == 0))
        self.report(MISPLACED, CROSSES, self.sender[row[over]], *self.nearest(dst[over], block))
        src_position = self.column["src_phase"][row] + period * self.column["src_step"][row]
        return Pieces(row, period == 0, src_position, position, src, dst, np.minimum(length, room[1]))

    def origin(self, side: str, row: Int64, block: Int64 | np.int64, copy: Int64) -> UInt64:
        """Return where copies of rows begin, by the arithmetic of `table.TABLE`, modulo 2**64."""
        first, stride, inner = (
            self.column[f"{side}_{name}"][row].view(np.uint64) for name in ("origin", "stride", "inner")
        )
        address: UInt64 = first + block.astype(np.uint64) * stride + copy.astype(np.uint64) * inner
        return address

    def room(self, row: Int64, src: UInt64, dst: UInt64) -> tuple[UInt64, UInt64]:
        """Return the bytes from each address to the end of its buffer, on src and on dst."""
        there = np.empty_like(src)
        for rank in np.unique(self.sender[row]).tolist():
            mine = self.sender[row] == rank
            there[mine] = labels.room(self.src.caches[rank], src[mine])
        return there, labels.room(self.dst.caches[self.rank], dst)

    def cells(self, parts: Segments, index: Int64, of: Fields | None = None) -> tuple[Int64, ...]:
        """Return tensor, head, first and last cell of segments."""
        of = of or self.dst.fields
        field = parts.field[index]
        count = parts.nbytes[index] // of.nbytes[field]
        return of.tensor[field], parts.head[index], parts.cell[index], parts.cell[index] + count

    def nearest(self, dst: UInt64, block: int) -> tuple[Int64, ...]:
        """Return the cells of the segments at or below addresses; tensor -1 where the group has none."""
        parts = self.parts.at(block)
        if not len(parts.start):
            return np.full(len(dst), -1), *(np.zeros(len(dst), np.int64) for _ in range(3))
        return self.cells(parts, np.maximum(np.searchsorted(parts.start, dst, "right") - 1, 0))


def _shares(part: Int64, parts: Int64) -> tuple[Int64, Int64, int]:
    """Cut the whole at all k/n; return each row's first share, the one after its last, and how many there are."""
    known, number = labels.distinct(part, parts)
    ends = [(Fraction(k, n), Fraction(k + 1, n)) if 0 <= k < n else (Fraction(0),) * 2 for k, n in known]
    cuts = sorted({Fraction(0), Fraction(1), *(end for pair in ends for end in pair)})
    index = {cut: place for place, cut in enumerate(cuts)}
    first, last = (np.array([index[pair[side]] for pair in ends], np.int64)[number] for side in (0, 1))
    return first, last, len(cuts) - 1
