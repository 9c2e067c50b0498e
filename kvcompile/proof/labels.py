"""Where each byte of each field of each rank lies, as arrays: design.md section 3 once more, for proofs.

It shares no arithmetic with the lowering and knows no table, no election and no descriptors. A *label* is
(tensor, head, cell, byte): a tensor is a (layer, field) of the model, heads count over the model, cells along the token
axis. Label -> address is a formula; address -> label is a search among *segments*, the contiguous cells of one head.
"""

from collections.abc import Callable, Sequence
from math import gcd
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcompile.cache import Cache
from kvcompile.errors import LayoutError
from kvcompile.layout import Field, Region

__all__ = [
    "Fields",
    "Segments",
    "Tensor",
    "address",
    "blocks",
    "distinct",
    "expand",
    "fields",
    "joined",
    "local_cell",
    "model_cell",
    "room",
    "segments",
    "touches",
]

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
Bool = npt.NDArray[np.bool_]

CHUNK = 1 << 22
"""Items of the largest intermediate array of a search that compares everything with everything."""


MAX_SEGMENTS = 1 << 23
"""Contiguous cells of the heads in one block of all layers of a rank: what bounds the memory of a proof."""


class Tensor(NamedTuple):
    """What makes a field of src and one of dst the same tensor; fields that differ in any of it are not."""

    layer: str | int
    field: str
    tokens: int  # of a cell
    heads: int
    nbytes: int  # of a cell
    state: bool
    rows: int | None  # of state


class Fields(NamedTuple):
    """All fields of all ranks of one side, one item each: int64 arrays [n]; sizes in bytes unless said otherwise."""

    rank: Int64
    region: Int64  # of its rank
    tensor: Int64  # number of the (layer, field) in the model; equal on both sides
    group: Int64
    base: Int64  # address of the first cell of block 0, as wrapped around
    block_stride: Int64  # of kernel blocks
    kernel_blocks: Int64
    blocks: Int64  # whole blocks, in ids
    first_head: Int64
    heads: Int64  # that this rank holds
    cells: Int64  # along the token axis of a kernel block
    nbytes: Int64  # of a cell
    head_stride: Int64
    cell_stride: Int64
    places: Int64  # of decode context parallelism: ranks among which the cells are dealt
    interleave: Int64  # cells dealt at a time
    place: Int64
    unit: Int64  # neighbouring cells that are contiguous here and in the model
    tokens: Int64  # of a cell

    @property
    def rows(self) -> Int64:
        """Cells along the token axis of a block that this rank holds."""
        return self.kernel_blocks * self.cells


class Segments(NamedTuple):
    """Contiguous cells of one head in one block: arrays [n]."""

    field: Int64  # index into Fields
    head: Int64  # of the model
    cell: Int64  # the first one's number in the block, as the rank holds them
    nbytes: Int64
    start: UInt64  # address in block 0
    stride: UInt64  # from block id to block id

    @property
    def end(self) -> UInt64:
        """Addresses after the last bytes, in block 0."""
        return self.start + self.nbytes.astype(np.uint64)

    def at(self, block: int) -> "Segments":
        """Return the segments of another block, ordered by address."""
        start = self.start + np.uint64(block) * self.stride
        return self._replace(start=start).pick(np.argsort(start, kind="stable"))

    def pick(self, index: Int64 | Bool) -> "Segments":
        """Return some of the segments."""
        field, head, cell, nbytes = (column[index] for column in self[:4])
        return Segments(field, head, cell, nbytes, self.start[index], self.stride[index])

    def disjoint(self) -> "Segments":
        """Return, of segments ordered by address, those that begin after all earlier ones end."""
        apart = np.ones(len(self.start), bool)
        apart[1:] = self.start[1:] >= np.maximum.accumulate(self.end)[:-1]
        return self.pick(apart)


def fields(caches: Sequence[Cache], tensors: dict[Tensor, int]) -> Fields:
    """Number the fields of a side; ``tensors`` gives equal numbers to what is the same tensor, and grows."""
    found = [
        (rank, number, *_field(cache, region, field, tensors))
        for rank, cache in enumerate(caches)
        for number, region in enumerate(cache.regions)
        for field in region.fields
    ]
    return Fields(*np.array(found, np.int64).reshape(-1, len(Fields._fields)).T.copy())


