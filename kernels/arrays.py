"""The arrays that host and kernels share, by name. Their columns are named in `item`."""

from typing import NamedTuple

import numpy as np

__all__ = ["SCRATCH_ROWS", "Batch", "Program", "Work"]

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

    status [requests, STATUS_COLUMNS]; aligned [requests, pairs, ALIGN_COLUMNS]; extent [requests, classes,
    EXTENT_COLUMNS]; src, dst: the pairs of blocks; run_src, run_dst, run_blocks: the first pair and the size of each
    run; uncovered uint8 [dst ids]; slots: hash table, a power of two above twice the dst ids; spans [requests + 1];
    scratch [SCRATCH_ROWS, n]: to sort the pairs of a class or the pieces of a chain, n 0 if not asked for.
    """

    status: np.ndarray
    aligned: np.ndarray
    extent: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    run_src: np.ndarray
    run_dst: np.ndarray
    run_blocks: np.ndarray
    uncovered: np.ndarray
    slots: np.ndarray
    spans: np.ndarray
    scratch: np.ndarray
