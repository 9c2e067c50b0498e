"""Lower two caches to the table of slices: what one src rank sends to one dst rank. It knows no request and no kernel.

The steps: for each (layer, field) that both caches hold, walk the elected cells of one period (`_cells`), join the ones
that touch on both sides (`_join`), shift the result to each layer's own origin, and join again across fields, layers
and regions. A period is the least number of tokens after which both sides are at the start of a block.
"""

import math
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcompile import topology
from kvcompile.cache import Cache
from kvcompile.errors import LayoutError
from kvcompile.layout import Field, Region

__all__ = ["TABLE", "GroupPair", "lower", "periods"]

Int64 = npt.NDArray[np.int64]

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
    ]
)
"""One row a slice: for every period q, ``length`` bytes from ``src_origin + src_ids[q*src_step + src_phase]*src_stride``
to ``dst_origin + dst_ids[q*dst_step + dst_phase]*dst_stride``. Bytes; strides are per block id."""

MAX_CELLS = 1 << 24
"""Cells in one period of one field: beyond it the block sizes have no useful common period, and lowering would not end."""

_JOINED = np.dtype([*TABLE.descr, ("src_buffer", np.int64), ("dst_buffer", np.int64)])


class GroupPair(NamedTuple):
    """A src group and a dst group that share a layer, elected or not."""

    src_group: int
    dst_group: int


class _Place(NamedTuple):
    """A field where it lies: its region and the cache around it."""

    cache: Cache
    region: Region
    field: Field

    @property
    def key(self) -> tuple[object, ...]:
        """All that the cells' offsets depend on."""
        return self.field, self.region.block_stride, self.region.kernel_blocks

    @property
    def rows(self) -> int:
        """Cells along the token axis in one block id."""
        return self.region.kernel_blocks * self.field.tokens


def periods(src_block_size: int, dst_block_size: int, state: bool) -> tuple[int, int]:
    """Return (src_step, dst_step), the blocks of each side in one period; a block of state is one unit."""
    if state:
        return 1, 1
    period = math.lcm(src_block_size, dst_block_size)
    return period // src_block_size, period // dst_block_size


def lower(
    src: Cache, dst: Cache, election: str, layers: Collection[str | int] | None
) -> tuple[npt.NDArray[np.void], tuple[GroupPair, ...]]:
    """Lower a pair of caches to its table.

    Parameters
    ----------
    src, dst : Cache
        One rank of each side.
    election : str
        One of `topology.ELECTIONS`.
    layers : collection of layer names, optional
        Only these.

    Returns
    -------
    table : structured array [rows] of `TABLE`
        In the order dst group, src group, src phase, dst phase, src buffer, src_origin.
    pairs : tuple of GroupPair
        By dst group, then src group.

    Raises
    ------
    LayoutError
        A layer that both hold, with other fields, heads, cell bytes, rows of state or state flags.
    """
    src_places, dst_places = _places(src, layers), _places(dst, layers)
    shared = [layer for layer in dst_places if layer in src_places]
    lowered: dict[tuple[object, ...], npt.NDArray[np.void]] = {}  # each distinct geometry once
    found = []
    pairs = set()
    for layer in shared:
        for a, b in _match(layer, src_places[layer], dst_places[layer]):
            pairs.add(GroupPair(a.region.group, b.region.group))
            key = (a.key, b.key)
            if key not in lowered:
                lowered[key] = _join(_cells(a, b, election))
            found.append(_place(lowered[key], a, b))
    table = _join(np.concatenate(found)) if found else np.empty(0, _JOINED)
    keys = ("dst_origin", "src_origin", "src_buffer", "dst_phase", "src_phase", "src_group", "dst_group")
    table = table[np.lexsort([table[key] for key in keys])]
    ordered = sorted(pairs, key=lambda pair: (pair.dst_group, pair.src_group))
    return table[list(TABLE.names or ())].astype(TABLE), tuple(ordered)


def _places(cache: Cache, layers: Collection[str | int] | None) -> dict[str | int, dict[str, _Place]]:
    places: dict[str | int, dict[str, _Place]] = {}
    for region in cache.regions:
        if layers is None or region.layer in layers:
            for field in region.fields:
                places.setdefault(region.layer, {})[field.name] = _Place(cache, region, field)
    return places