def blocks(cache: Cache) -> list[int]:
    """Return how many ids each group has: of its regions the least; 0 for a group without regions."""
    least: dict[int, int] = {}
    for region in cache.regions:
        blocks = region.num_blocks // region.kernel_blocks
        least[region.group] = min(blocks, least.get(region.group, blocks))
    return [least.get(group, 0) for group in range(len(cache.groups))]


def _field(cache: Cache, region: Region, field: Field, tensors: dict[Tensor, int]) -> tuple[int, ...]:
    state = cache.groups[region.group].state
    tokens, cells = field.tokens_per_cell, field.tokens // field.tokens_per_cell
    rows = cells if state else None
    tensor = Tensor(region.layer, field.name, tokens, field.heads, field.cell_nbytes, state, rows)
    first, stop = held(field, cache)
    places = cache.dcp_size if field.dcp_sharded else 1
    unit = cells if field.token_stride == field.cell_nbytes else 1
    base = region.base + field.offset
    return (
        tensors.setdefault(tensor, len(tensors)), region.group, base - (base >> 63 << 64), region.block_stride,
        region.kernel_blocks, region.num_blocks // region.kernel_blocks, first, stop - first, cells, field.cell_nbytes,
        field.head_stride, field.token_stride, places, cache.dcp_interleave if places > 1 else 1,
        cache.tp_rank % places, gcd(unit, cache.dcp_interleave) if places > 1 else unit, tokens,
    )  # fmt: skip


def held(field: Field, cache: Cache) -> tuple[int, int]:
    """Return the range of heads that a rank holds (design.md section 3)."""
    if field.replicated:
        return 0, field.heads
    first = cache.tp_rank * field.heads // cache.tp_size
    return first, first + 1 if cache.tp_size > field.heads else (cache.tp_rank + 1) * field.heads // cache.tp_size


def model_cell(of: Fields, field: Int64, position: Int64, cell: Int64) -> Int64:
    """Return the number, along the whole request, of a cell that a rank holds in its block of this position."""
    places, interleave = of.places[field], of.interleave[field]
    dealt, rest = np.divmod(cell, interleave)
    return position * of.rows[field] * places + (dealt * places + of.place[field]) * interleave + rest


def local_cell(of: Fields, field: Int64, cell: Int64) -> tuple[Int64, Int64, Bool]:
    """Return (position of the block, cell in it, whether the rank holds it); the inverse of `model_cell`."""
    places, interleave = of.places[field], of.interleave[field]
    position, cell = np.divmod(cell, of.rows[field] * places)
    dealt, rest = np.divmod(cell, interleave)
    return position, dealt // places * interleave + rest, dealt % places == of.place[field]


def address(of: Fields, field: Int64, block: Int64, head: Int64, cell: Int64) -> UInt64:
    """Return where a cell begins; ``head`` counts over the model, ``cell`` within the block."""
    kernel_block, row = np.divmod(cell, of.cells[field])
    kernel_block = block * of.kernel_blocks[field] + kernel_block
    place = kernel_block * of.block_stride[field] + (head - of.first_head[field]) * of.head_stride[field]
    return (of.base[field] + place + row * of.cell_stride[field]).astype(np.uint64)


def distinct(*columns: Int64) -> tuple[list[tuple[int, ...]], Int64]:
    """Return the distinct tuples of equally long columns, and each item's index among them."""
    found, number = np.unique(np.stack(columns), axis=1, return_inverse=True)
    return list(zip(*found.tolist(), strict=True)), number.reshape(-1)


