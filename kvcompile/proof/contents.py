"""What a plan sends, in the model's words: which layers, which heads of which fields. It proves nothing."""

from typing import NamedTuple

import numpy as np

from kvcompile.cache import Cache
from kvcompile.plan import Plan
from kvcompile.proof.labels import Tensor, expand
from kvcompile.proof.pieces import Receiver, Side

__all__ = ["Sent", "contents"]


class Sent(NamedTuple):
    """Layers that send the same heads of the same fields. ``heads``: of each field, half-open ranges."""

    src_group: int
    dst_group: int
    layers: tuple[str | int, ...]
    heads: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]


def contents(src: Cache, dst: Cache, plan: Plan) -> list[Sent]:
    """Return what the fields are that a plan's rows write, by the labels of dst."""
    tensors: dict[Tensor, int] = {}
    theirs, ours = Side.of([src], tensors), Side.of([dst], tensors)
    names = list(tensors)
    found: dict[tuple[int, int], dict[str | int, dict[str, set[int]]]] = {}
    for group in range(len(dst.groups)):
        table = plan.table[plan.table["dst_group"] == group]
        to = Receiver(theirs, ours, 0, group, table, np.zeros(len(table), np.int64), np.empty((1, 0), np.int64))
        pieces, parts = to.pieces(np.zeros(len(table), np.int64), 0), to.parts.at(0)
        first = np.searchsorted(parts.end, pieces.dst, "right")
        hits = np.maximum(np.searchsorted(parts.start, pieces.dst + pieces.length, "left") - first, 0)
        piece, number = expand(hits)
        part = first[piece] + number
        of_row = table["src_group"][pieces.row[piece]].tolist()
        tensor = ours.fields.tensor[parts.field[part]].tolist()
        for src_group, index, head in set(zip(of_row, tensor, parts.head[part].tolist(), strict=True)):
            layers = found.setdefault((src_group, group), {})
            layers.setdefault(names[index].layer, {}).setdefault(names[index].field, set()).add(head)
    sent: dict[tuple[object, ...], list[str | int]] = {}
    order = {region.layer: number for number, region in enumerate(dst.regions)}
    for pair, layers in sorted(found.items(), key=lambda item: item[0][::-1]):
        for layer in sorted(layers, key=order.__getitem__):
            heads = tuple((field, _ranges(layers[layer][field])) for field in sorted(layers[layer]))
            sent.setdefault((*pair, heads), []).append(layer)
    return [Sent(key[0], key[1], tuple(layers), key[2]) for key, layers in sent.items()]  # type: ignore[arg-type]


def _ranges(heads: set[int]) -> tuple[tuple[int, int], ...]:
    ordered = sorted(heads)
    starts = [head for head in ordered if head - 1 not in heads]
    stops = [head + 1 for head in ordered if head + 1 not in heads]
    return tuple(zip(starts, stops, strict=True))
