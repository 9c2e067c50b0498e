"""vLLM's transfer regions as a plan that emits what vLLM 0.33.0 emits: region by region, nothing merged across them.

Imports no vLLM: regions are anything with ``base_addr``, ``block_len``, ``kv_block_len``, ``group_index`` and
``shared_group_ids``. What a plan cannot say exactly as vLLM says it is left to vLLM's own code (`compile_regions`
returns None).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcompile.cache import Cache
from kvcompile.kernels import item
from kvcompile.lanes import lanes
from kvcompile.layout import Buffer, Group
from kvcompile.lowering import GroupPair
from kvcompile.plan import Plan
from kvcompile.program import Side
from kvcompile.table import TABLE

__all__ = ["Lists", "RegionPlan", "compile_regions"]

SHARED = -1
"""vLLM's group index of a region that several groups share: their ids, one list after the other."""

SenderPlan = Callable[[Any, Any], tuple[bool, int, int, int]]
"""(local region, remote region) -> whether to send, offset in the src block, offset in the dst block, bytes."""

Lists = tuple[int, ...]
"""The vLLM groups whose ids, one after the other, are the id list of one group of the plan."""


class RegionPlan(NamedTuple):
    """A plan, and which of vLLM's id lists each of its groups takes."""

    plan: Plan
    lists: tuple[Lists, ...]

    def take(self, by_group: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Return one id list a group of the plan from the id lists of vLLM's groups."""
        return [
            by_group[groups[0]] if len(groups) == 1 else [block for group in groups for block in by_group[group]]
            for groups in self.lists
        ]


def compile_regions(local: Sequence[Any], remote: Sequence[Any], sender_plan: SenderPlan) -> RegionPlan | None:
    """Compile aligned regions of a pair of ranks.

    Parameters
    ----------
    local, remote : sequence of regions
        Aligned: item i of one is item i of the other.
    sender_plan : callable
        What vLLM's worker answers for a pair of regions.

    Returns
    -------
    RegionPlan or None
        None where vLLM's own loop would do what no table says: fail an assertion, send nothing, overlap itself.
    """
    rows = np.zeros(len(local), TABLE)
    keys: list[Lists] = []
    kept = []
    for at, (a, b) in enumerate(zip(local, remote, strict=False)):
        if a.group_index != b.group_index or (a.group_index == SHARED and not a.shared_group_ids):
            return None
        sends, src_offset, dst_offset, nbytes = sender_plan(a, b)
        keys.append(tuple(a.shared_group_ids) if a.group_index == SHARED else (a.group_index,))
        if not sends:
            continue
        if not _regular(a, src_offset, nbytes) or not _regular(b, dst_offset, nbytes):
            return None
        kept.append(at)
        row = rows[at]
        row["src_origin"], row["src_stride"] = a.base_addr + src_offset, a.block_len
        row["dst_origin"], row["dst_stride"] = b.base_addr + dst_offset, b.block_len
        row["src_step"] = row["dst_step"] = row["count"] = row["parts"] = 1
        row["length"] = nbytes
    if any(group < 0 for key in keys for group in key):
        return None
    return _apart(rows[kept], [keys[at] for at in kept])


def _regular(region: Any, offset: int, nbytes: int) -> bool:
    """Whether a slice lies in its block, and the block before the next one, in 64 bits."""
    return (
        offset >= 0
        and nbytes > 0
        and offset + nbytes <= region.kv_block_len
        and region.kv_block_len <= region.block_len < 2**62
        and 0 <= region.base_addr < 2**64 - region.block_len
    )


def _apart(rows: npt.NDArray[np.void], keys: list[Lists]) -> RegionPlan | None:
    """Give rows that would merge with another row a group of their own: rows of two groups never merge."""
    lists: list[Lists] = []
    copies: dict[tuple[Lists, int], int] = {}  # (lists, how often they were needed before) -> group
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    rows["src_group"] = rows["dst_group"] = [numbers[key] for key in keys]
    nowhere = np.zeros(len(rows), np.int64)
    seen: dict[int, int] = {}
    for at, lane in enumerate(lanes(rows, nowhere, nowhere).tolist()):
        copy = seen[lane] = seen.get(lane, -1) + 1
        group = copies.setdefault((keys[at], copy), len(lists))
        if group == len(lists):
            lists.append(keys[at])
        rows[at]["src_group"] = rows[at]["dst_group"] = group
    side = _anywhere(len(lists))
    plan = Plan(rows, tuple(GroupPair(group, group) for group in range(len(lists))), side, side)
    # What is left are single rows: runs of whole blocks, or blocks apart. All else merges in ways vLLM's loop does not.
    return None if np.any(plan._program.lanes[:, item.LANE_KIND] == item.CHAIN) else RegionPlan(plan, tuple(lists))


def _anywhere(groups: int) -> Side:
    """Return a side without bounds of its own: vLLM checks no id, so only 64 bits limit one."""
    cache = Cache((), tuple(Group(1) for _ in range(groups)), (Buffer(0, 2**64 - 1),))
    return Side.of(cache)._replace(bound=(2**62,) * groups)
