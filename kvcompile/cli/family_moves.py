"""Move one request between all ranks of two deployments in one process, and check every byte, from strides alone."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcompile import Cache, Field, KVCompileError, Plan, Region, Request
from kvcompile.engines.base import Engine

__all__ = ["DST_FILL", "SRC_FILL", "Ids", "Memory", "Moved", "ids_for", "move"]

Bytes = npt.NDArray[np.uint8]

SRC_FILL, DST_FILL = 0xA5, 0x5A

CHUNK = 1 << 24
"""Bytes of one head written at a time."""

_TABLE = np.random.default_rng(2026).integers(0, 256, (1 << 16) + (1 << 20), np.uint8)


class Ids(NamedTuple):
    """What a request gives for one side: per group the block ids and the position of the first."""

    blocks: list[list[int]]
    first: list[int]


class Moved(NamedTuple):
    """What moving took: descriptors and bytes of all rank pairs, and bytes of all destinations that are wrong."""

    descriptors: int
    nbytes: int
    wrong: int


@dataclass
class Memory:
    """The memory of a side's ranks: `place` for `models.caches`, one array a rank."""

    fill: int
    arrays: list[Bytes] = field(default_factory=list)

    def place(self, nbytes: int) -> int:
        """Allocate so many bytes; return their address."""
        self.arrays.append(np.full(nbytes, self.fill, np.uint8))
        return int(self.arrays[-1].ctypes.data)


