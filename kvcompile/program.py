"""From a plan's table to the arrays that kernels read: rows by lane, lanes by kind, classes, groups."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcompile.backend import Program
from kvcompile.cache import Cache
from kvcompile.kernels import item
from kvcompile.lanes import lanes, number
from kvcompile.lowering import GroupPair, periods

__all__ = ["Side", "assemble", "fault", "with_lanes"]

Int64 = npt.NDArray[np.int64]
Table = npt.NDArray[np.void]


class Side(NamedTuple):
    """What a plan keeps of one cache: per group and buffer, nothing of layers, heads or ranks."""

    block_size: tuple[int, ...]
    state: tuple[bool, ...]
    bound: tuple[int | None, ...]
    null: tuple[int | None, ...]
    overlays: tuple[int, ...]
    buffers: tuple[tuple[int, int], ...]  # half-open ranges of addresses, ascending
    chunks: tuple[int, ...]  # bytes of a chunk of each buffer, 0 for none

    @classmethod
    def of(cls, cache: Cache) -> "Side":
        """Keep what request time needs of a cache."""
        return cls(
            tuple(group.block_size for group in cache.groups),
            tuple(group.state for group in cache.groups),
            tuple(cache.bound(number) for number in range(len(cache.groups))),
            tuple(group.null_block for group in cache.groups),
            cache.overlays,
            tuple((buffer.base, buffer.end) for buffer in cache.buffers or ()),
            tuple(buffer.chunk_nbytes or 0 for buffer in cache.buffers or ()),
        )

    @property
    def edges(self) -> Int64:
        """Base (wrapped to int64), bytes and chunk of each buffer, int64 [buffers, 3]; empty: no chunks."""
        rows = [(start, end - start, chunk) for (start, end), chunk in zip(self.buffers, self.chunks, strict=True)]
        return np.array(rows if any(self.chunks) else [], np.uint64).reshape(-1, 3).view(np.int64)


def fault(table: Table, pairs: tuple[GroupPair, ...], src: Side, dst: Side) -> str | None:
    """Return why request ids cannot be run through a table, None if they can.

    `lower` makes no such table; `Plan.with_table` may. Kernels index id lists by a row's steps and phases.
    """
    for at, row in enumerate(table):
        pair = GroupPair(int(row["src_group"]), int(row["dst_group"]))
        if pair not in pairs:
            return f"row {at}: groups {tuple(pair)} are no group pair of this plan"
        sizes = src.block_size[pair.src_group], dst.block_size[pair.dst_group]
        steps = periods(*sizes, src.state[pair.src_group])
        given = int(row["src_step"]), int(row["dst_step"])
        phases = int(row["src_phase"]), int(row["dst_phase"])
        if given != steps:
            return f"row {at}: steps are {given}, expected {steps}"
        if not (0 <= phases[0] < steps[0] and 0 <= phases[1] < steps[1]):
            return f"row {at}: phases {phases} are not below the steps {steps}"
        if steps != (1, 1) and not (
            phases[0] * sizes[0] < (phases[1] + 1) * sizes[1] and phases[1] * sizes[1] < (phases[0] + 1) * sizes[0]
        ):
            return f"row {at}: blocks of phases {phases} share no token"
        if (
            not 0 < int(row["length"]) < 2**63
            or not 0 < row["count"] < 2**31
            or not 0 <= row["part"] < row["parts"] < 2**31
        ):
            part = f"part {row['part']} of {row['parts']}"
            return f"row {at}: length {row['length']}, count {row['count']} or {part} out of range"
        if min(row[name] for name in ("src_stride", "dst_stride", "src_inner", "dst_inner", "tail")) < 0:
            return f"row {at}: a negative stride or tail"
    return None


def assemble(table: Table, pairs: tuple[GroupPair, ...], src: Side, dst: Side) -> Program:
    """Regroup a table for the kernels.

    Parameters
    ----------
    table : structured array [n] of `lowering.TABLE`
        Without a `fault`.
    pairs : tuple of GroupPair
    src, dst : Side

    Returns
    -------
    Program
        int64 arrays; columns as `kernels.item` names them.
    """
    src_buffer, dst_buffer = _buffers(table, "src", src), _buffers(table, "dst", dst)
    lane_of = lanes(table, src_buffer, dst_buffer)
    order = np.argsort(lane_of, kind="stable")

    divisor = np.maximum(np.gcd(table["src_stride"], table["dst_stride"]), 1)
    units = table["src_stride"] // divisor, table["dst_stride"] // divisor
    class_of, class_first = number([*(table[name] for name in _CLASS), *units], len(table))
    pair_number = {pair: at for at, pair in enumerate(pairs)}

    rows = np.empty((len(table), item.ROW_COLUMNS), np.int64)
    for column, name in _ROW:
        rows[:, column] = table[name].astype(np.int64)[order]
    rows[:, item.CLASS] = class_of[order]

    starts = np.flatnonzero(np.diff(lane_of[order], prepend=-1)) if len(table) else np.empty(0, np.int64)
    lane_rows = np.empty((len(starts), item.LANE_COLUMNS), np.int64)
    lane_rows[:, item.LANE_START] = starts
    lane_rows[:, item.LANE_STOP] = np.append(starts[1:], len(table))
    lane_rows[:, item.LANE_KIND] = _kinds(table[order], lane_rows)
    for column, same in _AGAIN:
        lane_rows[:, column] = _again(rows, lane_rows, same)

    classes = np.zeros((len(class_first), item.CLASS_COLUMNS), np.int64)
    for column, name in _CLASS_COLUMN:
        classes[:, column] = table[name][class_first]
    classes[:, item.SRC_UNIT], classes[:, item.DST_UNIT] = (unit[class_first] for unit in units)
    for at, first in enumerate(class_first):
        row = table[first]
        classes[at, item.CLASS_PAIR] = pair_number[GroupPair(int(row["src_group"]), int(row["dst_group"]))]
    pair_rows = np.empty((len(pairs), item.PAIR_COLUMNS), np.int64)
    for at, pair in enumerate(pairs):
        sizes, state = (src.block_size[pair.src_group], dst.block_size[pair.dst_group]), src.state[pair.src_group]
        pair_rows[at] = (*pair, *sizes, state, *periods(*sizes, state))
    limits = (_limits(table, "src", src_buffer, src), _limits(table, "dst", dst_buffer, dst))
    program = Program(rows, lane_rows, classes, pair_rows, _groups(src, limits[0]), _groups(dst, limits[1]))
    return with_lanes(program, lane_rows)


def with_lanes(program: Program, lane_rows: Int64) -> Program:
    """Return a program with some of its lanes, counted by class.

    Parameters
    ----------
    program : Program
    lane_rows : int64 array [lanes, LANE_COLUMNS]
        Lanes of it, in order: of those that are said to write alike, all or none.
    """
    classes = program.classes.copy()
    stop = lane_rows[:, item.LANE_STOP]
    sizes = stop - lane_rows[:, item.LANE_START]
    rows = program.rows[np.arange(sizes.sum()) + np.repeat(stop - np.cumsum(sizes), sizes)]
    kinds = np.repeat(lane_rows[:, item.LANE_KIND], sizes)
    for column, kind, weight in (
        (item.DENSE_LANES, item.DENSE, 1),
        (item.APART_SLICES, item.APART, rows[:, item.COUNT]),
        (item.CHAIN_ROWS, item.CHAIN, 1),
    ):
        each = np.where(kinds == kind, weight, 0)
        classes[:, column] = np.bincount(rows[:, item.CLASS], each, len(classes))
    return program._replace(classes=classes, lanes=lane_rows)


_ROW = (
    (item.SRC_ORIGIN, "src_origin"),
    (item.SRC_STRIDE, "src_stride"),
    (item.DST_ORIGIN, "dst_origin"),
    (item.DST_STRIDE, "dst_stride"),
    (item.LENGTH, "length"),
    (item.TAIL, "tail"),
    (item.COUNT, "count"),
    (item.SRC_INNER, "src_inner"),
    (item.DST_INNER, "dst_inner"),
)
_CLASS_COLUMN = (
    (item.SRC_STEP, "src_step"),
    (item.SRC_PHASE, "src_phase"),
    (item.DST_STEP, "dst_step"),
    (item.DST_PHASE, "dst_phase"),
    (item.PART, "part"),
    (item.PARTS, "parts"),
)
_CLASS = ("src_group", "dst_group", *(name for _, name in _CLASS_COLUMN))


_AGAIN = (
    (item.SRC_AGAIN, (item.CLASS, item.COUNT, item.SRC_STRIDE, item.SRC_INNER)),
    (item.DST_AGAIN, (item.CLASS, item.COUNT, item.DST_STRIDE, item.DST_INNER)),
    (item.LENGTH_AGAIN, (item.CLASS, item.COUNT, item.LENGTH, item.TAIL)),
)


def _again(rows: Int64, lane_rows: Int64, columns: Sequence[int]) -> Int64:
    """Return how many lanes behind each are of its kind, and their first rows the same in some columns."""
    key = np.column_stack([rows[lane_rows[:, item.LANE_START]][:, columns], lane_rows[:, item.LANE_KIND]])
    opens = np.ones(len(key) + 1, bool)
    opens[1:-1] = (key[1:] != key[:-1]).any(axis=1)
    first = np.flatnonzero(opens)
    stop = first[np.searchsorted(first, np.arange(len(key)), side="right")]
    again: Int64 = stop - np.arange(len(key)) - 1
    return again


def _kinds(table: Table, lane_rows: Int64) -> Int64:
    """Return how each lane merges.

    A row alone in its lane can meet itself only where its length is a whole number of both strides, whatever the ids.
    """
    row = table[lane_rows[:, item.LANE_START]]
    single = lane_rows[:, item.LANE_STOP] - lane_rows[:, item.LANE_START] == 1
    length = row["length"].astype(np.int64) + row["tail"]
    src, dst = np.maximum(row["src_stride"], 1), np.maximum(row["dst_stride"], 1)
    dense = (
        (length == row["src_stride"]) & (length == row["dst_stride"]) & (row["src_step"] == 1) & (row["dst_step"] == 1)
    )
    zero = (row["src_stride"] == 0) | (row["dst_stride"] == 0)
    apart = (row["count"] > 1) | zero | (length % src != 0) | (length % dst != 0)
    return np.select([single & dense, single & apart], [item.DENSE, item.APART], item.CHAIN)


def _buffers(table: Table, name: str, side: Side) -> Int64:
    """Return the buffer that holds each row's origin, -1 if none."""
    base = np.array([start for start, _ in side.buffers], np.uint64)
    end = np.array([stop for _, stop in side.buffers], np.uint64)
    index = np.searchsorted(base, table[f"{name}_origin"], side="right") - 1
    inside = (index >= 0) & (table[f"{name}_origin"] < end[index] if len(end) else False)
    return np.where(inside, index, -1)


