"""Lower two caches to the table of slices: what one src rank sends to one dst rank. It knows no request and no kernel.

The steps: for each (layer, field) that both caches hold, walk the elected cells of one period (`_cells`) and join what
touches on both sides (`join`); gather the fields that may touch each other into clusters, join again across fields,
layers and regions, and fold pieces that repeat at even distances (`strided.fold`). Equal geometries and equal clusters
are lowered once, and shifted to each layer's own origin. A period is the least number of tokens after which both sides
are at the start of a block.
"""

import math
from collections.abc import Collection
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcompile import bridge, strided, topology
from kvcompile.cache import Cache
from kvcompile.errors import LayoutError
from kvcompile.layout import Field, Region
from kvcompile.table import JOINED, TABLE, join

__all__ = ["GroupPair", "arrange", "lower", "periods"]

Int64 = npt.NDArray[np.int64]
Pieces = npt.NDArray[np.void]

MAX_BLOCKS = 1 << 12
"""Blocks of either side in one period: beyond it two block sizes have no useful period."""

MAX_CELLS = 1 << 19
"""Cells that are walked, over all distinct geometries. Like the next two a bound on what a peer can ask for."""

MAX_PIECES = 1 << 21
"""Pieces that may touch each other, and are sorted together."""

MAX_ROWS = 1 << 19
"""Rows of a table."""


class GroupPair(NamedTuple):
    """A src group and a dst group that share a layer, elected or not."""

    src_group: int
    dst_group: int


class _Place(NamedTuple):
    """A field where it lies: its region and the cache around it."""

    cache: Cache
    region: Region
    field: Field
    geometry: int  # equal in one cache where all is equal that the cells' offsets depend on, and the group
    base: int  # of the region
    kind: tuple[int, int, int]  # group, buffer, bytes from one block id to the next

    @property
    def tokens(self) -> int:
        """Tokens of one block id that this rank holds; rows of state in a state group."""
        return self.region.kernel_blocks * self.field.tokens

    @property
    def dcp(self) -> int:
        """Context-parallel ranks that the tokens are divided among."""
        return self.cache.dcp_size if self.field.dcp_sharded else 1

    @property
    def dcp_place(self) -> int:
        return self.cache.tp_rank % self.dcp

    @property
    def stride(self) -> int:
        return self.kind[2]


class _Walked(NamedTuple):
    """The pieces of one geometry, relative to the regions' bases, and the src bytes they take in two periods."""

    number: int
    pieces: Pieces
    start: int
    stop: int


class _Pair(NamedTuple):
    """A field on both sides, what was walked of it, and the src addresses that it takes with ids 0, 1, 2, ..."""

    start: int
    stop: int  # of two periods
    src: _Place
    dst: _Place
    walked: _Walked


def periods(src_block_size: int, dst_block_size: int, state: bool) -> tuple[int, int]:
    """Return (src_step, dst_step), the blocks of each side in one period; a block of state is one unit."""
    if state:
        return 1, 1
    period = math.lcm(src_block_size, dst_block_size)
    return period // src_block_size, period // dst_block_size


