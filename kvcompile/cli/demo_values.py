"""The demo's bytes: what every cell holds, writing it, checking every byte. From strides alone, no lowering."""

import zlib
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from kvcompile import Cache, Field, Region

__all__ = ["CANARY", "UNUSED", "Arena", "Load", "Wrong"]

Bytes = npt.NDArray[np.uint8]

LARGEST = 127
"""No cell holds a byte above this, so that these two are recognized wherever they turn up:"""
CANARY = 0xFD
UNUSED = 0xFE

GAP = 4096
"""Bytes before and after each layer that belong to nobody, and are checked too."""

CHUNK = 8 << 20

_TABLE_WORDS = 1 << 18
_LARGEST_CELL = 1 << 16


class Load(msgspec.Struct, frozen=True):
    """One request: its number, and per group the ids on both sides and the position of the first dst block."""

    number: int
    src_blocks: list[list[int]]
    dst_blocks: list[list[int]]
    dst_first: list[int]


class Wrong(msgspec.Struct, frozen=True):
    """A byte that is not what it should be; ``request`` None: a byte that no request may touch."""

    layer: str
    field: str
    head: int
    token: int
    byte: int
    request: int | None
    block: int
    got: int
    expected: int


class Arena:
    """One rank's memory: all layers with gaps between them.

    Parameters
    ----------
    nbytes : int
        Sum of the layers' sizes.
    layers : int
    progress : callable
        Called with the bytes done since the last call.
    """

    def __init__(self, nbytes: int, layers: int, progress: Callable[[int], None]) -> None:
        self.memory = np.empty(nbytes + (layers + 1) * GAP, np.uint8)
        self.progress = progress
        self._next = GAP
        self._table = np.random.default_rng(2026).integers(
            0, LARGEST, 8 * _TABLE_WORDS + _LARGEST_CELL, np.uint8, endpoint=True
        )

    def place(self, nbytes: int) -> int:
        """Return the address of the next ``nbytes`` bytes."""
        place, self._next = self._next, self._next + nbytes + GAP
        return int(self.memory.ctypes.data) + place

    def fill(self, byte: int) -> None:
        """Set every byte, gaps included."""
        for chunk in self._chunks():
            chunk[:] = byte
            self.progress(len(chunk))

    def write(self, cache: Cache, loads: list[Load]) -> None:
        """Write the values of all src cells of the requests."""
        for region, field, cells in self._fields(cache):
            for load in loads:
                ids = load.src_blocks[region.group]
                for blocks, tokens in _walk(cache, region, field, ids, 0, len(ids) * _tokens(cache, region, field)):
                    cells[blocks, :, : tokens.shape[1]] = self._values(load, cache, region, field, tokens)

    def check(self, cache: Cache, loads: list[Load], src_block_sizes: list[int]) -> tuple[int, int, Wrong | None]:
        """Check every byte; the cells that were moved are set to CANARY on the way.

        Returns
        -------
        moved : int
            Bytes that should have been written.
        wrong : int
            Bytes that are not what they should be.
        first : Wrong or None
        """
        moved = wrong = 0
        first: Wrong | None = None
        for region, field, cells in self._fields(cache):
            head = cache.shard(field)[0]
            for load in loads:
                group = cache.groups[region.group]
                start = load.dst_first[region.group] * group.block_size
                stop = len(load.src_blocks[region.group]) * src_block_sizes[region.group]
                if group.state:
                    start, stop = 0, field.tokens
                for blocks, tokens in _walk(cache, region, field, load.dst_blocks[region.group], start, stop):
                    place = (blocks, slice(None), slice(tokens.shape[1]))
                    got, expected = cells[place], self._values(load, cache, region, field, tokens)
                    cells[place] = CANARY
                    moved += got.size
                    self.progress(got.size)
                    bad = got != expected
                    if bad.any():
                        wrong += int(np.count_nonzero(bad))
                        b, h, n, c = (int(axis) for axis in np.unravel_index(np.argmax(bad), bad.shape))
                        first = first or Wrong(
                            str(region.layer), field.name, head + h, int(tokens[b, n]), c, load.number,
                            int(blocks[b]) // region.kernel_blocks, int(got[b, h, n, c]), int(expected[b, h, n, c]),
                        )  # fmt: skip
        seen = 0
        for chunk in self._chunks():
            bad = chunk != CANARY
            if bad.any():
                wrong += int(np.count_nonzero(bad))
                at = int(np.argmax(bad))
                first = first or self._locate(cache, seen + at, int(chunk[at]))
            seen += len(chunk)
            self.progress(len(chunk))
        return moved, wrong, first

    def _chunks(self) -> Iterator[Bytes]:
        for start in range(0, len(self.memory), CHUNK):
            yield self.memory[start : start + CHUNK]

    def _fields(self, cache: Cache) -> Iterator[tuple[Region, Field, Bytes]]:
        """Yield each field with its cells, a view [kernel blocks, local heads, tokens, bytes]."""
        for region in cache.regions:
            for field in region.fields:
                heads = cache.shard(field)
                place = region.base + field.offset - int(self.memory.ctypes.data)
                shape = (region.num_blocks, heads[1] - heads[0], field.tokens, field.cell_nbytes)
                strides = (region.block_stride, field.head_stride, field.token_stride, 1)
                yield region, field, np.lib.stride_tricks.as_strided(self.memory[place:], shape, strides)

    def _values(self, load: Load, cache: Cache, region: Region, field: Field, tokens: npt.NDArray[np.uint64]) -> Bytes:
        """Return what cells hold, [blocks, local heads, tokens, bytes].

        All coordinates are mixed into one number, which chooses a window of a table and is xored into its words.
        """
        start, stop = cache.shard(field)
        head = np.arange(start, stop, dtype=np.uint64)
        name = zlib.crc32(f"{region.layer}/{field.name}".encode())
        mixed = np.uint64((load.number * 0x9E3779B97F4A7C15 + name * 0xD6E8FEB86659FD93) % 2**64)
        mixed = mixed + tokens[:, None, :] * np.uint64(0xA0761D6478BD642F)
        mixed = mixed + head[None, :, None] * np.uint64(0xE7037ED1A0B428DB)
        mixed ^= mixed >> np.uint64(32)
        mixed *= np.uint64(0x8EBC6AF09C88C6E3)
        window = (mixed >> np.uint64(40)) % np.uint64(_TABLE_WORDS)
        words = -(-field.cell_nbytes // 8)
        windows = np.lib.stride_tricks.sliding_window_view(self._table.view(np.uint64), words)
        cells: npt.NDArray[np.uint64] = windows[window]
        cells ^= (mixed & np.uint64(0x7F7F7F7F7F7F7F7F))[..., None]
        return cells.view(np.uint8)[..., : field.cell_nbytes]

    def _locate(self, cache: Cache, place: int, got: int) -> Wrong:
        """Say which cell a byte of the arena is in, or that it is in none."""
        address = place + int(self.memory.ctypes.data)
        for region, field, cells in self._fields(cache):
            block, inside = divmod(address - region.base, region.block_stride)
            if not 0 <= block < region.num_blocks:
                continue
            for head in range(cells.shape[1]):
                token, byte = divmod(inside - field.offset - head * field.head_stride, field.token_stride)
                if 0 <= token < field.tokens and byte < field.cell_nbytes:
                    where = (cache.shard(field)[0] + head, token, byte, None, block // region.kernel_blocks)
                    return Wrong(str(region.layer), field.name, *where, got, CANARY)
        return Wrong("between layers", "padding", 0, 0, place, None, 0, got, CANARY)


def _tokens(cache: Cache, region: Region, field: Field) -> int:
    """Tokens of a block, or rows of state."""
    return region.kernel_blocks * field.tokens if not cache.groups[region.group].state else field.tokens


def _walk(
    cache: Cache, region: Region, field: Field, ids: list[int], start: int, stop: int
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]]:
    """Yield kernel blocks and the positions of their tokens [kernel blocks, tokens], for the tokens [start, stop).

    The list begins with the block of token ``start``. Whole kernel blocks come some at a time, one in part alone.
    """
    kernel = np.add.outer(np.array(ids, np.int64) * region.kernel_blocks, np.arange(region.kernel_blocks)).ravel()
    position = start + np.arange(len(kernel) * field.tokens, dtype=np.uint64).reshape(len(kernel), field.tokens)
    if cache.groups[region.group].state:
        position %= np.uint64(field.tokens)
    whole, rest = divmod(max(stop - start, 0), field.tokens)
    heads = cache.shard(field)
    step = max(1, CHUNK // ((heads[1] - heads[0]) * field.tokens * field.cell_nbytes))
    for first in range(0, min(whole, len(kernel)), step):
        last = min(first + step, whole, len(kernel))
        yield kernel[first:last], position[first:last]
    if rest and whole < len(kernel):
        yield kernel[whole : whole + 1], position[whole : whole + 1, :rest]
