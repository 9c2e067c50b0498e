"""Which fields of a rank have bytes in common, in whatever blocks: `Cache` refuses that within a region alone.

In one group every block has to be apart from all others. Blocks of two groups may share bytes at equal ids (they
overlay each other, design.md section 3), and at no others.
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from kvcompile import overlap
from kvcompile.proof import labels
from kvcompile.proof.faults import DUPLICATED, OTHER_ID, SHARED, Faults
from kvcompile.proof.labels import CHUNK, Fields, Int64, Segments

__all__ = ["meet", "shared"]


def shared(of: Fields, rank: int) -> list[Faults]:
    """Report the cells of a rank that lie on bytes of another field."""
    parts = labels.segments(of, np.flatnonzero((of.rank == rank) & (of.blocks > 0)))
    found: tuple[set[int], set[int]] = set(), set()
    for members in _together(of, parts):
        if not _apart(of, parts.pick(members)):
            _pairs(of, parts, members, found)
    faults = []
    for why, segments in zip((SHARED, OTHER_ID), found, strict=True):
        at = np.array(sorted(segments), np.int64)
        field = parts.field[at]
        stop = parts.cell[at] + parts.nbytes[at] // of.nbytes[field]
        faults.append(Faults.make(DUPLICATED, why, -1, of.tensor[field], parts.head[at], parts.cell[at], stop))
    return faults


def meet(a: tuple[int, int, int, int], b: tuple[int, int, int, int], own_ids: bool) -> bool:
    """Return whether any block of one segment shares a byte with any block of another.

    Parameters
    ----------
    a, b : (start, nbytes, stride, count)
        Blocks of a segment do not meet each other.
    own_ids : bool
        Blocks of equal numbers may meet.

    Notes
    -----
    Block j of b meets block i of a iff ``-n < a + i*s - b - j*t < m``. With ``s >= t`` at most two i do for one j: the
    greatest one below that bound, and the one before it. For each the j whose i is in range are a range, and whether
    any of them meets is the question for the least j with a residue in a range.
    """
    # Of a single block the stride means nothing: let it be wide.
    a, b = ((start, n, stride if count > 1 else max(n, stride), count) for start, n, stride, count in (a, b))
    if b[2] > a[2]:
        a, b = b, a
    (start, n, s, count), (other, m, t, others) = a, b
    s = s if count > 1 else n + m + t
    reach, width = other - start + m - 1, n + m - 2
    for back in (0, 1):
        if width < back * s:
            break
        # i = (j*t + reach)//s - back, from 0 to count - 1
        first = max(0, -(-(back * s - reach) // t))
        stop = min(others, -(-((count + back) * s - reach) // t))
        ranges = [(first, stop)]
        if own_ids:
            # i - j falls or stays as j grows (s >= t): j with i == j are a range too.
            low = _least(first, stop, lambda j: (j * t + reach) // s - back - j <= 0)  # noqa: B023 (called here)
            high = _least(first, stop, lambda j: (j * t + reach) // s - back - j < 0)  # noqa: B023
            ranges = [(first, low), (high, stop)]
        for begin, end in ranges:
            if begin < end:
                lacks = -(begin * t + reach) % s
                least = _first_in(t, s, lacks, min(lacks + width - back * s, s - 1))
                wraps = lacks + width - back * s >= s  # residue 0 is in range too: j = begin
                if wraps or (least is not None and least < end - begin):
                    return True
    return False


def _least(first: int, stop: int, holds: Callable[[int], bool]) -> int:
    """Return the least number of a range from which on a condition holds."""
    while first < stop:
        middle = (first + stop) // 2
        first, stop = (first, middle) if holds(middle) else (middle + 1, stop)
    return first


def _first_in(step: int, modulus: int, low: int, high: int) -> int | None:
    """Return the least k >= 0 with ``low <= k*step % modulus <= high < modulus``; None if there is none.

    As Euclid's algorithm goes: either a multiple of the step lies in the range, or the question is one of residues
    modulo the step.
    """
    if low == 0:
        return 0
    step %= modulus
    if 2 * step > modulus:
        step, low, high = modulus - step, modulus - high, modulus - low
    if step == 0:
        return None
    least = -(-low // step)
    if least * step <= high:
        return least
    turns = _first_in(step - modulus % step, step, low % step, high % step)
    return None if turns is None else -(-(low + modulus * turns) // step)


def _ends(of: Fields, parts: Segments) -> labels.UInt64:
    """Return the addresses after the last bytes of the last blocks."""
    return parts.end + (of.blocks[parts.field] - 1).astype(np.uint64) * parts.stride


def _together(of: Fields, parts: Segments) -> list[Int64]:
    """Return the segments whose spans hang together, where they are of several regions."""
    ends = _ends(of, parts)
    order = np.argsort(parts.start, kind="stable")
    opens = np.flatnonzero(np.concatenate([[True], parts.start[order][1:] >= np.maximum.accumulate(ends[order])[:-1]]))
    found = [order[start:stop] for start, stop in pairwise([*opens.tolist(), len(order)])]
    region = of.region[parts.field]
    return [members for members in found if np.any(region[members] != region[members[:1]])]


def _apart(of: Fields, some: Segments) -> bool:
    """Return whether a common stride shows at once that nothing is shared that must not be."""
    stride, blocks = some.stride.astype(np.int64), of.blocks[some.field]
    several = stride[blocks > 1]
    if len(np.unique(several)) > 1 or int(_ends(of, some).max()) - int(some.start.min()) >= 2**62:
        return False  # no common residue, or no room for it: left to the pairwise comparison
    step = int(several.max(initial=0))
    start = (some.start - some.start.min()).astype(np.int64)
    group, most = of.group[some.field], int(blocks.max())
    pieces = [overlap.pieces(start[group == number], some.nbytes[group == number], step, most) for number in set(group)]
    if any(overlap.collide(rectangles) for rectangles in pieces):
        return False
    # Of several groups: where residues meet, ids are equal iff the levels are.
    whole = np.concatenate(pieces)
    whole = whole[np.argsort(whole[:, 0], kind="stable")]
    meets = whole[1:, 0] < np.maximum.accumulate(whole[:, 1])[:-1]
    return len(pieces) == 1 or not np.any(meets & (whole[1:, 2] != whole[:-1, 2]))


def _pairs(of: Fields, parts: Segments, members: Int64, found: tuple[set[int], set[int]]) -> None:
    """Compare every two segments whose spans overlap; add those that share bytes, and those that do at other ids."""
    some = parts.pick(members)
    ends, group, region = _ends(of, some), of.group[some.field], of.region[some.field]
    columns = (some.start, some.nbytes, some.stride, of.blocks[some.field])
    series = list(zip(*(column.tolist() for column in columns), strict=True))
    step = max(1, CHUNK // len(members))
    for at in range(0, len(members), step):
        here = slice(at, at + step)
        near = (some.start[here, None] < ends) & (some.start < ends[here, None]) & (region[here, None] != region)
        for one, other in zip(*(index.tolist() for index in np.nonzero(near)), strict=True):
            one += at  # noqa: PLW2901
            overlaid = bool(group[one] != group[other])
            if one < other and meet(series[one], series[other], own_ids=overlaid):
                found[overlaid].update(members[[one, other]].tolist())
