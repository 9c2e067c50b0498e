"""Say in words what a plan does: bytes and descriptors a block, which slices merge, and why the others cannot.

It reads what a build reads (`kernels.item` names the columns), and runs nothing.
"""

from collections import Counter
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcompile.backend import Program
from kvcompile.kernels import item
from kvcompile.program import Side

__all__ = ["Figures", "amount", "explain", "figures"]

Int64 = npt.NDArray[np.int64]


def explain(program: Program, src: Side, dst: Side) -> str:
    """Describe a compiled table: a paragraph a group pair, a line a kind of lane.

    Parameters
    ----------
    program : Program
    src, dst : Side
    """
    of_lane = _pair_of_lane(program)
    counts = ((program.rows, "row"), (program.lanes, "lane"), (program.pairs, "group pair"))
    lines = [", ".join(_many(len(rows), what) for rows, what in counts)]
    for number, of in enumerate(figures(program)):
        sizes = _size(src, of.src_group), _size(dst, of.dst_group)
        head = f"src group {of.src_group} ({sizes[0]}) to dst group {of.dst_group} ({sizes[1]})"
        lines += ["", *_group_pair(program, head, of, program.lanes[of_lane == number])]
    return "\n".join(lines)


class Figures(NamedTuple):
    """What a plan sends from one group to another."""

    src_group: int
    dst_group: int
    rows: int
    lanes: int
    merging: int  # lanes that may merge
    nbytes: Fraction  # a dst block: on average over a period, and over the parts of a stripe
    descriptors: Fraction  # a dst block, where nothing merges
    parts: tuple[tuple[int, int], ...]  # (part, parts) of a stripe


def figures(program: Program) -> list[Figures]:
    """Count what a plan does, an item a group pair."""
    of_lane = _pair_of_lane(program)
    of_row = program.classes[program.rows[:, item.CLASS], item.CLASS_PAIR]
    found = []
    for number, pair in enumerate(program.pairs.tolist()):
        lanes, rows = program.lanes[of_lane == number], program.rows[of_row == number]
        nbytes, most, parts = Fraction(0), Fraction(0), set()
        alike, times = np.unique(rows[:, [item.CLASS, item.COUNT, item.LENGTH]], axis=0, return_counts=True)
        for (number_of, count, length), rows_alike in zip(alike.tolist(), times.tolist(), strict=True):
            kind = program.classes[number_of].tolist()
            share = Fraction(rows_alike * count, kind[item.DST_STEP] * kind[item.PARTS])
            most += share
            nbytes += share * length
            if kind[item.PARTS] > 1:
                parts.add((kind[item.PART], kind[item.PARTS]))
        merging = int(np.count_nonzero(lanes[:, item.LANE_KIND] != item.APART))
        groups = pair[item.SRC_GROUP], pair[item.DST_GROUP]
        found.append(Figures(*groups, len(rows), len(lanes), merging, nbytes, most, tuple(sorted(parts))))
    return found


def _group_pair(program: Program, head: str, of: Figures, lanes: Int64) -> list[str]:
    if not of.rows:
        return [f"{head}: nothing; no head in common, or another src rank sends it"]
    lines = [f"{head}: {amount(of.nbytes)} bytes and at most {amount(of.descriptors)} descriptors a dst block"]
    if not of.merging:
        lines.append("  nothing merges, whatever the block ids")
    # What a line says depends on these alone: one of each is looked at.
    length = program.rows[:, item.LENGTH]
    starts = np.stack([lanes[:, item.LANE_START], lanes[:, item.LANE_STOP]], axis=1).ravel()
    ends = np.append(length, 0)  # reduceat takes no index past the end
    shortest, longest = (reduce.reduceat(ends, starts)[::2] for reduce in (np.minimum, np.maximum))
    looks = [item.TAIL, item.COUNT, item.SRC_STRIDE, item.DST_STRIDE, item.SRC_INNER, item.DST_INNER]
    sizes = lanes[:, item.LANE_STOP] - lanes[:, item.LANE_START]
    keys = np.column_stack([
        lanes[:, item.LANE_KIND], sizes, shortest, longest, program.rows[lanes[:, item.LANE_START]][:, looks]
    ])  # fmt: skip
    _, first, counts = np.unique(keys, axis=0, return_index=True, return_counts=True)
    said: Counter[str] = Counter()
    for number in np.argsort(first).tolist():
        start, stop, kind = lanes[first[number], : item.LANE_KIND + 1].tolist()
        said[_lane(program.rows[start:stop], kind)] += int(counts[number])
    lines += [f"  {_many(count, 'lane')} of {text}" for text, count in said.items()]
    striped = [f"part {part + 1} of {count}" for part, count in of.parts]
    return [*lines, *(f"  striped: {text} of each request's blocks, other src ranks send the rest" for text in striped)]


def _pair_of_lane(program: Program) -> Int64:
    first: Int64 = program.rows[program.lanes[:, item.LANE_START], item.CLASS]
    pair: Int64 = program.classes[first, item.CLASS_PAIR]
    return pair


def _lane(rows: Int64, kind: int) -> str:
    """Describe one lane: in equal words what differs in addresses alone."""
    row = rows[0]
    lengths = sorted(set(rows[:, item.LENGTH].tolist()))
    nbytes = " or ".join(f"{length:,}" for length in lengths if length in (lengths[0], lengths[-1]))
    if kind == item.DENSE:
        tail = f", and the {row[item.TAIL]:,} bytes of padding behind each" if row[item.TAIL] else ""
        return f"1 row of {nbytes} bytes: one descriptor for each run of blocks consecutive on both sides{tail}"
    if kind == item.CHAIN:
        return (
            f"{_many(len(rows), 'row')} of {nbytes} bytes: one merges with the next wherever they touch on both sides"
        )
    what = f"{row[item.COUNT]:,} slices" if row[item.COUNT] > 1 else "1 row"
    sides = (("src", item.SRC_STRIDE, item.SRC_INNER), ("dst", item.DST_STRIDE, item.DST_INNER))
    why = [f"on {side} {_gap(row, int(row[stride]), int(row[inner]))}" for side, stride, inner in sides]
    return f"{what} of {nbytes} bytes that never merge: {', '.join(why)}"


def _gap(row: Int64, stride: int, inner: int) -> str:
    """Say what lies between the slices of a row that never merges, on one side."""
    length = int(row[item.LENGTH])
    if row[item.COUNT] > 1:
        return f"one is {inner - length:,} bytes behind the other" if inner != length else "they touch"
    if stride < length:
        return "there is one block"
    return (
        f"{stride - length:,} bytes lie between consecutive blocks'" if stride != length else "consecutive blocks touch"
    )


def _size(side: Side, group: int) -> str:
    return "blocks of state" if side.state[group] else f"blocks of {_many(side.block_size[group], 'token')}"


def amount(value: Fraction) -> str:
    """Write a number of bytes or descriptors, as a fraction where it is none of whole ones."""
    return f"{value.numerator:,}" if value.denominator == 1 else f"{value.numerator:,}/{value.denominator:,}"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")
