"""Parts in an order of axes: from that, one rank's strides, offsets and regions. It knows no model and no memory.

An order names the axes outermost first, in vLLM's letters (RFC vllm#42082; ``vllm/v1/kv_cache_layout.py``,
``KVCacheLayout``, 0.33.0): L layers, B kernel blocks, H heads, N tokens (rows of state), C the bytes of a cell; and P
for the parts that one tensor or one block holds (K and V, data and scales, x and B and C). One law gives every layout:
a step along an axis is what lies inside it, the parts inside P each by themselves, outside P all together.

===========  ==============================================================================================
``LBPHNC``   ``hnd``: [K | V] in each block, heads outside tokens (FlashInfer, HND)
``LBPNHC``   ``nhd``: [K | V] in each block, tokens outside heads (FlashInfer, NHD)
``LBHNC``    vLLM 0.33.0: K and V fused in C; with ``LBNHC``, ``LHBNC`` (head-major), ``BLHNC``, ``BLNHC``, ``BHLNC``
``LPBNHC``   SGLang 0.5.23: K and V of a layer as two halves of one tensor, or as two tensors
``LBHPNC``   NVFP4 in slots 2*head+side (vLLM 0.33.0, MiniMax-M3's MSA backend)
===========  ==============================================================================================
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvcompile import topology
from kvcompile.errors import LayoutError
from kvcompile.layout import Field, Region

__all__ = ["Arrangement", "Part", "ordered", "stack"]

AXES = "LBPHNC"
NAMED = {"hnd": "LBPHNC", "nhd": "LBPNHC"}
CONTENTS = {"H": "heads", "N": "tokens", "P": "parts", "B": "blocks", "L": "layers"}


class Part(NamedTuple):
    """A field that has no place yet; attributes as of `Field`."""

    name: str
    heads: int
    tokens: int
    cell_nbytes: int
    replicated: bool = False
    dcp_sharded: bool = False
    tokens_per_cell: int = 1

    @property
    def cells(self) -> int:
        """Cells of one head in a kernel block."""
        return self.tokens // self.tokens_per_cell

    def local_heads(self, tp_rank: int, tp_size: int) -> int:
        """Heads that a rank holds."""
        start, stop = topology.shard(self.heads, tp_rank, tp_size, self.replicated)
        return stop - start


class Steps(NamedTuple):
    """One rank's strides: for each part the bytes of a step along L, B, H and N; its offset; and all bytes together."""

    axes: dict[str, list[int]]
    offsets: list[int]
    nbytes: int


class Arrangement:
    """The fields of one tensor, or of one piece of a block, and the order of its axes. What every builder returns.

    Parameters
    ----------
    parts : sequence of Part
        In the order in which they lie.
    order : str
        The axes, outermost first: ``hnd``, ``nhd`` or letters as in this file's table. Missing letters: L and B are
        outermost, P lies directly outside C, H outside N, C innermost.
    align : int
        A block is padded to a multiple of so many bytes.
    part_align : int
        Each part is padded to a multiple of so many bytes.

    Raises
    ------
    LayoutError
        An order that is none, or that puts heads, tokens or parts inside a cell: what is interleaved byte by byte
        cannot be cut.
    """

    def __init__(self, parts: Sequence[Part], order: str, *, align: int = 1, part_align: int = 1) -> None:
        self.parts = tuple(parts)
        self.order = ordered(order)
        self.align = align
        self.part_align = part_align

    def __repr__(self) -> str:
        return f"Arrangement({', '.join(part.name for part in self.parts)}; {self.order})"

    def steps(
        self, tp_rank: int, tp_size: int, num_blocks: int = 1, num_layers: int = 1, block_stride: int | None = None
    ) -> Steps:
        """Walk the axes from the innermost outwards.

        Parameters
        ----------
        tp_rank, tp_size : int
        num_blocks : int
            Kernel blocks.
        num_layers : int
        block_stride : int, optional
            Bytes from one kernel block to the next, where more lies between them than this.
        """
        extent = [part.cell_nbytes for part in self.parts]
        counts = {
            "N": [part.cells for part in self.parts],
            "H": [part.local_heads(tp_rank, tp_size) for part in self.parts],
            "B": [num_blocks] * len(self.parts),
            "L": [num_layers] * len(self.parts),
        }
        axes: dict[str, list[int]] = {}
        offsets = [0] * len(self.parts)
        joined = padded = False
        for axis in reversed(self.order[:-1]):
            if axis == "P":
                total = 0
                for index, nbytes in enumerate(extent):
                    offsets[index] = total
                    total += _up(nbytes, self.part_align)
                extent, joined = [total] * len(extent), True
                continue
            if joined and len(set(counts[axis])) > 1:
                numbers = ", ".join(
                    f"{part.name} {count}" for part, count in zip(self.parts, counts[axis], strict=True)
                )
                raise LayoutError(
                    f"order {self.order!r}: {CONTENTS[axis]} outside parts, expected equal numbers of them: {numbers}"
                )
            if axis in "LB" and not padded:
                extent, padded = [_up(nbytes, self.align) for nbytes in extent], True
            if axis == "B" and block_stride is not None:
                extent = [block_stride] * len(extent)
            axes[axis] = extent
            extent = [nbytes * count for nbytes, count in zip(extent, counts[axis], strict=True)]
        return Steps(axes, offsets, sum(extent) if not joined else extent[0])

    def block_nbytes(self, tp_rank: int = 0, tp_size: int = 1) -> int:
        """Return the bytes of one kernel block of one layer, padding included."""
        return self.steps(tp_rank, tp_size).nbytes

    def regions(
        self,
        *,
        layers: Sequence[str | int],
        base: int,
        num_blocks: int,
        group: int = 0,
        kernel_blocks: int = 1,
        tp_rank: int = 0,
        tp_size: int = 1,
        block_stride: int | None = None,
    ) -> list[Region]:
        """Make the regions of layers that lie together in one allocation.

        Parameters
        ----------
        layers : sequence of names
            In the order of L.
        base : int
            Address of the first byte.
        num_blocks, kernel_blocks, group : int
            As of `Region`: kernel blocks, and how many of them one block id stands for.
        tp_rank, tp_size : int
        block_stride : int, optional
            As of `steps`: packed rows, blocks of other groups in between.
        """
        steps = self.steps(tp_rank, tp_size, num_blocks, len(layers), block_stride)
        apart = self.order.index("P") < self.order.index("B")  # parts in other blocks are other regions
        made = []
        for number, layer in enumerate(layers):
            fields = []
            for index, part in enumerate(self.parts):
                origin = base + number * steps.axes["L"][index]
                offset, head_stride, token_stride = steps.offsets[index], steps.axes["H"][index], steps.axes["N"][index]
                fields.append(
                    Field(
                        *part[:4],
                        0 if apart else offset,
                        head_stride,
                        token_stride,
                        part.replicated,
                        part.dcp_sharded,
                        part.tokens_per_cell,
                    )
                )
                if apart or index + 1 == len(self.parts):
                    origin += offset if apart else 0
                    made.append(
                        Region(layer, group, origin, steps.axes["B"][index], num_blocks, tuple(fields), kernel_blocks)
                    )
                    fields = []
        return made


