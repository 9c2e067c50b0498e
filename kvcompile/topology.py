"""Who holds which heads, and who sends them: arithmetic on sizes and ranks alone. It knows no memory.

All answers are half-open ranges, since ranks that hold a head are always neighbours.
"""

import numpy as np
import numpy.typing as npt

__all__ = ["ELECTIONS", "elected", "holders", "paired", "shard"]

ELECTIONS = ("nearest", "balanced")

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


def elected(
    head: Ranks,
    heads: int,
    election: str,
    src_size: int,
    src_replicated: bool,
    dst_rank: int,
    dst_size: int,
    dst_replicated: bool,
    dp_rank: int = 0,
    dp_size: int = 1,
) -> Ranks:
    """Return, for each head that a dst rank holds, the one src rank that sends it.

    Both sides compute the same answer without talking (design.md section 4).

    Parameters
    ----------
    head : int64 array [n]
        Head numbers; the dst rank holds each of them.
    election : "nearest" or "balanced"
        ``nearest``: the lowest paired holder, else the lowest holder. ``balanced``: consumer ``c`` of the ``dp_size*C``
        that want the head takes replica ``c*R//(dp_size*C)`` of the R holders.

    Returns
    -------
    int64 array [n]
    """
    start, stop = holders(head, heads, src_size, src_replicated)
    if election == "nearest":
        pair_start, pair_stop = paired(dst_rank, src_size, dst_size)
        lowest = np.maximum(start, pair_start)
        return np.where(lowest < np.minimum(stop, pair_stop), lowest, start)
    first, last = holders(head, heads, dst_size, dst_replicated)
    consumers = last - first
    number = dp_rank * consumers + (dst_rank - first)
    return start + number * (stop - start) // (dp_size * consumers)
