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
    found = []
    for number, pair in enumerate(program.pairs.tolist()):
        lanes = program.lanes[of_lane == number]
        chosen = [row for start, stop, _ in lanes.tolist() for row in program.rows[start:stop].tolist()]
        classes = [program.classes[row[item.CLASS]].tolist() for row in chosen]
        shares = [
            Fraction(row[item.COUNT], of_row[item.DST_STEP] * of_row[item.PARTS])
            for row, of_row in zip(chosen, classes, strict=True)
        ]
        nbytes = sum((share * row[item.LENGTH] for share, row in zip(shares, chosen, strict=True)), Fraction(0))
        parts = {(of_row[item.PART], of_row[item.PARTS]) for of_row in classes if of_row[item.PARTS] > 1}
        merging = int(np.count_nonzero(lanes[:, item.LANE_KIND] != item.APART))
        most = sum(shares, Fraction(0))
        groups = pair[item.SRC_GROUP], pair[item.DST_GROUP]
        found.append(Figures(*groups, len(chosen), len(lanes), merging, nbytes, most, tuple(sorted(parts))))
    return found


def _group_pair(program: Program, head: str, of: Figures, lanes: Int64) -> list[str]:
    if not of.rows:
        return [f"{head}: nothing; no head in common, or another src rank sends it"]
    lines = [f"{head}: {amount(of.nbytes)} bytes and at most {amount(of.descriptors)} descriptors a dst block"]
    if not of.merging:
        lines.append("  nothing merges, whatever the block ids")
    said = Counter(_lane(program.rows[start:stop], kind) for start, stop, kind in lanes.tolist())
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