def _limits(table: Table, name: str, buffer: Int64, side: Side) -> Int64:
    """Return, per group, the least id from which some row would leave its buffer; 2**62 where none would."""
    end = np.array([*(stop for _, stop in side.buffers), 0], np.uint64)[buffer]  # -1: none, an end of 0
    stride = table[f"{name}_stride"].astype(np.uint64)
    length = table["length"] + (table["count"] - 1).astype(np.uint64) * table[f"{name}_inner"].astype(np.uint64)
    room = np.where(buffer >= 0, end - table[f"{name}_origin"], np.uint64(0))
    # A stride of 0 never leaves; the ids that stay number room // stride, and id 0 itself.
    ids = (room - length) // np.maximum(stride, np.uint64(1)) + np.uint64(1)
    ids = np.where(stride == 0, np.uint64(2**62), np.minimum(ids, np.uint64(2**62)))
    limits = np.full(len(side.block_size), 2**62, np.int64)
    np.minimum.at(limits, table[f"{name}_group"], np.where(room >= length, ids, np.uint64(0)).astype(np.int64))
    return limits


def _groups(side: Side, limits: Int64) -> Int64:
    groups = np.zeros((len(side.block_size), item.GROUP_COLUMNS), np.int64)
    for at, (bound, null, overlay) in enumerate(zip(side.bound, side.null, side.overlays, strict=True)):
        most = 2**63 - 1 if bound is None else bound
        groups[at, item.BOUND] = min(most, int(limits[at])) if bound is not None else most
        groups[at, item.HAS_NULL] = null is not None
        groups[at, item.NULL] = null or 0
        groups[at, item.OVERLAY] = overlay
    return groups