def lower(
    src: Cache, dst: Cache, election: str, layers: Collection[str | int] | None = None, bridge_padding: bool = False
) -> tuple[Pieces, tuple[GroupPair, ...]]:
    """Lower a pair of caches to the rows of its table.

    Parameters
    ----------
    src, dst : Cache
        One rank of each side.
    election : str
        One of `topology.ELECTIONS`.
    layers : collection of layer names, optional
        Only these.
    bridge_padding : bool
        Copy padding along where that saves descriptors and harms nothing (`bridge`).

    Returns
    -------
    rows : structured array [rows] of `table.JOINED`
        In no order (`arrange`).
    pairs : tuple of GroupPair
        By dst group, then src group.

    Raises
    ------
    LayoutError
        A layer that both hold, with other fields, heads, cell bytes, tokens of a cell, rows of state or state flags;
        block sizes without a useful common period, or a table beyond what any deployment has.
    """
    src_places, dst_places = _places(src, layers), _places(dst, layers)
    walked: dict[tuple[int, int], _Walked] = {}
    found: dict[tuple[tuple[int, int, int], ...], list[_Pair]] = {}  # pieces of different kinds never join
    pairs: set[GroupPair] = set()
    cells = 0
    for layer in (layer for layer in dst_places if layer in src_places):
        for a, b in _match(layer, src_places[layer], dst_places[layer]):
            of = walked.get((a.geometry, b.geometry))
            if of is None:
                _check_same(a, b)
                pairs.add(_group_pair(a, b))
                walks = _cells(a, b, election, MAX_CELLS - cells)
                of = walked[a.geometry, b.geometry] = _walk(len(walked), walks, a.stride)
                cells += len(walks)
            if len(of.pieces):
                pair = _Pair(a.base + of.start, a.base + of.stop, a, b, of)
                found.setdefault((a.kind, b.kind), []).append(pair)
    folded: dict[tuple[tuple[int, ...], ...], _Folded] = {}
    for same_kind in found.values():
        for cluster in _clusters(same_kind, whole=bridge_padding):
            _fold_cluster(cluster, folded, bridge_padding)
    ordered = sorted(pairs, key=lambda pair: (pair.dst_group, pair.src_group))
    return _placed(folded.values()), tuple(ordered)


def arrange(rows: Pieces) -> Pieces:
    """Return rows as a table, by dst group, src group, src phase, dst phase, src buffer, src_origin."""
    keys = ("dst_origin", "src_origin", "src_buffer", "dst_phase", "src_phase", "src_group", "dst_group")
    rows = rows[np.lexsort([rows[key] for key in keys])]
    table = np.empty(len(rows), TABLE)
    for name in TABLE.names or ():
        table[name] = rows[name]
    return table


def _places(cache: Cache, layers: Collection[str | int] | None) -> dict[str | int, dict[str, _Place]]:
    """Return the fields of a cache by layer and name; kept with the cache, which meets many peers."""
    places: dict[str | int, dict[str, _Place]] | None = cache.__dict__.get("_places")
    if places is None:
        places = {}
        numbers: dict[tuple[object, ...], int] = {}
        for region in cache.regions:
            stride = region.block_stride * region.kernel_blocks
            for field in region.fields:
                geometry = (field, region.block_stride, region.kernel_blocks, region.group)
                number = numbers.setdefault(geometry, len(numbers))
                kind = (region.group, cache.buffer_of(region.base + field.offset), stride)
                place = _Place(cache, region, field, number, region.base, kind)
                places.setdefault(region.layer, {})[field.name] = place
        cache.__dict__["_places"] = places
    return places if layers is None else {layer: places[layer] for layer in places if layer in layers}


def _match(layer: str | int, src: dict[str, _Place], dst: dict[str, _Place]) -> list[tuple[_Place, _Place]]:
    """Pair the fields of a layer by name."""
    if src.keys() != dst.keys():
        names = f"src has fields {sorted(src)!r:.200}, dst has {sorted(dst)!r:.200}"
        raise LayoutError(f"layer {layer!r:.80}: {names}, expected the same names")
    return [(a, dst[name]) for name, a in src.items()]


def _check_same(src: _Place, dst: _Place) -> None:
    """Refuse two fields of one layer and name that are not the same tensor."""
    a, b = src.field, dst.field
    state = src.cache.groups[src.region.group].state, dst.cache.groups[dst.region.group].state
    for what, values in (
        ("state", state),
        ("heads", (a.heads, b.heads)),
        ("cell_nbytes", (a.cell_nbytes, b.cell_nbytes)),
        ("tokens_per_cell", (a.tokens_per_cell, b.tokens_per_cell)),
        ("rows of state (tokens)", (a.tokens, b.tokens) if all(state) else (0, 0)),
    ):
        if values[0] != values[1]:
            given = f"{what} is {values[0]} on src and {values[1]} on dst"
            if what == "heads" and a.heads * a.cell_nbytes == b.heads * b.cell_nbytes:
                given += " (of equal bytes in all: heads lie inside a cell, which cannot be cut)"
            raise LayoutError(f"layer {src.region.layer!r:.80}, field {a.name!r:.80}: {given}, expected the same")