def _match(layer: str | int, src: dict[str, _Place], dst: dict[str, _Place]) -> list[tuple[_Place, _Place]]:
    """Pair the fields of a layer by name; what is paired must be the same tensor."""
    if set(src) != set(dst):
        raise LayoutError(
            f"layer {layer!r}: src has fields {sorted(src)}, dst has {sorted(dst)}, expected the same names"
        )
    for name, a in src.items():
        b = dst[name]
        state = a.cache.groups[a.region.group].state, b.cache.groups[b.region.group].state
        values = {
            "state": state,
            "heads": (a.field.heads, b.field.heads),
            "cell_nbytes": (a.field.cell_nbytes, b.field.cell_nbytes),
            "rows of state (tokens)": (a.field.tokens, b.field.tokens) if all(state) else (0, 0),
        }
        for what, (given, expected) in values.items():
            if given != expected:
                raise LayoutError(
                    f"layer {layer!r}, field {name!r}: {what} is {given} on src and {expected} on dst, expected the same"
                )
    return [(a, dst[name]) for name, a in src.items()]


def _cells(src: _Place, dst: _Place, election: str) -> npt.NDArray[np.void]:
    """Walk the cells of one period that this src rank is elected to send; origins are relative to the regions' bases."""
    field = src.field
    heads = _elected_heads(src, dst, election)
    # A period of state is its rows; of tokens, the common period of the two block sizes.
    tokens = math.lcm(src.rows, dst.rows)
    if len(heads) * tokens > MAX_CELLS:
        raise LayoutError(
            f"layer {src.region.layer!r}, field {field.name!r}: blocks of {src.rows} and {dst.rows} tokens make "
            f"{len(heads) * tokens} cells in a period, expected at most {MAX_CELLS}"
        )
    token = np.arange(tokens, dtype=np.int64)
    cells = np.zeros((len(heads), tokens), _JOINED)
    cells["length"] = field.cell_nbytes
    for side, place in (("src", src), ("dst", dst)):
        phase, row = np.divmod(token, place.rows)
        kernel_block, row = np.divmod(row, place.field.tokens)
        local = heads - place.cache.shard(place.field)[0]
        in_block = kernel_block * place.region.block_stride + row * place.field.token_stride
        offset = place.field.offset + local[:, None] * place.field.head_stride + in_block
        cells[f"{side}_phase"] = phase
        cells[f"{side}_origin"] = offset.astype(np.uint64)
        cells[f"{side}_step"] = tokens // place.rows
        cells[f"{side}_stride"] = place.region.block_stride * place.region.kernel_blocks
    return cells.ravel()


def _elected_heads(src: _Place, dst: _Place, election: str) -> Int64:
    """Return the heads that this src rank sends to this dst rank, ascending."""
    src_start, src_stop = src.cache.shard(src.field)
    dst_start, dst_stop = dst.cache.shard(dst.field)
    heads = np.arange(max(src_start, dst_start), min(src_stop, dst_stop), dtype=np.int64)
    sender = topology.elected(
        heads,
        src.field.heads,
        election,
        src.cache.tp_size,
        src.field.replicated,
        dst.cache.tp_rank,
        dst.cache.tp_size,
        dst.field.replicated,
        dst.cache.dp_rank,
        dst.cache.dp_size,
    )
    return heads[sender == src.cache.tp_rank]


def _place(pieces: npt.NDArray[np.void], src: _Place, dst: _Place) -> npt.NDArray[np.void]:
    """Shift pieces to the regions' own bases."""
    placed = pieces.copy()
    for side, place in (("src", src), ("dst", dst)):
        placed[f"{side}_origin"] += np.uint64(place.region.base)
        placed[f"{side}_group"] = place.region.group
        placed[f"{side}_buffer"] = place.cache.buffer_of(place.cache.span(place.region)[0])
    return placed


def _join(pieces: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Join the pieces that touch on both sides, where all else is equal.

    Law: pieces that touch on both sides lie on one diagonal (dst - src), so after sorting by diagonal and src they are
    neighbours, whatever lies between them in memory.
    """
    if len(pieces) < 2:
        return pieces
    same = [name for name in _JOINED.names or () if name not in ("src_origin", "dst_origin", "length")]
    diagonal = pieces["dst_origin"] - pieces["src_origin"]
    order = np.lexsort([pieces["src_origin"], diagonal, *(pieces[name] for name in same)])
    pieces, diagonal = pieces[order], diagonal[order]
    before, after = pieces[:-1], pieces[1:]
    opens = (diagonal[1:] != diagonal[:-1]) | (before["src_origin"] + before["length"] != after["src_origin"])
    for name in same:
        opens |= before[name] != after[name]
    first = np.flatnonzero(np.concatenate([[True], opens]))
    joined = pieces[first]
    joined["length"] = np.add.reduceat(pieces["length"], first)
    return joined
