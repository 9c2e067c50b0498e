"""Tables by shape: a rank that meets many peers of one shape lowers it once, and then only shifts origins.

Two caches of one `Cache.shape_digest` differ in the addresses of their buffers alone, and rows never leave a buffer.
"""

import threading
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcompile.cache import Cache
from kvcompile.lowering import GroupPair, arrange, lower

__all__ = ["MAX_NBYTES", "lowered"]

MAX_NBYTES = 64 << 20
"""What the tables kept may take; the least recently used go first."""

MAX_SHAPES = 1 << 11
"""Tables kept: of pairs that share nothing they are empty, but not free."""


class _Shape(NamedTuple):
    """Rows with origins relative to their buffers, and buffers numbered by first use."""

    rows: npt.NDArray[np.void]
    pairs: tuple[GroupPair, ...]
    nbytes: int


_kept: OrderedDict[tuple[object, ...], _Shape] = OrderedDict()
_lock = threading.Lock()


def lowered(
    src: Cache, dst: Cache, election: str, layers: frozenset[str | int] | None, bridge_padding: bool
) -> tuple[npt.NDArray[np.void], tuple[GroupPair, ...]]:
    """Return the table and group pairs of two caches. Arguments and errors as for `lowering.lower`."""
    key = (src.shape_digest, dst.shape_digest, election, layers, bridge_padding)
    with _lock:
        shape = _kept.get(key)
        if shape is not None:
            _kept.move_to_end(key)
    if shape is None:
        rows, pairs = lower(src, dst, election, layers, bridge_padding)
        shape = _Shape(_shift(rows, src, dst, absolute=False), pairs, rows.nbytes)
        _keep(key, shape)
    return arrange(_shift(shape.rows, src, dst, absolute=True)), shape.pairs


def _keep(key: tuple[object, ...], shape: _Shape) -> None:
    with _lock:
        _kept[key] = shape
        total = sum([kept.nbytes for kept in _kept.values()])
        while (total > MAX_NBYTES or len(_kept) > MAX_SHAPES) and len(_kept) > 1:
            total -= _kept.popitem(last=False)[1].nbytes


def _shift(rows: npt.NDArray[np.void], src: Cache, dst: Cache, absolute: bool) -> npt.NDArray[np.void]:
    """Turn origins and buffers into absolute ones, or from absolute into relative ones."""
    rows = rows.copy()
    for side, cache in (("src", src), ("dst", dst)):
        order = np.array(cache.buffer_order, np.int64)  # buffer by number of first use
        base = np.array([buffer.base for buffer in cache.buffers or ()], np.uint64)
        if absolute:
            rows[f"{side}_buffer"] = order[rows[f"{side}_buffer"]]
            rows[f"{side}_origin"] += base[rows[f"{side}_buffer"]]
        else:
            rows[f"{side}_origin"] -= base[rows[f"{side}_buffer"]]
            rows[f"{side}_buffer"] = np.argsort(order)[rows[f"{side}_buffer"]]
    return rows
