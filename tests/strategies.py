"""Hypothesis strategy for deployments: the caches of all src ranks and of one dst rank.

What is drawn is the style of a side, once for all its ranks; ranks differ in their heads and addresses.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd

from hypothesis import strategies as st

from kvcompile import Buffer, Cache, Field, Group, Region

Draw = Callable[[st.SearchStrategy], object]


@dataclass(frozen=True)
class Tensor:
    """One field of the model. ``rows``: of state, 0 where the axis counts tokens."""

    name: str
    heads: int
    cell: int
    rows: int = 0
    replicated: bool = False


@dataclass(frozen=True)
class Family:
    """Layers of one kind; a group of either side holds one family or several."""

    layers: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    state: bool


@dataclass(frozen=True)
class LayerStyle:
    """How one side lays out a layer.

    ``parts`` lists the fields of each region; ``shape`` says how they lie in it: one after another ("rows"), K and V in
    one cell ("fused") or side by side in a head or token ("paired"), far-apart halves ("halves"), or a plane for each
    head ("planes").
    """

    kernel_blocks: int
    parts: tuple[tuple[int, ...], ...]
    shape: str
    nhd: tuple[bool, ...]
    padding: tuple[int, ...]


@dataclass(frozen=True)
class GroupStyle:
    """A group of one side. ``packed``: a block of all its layers is one row of memory."""

    families: tuple[int, ...]
    block_size: int
    null: int | None
    bound: int
    packed: bool
    padding: int


@dataclass(frozen=True)
class Side:
    """One side of a deployment, for all its ranks."""

    tp: int
    groups: tuple[GroupStyle, ...]
    layers: dict[str, LayerStyle]
    stages: tuple[frozenset[str], ...]
    base: int
    gap: int
    buffers: str
    overlay: bool
    flipped: bool


@dataclass(frozen=True)
class Rank:
    """A cache, and for each of its groups the number it has on its side."""

    cache: Cache
    groups: tuple[int, ...]


@dataclass(frozen=True)
class Deployment:
    """All src ranks and one dst rank."""

    families: tuple[Family, ...]
    sides: tuple[Side, Side]
    srcs: tuple[Rank, ...]
    dst: Rank


@st.composite
def families(draw: Draw) -> tuple[Family, ...]:
    """The model: one to three families, up to five layers."""
    found, count = [], 0
    for number in range(draw(st.integers(1, 3))):
        heads, cell = draw(st.integers(1, 12)), draw(st.integers(1, 4))
        match draw(st.sampled_from(["kv", "k_v", "k_v", "scales", "latent", "state"])):
            case "kv":
                tensors = [Tensor("kv", heads, cell)]
            case "k_v":
                tensors = [Tensor("k", heads, cell), Tensor("v", heads, draw(st.sampled_from([cell, cell, 3])))]
            case "scales":
                tensors = [Tensor("k", heads, cell), Tensor("v", heads, cell)]
                tensors += [Tensor("k_scale", heads, 1), Tensor("v_scale", heads, 1)]
            case "latent":
                indexer = Tensor("indexer", draw(st.integers(1, 3)), cell, replicated=True)
                tensors = [Tensor("latent", 1, 3 * cell, replicated=True), indexer][: draw(st.integers(1, 2))]
            case "state":
                conv = Tensor("conv_x", heads, cell, rows=draw(st.integers(1, 3)))
                tensors = [conv, Tensor("ssm", draw(st.integers(1, 8)), 2, rows=1)]
        layers = tuple(f"layer.{number}.{index}" for index in range(draw(st.integers(1, 3 if count < 3 else 1))))
        count += len(layers)
        found.append(Family(layers, tuple(tensors), tensors[0].rows > 0))
    return tuple(found)


@st.composite
def layer_style(draw: Draw, family: Family, block_size: int, kernel_blocks: int | None) -> LayerStyle:
    """One layer of one side. ``kernel_blocks``: given where the layers of the group share packed rows."""
    count = len(family.tensors)
    divisors = [1] if family.state else [d for d in range(1, block_size + 1) if block_size % d == 0]
    order = draw(st.permutations(range(count))) if draw(st.integers(0, 3)) == 0 else list(range(count))
    shapes = ["rows", "rows", "rows", "halves", "planes"] if kernel_blocks is None else ["rows", "rows"]
    if [tensor.name for tensor in family.tensors[:2]] == ["k", "v"]:
        shapes += ["fused", "paired"]
    shape = draw(st.sampled_from(shapes))
    if shape in ("fused", "paired"):
        parts = [(0, 1), tuple(range(2, count))] if draw(st.booleans()) else [tuple(range(count))]
    elif draw(st.integers(0, 2)) == 0:
        parts = [(index,) for index in order]
    else:
        parts = [tuple(order)]
    nhd = draw(st.booleans())
    mixed = draw(st.integers(0, 7)) == 0
    return LayerStyle(
        kernel_blocks or draw(st.sampled_from(divisors)),
        tuple(part for part in parts if part),
        shape,
        tuple(nhd ^ (mixed and bool(index % 2)) for index in range(count)),
        tuple(draw(st.integers(0, 2)) and draw(st.sampled_from([0, 0, 0, 1, 5])) for _ in range(count)),
    )


@st.composite
def side(draw: Draw, model: tuple[Family, ...], sizes: tuple[int, ...], tp: int) -> Side:
    """Group the families of the model, give each group a style, cut the layers into stages."""
    members: list[list[int]] = []
    for number, family in enumerate(model):
        for group in members:
            first = model[group[0]]
            if family.state == first.state and sizes[number] == sizes[group[0]] and draw(st.integers(0, 2)) == 0:
                group.append(number)
                break
        else:
            members.append([number])
    if draw(st.booleans()):
        members.reverse()
    overlay = len(members) == 2 and draw(st.integers(0, 3)) == 0
    groups, layers = [], {}
    for group in members:
        style = GroupStyle(
            families=tuple(group),
            block_size=sizes[group[0]],
            null=draw(st.sampled_from([None, None, 0, 3, -1])),
            bound=draw(st.sampled_from([160] * 10 + [12, 1])),
            packed=overlay or draw(st.integers(0, 2)) == 0,
            padding=draw(st.sampled_from([0, 0, 0, 0, 0, 4, 7])),
        )
        groups.append(style)
        divisors = [d for d in range(1, style.block_size + 1) if style.block_size % d == 0]
        kernel_blocks = None
        if style.packed:
            kernel_blocks = 1 if model[group[0]].state else draw(st.sampled_from(divisors))
        for number in group:
            look = layer_style(model[number], style.block_size, kernel_blocks)
            shared = draw(look)
            for layer in model[number].layers:
                layers[layer] = shared if draw(st.integers(0, 3)) else draw(look)
    return draw(placed(Side(tp, tuple(groups), layers, (), 0, 0, "", overlay, False), model))


@st.composite
def placed(draw: Draw, half: Side, model: tuple[Family, ...]) -> Side:
    """Draw what does not change how blocks look: stages, addresses, buffers."""
    names = [layer for family in model for layer in family.layers]
    cuts = sorted({0, len(names), *([draw(st.integers(1, len(names)))] if draw(st.integers(0, 2)) == 0 else [])})
    return replace(
        half,
        stages=tuple(frozenset(names[a:b]) for a, b in pairwise(cuts)),
        base=draw(st.sampled_from([4096, 2**31 - 100, 2**40 + 8, 0xFF00000000000000, 2**63 - 512])),
        gap=draw(st.sampled_from([0, 0, 16, 100])),
        buffers=draw(st.sampled_from(["default", "default", "one", "spans"])),
        flipped=draw(st.booleans()),
    )


@st.composite
def alike(draw: Draw, half: Side, model: tuple[Family, ...], tp: int, uneven: bool) -> Side:
    """A side whose blocks look as on the other, so that much can merge; with other block sizes if ``uneven``."""
    groups, layers = half.groups, half.layers
    if uneven:
        groups = tuple(replace(style, block_size=draw(st.sampled_from([1, 2, 4, 6, 8]))) for style in groups)
        layers = {layer: replace(style, kernel_blocks=1) for layer, style in layers.items()}
    return draw(placed(replace(half, tp=tp, groups=groups, layers=layers), model))


def fields_of(
    tensors: list[Tensor],
    style: LayerStyle,
    numbers: tuple[int, ...],
    tokens: int,
    blocks: int,
    padding: int,
    local: list[int],
) -> tuple[list[Field], int]:
    """Return the fields of one region and the payload of one of its kernel blocks (without the far planes).

    ``numbers``: what the tensors are in their layer; ``blocks`` and ``padding``: how many kernel blocks there are, and
    how far apart beyond the payload; ``local``: the heads of each tensor that the rank holds.
    """
    counts = [tensor.rows or tokens for tensor in tensors]
    plane = max(count * tensor.cell for count, tensor in zip(counts, tensors, strict=True))
    half = max(h * n * t.cell for h, n, t in zip(local, counts, tensors, strict=True))
    fields, offset, planes = [], 0, 0
    for index, (number, tensor) in enumerate(zip(numbers, tensors, strict=True)):
        heads, count, nhd, cell = local[index], counts[index], style.nhd[number], tensor.cell
        if style.shape == "planes":
            place, head_stride, token_stride = planes * (plane + padding) * blocks, (plane + padding) * blocks, cell
            planes += heads
        elif style.shape == "halves":
            place = index * (half + padding) * blocks
            head_stride, token_stride = strides(nhd, heads, count, cell)
        elif style.shape in ("fused", "paired") and number < 2:
            both, nhd = sum(t.cell for t in tensors[:2]), style.nhd[0]
            head_stride, token_stride = strides(nhd, heads, count, both)
            first = tensors[0].cell  # where V follows K: a cell, the head's tokens, or the token's heads later
            if style.shape == "paired":
                first *= heads if nhd else count
                head_stride, token_stride = (cell, token_stride) if nhd else (head_stride, cell)
            place = index * first
            offset = heads * count * both + style.padding[0]
        else:
            padded = heads + (style.padding[number] == 5)
            place, head_stride, token_stride = offset, *strides(nhd, padded, count, cell)
            offset += padded * count * cell + style.padding[number]
        flags = {"replicated": tensor.replicated}
        fields.append(Field(tensor.name, tensor.heads, count, cell, place, head_stride, token_stride, **flags))
    return fields, {"planes": plane, "halves": half}.get(style.shape, offset)


def strides(nhd: bool, heads: int, tokens: int, cell: int) -> tuple[int, int]:
    """Head and token stride."""
    return (cell, heads * cell) if nhd else (tokens * cell, cell)


def held(tensor: Tensor | Field, rank: int, tp: int) -> int:
    """How many heads a rank holds."""
    if tensor.replicated:
        return tensor.heads
    return (rank + 1) * tensor.heads // tp - rank * tensor.heads // tp if tp <= tensor.heads else 1


def build(model: tuple[Family, ...], half: Side, stage: int, rank: int, dp: tuple[int, int] = (0, 1)) -> Rank:
    """Make the cache of one rank."""
    present = [
        number
        for number, style in enumerate(half.groups)
        if any(layer in half.stages[stage] for family in style.families for layer in model[family].layers)
    ]
    if half.flipped and stage % 2:
        present.reverse()
    slabs = [  # the slabs of a group: (kernel blocks, payload of one, [(layer, offset in it, fields)])
        slabs_of(model, half, half.groups[number], stage, rank) for number in present
    ]
    base, regions, starts = half.base + 4096 * rank + (stage << 20), [], []
    overlay = half.overlay and len(slabs) == 2
    if overlay:
        wide = max(kernel_blocks * payload for group in slabs for kernel_blocks, payload, _ in group)
        common = slabs[0][0][0] * slabs[1][0][0] // gcd(slabs[0][0][0], slabs[1][0][0])
        wide += -wide % common
    for number, (group, style) in enumerate(zip(slabs, (half.groups[index] for index in present), strict=True)):
        if overlay:
            base = starts[0] if starts else base
        for kernel_blocks, payload, rows in group:
            stride = wide // kernel_blocks if overlay else payload + style.padding
            blocks = style.bound * kernel_blocks + (kernel_blocks - 1)
            starts.append(base)
            made = [
                Region(layer, number, base + offset, stride, blocks, fields, kernel_blocks)
                for layer, offset, fields in rows
            ]
            regions += made
            base = max([base, *(span(region, rank, half.tp)[1] for region in made)]) + half.gap
    groups = [
        Group(style.block_size, style.null, state=model[style.families[0]].state)
        for style in (half.groups[number] for number in present)
    ]
    spans = [span(region, rank, half.tp) for region in regions]
    low, high = min(start for start, _ in spans), max(end for _, end in spans)
    apart = [Buffer(start, end - start) for start, end in union(spans)]
    buffers = {"default": None, "one": [Buffer(low - 3, high - low + 10)], "spans": apart[::-1]}
    place = {"tp_rank": rank, "tp_size": half.tp, "dp_rank": dp[0], "dp_size": dp[1]}
    return Rank(Cache(regions, groups, buffers[half.buffers], **place), tuple(present))


def slabs_of(
    model: tuple[Family, ...], half: Side, style: GroupStyle, stage: int, rank: int
) -> list[tuple[int, int, list]]:
    """Lay out the regions of a group: all in one row where it is packed, else each for itself."""
    slabs: list[tuple[int, int, list]] = []
    for family in style.families:
        for layer in model[family].layers:
            if layer not in half.stages[stage]:
                continue
            look = half.layers[layer]
            for part in look.parts:
                tensors = [model[family].tensors[number] for number in part]
                blocks = style.bound * look.kernel_blocks + (look.kernel_blocks - 1)
                tokens = style.block_size // look.kernel_blocks
                local = [held(tensor, rank, half.tp) for tensor in tensors]
                fields, payload = fields_of(tensors, look, part, tokens, blocks, style.padding, local)
                if style.packed and slabs:
                    kernel_blocks, offset, rows = slabs.pop()
                    slabs.append((kernel_blocks, offset + payload, [*rows, (layer, offset, fields)]))
                else:
                    slabs.append((look.kernel_blocks, payload, [(layer, 0, fields)]))
    return slabs


def span(region: Region, rank: int, tp: int) -> tuple[int, int]:
    """First byte of a region's payload, and the one after its last."""
    ends = []
    for field in region.fields:
        last_head, last_token = held(field, rank, tp) - 1, field.tokens - 1
        last = field.offset + last_head * field.head_stride + last_token * field.token_stride
        ends.append(last + field.cell_nbytes)
    first = region.base + min(field.offset for field in region.fields)
    return first, region.base + (region.num_blocks - 1) * region.block_stride + max(ends)


