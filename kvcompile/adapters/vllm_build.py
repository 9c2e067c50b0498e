"""From vLLM's ready requests to descriptors: the checks that vLLM 0.33.0 makes, in its words, then one build of a plan.

Imports no vLLM. It decides nothing about layouts: the plan is given.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvcompile.adapters.vllm_table import RegionPlan
from kvcompile.descriptors import Descriptors
from kvcompile.plan import Plan
from kvcompile.request import Request

__all__ = ["NULL_BLOCK", "Built", "Checked", "Rules", "build_pair", "build_regions", "check"]

NULL_BLOCK = 0
"""vLLM's id of no block (``NULL_BLOCK_ID``)."""

GROUP_COUNT = "KV group count mismatch"
FEWER_BLOCKS = "P num blocks less than D"
"""vLLM 0.33.0's two errors of a request; peers may look for these words."""

ByGroup = list[list[int]]


class Checked(NamedTuple):
    """Requests that passed, with the block ids that pair, by group on both sides; and those that did not."""

    ids: list[str]
    src: list[ByGroup]
    dst: list[ByGroup]
    failed: dict[str, str]  # request id -> error, in order


class Built(NamedTuple):
    """Descriptors of a batch, one request a span, and why others have none."""

    descriptors: Descriptors
    failed: dict[str, str]


class Rules(NamedTuple):
    """How the lists of a peer's requests are read.

    Attributes
    ----------
    kinds : sequence of str
        "full", "window" or "state", one a group.
    nulls : bool
        Correct null ids: pairs with one are dropped *after* alignment. vLLM 0.33.0 takes them out of state lists
        before, and copies them in all others.
    scratch : sequence of (int, int)
        Speculative blocks at the end of the src and of the dst list of each group, to leave off.
    last : collection of int
        State groups whose blocks stand for other numbers of tokens on the two sides: only the last blocks pair.
    """

    kinds: Sequence[str]
    nulls: bool = False
    scratch: Sequence[tuple[int, int]] = ()
    last: frozenset[int] = frozenset()


def check(ready: Sequence[tuple[str, Any]], wanted: dict[str, tuple[str, ByGroup]], rules: Rules) -> Checked:
    """Align each request's lists as vLLM 0.33.0 does (they end together), and refuse what it refuses.

    Parameters
    ----------
    ready : sequence of (request id, send meta with ``local_block_ids``)
    wanted : dict
        Request id -> (transfer id, the consumer's ids by group).
    rules : Rules

    Returns
    -------
    Checked
        A request that wants nothing is neither passed nor failed.
    """
    checked = Checked([], [], [], {})
    for request, meta in ready:
        remote = wanted[request][1]
        if not any(len(ids) for ids in remote):
            continue
        local = meta.local_block_ids
        if len(local) != len(remote):
            checked.failed[request] = GROUP_COUNT
            continue
        src: ByGroup = []
        dst: ByGroup = []
        for group, (have, want) in enumerate(zip(local, remote, strict=True)):
            pairs = _align(have, want, group, rules)
            if isinstance(pairs, str):
                checked.failed[request] = pairs
                break
            src.append(pairs[0])
            dst.append(pairs[1])
        else:
            if any(src):
                checked.ids.append(request)
                checked.src.append(src)
                checked.dst.append(dst)
    return checked


def _align(have: list[int], want: list[int], group: int, rules: Rules) -> tuple[list[int], list[int]] | str:
    """Return the ids that pair, or why the request fails."""
    kind = rules.kinds[group]
    if rules.scratch and any(rules.scratch[group]):
        have, want = (ids[: len(ids) - n] for ids, n in zip((have, want), rules.scratch[group], strict=True))
    if group in rules.last:
        have, want = have[-1:], want[-1:]
    if kind == "state" and not rules.nulls:
        have, want = ([block for block in ids if block != NULL_BLOCK] for ids in (have, want))
    elif rules.nulls and want and want[0] == NULL_BLOCK:
        want = want[next((at for at, block in enumerate(want) if block != NULL_BLOCK), len(want)) :]
    if len(have) < len(want):
        return FEWER_BLOCKS
    have = have[len(have) - len(want) :]
    if not rules.nulls or (NULL_BLOCK not in have and NULL_BLOCK not in want):
        return have, want
    pairs = [(a, b) for a, b in zip(have, want, strict=True) if b != NULL_BLOCK]
    if kind == "full" and any(a == NULL_BLOCK for a, _ in pairs):
        return f"kvcompile: group {group} has no src block for a block that is wanted"
    pairs = [(a, b) for a, b in pairs if a != NULL_BLOCK]
    return [a for a, _ in pairs], [b for _, b in pairs]


def build_regions(plan: RegionPlan, checked: Checked, expand: Callable[[ByGroup], ByGroup]) -> Built | None:
    """Build what vLLM's own loop would emit for checked requests.

    Parameters
    ----------
    plan : RegionPlan
    checked : Checked
    expand : callable
        From ids of blocks to ids of kernel blocks, by group (vLLM's own).

    Returns
    -------
    Built or None
        None where the plan refuses ids that vLLM's loop would take (a block given twice, an id out of 64 bits).
    """
    requests = [
        Request(request, plan.take(expand(src)), plan.take(expand(dst)))
        for request, src, dst in zip(checked.ids, checked.src, checked.dst, strict=True)
    ]
    descriptors = plan.plan.build(requests)
    return None if descriptors.failed else Built(descriptors, checked.failed)


def build_pair(plan: Plan, checked: Checked, sort: bool) -> Built:
    """Build checked requests with a plan compiled from two caches; what it refuses fails, by request."""
    requests = [
        Request(request, src, dst) for request, src, dst in zip(checked.ids, checked.src, checked.dst, strict=True)
    ]
    descriptors = plan.build(requests, sort=sort)
    refused = {str(request): f"kvcompile: {error}" for request, error in descriptors.failed.items()}
    return Built(descriptors, checked.failed | refused)
