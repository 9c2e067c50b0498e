"""The table of slices: its columns, and the one operation on them, joining. It knows no cache."""

import numpy as np
import numpy.typing as npt

__all__ = ["JOINED", "TABLE", "join"]

TABLE = np.dtype(
    [
        ("src_group", np.int64),
        ("src_origin", np.uint64),
        ("src_stride", np.int64),
        ("src_step", np.int64),
        ("src_phase", np.int64),
        ("dst_group", np.int64),
        ("dst_origin", np.uint64),
        ("dst_stride", np.int64),
        ("dst_step", np.int64),
        ("dst_phase", np.int64),
        ("length", np.uint64),
        ("count", np.int64),
        ("src_inner", np.int64),
        ("dst_inner", np.int64),
        ("part", np.int64),
        ("parts", np.int64),
        ("tail", np.int64),
    ]
)
"""One row a slice: for every period q, ``length`` bytes from
``src_origin + src_ids[q*src_step + src_phase]*src_stride`` to
``dst_origin + dst_ids[q*dst_step + dst_phase]*dst_stride``. Bytes; strides are per block id.

- ``count``, ``src_inner``, ``dst_inner``: the row stands for ``count`` slices, so many bytes apart on each side.
- ``part``, ``parts``: of the Q periods from q0 that a request's overlap touches, only
  ``[q0 + part*Q//parts, q0 + (part+1)*Q//parts)``.
- ``tail``: bytes of padding after the slice that may be copied along to reach the slice behind (``bridge_padding``)."""

JOINED = np.dtype([*TABLE.descr, ("src_buffer", np.int64), ("dst_buffer", np.int64), ("owner", np.int64)])
"""A row while it is lowered: with the buffers that hold it, and the field it is of; negative where it is of several."""

_ITS_OWN = ("src_origin", "dst_origin", "length", "owner")


def join(pieces: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Join the pieces that touch on both sides, where all else is equal.

    Law: pieces that touch on both sides lie on one diagonal (dst - src), so after sorting by diagonal and src they are
    neighbours, whatever lies between them in memory.

    Parameters
    ----------
    pieces : structured array [n] of `JOINED`

    Returns
    -------
    structured array [m] of `JOINED`
        Sorted by everything but addresses, then diagonal, then src.
    """
    if not len(pieces):
        return pieces
    pieces, touches, alike = by_diagonal(pieces)
    first = np.flatnonzero(~(touches & alike))
    joined = pieces[first]
    joined["length"] = np.add.reduceat(pieces["length"], first)
    mixed = np.flatnonzero(np.maximum.reduceat(pieces["owner"], first) != np.minimum.reduceat(pieces["owner"], first))
    joined["owner"][mixed] = -1 - mixed
    return joined


def by_diagonal(
    pieces: npt.NDArray[np.void],
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Sort pieces so that those which may join are neighbours.

    Returns
    -------
    pieces : structured array [n] of `JOINED`
    touches : bool array [n]
        The piece begins where the one before it ends, on both sides, if they are alike; False for the first.
    alike : bool array [n]
        The piece and the one before it agree in all but addresses, and lie on one diagonal; False for the first.
    """
    same = [name for name in JOINED.names or () if name not in _ITS_OWN]
    # Most columns are constant; sorting by them would only cost time.
    varying = [name for name in same if np.any(pieces[name] != pieces[name][0])]
    diagonal = pieces["dst_origin"] - pieces["src_origin"]
    order = np.lexsort([pieces["src_origin"], diagonal, *(pieces[name] for name in varying)])
    pieces, diagonal = pieces[order], diagonal[order]
    alike = np.concatenate([[False], diagonal[1:] == diagonal[:-1]])
    for name in varying:
        alike[1:] &= pieces[name][1:] == pieces[name][:-1]
    touches = np.concatenate([[False], pieces["src_origin"][:-1] + pieces["length"][:-1] == pieces["src_origin"][1:]])
    return pieces, touches, alike
