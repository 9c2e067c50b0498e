"""The arrays that host and kernels share, by name. Their columns are named in `item`.

What a batch gives and what its kernels hand on lie behind each other in one array, cut into parts here: each costs a
microsecond to make. The functions are plain: the host calls them as they are, the drivers compile them.
"""

from typing import NamedTuple

import numpy as np

from kvcompile.kernels import item

__all__ = ["SCRATCH_ROWS", "Batch", "Program", "Work", "batch_of", "given_size", "memory_size", "work_of"]

SCRATCH_ROWS = 7
"""Delta, src, length and tail of each piece, and what `order.sort` needs."""


class Program(NamedTuple):
    """What a plan compiled: int64 arrays, one row an item, columns as `item` names them."""

    rows: np.ndarray
    lanes: np.ndarray
    classes: np.ndarray
    pairs: np.ndarray
    src_groups: np.ndarray
    dst_groups: np.ndarray


class Batch(NamedTuple):
    """What the requests gave. List (r, g) of a side is ``ids[at[r*groups + g]:at[r*groups + g + 1]]``."""

    src_ids: np.ndarray
    src_at: np.ndarray
    dst_ids: np.ndarray
    dst_at: np.ndarray
    src_first: np.ndarray  # [requests, groups], -1: no positions
    dst_first: np.ndarray
    num_tokens: np.ndarray  # [requests], -1: not given
    twice: np.ndarray  # [requests], 1: the request id is given twice


class Work(NamedTuple):
    """What the kernels hand on.

    status [requests, STATUS_COLUMNS]; spans [requests + 1]; uncovered [dst ids]; aligned [requests, pairs,
    ALIGN_COLUMNS]; extent [requests, classes, EXTENT_COLUMNS]; src, dst: the pairs of blocks; run_src, run_dst,
    run_blocks: the first pair and the size of each run; slots: hash table, a power of two above twice the dst ids;
    scratch [SCRATCH_ROWS, n]: to sort the pairs of a class or the pieces of a chain, n 0 if not asked for.
    """

    status: np.ndarray
    spans: np.ndarray
    uncovered: np.ndarray
    aligned: np.ndarray
    extent: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    run_src: np.ndarray
    run_dst: np.ndarray
    run_blocks: np.ndarray
    slots: np.ndarray
    scratch: np.ndarray


def given_size(requests: int, src_groups: int, dst_groups: int) -> int:
    """Return the words that come before the ids in the array that a batch is given in."""
    groups = src_groups + dst_groups
    return requests * (item.STATUS_COLUMNS + 2 * groups + 2) + 2


def batch_of(given: np.ndarray, requests: int, src_groups: int, dst_groups: int) -> tuple[np.ndarray, Batch]:
    """Cut the array that a batch is given in: its status, [requests, STATUS_COLUMNS], and the batch; ids come last."""
    at = requests * item.STATUS_COLUMNS
    status = given[:at].reshape((requests, item.STATUS_COLUMNS))
    src_at, at = given[at : at + requests * src_groups + 1], at + requests * src_groups + 1
    dst_at, at = given[at : at + requests * dst_groups + 1], at + requests * dst_groups + 1
    src_first, at = given[at : at + requests * src_groups], at + requests * src_groups
    dst_first, at = given[at : at + requests * dst_groups], at + requests * dst_groups
    num_tokens, at = given[at : at + requests], at + requests
    twice, at = given[at : at + requests], at + requests
    src_ids = given[at : at + src_at[-1]]
    dst_ids = given[at + src_at[-1] : at + src_at[-1] + dst_at[-1]]
    firsts = src_first.reshape((requests, src_groups)), dst_first.reshape((requests, dst_groups))
    return status, Batch(src_ids, src_at, dst_ids, dst_at, firsts[0], firsts[1], num_tokens, twice)


def memory_size(
    requests: int, src_groups: int, dst_groups: int, src_ids: int, dst_ids: int, pairs: int, classes: int, scratch: int
) -> int:
    """Return the words of a batch of so many ids or fewer, and of a `Work` but for status and spans.

    A class pairs each id at most once. (Classes of one group pair may have equal phases: other strides, other parts.)
    """
    lines, most = pairs * item.ALIGN_COLUMNS + classes * item.EXTENT_COLUMNS, classes * min(src_ids, dst_ids)
    given = given_size(requests, src_groups, dst_groups) + src_ids + dst_ids
    return given + dst_ids + requests * lines + 5 * most + max(4 * dst_ids + 2, SCRATCH_ROWS * scratch)


def work_of(
    memory: np.ndarray,
    status: np.ndarray,
    spans: np.ndarray,
    pairs: int,
    classes: int,
    src_ids: int,
    dst_ids: int,
    sorts: int,
) -> Work:
    """Cut memory into a `Work`; what is uncovered comes first.

    Slots and scratch are the same memory, all that is left: nothing is sorted before all conflicts are found.
    """
    requests, most = len(status), classes * min(src_ids, dst_ids)
    uncovered, at = memory[:dst_ids], dst_ids
    size = requests * pairs * item.ALIGN_COLUMNS
    aligned, at = memory[at : at + size].reshape((requests, pairs, item.ALIGN_COLUMNS)), at + size
    size = requests * classes * item.EXTENT_COLUMNS
    extent, at = memory[at : at + size].reshape((requests, classes, item.EXTENT_COLUMNS)), at + size
    src, at = memory[at : at + most], at + most
    dst, at = memory[at : at + most], at + most
    run_src, at = memory[at : at + most], at + most
    run_dst, at = memory[at : at + most], at + most
    run_blocks, at = memory[at : at + most], at + most
    slots = 2
    while slots <= 2 * dst_ids:
        slots *= 2
    table, columns = memory[at : at + slots], sorts * (len(memory) - at) // SCRATCH_ROWS
    to_sort = memory[at : at + SCRATCH_ROWS * columns].reshape((SCRATCH_ROWS, columns))
    return Work(status, spans, uncovered, aligned, extent, src, dst, run_src, run_dst, run_blocks, table, to_sort)
