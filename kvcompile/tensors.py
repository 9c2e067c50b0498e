"""Regions from an engine's own tensors: strides give the places, arrangements the meaning. It reads no bytes."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from kvcompile.errors import LayoutError
from kvcompile.fields import Arrangement, Part
from kvcompile.layout import Buffer, Field, Region
from kvcompile.memory import Strided, strided

__all__ = ["buffers_of", "regions_of"]


def regions_of(
    tensors: Mapping[str | int, Any],
    fields: Any,
    dims: Any = None,
    group: int | Mapping[str | int, int] = 0,
    kernel_blocks: int | Mapping[str | int, int] = 1,
    tp_rank: int = 0,
    tp_size: int = 1,
) -> tuple[list[Region], list[Strided]]:
    """Make the regions of an engine's tensors; parameters and errors as of `Cache.from_torch`.

    Returns
    -------
    regions : list of Region
    memories : list of Strided
        Of all tensors.
    """
    if not isinstance(tensors, Mapping):
        raise LayoutError(f"tensors is a {type(tensors).__name__}, expected a mapping of layer names to tensors")
    regions, memories = [], []
    for layer, given in tensors.items():
        several = given if isinstance(given, (list, tuple)) else [given]
        arrangements = _several(_of(fields, layer), len(several), Arrangement, f"layer {layer!r}: fields")
        if len(arrangements) == 1 and len(several) == len(arrangements[0].parts):
            (whole,) = arrangements  # K and V of one arrangement, in a tensor each
            arrangements = [Arrangement([part], whole.order) for part in whole.parts]
        names = _several(_of(dims, layer), len(several), str, f"layer {layer!r}: dims") if dims is not None else [None]
        if len(arrangements) != len(several):
            raise LayoutError(
                f"layer {layer!r}: {len(several)} tensors, {len(arrangements)} arrangements, expected as many"
            )
        for number, (tensor, arrangement) in enumerate(zip(several, arrangements, strict=True)):
            where = f"layer {layer!r}, tensor {number}"
            memory = strided(tensor, where)
            memories.append(memory)
            axes = _Axes(memory, arrangement, names[min(number, len(names) - 1)], tp_rank, tp_size, where)
            made = [axes.field(index, part) for index, part in enumerate(arrangement.parts)]
            stride = axes.strides["B"][0]
            own = _of(group, layer)
            regions.append(
                Region(layer, own, memory.address, stride, axes.blocks, tuple(made), _of(kernel_blocks, layer))
            )
    return regions, memories


def buffers_of(memories: Iterable[Strided]) -> list[Buffer]:
    """Return the storages as buffers, each once; a tensor's own span where its storage is not known."""
    known = {memory.storage for memory in memories if memory.storage is not None and memory.storage[1]}
    spans = [(start, start + nbytes) for start, nbytes in known]
    for memory in memories:
        start, end = memory.span
        if not any(low <= start and end <= high for low, high in spans):
            spans.append((start, end))
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start < merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return [Buffer(start, end - start) for start, end in merged]


