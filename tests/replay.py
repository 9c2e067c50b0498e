"""What a plan's table says a request emits, row by row, and the bytes that descriptors move (design.md sections 4, 6).

It takes the table as given and makes no use of layouts beyond their buffers; whether the table is right is the
oracle's question.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from kvcompile import Cache, Descriptors, Plan, Request
from tests import oracle

WORD = 2**64


class Row(NamedTuple):
    """One row of ``plan.table``, as Python integers, with the buffers that its origins lie in."""

    src_group: int
    src_origin: int
    src_stride: int
    src_step: int
    src_phase: int
    dst_group: int
    dst_origin: int
    dst_stride: int
    dst_step: int
    dst_phase: int
    length: int
    count: int
    src_inner: int
    dst_inner: int
    part: int
    parts: int
    tail: int
    src_buffer: int
    dst_buffer: int

    @property
    def kind(self) -> tuple[int, ...]:
        """What two rows of one lane agree in."""
        return (
            *(self.src_group, self.src_stride, self.src_step, self.src_buffer),
            *(self.dst_group, self.dst_stride, self.dst_step, self.dst_buffer),
        )

    def begin(self, period: int) -> tuple[int, int]:
        """Where it begins on both sides in a period, with block ids 0, 1, 2, ..."""
        return (
            (self.src_origin + (period * self.src_step + self.src_phase) * self.src_stride) % WORD,
            (self.dst_origin + (period * self.dst_step + self.dst_phase) * self.dst_stride) % WORD,
        )

    def end(self) -> tuple[int, int]:
        """Where it ends on both sides in period 0, the padding that may be copied along included."""
        src, dst = self.begin(0)
        return (src + self.length + self.tail) % WORD, (dst + self.length + self.tail) % WORD

    def slices(self) -> list["Row"]:
        """Return the ``count`` slices that it stands for, each a row of its own."""
        return [
            self._replace(
                src_origin=(self.src_origin + number * self.src_inner) % WORD,
                dst_origin=(self.dst_origin + number * self.dst_inner) % WORD,
                count=1,
            )
            for number in range(self.count)
        ]


COLUMNS = Row._fields[:17]


def buffer_of(cache: Cache, start: int, length: int) -> int:
    """Index of the buffer that [start, start + length) lies in; -1 if none."""
    for index, buffer in enumerate(cache.buffers):
        if buffer.base <= start and start + length <= buffer.base + buffer.nbytes:
            return index
    return -1


def rows(plan: Plan, src: Cache, dst: Cache) -> list[Row]:
    """Rows of a plan in table order."""
    columns = [plan.table[name].tolist() for name in COLUMNS]
    found = []
    for values in zip(*columns, strict=True):
        row = dict(zip(COLUMNS, values, strict=True))
        buffers = (
            buffer_of(cache, row[f"{side}_origin"], row["length"]) for side, cache in (("src", src), ("dst", dst))
        )
        found.append(Row(*values, *buffers))
    return found


def lanes(table: list[Row]) -> list[list[Row]]:
    """Split rows into lanes: components of "ends on both sides where the other begins, now or a period later"."""
    starts = defaultdict(set)
    single = [index for index, row in enumerate(table) if row.count == 1]  # the others stand alone by definition
    for index in single:
        for period in (0, 1):
            starts[table[index].kind, table[index].begin(period)].add(index)
    lane = list(range(len(table)))
    for index in single:
        for other in starts[table[index].kind, table[index].end()]:
            low, high = sorted((lane[index], lane[other]))
            lane = [low if number == high else number for number in lane]
    return [[row for row, number in zip(table, lane, strict=True) if number == one] for one in sorted(set(lane))]


def share(row: Row, left: list[tuple[int, int]], right: list[tuple[int, int]], sizes: tuple[int, int]) -> range:
    """Periods of a row's part: of the Q of the overlap, q0 first, [q0 + part*Q//parts, q0 + (part+1)*Q//parts)."""
    if not left or not right:
        return range(0)
    start = max(left[0][0] * sizes[0], right[0][0] * sizes[1])
    stop = min((left[-1][0] + 1) * sizes[0], (right[-1][0] + 1) * sizes[1])
    period = math.lcm(*sizes)
    first, last = start // period, -(-stop // period)
    return range(*(first + part * (last - first) // row.parts for part in (row.part, row.part + 1)))


def pieces(row: Row, request: Request, src: Cache, dst: Cache) -> dict[int, list[tuple[int, int, int]]]:
    """{period: [(src, dst, length)]} of a row: ``count`` pieces for each pair of given blocks that are not null."""
    left, right, _ = oracle.place(request, src, dst, (row.src_group, row.dst_group))
    src_group, dst_group = src.groups[row.src_group], dst.groups[row.dst_group]
    sizes = (src_group.block_size, dst_group.block_size)
    src_step, src_phase, dst_step, dst_phase = row.src_step, row.src_phase, row.dst_step, row.dst_phase
    if dst_group.state:  # a block is one unit whatever the block sizes
        src_step, src_phase, dst_step, dst_phase, sizes = 1, 0, 1, 0, (1, 1)
    sources = dict(left)
    mine = share(row, left, right, sizes)
    found = {}
    for position, dst_block in right:
        period, phase = divmod(position, dst_step)
        src_block = sources.get(period * src_step + src_phase)
        if phase != dst_phase or src_block in (None, src_group.null_block) or dst_block == dst_group.null_block:
            continue
        if period not in mine:
            continue
        source = row.src_origin + src_block * row.src_stride
        target = row.dst_origin + dst_block * row.dst_stride
        found[period] = [
            ((source + k * row.src_inner) % WORD, (target + k * row.dst_inner) % WORD, row.length)
            for k in range(row.count)
        ]
    return found


def emission(table: list[Row], request: Request, src: Cache, dst: Cache) -> list[list[tuple[int, int, int]]]:
    """Descriptors of a request, lane by lane: period by period, rows in table order, touching pieces merged."""
    found = []
    for lane in lanes(table):
        of_row = [pieces(row, request, src, dst) for row in lane]
        merged: list[tuple[int, int, int]] = []
        tail = 0  # what the piece before allows to be copied along
        for period in sorted(set().union(*of_row)):
            for row, own in zip(lane, of_row, strict=True):
                for piece in own.get(period, []):
                    ends = () if not merged else (sum(merged[-1][::2]) + tail, sum(merged[-1][1:]) + tail)
                    if ends == piece[:2]:
                        merged[-1] = (*merged[-1][:2], merged[-1][2] + tail + piece[2])
                    else:
                        merged.append(piece)
                    tail = row.tail
        found.append(merged)
    return found


def cut(descriptors: list[tuple[int, int, int]], max_length: int) -> list[tuple[int, int, int]]:
    """Cut each descriptor into pieces of ``max_length`` from its start."""
    return [
        (src + at, dst + at, min(max_length, length - at))
        for src, dst, length in descriptors
        for at in range(0, length, max_length)
    ]


def triples(descriptors: Descriptors, index: int | None = None) -> list[tuple[int, int, int]]:
    """Return (src, dst, length) of all descriptors or of request number ``index``, as Python integers."""
    rows = slice(None) if index is None else slice(*descriptors.spans[index : index + 2].tolist())
    columns = (descriptors.src[rows].tolist(), descriptors.dst[rows].tolist(), descriptors.length[rows].tolist())
    return list(zip(*columns, strict=True))


def moved(descriptors: list[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    """Yield (src address, dst address) of every byte that is copied."""
    for src, dst, length in descriptors:
        for byte in range(length):
            yield src + byte, dst + byte