def stack(
    arrangements: Sequence[Arrangement],
    *,
    layers: Sequence[str | int],
    base: int,
    num_blocks: int,
    group: int = 0,
    tp_rank: int = 0,
    tp_size: int = 1,
    align: int = 1,
    block_stride: int | None = None,
    layer_stride: int | None = None,
    kernel_blocks: int = 1,
) -> list[Region]:
    """Make the regions of layers whose blocks are several arrangements one after another: convolution, then SSM state.

    Parameters
    ----------
    arrangements : sequence of Arrangement
        Each with parts, heads and tokens inside blocks.
    align : int
        The whole block is padded to a multiple of so many bytes.
    block_stride : int, optional
        Bytes from one kernel block to the next; the padded block by default.
    layer_stride : int, optional
        Bytes from one layer to the next; ``num_blocks`` blocks by default.
    layers, base, num_blocks, group, kernel_blocks, tp_rank, tp_size
        As of `Arrangement.regions`.
    """
    sizes = [arrangement.block_nbytes(tp_rank, tp_size) for arrangement in arrangements]
    if block_stride is None:
        block_stride = _up(sum(sizes), align)
    if layer_stride is None:
        layer_stride = block_stride * num_blocks
    made = []
    for number, layer in enumerate(layers):
        place = base + number * layer_stride
        for arrangement, nbytes in zip(arrangements, sizes, strict=True):
            if min(arrangement.order.index(axis) for axis in "PHN") < 2:
                raise LayoutError(
                    f"{arrangement!r}: expected L and B outermost where arrangements are stacked in a block"
                )
            made += arrangement.regions(
                layers=[layer],
                base=place,
                num_blocks=num_blocks,
                group=group,
                kernel_blocks=kernel_blocks,
                tp_rank=tp_rank,
                tp_size=tp_size,
                block_stride=block_stride,
            )
            place += nbytes
    return made


def ordered(order: str) -> str:
    """Return an order of axes with every letter, outermost first.

    Raises
    ------
    LayoutError
        As of `Arrangement`.
    """
    if not isinstance(order, str):
        raise LayoutError(f"order is {order!r:.80}, expected {', '.join(NAMED)} or the letters {AXES} in some order")
    letters = NAMED.get(order.lower(), order.upper())
    if "C" not in letters:
        letters += "C"
    if "P" not in letters:
        letters = letters.replace("C", "PC")
    if "N" not in letters:
        letters = letters.replace("PC", "NPC") if "PC" in letters else letters.replace("C", "NC")
    if "H" not in letters:
        letters = letters.replace("N", "HN")
    letters = "".join(axis for axis in "LB" if axis not in letters) + letters
    if sorted(letters) != sorted(AXES):
        raise LayoutError(f"order is {order!r:.80}, expected {', '.join(NAMED)} or the letters {AXES} in some order")
    inside = letters[letters.index("C") + 1 :]
    if inside:
        raise LayoutError(
            f"order {order!r} puts {' and '.join(CONTENTS[axis] for axis in inside)} inside a cell: a layout whose "
            "cells hold several of them cannot be cut there. A head's tokens of a block as one cell (tokens_per_cell), "
            "or all heads of a rank as one (fields.whole), can still be moved between equal layouts"
        )
    return letters


def _up(nbytes: int, align: int) -> int:
    return -(-nbytes // align) * align