class _Axes:
    """The strides of each letter's axis, found by matching a tensor's dimensions with an arrangement's order."""

    def __init__(
        self, memory: Strided, arrangement: Arrangement, dims: str | None, tp_rank: int, tp_size: int, where: str
    ) -> None:
        self.memory, self.parts, self.where = memory, arrangement.parts, where
        self.order = arrangement.order.replace("L", "")
        self.counts = {
            "P": [len(self.parts)] * len(self.parts),
            "H": [part.local_heads(tp_rank, tp_size) for part in self.parts],
            "N": [part.cells for part in self.parts],
        }
        self.names = self._named(dims)
        self.strides: dict[str, list[int]] = {}
        self.offsets = [0] * len(self.parts)
        self.blocks = 0
        self._check_order()
        for letters, axes in self._groups():
            self._match(letters, axes)
        for letter, counts in self.counts.items():
            if letter not in self.strides:
                if set(counts) != {1}:
                    raise self.refuse(f"no dimension for {letter}, which counts {counts}")
                self.strides[letter] = [part.cell_nbytes for part in self.parts]
        if "B" not in self.strides:
            raise self.refuse("no dimension for B, the kernel blocks")

    def field(self, index: int, part: Part) -> Field:
        """Return a part as a field where the tensor has it."""
        heads, tokens = self.strides["H"][index], self.strides["N"][index]
        flags = part.replicated, part.dcp_sharded, part.tokens_per_cell
        return Field(*part[:4], self.offsets[index], heads, tokens, *flags)

    def refuse(self, problem: str) -> LayoutError:
        memory = self.memory
        return LayoutError(
            f"{self.where}: {problem} (shape {memory.shape}, strides {memory.strides} bytes, "
            f"dims {' '.join(self.names)!r}, order {self.order!r} of {[part.name for part in self.parts]})"
        )

    def _named(self, dims: str | None) -> list[str]:
        """Return the letters of each dimension: as given, or the order's own, without what there is only one of."""
        ndim = len(self.memory.shape)
        if dims is not None:
            self.names = [letters.upper() for letters in dims.split()]
            if len(self.names) != ndim or not all(set(letters) <= set("BPHNC1") for letters in self.names):
                raise self.refuse(
                    f"dims name {len(self.names)} dimensions, expected {ndim} groups of the letters BPHNC or 1"
                )
            return self.names
        self.names = list(self.order)
        single = [letter for letter in "PNH" if set(self.counts[letter]) == {1}]
        while len(self.names) > ndim and single:
            self.names.remove(single.pop(0))
        if len(self.names) == ndim + 1 and self.names[-2:] == ["P", "C"]:
            self.names[-2:] = ["PC"]  # vLLM: K and V in a cell
        if len(self.names) != ndim:
            raise self.refuse(f"{ndim} dimensions, expected {len(self.names)}; say with dims= what they are")
        return self.names

    def _groups(self) -> list[tuple[str, list[int]]]:
        """Unite dimensions that share letters: what lies in them is dense. Letters in the order's order."""
        groups: list[tuple[set[str], list[int]]] = []
        for axis, letters in enumerate(self.names):
            mine, axes = set(letters) - {"1"}, [axis]
            if "1" in letters and self.memory.shape[axis] != 1:
                raise self.refuse(f"dimension {axis} has {self.memory.shape[axis]} entries, expected 1")
            for other in [group for group in groups if group[0] & mine]:
                groups.remove(other)
                mine, axes = mine | other[0], other[1] + axes
            groups.append((mine, axes))
        return [("".join(sorted(mine, key=self.order.index)), axes) for mine, axes in groups if mine]

    def _match(self, letters: str, axes: list[int]) -> None:
        """Give the strides of a group's letters, from the innermost outwards, as `Arrangement.steps` walks them."""
        memory = self.memory
        axes = sorted((axis for axis in axes if memory.shape[axis] > 1), key=lambda axis: -memory.strides[axis])
        for outer, inner in pairwise(axes):
            if memory.strides[outer] != memory.strides[inner] * memory.shape[inner]:
                raise self.refuse(f"dimensions {axes} together are {letters}, expected them dense")
        unit = memory.strides[axes[-1]] if axes else memory.itemsize
        total = unit
        for axis in axes:
            total *= memory.shape[axis]
        if letters[-1] == "C":
            if unit != memory.itemsize:
                raise self.refuse(f"the bytes of a cell are {unit} apart, expected them together")
            extent = [part.cell_nbytes for part in self.parts]
            letters = letters[:-1]
        else:
            extent = [unit] * len(self.parts)
        parts_inside = False
        for letter in reversed(letters):
            if letter == "P":
                # Parts in their own dimension are as far apart as it says; in a dense group they follow one another.
                starts = [sum(extent[:index]) for index in range(len(extent))]
                self.offsets = starts
                extent, parts_inside = [sum(extent)] * len(extent), True
                self.strides["P"] = extent
            elif letter == "B":
                self.strides["B"], self.blocks = extent, total // max(extent)
                extent = [nbytes * self.blocks for nbytes in extent]
            else:
                if parts_inside and len(set(self.counts[letter])) > 1:
                    raise self.refuse(f"{letter} outside parts counts {self.counts[letter]}, expected equal numbers")
                self.strides[letter] = extent
                extent = [nbytes * count for nbytes, count in zip(extent, self.counts[letter], strict=True)]
        if set(extent) != {total}:
            raise self.refuse(
                f"dimension(s) for {letters or 'C'} hold {total} bytes or steps, expected {sorted(set(extent))}"
            )

    def _check_order(self) -> None:
        """Refuse strides that contradict the order, of letters that have a dimension of their own."""
        own: dict[str, int] = {}
        for letter in self.order:
            axes = [axis for axis, letters in enumerate(self.names) if letter in letters]
            if len(axes) == 1 and self.memory.shape[axes[0]] > 1:
                own[letter] = axes[0]
        for outer, axis in own.items():
            for inner, other in own.items():
                wide, narrow = self.memory.strides[axis], self.memory.strides[other]
                if self.order.index(outer) < self.order.index(inner) and axis != other and wide < narrow:
                    raise self.refuse(
                        f"the order has {outer} outside {inner}, the strides say otherwise: {wide} and {narrow}"
                    )


def _of(value: Any, layer: str | int) -> Any:
    """Return what holds for a layer, where a mapping may say it for each."""
    if isinstance(value, Mapping):
        if layer not in value:
            raise LayoutError(f"layer {layer!r} is not among {sorted(map(repr, value))[:5]}")
        return value[layer]
    return value


def _several(value: Any, count: int, kind: type, what: str) -> Sequence[Any]:
    """Return a value, or a sequence of them, as a sequence."""
    several = list(value) if isinstance(value, (list, tuple)) else [value]
    if not several or not all(isinstance(item, kind) for item in several):
        raise LayoutError(f"{what} is {value!r:.200}, expected a {kind.__name__} or one for each of {count} tensor(s)")
    return several
