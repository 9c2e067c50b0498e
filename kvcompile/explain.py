"""Say in words what a plan does: bytes and descriptors a block, which slices merge, and why the others cannot.

It reads what a build reads (`kernels.item` names the columns), and runs nothing.
"""

from collections import Counter
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from kvcompile.backend import Program
from kvcompile.kernels import item
from kvcompile.program import Side

__all__ = ["explain"]

Int64 = npt.NDArray[np.int64]


def explain(program: Program, src: Side, dst: Side) -> str:
    """Describe a compiled table: a paragraph a group pair, a line a kind of lane.

    Parameters
    ----------
    program : Program
    src, dst : Side
    """
    of_lane = program.classes[program.rows[program.lanes[:, item.LANE_START], item.CLASS], item.CLASS_PAIR]
    counts = ((program.rows, "row"), (program.lanes, "lane"), (program.pairs, "group pair"))
    lines = [", ".join(_many(len(rows), what) for rows, what in counts)]
    for number, pair in enumerate(program.pairs.tolist()):
        src_group, dst_group = pair[item.SRC_GROUP], pair[item.DST_GROUP]
        head = f"src group {src_group} ({_size(src, src_group)}) to dst group {dst_group} ({_size(dst, dst_group)})"
        lines += ["", *_group_pair(program, head, program.lanes[of_lane == number])]
    return "\n".join(lines)


def _group_pair(program: Program, head: str, lanes: Int64) -> list[str]:
    if not len(lanes):
        return [f"{head}: nothing; no head in common, or another src rank sends it"]
    nbytes, most = Fraction(0), Fraction(0)
    said: Counter[str] = Counter()
    parts = set()
    for start, stop, kind in lanes.tolist():
        rows = program.rows[start:stop]
        for row in rows.tolist():
            of_row = program.classes[row[item.CLASS]].tolist()
            # On average: a row is there for one block in a period, and a stripe for one of its parts.
            share = Fraction(row[item.COUNT], of_row[item.DST_STEP] * of_row[item.PARTS])
            most += share
            nbytes += share * row[item.LENGTH]
            parts.add((of_row[item.PART] + 1, of_row[item.PARTS]))
        said[_lane(rows, kind)] += 1
    lines = [f"{head}: {_number(nbytes)} bytes and at most {_number(most)} descriptors a dst block"]
    if set(lanes[:, item.LANE_KIND].tolist()) == {item.APART}:
        lines.append("  nothing merges, whatever the block ids")
    lines += [f"  {_many(count, 'lane')} of {text}" for text, count in said.items()]
    striped = [f"part {part} of {count}" for part, count in sorted(parts) if count > 1]
    return [*lines, *(f"  striped: {text} of each request's blocks, other src ranks send the rest" for text in striped)]


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


def _number(value: Fraction) -> str:
    return f"{value.numerator:,}" if value.denominator == 1 else f"{value.numerator:,}/{value.denominator:,}"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")