def segments(of: Fields, chosen: Int64) -> Segments:
    """Return the segments of one block of the chosen fields.

    Raises
    ------
    LayoutError
        More than any deployment has.
    """
    runs: Int64 = of.cells[chosen] // of.unit[chosen]
    count = (of.heads[chosen].astype(np.float64) * of.kernel_blocks[chosen] * runs).sum()
    if count > MAX_SEGMENTS:
        raise LayoutError(
            f"a block of all layers of a rank has {count:.0f} pieces to be proved, expected at most {MAX_SEGMENTS}"
        )
    item, number = expand(of.heads[chosen] * of.kernel_blocks[chosen] * runs)
    field = chosen[item]
    run = number % runs[item]
    head, kernel_block = np.divmod(number // runs[item], of.kernel_blocks[field])
    head = head + of.first_head[field]
    cell = kernel_block * of.cells[field] + run * of.unit[field]
    stride = of.block_stride[field] * of.kernel_blocks[field]
    start = address(of, field, np.zeros_like(field), head, cell)
    return Segments(field, head, cell, of.unit[field] * of.nbytes[field], start, stride.astype(np.uint64))


def joined(of: Fields, parts: Segments) -> Segments:
    """Return fewer segments over the same bytes: neighbours of one group that stay neighbours in every block."""
    blocks, group = of.blocks[parts.field], of.group[parts.field]
    order = np.lexsort([parts.start, blocks, parts.stride, group])
    parts, blocks, group = parts.pick(order), blocks[order], group[order]
    opens = np.ones(len(order), bool)
    opens[1:] = parts.end[:-1] != parts.start[1:]
    for key in (parts.stride, blocks, group):
        opens[1:] |= key[1:] != key[:-1]
    first = np.flatnonzero(opens)
    return parts.pick(first)._replace(nbytes=np.add.reduceat(parts.nbytes, first) if len(first) else parts.nbytes)


def room(cache: Cache, start: UInt64) -> UInt64:
    """Return how many bytes from each address on lie in the buffer that the address lies in; 0 where there is none."""
    base = np.array([buffer.base for buffer in cache.buffers or ()], np.uint64)
    end = np.array([buffer.end for buffer in cache.buffers or ()] + [0], np.uint64)  # index -1: none
    end = end[np.searchsorted(base, start, "right") - 1]
    return np.where(start < end, end - start, np.uint64(0))


def expand(counts: Int64) -> tuple[Int64, Int64]:
    """Return, for ``counts[i]`` copies of each item ``i``, the item and the number of each copy."""
    item = np.repeat(np.arange(len(counts)), counts)
    return item, np.arange(len(item)) - np.repeat(np.cumsum(counts) - counts, counts)


def touches(
    of: Fields, parts: Segments, lo: UInt64, hi: UInt64, block: Int64, apart: Callable[[slice], Bool]
) -> tuple[Int64, Int64]:
    """Find the spans [lo, hi) that meet any block of any segment of a rank.

    Parameters
    ----------
    parts : Segments [m]
        Of one rank.
    lo, hi : uint64 arrays [n]
    block : int64 array [n]
    apart : function
        Given a slice of the spans, bool [n, m]: where true, the segment's block of the span's own id does not count.

    Returns
    -------
    span, part : int64 arrays
        Each such span, and the first segment that it meets.
    """
    step = max(1, CHUNK // max(1, len(parts.field)))
    found = [np.empty((2, 0), np.int64)]
    ends = parts.end
    last = (of.blocks[parts.field] - 1).astype(np.uint64)
    stride, one = np.maximum(parts.stride, np.uint64(1)), np.uint64(1)
    for at in range(0, len(lo), step):
        here = slice(at, at + step)
        a, b = lo[here, None], hi[here, None]
        # Blocks least <= k < most of a segment meet the span; unsigned, so each difference is guarded.
        least = np.where(a >= ends, (a - ends) // stride + one, np.uint64(0))
        most = np.where(b > parts.start, np.minimum((b - parts.start - one) // stride, last) + one, np.uint64(0))
        own = block[here, None].astype(np.uint64)
        single = (least <= own) & (own < most) & apart(here)
        met = most > least + single
        span = np.flatnonzero(met.any(axis=1))
        found.append(np.stack([span + at, met[span].argmax(axis=1)]))
    span, part = np.concatenate(found, axis=1)
    return span, part
