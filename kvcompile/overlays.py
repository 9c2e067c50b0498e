"""Which groups of a cache share memory: they use one id space. It raises no errors."""

import math
from typing import TYPE_CHECKING

import numpy as np

from kvcompile import overlap
from kvcompile.layout import Region

if TYPE_CHECKING:
    from kvcompile.cache import Cache

__all__ = ["owners"]

MAX_PIECES = 1 << 13
"""Contiguous pieces that are compared; where regions that may share memory have more, their groups count as sharing."""


def owners(cache: "Cache") -> tuple[int, ...]:
    """Return for each group the lowest one that it shares bytes with, directly or through others (`Cache.overlays`)."""
    owner = list(range(len(cache.groups)))
    budget = MAX_PIECES
    spans = sorted((*span, number) for number, span in enumerate(cache.spans))
    cluster: list[Region] = []
    reach = 0
    for start, end, number in spans:
        if start >= reach:
            budget -= _unite(cache, cluster, owner, budget)
            cluster = []
        cluster.append(cache.regions[number])
        reach = max(reach, end)
    _unite(cache, cluster, owner, budget)
    return tuple(owner)


def _unite(cache: "Cache", cluster: list[Region], owner: list[int], budget: int) -> int:
    """Unite, in ``owner``, the groups that share bytes among regions whose spans hang together.

    Returns how many pieces were compared.
    """
    groups = sorted({region.group for region in cluster})
    if len(groups) < 2:
        return 0
    strides = {r.block_stride * r.kernel_blocks for r in cluster if r.num_blocks > r.kernel_blocks}
    same = len(strides) < 2
    count = sum(_pieces(cache, region) if same else 1 for region in cluster)
    origin = min(region.base for region in cluster)
    if count > budget or max(cache.span(region)[1] for region in cluster) - origin >= 2**62:
        for group in groups:
            _join(owner, groups[0], group)
        return 0
    found, of_group = [], []
    for region in cluster:
        # Without a common stride there is no common residue: count the whole span as taken.
        start, end = cache.span(region)
        stride = max(strides, default=0)
        whole = np.array([(start - origin, end - origin, 0, 1)], np.int64)
        found.append(cache.payload([region], origin, stride) if same else whole)
        of_group.append(np.full(len(found[-1]), region.group))
    pieces, group_of = np.concatenate(found), np.concatenate(of_group)
    for piece, group in zip(pieces.tolist(), group_of.tolist(), strict=True):
        for other in set(group_of[overlap.crosses(piece, pieces)].tolist()):
            _join(owner, group, other)
    return count


def _pieces(cache: "Cache", region: Region) -> int:
    """Return how many contiguous pieces one block id of a region has."""
    counts = [math.prod(count for _, count in cache.fold(field)[0]) for field in region.fields]
    return min(region.kernel_blocks, region.num_blocks) * sum(counts)


def _join(owner: list[int], a: int, b: int) -> None:
    if owner[a] != owner[b]:
        low, high = sorted((owner[a], owner[b]))
        owner[:] = [low if group == high else group for group in owner]
