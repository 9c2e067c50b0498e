"""Who holds which heads, and who sends them: arithmetic on sizes and ranks alone. It knows no memory.

All answers are half-open ranges, since ranks that hold a head are always neighbours.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["ELECTIONS", "Consumer", "candidates", "elect", "holders", "paired", "shard"]

ELECTIONS = ("nearest", "balanced", "striped")

Ranks = npt.NDArray[np.int64]


def shard(heads: int, rank: int, size: int, replicated: bool = False) -> tuple[int, int]:
    """Return the range of heads that a rank holds.

    Law: shards of ``size <= heads`` ranks partition the heads; with more ranks each holds one head and
    equal shards are neighbours.

    Parameters
    ----------
    heads : int
        Heads of the whole model.
    rank, size : int
        Place in, and number of, the tensor-parallel ranks.
    replicated : bool
        Every rank holds every head.
    """
    if replicated:
        return 0, heads
    start = rank * heads // size
    return start, max(start + 1, (rank + 1) * heads // size)


def holders(head: Ranks, heads: int, size: int, replicated: bool = False) -> tuple[Ranks, Ranks]:
    """Return, for each head, the range of ranks that hold it (the inverse of `shard`).

    Parameters
    ----------
    head : int64 array [n]
        Head numbers.

    Returns
    -------
    start, stop : int64 arrays [n]
    """
    if replicated:
        return np.zeros_like(head), np.full_like(head, size)
    stop = -(-(head + 1) * size // heads)
    start = -(-head * size // heads) if size > heads else stop - 1
    return start, stop


def paired(dst_rank: int, src_size: int, dst_size: int) -> tuple[int, int]:
    """Return the range of src ranks that are paired with a dst rank.

    Law: the larger side is cut evenly among the smaller; a pair is what vLLM's connector connects.
    """
    if src_size >= dst_size:
        return -(-dst_rank * src_size // dst_size), -(-(dst_rank + 1) * src_size // dst_size)
    rank = dst_rank * src_size // dst_size
    return rank, rank + 1


def candidates(
    head: Ranks, heads: int, size: int, replicated: bool, place: int = 0, places: int = 1
) -> tuple[Ranks, int, Ranks]:
    """Return, for each head, the ranks that hold it at one context-parallel place: every ``places``-th of its holders.

    Returns
    -------
    first : int64 array [n]
    step : int
    count : int64 array [n]
        The ranks ``first + step*k`` for k below ``count``.
    """
    start, stop = holders(head, heads, size, replicated)
    first = start + (place - start) % places
    return first, places, np.maximum(0, -(-(stop - first) // places))


class Consumer(NamedTuple):
    """The place of a dst rank."""

    rank: int
    size: int
    replicated: bool = False
    dp_rank: int = 0
    dp_size: int = 1


def elect(
    election: str, head: Ranks, heads: int, first: Ranks, step: int, count: Ranks, src_size: int, dst: Consumer
) -> tuple[Ranks, Ranks]:
    """Return, for each head that a dst rank holds, the src ranks that send it, among the candidates given.

    Both sides compute the same answer without talking (design.md section 4).

    Parameters
    ----------
    election : str
        ``nearest``: the lowest candidate paired with the dst rank, else the lowest. ``balanced``: of R candidates,
        consumer ``c`` of the ``dp_size*C`` that want the head takes number ``c*R//(dp_size*C)``. ``striped``: all that
        are paired, or all if none is, each a part.
    head : int64 array [n]
        Head numbers; the dst rank holds each of them.
    first, step, count : see `candidates`

    Returns
    -------
    first : int64 array [n]
    senders : int64 array [n]
        The ranks ``first + step*k`` for k below ``senders`` send part k each.
    """
    if election == "balanced":
        start, stop = holders(head, heads, dst.size, dst.replicated)
        consumers = dst.dp_size * (stop - start)
        number = dst.dp_rank * (stop - start) + (dst.rank - start)
        return first + step * (number * count // consumers), np.minimum(count, 1)
    pair_start, pair_stop = paired(dst.rank, src_size, dst.size)
    lowest = first + step * np.maximum(0, -(-(pair_start - first) // step))
    both = np.minimum(-(-(pair_stop - lowest) // step), count - (lowest - first) // step)
    any_paired = both > 0
    senders = np.where(any_paired, both, count)
    return np.where(any_paired, lowest, first), senders if election == "striped" else np.minimum(senders, 1)