def _group_pair(src: _Place, dst: _Place) -> GroupPair:
    groups = src.cache.groups[src.region.group], dst.cache.groups[dst.region.group]
    blocks = periods(groups[0].block_size, groups[1].block_size, groups[0].state)
    if max(blocks) > MAX_BLOCKS:
        raise LayoutError(
            f"layer {src.region.layer!r:.80}: blocks of {groups[0].block_size} and {groups[1].block_size} tokens make "
            f"periods of {blocks[0]} and {blocks[1]} blocks, expected at most {MAX_BLOCKS}"
        )
    return GroupPair(src.region.group, dst.region.group)


def _walk(number: int, cells: Pieces, stride: int) -> _Walked:
    """Join cells, which lie so many bytes from one src block id to the next."""
    pieces = join(cells)
    if not len(pieces):
        return _Walked(number, pieces, 0, 0)
    begin = pieces["src_origin"] + pieces["src_phase"].astype(np.uint64) * np.uint64(stride)
    end = int((begin + pieces["length"]).max()) + int(pieces["src_step"][0]) * stride
    return _Walked(number, pieces, int(begin.min()), end)


def _cells(src: _Place, dst: _Place, election: str, most: int) -> Pieces:
    """Walk the cells of one period that this src rank is elected to send; origins are relative to the regions' bases.

    Token t of a context-parallel field is on place ``t // interleave % size``, there number
    ``t // (interleave*size) * interleave + t % interleave`` (design.md section 3).
    """
    heads, part, parts = _elected_heads(src, dst, election)
    period = math.lcm(src.tokens * src.dcp, dst.tokens * dst.dcp)
    per_cell = src.field.tokens_per_cell
    if len(heads) * (period // per_cell) > most:
        raise LayoutError(
            f"layer {src.region.layer!r:.80}, field {src.field.name!r:.80}: blocks of {src.tokens * src.dcp} and "
            f"{dst.tokens * dst.dcp} tokens make {len(heads) * (period // per_cell)} cells in a period, expected at "
            f"most {most}, which is what other fields have left of {MAX_CELLS}"
        )
    token = np.arange(0, period if len(heads) else 0, per_cell, dtype=np.int64)
    for place in (src, dst):
        if place.dcp > 1:
            token = token[token // place.cache.dcp_interleave % place.dcp == place.dcp_place]
    cells = np.zeros((len(heads), len(token)), JOINED)
    cells["length"], cells["count"] = src.field.cell_nbytes, 1
    cells["part"], cells["parts"] = part[:, None], parts[:, None]
    for side, place in (("src", src), ("dst", dst)):
        interleave = place.cache.dcp_interleave
        local = token if place.dcp == 1 else token // (interleave * place.dcp) * interleave + token % interleave
        phase, local = np.divmod(local, place.tokens)
        kernel_block, local = np.divmod(local, place.field.tokens)
        local_head = heads - place.cache.shard(place.field)[0]
        in_block = kernel_block * place.region.block_stride + local // per_cell * place.field.token_stride
        offset = place.field.offset + local_head[:, None] * place.field.head_stride + in_block
        cells[f"{side}_phase"] = phase
        cells[f"{side}_origin"] = offset.astype(np.uint64)
        cells[f"{side}_step"] = period // (place.tokens * place.dcp)
        cells[f"{side}_stride"] = place.stride
    return cells.ravel()


def _elected_heads(src: _Place, dst: _Place, election: str) -> tuple[Int64, Int64, Int64]:
    """Return the heads that this src rank sends to this dst rank, ascending, and its part of how many parts."""
    src_start, src_stop = src.cache.shard(src.field)
    dst_start, dst_stop = dst.cache.shard(dst.field)
    held = range(max(src_start, dst_start), min(src_stop, dst_stop))
    if len(held) > MAX_CELLS:
        raise LayoutError(
            f"layer {src.region.layer!r:.80}, field {src.field.name!r:.80}: both ranks hold {len(held)} heads, "
            f"expected at most {MAX_CELLS}"
        )
    heads = np.arange(held.start, held.stop, dtype=np.int64)
    first, step, count = topology.candidates(
        heads, src.field.heads, src.cache.tp_size, src.field.replicated, src.dcp_place, src.dcp
    )
    consumer = topology.Consumer(
        dst.cache.tp_rank, dst.cache.tp_size, dst.field.replicated, dst.cache.dp_rank, dst.cache.dp_size
    )
    first, parts = topology.elect(election, heads, src.field.heads, first, step, count, src.cache.tp_size, consumer)
    part = (src.cache.tp_rank - first) // step
    mine = (part >= 0) & (part < parts)
    return heads[mine], part[mine], parts[mine]


def _clusters(same_kind: list[_Pair], whole: bool) -> list[list[_Pair]]:
    """Split pairs of one kind where nothing of theirs can touch on src: there their addresses leave a gap."""
    clusters: list[list[_Pair]] = []
    reach = -1
    for pair in sorted(same_kind, key=itemgetter(0, 1)):
        if pair.start > reach and not (whole and clusters):
            clusters.append([])
        clusters[-1].append(pair)
        reach = max(reach, pair.stop)
    return clusters


class _Folded(NamedTuple):
    """The rows of a cluster, relative to its first regions' bases, and everywhere that an equal cluster stands."""

    rows: Pieces
    places: list[tuple[int, ...]]  # src, dst base; src group, buffer; dst group, buffer


def _fold_cluster(
    cluster: list[_Pair], folded: dict[tuple[tuple[int, ...], ...], _Folded], bridge_padding: bool
) -> None:
    """Join and fold the pieces of a cluster, unless that was done for an equal one."""
    _, _, src, dst, _ = cluster[0]
    shifts = tuple([(walked.number, a.base - src.base, b.base - dst.base) for _, _, a, b, walked in cluster])
    # Bridging depends on what else lies around.
    key: tuple[tuple[int, ...], ...] = (*shifts, (src.base, dst.base)) if bridge_padding else shifts
    if key not in folded:
        if sum(len(pair.walked.pieces) for pair in cluster) > MAX_PIECES:
            raise LayoutError(
                f"layer {src.region.layer!r:.80} and {len(cluster) - 1} more fields whose memory hangs together: over "
                f"{MAX_PIECES} pieces in a period, expected fewer"
            )
        pieces = [_shift(pair.walked.pieces, *shift) for pair, (_, *shift) in zip(cluster, shifts, strict=True)]
        for owner, of_field in enumerate(pieces):
            of_field["owner"] = owner
        joined = pieces[0] if len(pieces) == 1 else join(np.concatenate(pieces))
        if bridge_padding:
            joined = _shift(joined, src.base, dst.base)
            joined = bridge.bridge(joined, src.cache, dst.cache, src.region.group, dst.region.group)
            joined = _shift(joined, -src.base, -dst.base)
        folded[key] = _Folded(strided.fold(joined), [])
    folded[key].places.append((src.base, dst.base, *src.kind[:2], *dst.kind[:2]))


def _placed(folded: Collection[_Folded]) -> Pieces:
    """Return the rows of all clusters where they stand, with their groups and buffers."""
    size = sum(len(rows) * len(places) for rows, places in folded)
    if size > MAX_ROWS:
        raise LayoutError(f"the table of these caches has {size} rows, expected at most {MAX_ROWS}")
    table = np.empty(size, JOINED)
    at = 0
    for rows, places in folded:
        here = table[at : at + len(rows) * len(places)]
        at += len(here)
        here[:] = np.tile(rows, len(places))
        src_base, dst_base, *rest = (
            np.repeat(np.array(column, np.uint64), len(rows)) for column in zip(*places, strict=True)
        )
        here["src_origin"] += src_base
        here["dst_origin"] += dst_base
        for name, column in zip(("src_group", "src_buffer", "dst_group", "dst_buffer"), rest, strict=True):
            here[name] = column
    return table


def _shift(pieces: Pieces, src: int, dst: int) -> Pieces:
    shifted: Pieces = pieces.copy()
    shifted["src_origin"] += np.uint64(src % 2**64)
    shifted["dst_origin"] += np.uint64(dst % 2**64)
    return shifted