def union(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge spans that overlap."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


@st.composite
def deployments(draw: Draw) -> Deployment:
    """All ranks of src and one rank of dst, over a model drawn once."""
    model = draw(families())
    block_sizes = st.sampled_from([1, 2, 3, 4, 6, 8])
    src_sizes = tuple(draw(block_sizes) for _ in model)
    uneven = draw(st.integers(0, 3)) == 0
    dst_sizes = tuple(draw(block_sizes) if uneven else size for size in src_sizes)
    tps = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8])
    src_tp, dst_tp = draw(tps), draw(tps)
    src = draw(side(model, src_sizes, src_tp))
    if draw(st.integers(0, 3)):
        dst_tp = draw(st.sampled_from([src_tp, src_tp, src_tp, dst_tp]))
        halves = (src, draw(alike(src, model, dst_tp, uneven)))
    else:
        halves = (src, draw(side(model, dst_sizes, dst_tp)))
    if draw(st.integers(0, 7)) == 0:  # layers that only one side holds
        gone, number = model[-1].layers[-1], draw(st.integers(0, 1))
        stages = tuple(stage - {gone} for stage in halves[number].stages)
        if all(stages):
            halves = tuple(replace(half, stages=stages) if half is halves[number] else half for half in halves)
    srcs = tuple(
        build(model, halves[0], stage, rank) for stage in range(len(halves[0].stages)) for rank in range(src_tp)
    )
    dp_size = draw(st.integers(1, 3))
    stage, rank = draw(st.integers(0, len(halves[1].stages) - 1)), draw(st.integers(0, dst_tp - 1))
    held_whole = draw(st.integers(0, 7)) == 0  # a field that dst keeps whole on every rank and src does not
    last = model[-1]
    if held_whole:
        last = replace(last, tensors=tuple(replace(tensor, replicated=True) for tensor in last.tensors))
    dst = build((*model[:-1], last), halves[1], stage, rank, (draw(st.integers(0, dp_size - 1)), dp_size))
    return Deployment(model, halves, srcs, dst)