def ids_for(caches: Sequence[Cache], windows: Sequence[int | None], tokens: int, random: np.random.Generator) -> Ids:
    """Draw block ids of one request, in runs, for the groups of a side.

    Parameters
    ----------
    caches : sequence of Cache
        All ranks of the side.
    windows : sequence
        For each group the tokens it looks back, None for all.
    tokens : int
        Length of the request.
    """
    lists: list[list[int]] = []
    taken: dict[int, set[int]] = {}  # groups that overlay each other have one id space
    for number, group in enumerate(caches[0].groups):
        bounds = [bound for cache in caches if (bound := cache.bound(number)) is not None]
        count = 1 if group.state else -(-tokens // group.block_size)
        null, window = group.null_block, windows[number]
        used = taken.setdefault(caches[0].overlays[number], set())
        free = [block for block in range(min(bounds, default=count + 1)) if block != null and block not in used]
        gone = 0 if window is None or null is None else max(tokens - window + 1, 0) // group.block_size
        if count - gone > len(free):
            raise KVCompileError(f"group {number}: {count - gone} blocks needed, {len(free)} there")
        cut = int(random.integers(1, len(free))) if len(free) > 1 else 0
        blocks = (free[cut:] + free[:cut])[: count - gone]
        used.update(blocks)
        lists.append([0 if null is None else null] * gone + blocks)
    return Ids(lists, [0] * len(lists))


def move(
    srcs: Sequence[Cache],
    dsts: Sequence[Cache],
    memory: tuple[Memory, Memory],
    ids: tuple[Ids, Ids],
    tokens: int,
    engines: tuple[Engine, Engine],
    plans: Mapping[tuple[int, int], Plan],
) -> Moved:
    """Move one request from all src ranks to all dst ranks, and compare all of the destinations' memory.

    Parameters
    ----------
    memory, ids, engines : pairs
        Of src and dst; the engines have the caches registered.
    plans : mapping
        Of the indices of each src and dst.
    """
    for cache, array in zip(srcs, memory[0].arrays, strict=True):
        paint(cache, array, ids[0], ids[0], srcs, tokens)
    request = Request("request", ids[0].blocks, ids[1].blocks, ids[0].first, ids[1].first, tokens)
    count = nbytes = 0
    for plan in plans.values():
        built = plan.build([request])
        for error in built.failed.values():
            raise error
        engines[0].write(engines[1].session, built)
        count, nbytes = count + len(built), nbytes + built.nbytes
    wrong = 0
    scratch = np.empty(max(map(len, memory[1].arrays)), np.uint8)
    for cache, array in zip(dsts, memory[1].arrays, strict=True):
        expected = scratch[: len(array)]
        expected[:] = memory[1].fill
        paint(cache, expected, ids[1], ids[0], srcs, tokens)
        wrong += int(np.count_nonzero(array != expected))
    return Moved(count, nbytes, wrong)


def paint(cache: Cache, array: Bytes, own: Ids, source: Ids, sources: Sequence[Cache], tokens: int) -> None:
    """Write into memory what every cell holds that the request's source has, and its own blocks have a place for."""
    has = [_present(sources[0], source, number, tokens) for number in range(len(sources[0].groups))]
    groups = {(r.layer, part.name): r.group for one in sources for r in one.regions for part in r.fields}
    for region in cache.regions:
        group = cache.groups[region.group]
        blocks = np.array(own.blocks[region.group], np.int64)
        kernel = np.add.outer(blocks * region.kernel_blocks, np.arange(region.kernel_blocks)).ravel()
        real = np.repeat(blocks != (-1 if group.null_block is None else group.null_block), region.kernel_blocks)
        for part in region.fields:
            source_group = groups.get((region.layer, part.name))
            if source_group is None:  # on no src rank
                continue
            token = _tokens(cache, region, part, own.first[region.group], len(blocks))
            there = np.broadcast_to(real[:, None], token.shape)
            if not group.state:
                known = has[source_group]
                there = there & (token < len(known)) & known[np.minimum(token, len(known) - 1)]
            for start in range(0, len(kernel), step := max(1, CHUNK // (part.cells * part.cell_nbytes))):
                block, cell = np.nonzero(there[start : start + step])
                values = _values(cache, region, part, token[start : start + step][block, cell])
                _view(cache, array, region, part)[kernel[start : start + step][block], :, cell] = values


def _present(cache: Cache, ids: Ids, number: int, tokens: int) -> npt.NDArray[np.bool_]:
    """Whether a side has each token, by position: not in null blocks, whole blocks up to the last token."""
    group = cache.groups[number]
    blocks = ids.blocks[number][: -(-tokens // group.block_size)]
    present = np.repeat(np.array([block != group.null_block for block in blocks], bool), group.block_size)
    return np.concatenate([np.zeros(ids.first[number] * group.block_size, bool), present])


def _view(cache: Cache, array: Bytes, region: Region, part: Field) -> Bytes:
    """Return a field's cells, a view [kernel blocks, local heads, cells, bytes] of the cache's one buffer."""
    start, stop = cache.shard(part)
    (buffer,) = cache.buffers or ()
    at = region.base + part.offset - buffer.base
    shape = (region.num_blocks, stop - start, part.cells, part.cell_nbytes)
    strides = (region.block_stride, part.head_stride, part.token_stride, 1)
    return np.lib.stride_tricks.as_strided(array[at:], shape, strides)


def _tokens(cache: Cache, region: Region, part: Field, first: int, count: int) -> npt.NDArray[np.int64]:
    """Return the first token of each cell of blocks, counted over the request: [kernel blocks, cells]."""
    if cache.groups[region.group].state:
        return np.tile(np.arange(part.cells, dtype=np.int64), (count, 1))
    kernel_blocks = count * region.kernel_blocks
    local = np.arange(kernel_blocks * part.cells, dtype=np.int64) * part.tokens_per_cell
    local += first * region.kernel_blocks * part.tokens
    if part.dcp_sharded and cache.dcp_size > 1:
        size, interleave, place = cache.dcp_size, cache.dcp_interleave, cache.tp_rank % cache.dcp_size
        local = local // interleave * interleave * size + place * interleave + local % interleave
    return local.reshape(kernel_blocks, part.cells)


def _values(cache: Cache, region: Region, part: Field, token: npt.NDArray[np.int64]) -> Bytes:
    """Return what cells hold, [tokens, heads, bytes]: a window of a table that all coordinates choose."""
    head = np.arange(*cache.shard(part), dtype=np.int64)
    name = zlib.crc32(f"{region.layer}/{part.name}".encode())
    mixed = (name + token[:, None] * 40503 + head * 2654435761) * 2246822519
    windows = np.lib.stride_tricks.sliding_window_view(_TABLE, part.cell_nbytes)
    values: Bytes = windows[(mixed >> 13) % (1 << 16)]
    return values
