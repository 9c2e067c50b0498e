"""One rank's whole KV cache: its values fit together, or it cannot be made. It pairs nothing and moves nothing."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from kvcompile import handshake, overlap, overlays, topology
from kvcompile import tensors as tensors_
from kvcompile.errors import LayoutError
from kvcompile.layout import Buffer, Field, Group, Region, Value

__all__ = ["Cache", "merge"]

MAX_INTERVALS = 1 << 18
"""Contiguous pieces in one block, summed over a cache's distinct geometries: a bound on what validation may cost."""

MAX_ITEMS = {"regions": 1 << 14, "groups": 1 << 10, "buffers": 1 << 16}
"""Far beyond any model's: bounds on what a peer can make this side look at."""

MAX_CHUNKS = 1 << 20
"""Registered pieces of all buffers."""


class Cache(Value, frozen=True, dict=True):
    """One rank's whole cache: its regions, the groups they belong to, and the rank's place.

    Parameters
    ----------
    regions : sequence of Region
    groups : sequence of Group
    buffers : sequence of Buffer, optional
        Registered spans, disjoint; kept in order of address. Default: the regions' own spans, overlapping ones merged.
    tp_rank, tp_size : int
        Place in tensor parallelism; decides the heads this rank holds.
    dcp_size, dcp_interleave : int
        Decode context parallelism inside tensor parallelism: ``dcp_size`` divides ``tp_size``, this rank's place is
        ``tp_rank % dcp_size``. Token t of a ``dcp_sharded`` field is on place ``(t // dcp_interleave) % dcp_size``; a
        rank keeps its tokens in order, packed.
    dp_rank, dp_size : int
        Place in data parallelism; the balanced election spreads consumers by it.
    instance : str
        Drawn anew at each registration by an engine; part of `digest`, never given by hand.

    Raises
    ------
    LayoutError
        Two cells on one byte, bytes outside every buffer, an end at or past 2**64, an unknown group, sizes that do not
        agree, the same (layer, field) twice, a rank outside its size, or a value of the wrong kind.

    Notes
    -----
    Regions may overlap: packed rows, groups that overlay each other. Memory that several layers of a group share is
    declared once, under its owner's name; that is not refused here, since a src that reads it twice harms nobody: on
    dst, `prove` names it as duplicated.
    """

    regions: Sequence[Region]
    groups: Sequence[Group]
    buffers: Sequence[Buffer] = None  # type: ignore[assignment]  # never None once made
    tp_rank: int = 0
    tp_size: int = 1
    dcp_size: int = 1
    dcp_interleave: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    instance: str = ""

    def __post_init__(self) -> None:
        self.sequence("regions", Region)
        self.sequence("groups", Group)
        self._check_count("regions")
        self._check_count("groups")
        self.integers(1, "tp_size", "dcp_size", "dcp_interleave", "dp_size", most=2**31 - 1)
        self.integers(0, "tp_rank", most=self.tp_size - 1)
        self.integers(0, "dp_rank", most=self.dp_size - 1)
        if self.tp_size % self.dcp_size:
            self.refuse("dcp_size", self.dcp_size, f"a divisor of tp_size {self.tp_size}")
        if not isinstance(self.instance, str) or len(self.instance) > 64:
            self.refuse("instance", self.instance, "a string of at most 64 characters")
        self.text("instance")
        self._check_groups()
        self._check_cells()
        self._check_buffers()

    def shard(self, field: Field) -> tuple[int, int]:
        """Return the range of heads of a field that this rank holds."""
        return topology.shard(field.heads, self.tp_rank, self.tp_size, field.replicated)

    def span(self, region: Region) -> tuple[int, int]:
        """Return the range of addresses from a region's first to its last payload byte."""
        last = region.base + (region.num_blocks - 1) * region.block_stride
        return (
            region.base + min(field.offset for field in region.fields),
            last + max(self._extent(field) for field in region.fields),
        )

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """The `span` of each region."""
        return [self.span(region) for region in self.regions]

    def buffer_of(self, address: int) -> int:
        """Return the index of the last buffer that starts at or below an address, -1 if none does."""
        return bisect_right(self._bases, address) - 1

    def bound(self, group: int) -> int | None:
        """Return what every block id of a group lies below, None for a group without regions."""
        return self._bounds.get(group)

    def fold(self, field: Field) -> tuple[list[tuple[int, int]], int]:
        """Return what is left to walk of a field on this rank, and the contiguous bytes there (`overlap.fold`)."""
        start, stop = self.shard(field)
        return overlap.fold(field.head_stride, stop - start, field.token_stride, field.cells, field.cell_nbytes)

    def payload(self, regions: Sequence[Region], origin: int, stride: int) -> overlap.Int64:
        """Return the bytes that regions take, as `overlap.pieces` relative to ``origin``.

        ``stride`` is the bytes per block id of each of the regions that has several.
        """
        found = []
        for region in regions:
            for field in region.fields:
                axes, nbytes = self.fold(field)
                axes = [*axes, (region.block_stride, min(region.kernel_blocks, region.num_blocks))]
                start = overlap.intervals(field.offset + region.base - origin, axes)
                count = max(region.num_blocks // region.kernel_blocks, 1)
                found.append(overlap.pieces(start, np.full(len(start), nbytes, np.int64), stride, count))
        return np.concatenate(found)

    @cached_property
    def overlays(self) -> tuple[int, ...]:
        """For each group the lowest group that it shares bytes with, directly or through others; itself if none.

        Groups that overlay each other use one id space: an id belongs to one of them at a time. Exact where the
        regions' strides per block id agree; regions of two groups with other strides count as sharing where their
        spans overlap.
        """
        return overlays.owners(self)

    def at_rank(self, tp_rank: int) -> "Cache":
        """Describe another rank of the same deployment, with made-up bases: this rank's own.

        For proofs at a worker that sees only itself; no descriptor may be built with the result.

        Raises
        ------
        LayoutError
            A rank outside ``tp_size``, or one that holds another number of heads: its strides are not known here.
        """
        if isinstance(tp_rank, int) and 0 <= tp_rank < self.tp_size:  # else the constructor says what is wrong
            for region in self.regions:
                for field in region.fields:
                    start, stop = self.shard(field)
                    first, last = topology.shard(field.heads, tp_rank, self.tp_size, field.replicated)
                    if stop - start != last - first:
                        raise LayoutError(
                            f"layer {region.layer!r:.80}, field {field.name!r:.80}: rank {tp_rank} holds "
                            f"{last - first} heads, expected {stop - start}, as rank {self.tp_rank}"
                        )
        return msgspec.structs.replace(self, tp_rank=tp_rank, instance="")

    def to_bytes(self) -> bytes:
        """Encode for the handshake: msgpack, with a version."""
        return handshake.pack(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Cache":
        """Decode what `to_bytes` made.

        Raises
        ------
        HandshakeError
            Anything wrong: truncated, extended, too long, not msgpack, another version, or an invalid cache.
        """
        return handshake.unpack(data, cls)

    @classmethod
    def from_torch(
        cls,
        tensors: Mapping[str | int, Any],
        *,
        fields: Any,
        groups: Sequence[Group],
        group: int | Mapping[str | int, int] = 0,
        dims: Any = None,
        kernel_blocks: int | Mapping[str | int, int] = 1,
        buffers: Sequence[Buffer] | None = None,
        **places: Any,
    ) -> "Cache":
        """Describe an engine's own tensors: strides give the addresses, arrangements the meaning.

        Parameters
        ----------
        tensors : mapping
            Layer name to tensor, or to a sequence of tensors (K and V; convolution and SSM state): torch, NumPy or CuPy
            arrays, or anything with ``__dlpack__``; on any device. Views, slices and padded strides are taken as found.
        fields : Arrangement, or a sequence or mapping of them
            What a tensor holds, and the order of its axes: a builder's result (`kvcompile.fields`). A sequence where a
            layer has several tensors (one arrangement of as many parts is split among them); a mapping by layer name.
        groups : sequence of Group
        group : int or mapping by layer name
            The group of each layer.
        dims : str, or a sequence or mapping of them, optional
            The axes that each dimension of a tensor's shape stands for, in the arrangement's letters, with spaces
            between: ``"B H N PC"`` is vLLM's [blocks, heads, tokens, K and V], ``"BN H C"`` SGLang's [slots, heads,
            elements], ``1`` a dimension of one entry. Dimensions that share a letter are dense together
            (``"B PH PN PC"``: NVFP4 pages). By default the arrangement's own order.
        kernel_blocks : int or mapping by layer name
            Kernel blocks (the tensor's first axis) of one block id.
        buffers : sequence of Buffer, optional
            Default: the tensors' storages.
        **places
            ``tp_rank``, ``tp_size``, ``dcp_size``, ``dcp_interleave``, ``dp_rank``, ``dp_size``.

        Raises
        ------
        LayoutError
            A shape that is not the arrangement's, an order that the strides contradict; and as of `Cache`.
        """
        ranks = {name: places[name] for name in ("tp_rank", "tp_size") if name in places}
        regions, memories = tensors_.regions_of(tensors, fields, dims, group, kernel_blocks, **ranks)
        found = tensors_.buffers_of(memories) if buffers is None else buffers
        return cls(tuple(regions), tuple(groups), tuple(found), **places)

    @cached_property
    def digest(self) -> str:
        """sha256 in hex of everything, ``instance`` included: it changes at every registration."""
        return handshake.digest(self.to_bytes())

    @cached_property
    def shape_digest(self) -> str:
        """sha256 in hex of all but ``instance`` and the buffers' bases: equal where only addresses differ."""
        order, buffers = self.buffer_order, self.buffers
        number = {index: number for number, index in enumerate(order)}
        shapes = []
        for region, (start, _) in zip(self.regions, self.spans, strict=True):
            index = self.buffer_of(start)
            shapes.append((number[index], (region.base - buffers[index].base) % 2**64, _shape(region)))
        sizes = [(buffers[index].nbytes, buffers[index].chunk_nbytes) for index in order]
        places = (self.tp_rank, self.tp_size, self.dcp_size, self.dcp_interleave, self.dp_rank, self.dp_size)
        return handshake.digest(handshake.pack((shapes, self.groups, sizes, places)))

    @cached_property
    def buffer_order(self) -> tuple[int, ...]:
        """Indices of the buffers, in the order in which the regions first use them; unused ones last, by size."""
        used = dict.fromkeys(self.buffer_of(start) for start, _ in self.spans)
        rest = [index for index in range(len(self.buffers)) if index not in used]
        return (*used, *sorted(rest, key=lambda index: self.buffers[index].nbytes))

    @cached_property
    def _bounds(self) -> dict[int, int]:
        least: dict[int, int] = {}
        for region in self.regions:
            blocks = region.num_blocks // region.kernel_blocks
            least[region.group] = min(blocks, least.get(region.group, blocks))
        return least

    @cached_property
    def _bases(self) -> list[int]:
        return [buffer.base for buffer in self.buffers]

    def _extent(self, field: Field) -> int:
        start, stop = self.shard(field)
        heads = (stop - start - 1) * field.head_stride
        return field.offset + heads + (field.cells - 1) * field.token_stride + field.cell_nbytes

    def _check_count(self, name: str) -> None:
        count = len(getattr(self, name))
        if count > MAX_ITEMS[name]:
            raise LayoutError(f"Cache: {name} has {count} items, expected at most {MAX_ITEMS[name]}")

    def _check_groups(self) -> None:
        seen = set()
        for region in self.regions:
            if region.group >= len(self.groups):
                region.refuse("group", region.group, f"a number below {len(self.groups)}, the groups of this cache")
            group = self.groups[region.group]
            if group.state and region.kernel_blocks != 1:
                region.refuse("kernel_blocks", region.kernel_blocks, "1 in a state group")
            for field in region.fields:
                local = region.kernel_blocks * field.tokens
                tokens = local * (self.dcp_size if field.dcp_sharded else 1)
                where = f"layer {region.layer!r:.80}, field {field.name!r:.80}"
                if group.state and (field.dcp_sharded or field.tokens_per_cell != 1):
                    given = f"dcp_sharded {field.dcp_sharded}, tokens_per_cell {field.tokens_per_cell}"
                    raise LayoutError(f"{where}: {given}, expected False and 1 in a state group")
                if not group.state and tokens != group.block_size:
                    raise LayoutError(
                        f"{where}: {region.kernel_blocks} kernel block(s) of {field.tokens} tokens on "
                        f"{tokens // local} context-parallel rank(s) make {tokens} tokens, expected block_size "
                        f"{group.block_size} of group {region.group}"
                    )
                if field.dcp_sharded and local % self.dcp_interleave:
                    raise LayoutError(
                        f"{where}: a block holds {local} tokens of a rank, expected a multiple of dcp_interleave "
                        f"{self.dcp_interleave}"
                    )
                if (region.layer, field.name) in seen:
                    raise LayoutError(f"{where}: declared twice, expected once")
                seen.add((region.layer, field.name))

    def _check_cells(self) -> None:
        checked = set()
        budget = MAX_INTERVALS
        for region in self.regions:
            geometry = (region.block_stride, region.num_blocks, region.fields)
            if geometry in checked:
                continue
            checked.add(geometry)
            # Only offsets within a block may be large here; the base was bounded at 2**64 and is added below.
            if self.span(region)[1] - region.base >= 2**63:
                region.refuse(
                    "block_stride", region.block_stride, f"a span below 2**63 bytes for {region.num_blocks} blocks"
                )
            starts, sizes = [], []
            for field in region.fields:
                axes, nbytes = self.fold(field)
                budget -= int(np.prod([count for _, count in axes], dtype=object))
                if budget < 0:
                    region.refuse(
                        "fields", field.name, f"at most {MAX_INTERVALS} contiguous pieces in the blocks of a cache"
                    )
                starts.append(overlap.intervals(field.offset, axes))
                sizes.append(np.full(len(starts[-1]), nbytes, np.int64))
            start, size = np.concatenate(starts), np.concatenate(sizes)
            # A zero or short stride needs no sweep: a block would lie on its own successor.
            short = region.num_blocks > 1 and bool(np.any(size > region.block_stride))
            if short or overlap.collide(overlap.pieces(start, size, region.block_stride, region.num_blocks)):
                raise LayoutError(
                    f"layer {region.layer!r:.80}: two cells of its region share a byte, expected each in one cell: "
                    f"fields {[field.name for field in region.fields]!r:.200}, block_stride {region.block_stride}, "
                    f"{region.num_blocks} blocks"
                )

    def _check_buffers(self) -> None:
        spans = self.spans
        for region, (_, end) in zip(self.regions, spans, strict=True):
            if end >= 2**64:
                region.refuse("base", region.base, f"an end below 2**64, got {end}")
        if self.buffers is None:
            self.put("buffers", tuple(Buffer(start, end - start) for start, end in merge(spans)))
        self.sequence("buffers", Buffer)
        self._check_count("buffers")
        chunks = sum(-(-buffer.nbytes // buffer.chunk_nbytes) for buffer in self.buffers if buffer.chunk_nbytes)
        if chunks > MAX_CHUNKS:
            raise LayoutError(f"Cache: chunk_nbytes of the buffers make {chunks} chunks, expected at most {MAX_CHUNKS}")
        self.put("buffers", tuple(sorted(self.buffers, key=lambda buffer: buffer.base)))
        for below, above in zip(self.buffers, self.buffers[1:]):  # noqa: B905 (neighbours)
            if below.end > above.base:
                self.refuse("buffers", above, f"disjoint spans, but {below} reaches into it")
        for region, (start, end) in zip(self.regions, spans, strict=True):
            index = self.buffer_of(start)
            if index < 0 or end > self.buffers[index].end:
                region.refuse("base", region.base, f"its payload [{start}, {end}) inside one buffer of the cache")


def merge(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge spans that overlap into their union; touching ones stay apart. Half-open ranges of addresses, ascending."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _shape(region: Region) -> tuple[Any, ...]:
    return region.layer, region.group, region.block_stride, region.num_blocks, region.fields, region.kernel_blocks
