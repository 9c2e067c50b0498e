"""From a plan's table to the arrays that kernels read: rows by lane, lanes by kind, classes, groups. No requests here.

Two rows *touch* if, with block ids 0, 1, 2, ..., one ends on both sides where the other begins in the same or the next
period. A lane is a connected component of that. Only rows of one lane ever merge.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcompile.backend import Program
from kvcompile.cache import Cache
from kvcompile.kernels import item
from kvcompile.lowering import GroupPair, periods

__all__ = ["Side", "assemble", "fault"]

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
        )


def fault(table: Table, pairs: tuple[GroupPair, ...], src: Side, dst: Side) -> str | None:
    """Return why request ids cannot be run through a table, None if they can.

    `lower` makes no such table; `Plan.with_table` may. Kernels index id lists by a row's steps and phases.
    """
    for number, row in enumerate(table):
        pair = GroupPair(int(row["src_group"]), int(row["dst_group"]))
        if pair not in pairs:
            return f"row {number}: groups {tuple(pair)} are no group pair of this plan"
        sizes = src.block_size[pair.src_group], dst.block_size[pair.dst_group]
        steps = periods(*sizes, src.state[pair.src_group])
        given = int(row["src_step"]), int(row["dst_step"])
        phases = int(row["src_phase"]), int(row["dst_phase"])
        if given != steps:
            return f"row {number}: steps are {given}, expected {steps}"
        if not (0 <= phases[0] < steps[0] and 0 <= phases[1] < steps[1]):
            return f"row {number}: phases {phases} are not below the steps {steps}"
        if steps != (1, 1) and not (
            phases[0] * sizes[0] < (phases[1] + 1) * sizes[1] and phases[1] * sizes[1] < (phases[0] + 1) * sizes[0]
        ):
            return f"row {number}: blocks of phases {phases} share no token"
        if row["src_stride"] < 0 or row["dst_stride"] < 0 or not 0 < int(row["length"]) < 2**63:
            return f"row {number}: negative stride, or length {row['length']} outside [1, 2**63)"
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

    class_keys = [table[name] for name in ("src_group", "dst_group", "src_phase", "dst_phase")]
    class_of, class_first = _number(class_keys, len(table))
    pair_number = {pair: number for number, pair in enumerate(pairs)}

    rows = np.empty((len(table), item.ROW_COLUMNS), np.int64)
    for column, name in (
        (item.SRC_ORIGIN, "src_origin"),
        (item.SRC_STRIDE, "src_stride"),
        (item.DST_ORIGIN, "dst_origin"),
        (item.DST_STRIDE, "dst_stride"),
        (item.LENGTH, "length"),
    ):
        rows[:, column] = table[name].astype(np.int64)[order]
    rows[:, item.CLASS] = class_of[order]

    starts = np.flatnonzero(np.diff(lane_of[order], prepend=-1)) if len(table) else np.empty(0, np.int64)
    lane_rows = np.empty((len(starts), item.LANE_COLUMNS), np.int64)
    lane_rows[:, item.LANE_START] = starts
    lane_rows[:, item.LANE_STOP] = np.append(starts[1:], len(table))
    lane_rows[:, item.LANE_KIND] = _kinds(table[order], lane_rows)

    classes = np.zeros((len(class_first), item.CLASS_COLUMNS), np.int64)
    for number, first in enumerate(class_first):
        row = table[first]
        classes[number, item.CLASS_PAIR] = pair_number[GroupPair(int(row["src_group"]), int(row["dst_group"]))]
        for column, name in (
            (item.SRC_STEP, "src_step"),
            (item.SRC_PHASE, "src_phase"),
            (item.DST_STEP, "dst_step"),
            (item.DST_PHASE, "dst_phase"),
        ):
            classes[number, column] = row[name]
    dense = lane_rows[lane_rows[:, item.LANE_KIND] == item.DENSE, item.LANE_START]
    classes[rows[dense, item.CLASS], item.HAS_DENSE] = 1

    pair_rows = np.empty((len(pairs), item.PAIR_COLUMNS), np.int64)
    for number, pair in enumerate(pairs):
        sizes = src.block_size[pair.src_group], dst.block_size[pair.dst_group]
        pair_rows[number] = (*pair, *sizes, src.state[pair.src_group])
    limits = (_limits(table, "src", src_buffer, src), _limits(table, "dst", dst_buffer, dst))
    return Program(rows, lane_rows, classes, pair_rows, _groups(src, limits[0]), _groups(dst, limits[1]))


def lanes(table: Table, src_buffer: Int64, dst_buffer: Int64) -> Int64:
    """Return the lane of each row: lanes are numbered in the order of their first rows.

    A row ends at one place and begins at two (its own period's and the next one's); rows that end where others begin
    are joined by following, from each row, the least number it can reach.
    """
    if not len(table):
        return np.empty(0, np.int64)
    same = ("src_group", "dst_group", "src_stride", "dst_stride", "src_step", "dst_step")
    kind, _ = _number([table[name] for name in same] + [src_buffer, dst_buffer], len(table))
    begin, end, turn = [], [], []
    for side in ("src", "dst"):
        stride = table[f"{side}_stride"].astype(np.uint64)
        first = table[f"{side}_origin"] + table[f"{side}_phase"].astype(np.uint64) * stride
        begin.append(first)
        end.append(first + table["length"])
        turn.append(first + table[f"{side}_step"].astype(np.uint64) * stride)
    edges = [(np.arange(len(table)), np.arange(len(table)))]
    for start in (begin, turn):
        edges.append(_equal([kind, *end], [kind, *start]))
    return _components(len(table), np.concatenate([a for a, _ in edges]), np.concatenate([b for _, b in edges]))


def _equal(left: list[npt.NDArray[np.generic]], right: list[npt.NDArray[np.generic]]) -> tuple[Int64, Int64]:
    """Return index pairs (i, j) that connect all i, j with equal keys ``left[.][i] == right[.][j]``."""
    size = len(left[0])
    number, _ = _number([np.concatenate([a, b]) for a, b in zip(left, right, strict=True)], 2 * size)
    left_number, right_number = number[:size], number[size:]
    order = np.argsort(right_number, kind="stable")
    at = np.searchsorted(right_number[order], left_number)
    stop = np.searchsorted(right_number[order], left_number, side="right")
    found = np.flatnonzero(stop > at)
    # Rows that begin at one place are connected to each other only if a row ends there: through that row.
    repeats = (stop - at)[found]
    offsets = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    return np.repeat(found, repeats), order[np.repeat(at[found], repeats) + offsets]


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


def _number(keys: list[npt.NDArray[np.generic]], size: int) -> tuple[Int64, Int64]:
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


def _kinds(table: Table, lane_rows: Int64) -> Int64:
    """Return how each lane merges.

    A row alone in its lane can meet itself only where its length is a whole number of both strides, whatever the ids.
    """
    row = table[lane_rows[:, item.LANE_START]]
    single = lane_rows[:, item.LANE_STOP] - lane_rows[:, item.LANE_START] == 1
    length = row["length"].astype(np.int64)
    src, dst = np.maximum(row["src_stride"], 1), np.maximum(row["dst_stride"], 1)
    dense = (
        (length == row["src_stride"]) & (length == row["dst_stride"]) & (row["src_step"] == 1) & (row["dst_step"] == 1)
    )
    zero = (row["src_stride"] == 0) | (row["dst_stride"] == 0)
    apart = zero | (length % src != 0) | (length % dst != 0)
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
    length, stride = table["length"], table[f"{name}_stride"].astype(np.uint64)
    room = np.where(buffer >= 0, end - table[f"{name}_origin"], np.uint64(0))
    # A stride of 0 never leaves; the ids that stay number room // stride, and id 0 itself.
    ids = (room - length) // np.maximum(stride, np.uint64(1)) + np.uint64(1)
    ids = np.where(stride == 0, np.uint64(2**62), np.minimum(ids, np.uint64(2**62)))
    limits = np.full(len(side.block_size), 2**62, np.int64)
    np.minimum.at(limits, table[f"{name}_group"], np.where(room >= length, ids, np.uint64(0)).astype(np.int64))
    return limits


def _groups(side: Side, limits: Int64) -> Int64:
    groups = np.zeros((len(side.block_size), item.GROUP_COLUMNS), np.int64)
    for number, (bound, null, overlay) in enumerate(zip(side.bound, side.null, side.overlays, strict=True)):
        most = 2**63 - 1 if bound is None else bound
        groups[number, item.BOUND] = min(most, int(limits[number])) if bound is not None else most
        groups[number, item.HAS_NULL] = null is not None
        groups[number, item.NULL] = null or 0
        groups[number, item.OVERLAY] = overlay
    return groups
