"""What a proof finds, as arrays: kinds, reasons, and faults that are neighbours made one. It knows no bytes."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "ANOTHER_BLOCK",
    "CROSSES",
    "DUPLICATED",
    "MISPLACED",
    "MISSING",
    "NEGATIVE",
    "NOBODY",
    "NOT_HELD",
    "NO_FIELD",
    "NO_GROUP",
    "OTHER_BYTES",
    "OTHER_ID",
    "OVERWRITES",
    "SHARED",
    "TWICE",
    "WHY",
    "Faults",
    "merge",
]

Int64 = npt.NDArray[np.int64]

MISSING, DUPLICATED, MISPLACED = range(3)

WHY = (
    "nobody writes it",
    "written more than once",
    "another field of this rank has the same bytes: memory that layers share is declared once",
    "another group of this rank has the same bytes in blocks of other ids",
    "src rank {} does not hold it",
    "src rank {} takes it from a block of another group or position",
    "src rank {} takes it from other bytes",
    "src rank {} writes it where this block has no field",
    "src rank {} writes over it for another block",
    "src rank {} crosses the edge of a buffer here",
    "src rank {} names a dst group that there is not",
    "src rank {} has a row with a negative stride or tail here",
)
(
    NOBODY,
    TWICE,
    SHARED,
    OTHER_ID,
    NOT_HELD,
    ANOTHER_BLOCK,
    OTHER_BYTES,
    NO_FIELD,
    OVERWRITES,
    CROSSES,
    NO_GROUP,
    NEGATIVE,
) = range(len(WHY))


class Faults(NamedTuple):
    """Faults of one dst rank: int64 arrays [n]."""

    kind: Int64
    why: Int64
    src: Int64  # rank, -1 for none
    tensor: Int64  # -1 for none
    head: Int64
    start: Int64  # cells of a block, half-open
    stop: Int64

    @classmethod
    def make(cls, kind: int, why: int | Int64, src: int | Int64, *place: Int64) -> "Faults":
        """Make faults of one kind at ``place``: tensor, head, start, stop."""
        columns = (kind, why, src, *place)
        return cls(*(np.broadcast_to(np.asarray(column, np.int64), len(place[0])) for column in columns))


def merge(faults: list[Faults]) -> list[tuple[int, ...]]:
    """Merge faults whose cells touch or overlap, then those of neighbouring heads.

    Returns
    -------
    list of (kind, why, src, tensor, first head, last head, start, stop)
        Half-open, in this order.
    """
    faults = [some for some in faults if len(some.kind)]
    if not faults:
        return []
    kind, why, src, tensor, head, start, stop = (np.concatenate(columns) for columns in zip(*faults, strict=True))
    (kind, why, src, tensor, head), start, stop = _join([kind, why, src, tensor, head], start, stop)
    (kind, why, src, tensor, start, stop), first, last = _join([kind, why, src, tensor, start, stop], head, head + 1)
    order = np.lexsort([start, first, src, why, tensor, kind])
    columns = (kind, why, src, tensor, first, last, start, stop)
    return list(zip(*(column[order].tolist() for column in columns), strict=True))


def _join(keys: list[Int64], start: Int64, stop: Int64) -> tuple[list[Int64], Int64, Int64]:
    """Unite the ranges [start, stop) that touch or overlap where all keys are equal."""
    order = np.lexsort([start, *keys])
    keys, start, stop = [key[order] for key in keys], start[order], stop[order]
    new = np.zeros(len(order), bool)
    new[0] = True
    for key in keys:
        new[1:] |= key[1:] != key[:-1]
    # The furthest stop so far among equal keys: keys are numbered, and a stop of a later number is larger than any.
    span = int(stop.max()) + 1
    reach = np.maximum.accumulate(stop + (np.cumsum(new) - 1) * span) - (np.cumsum(new) - 1) * span
    new[1:] |= start[1:] > reach[:-1]
    first = np.flatnonzero(new)
    return [key[first] for key in keys], start[first], np.maximum.reduceat(stop, first)
