"""From vLLM's ready requests to descriptors: the checks that vLLM 0.33.0 makes, in its words, then one build of a plan.

Imports no vLLM. It decides nothing about layouts: the plan is given.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvcompile.adapters.vllm_table import RegionPlan
from kvcompile.descriptors import Descriptors
from kvcompile.request import Request

__all__ = ["NULL_BLOCK", "Built", "Checked", "build_regions", "check"]

logger = logging.getLogger("vllm.kvcompile")

NULL_BLOCK = 0
"""vLLM's id of no block (``NULL_BLOCK_ID``)."""

GROUP_COUNT = "KV group count mismatch"
FEWER_BLOCKS = "P num blocks less than D"
"""vLLM 0.33.0's two errors of a request; peers may look for these words."""

ByGroup = list[list[int]]


class Checked(NamedTuple):
    """Requests that passed, their aligned ids by group on both sides, and the ones that did not."""

    ids: list[str]
    src: list[ByGroup]
    dst: list[ByGroup]
    failed: dict[str, str]  # request id -> error, in order
    silent: bool = False


class Built(NamedTuple):
    """Descriptors of a batch, one request a span in the order of ``Checked.ids``, and why others have none."""

    descriptors: Descriptors
    failed: dict[str, str]


def check(
    ready: Sequence[tuple[str, Any]],
    wanted: dict[str, tuple[str, ByGroup]],
    is_state: Callable[[int], bool],
) -> Checked:
    """Align each request's lists as vLLM 0.33.0 does: null ids of state groups are taken out first, then lists end together.

    Parameters
    ----------
    ready : sequence of (request id, send meta with ``local_block_ids``)
    wanted : dict
        Request id -> (transfer id, the consumer's ids by group).
    is_state : callable
        Group number -> whether it holds recurrent state.

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
            if is_state(group):
                have = [block for block in have if block != NULL_BLOCK]  # noqa: PLW2901
                want = [block for block in want if block != NULL_BLOCK]  # noqa: PLW2901
            if len(have) < len(want):
                checked.failed[request] = FEWER_BLOCKS
                break
            src.append(have[len(have) - len(want) :])
            dst.append(want)
        else:
            if any(src):
                checked.ids.append(request)
                checked.src.append(src)
                checked.dst.append(dst)
    return checked


def build_regions(
    plan: RegionPlan, checked: Checked, expand: Callable[[ByGroup], ByGroup], out: Descriptors | None = None
) -> Built | None:
    """Build what vLLM's own loop would emit for checked requests.

    Parameters
    ----------
    plan : RegionPlan
    checked : Checked
    expand : callable
        From ids of blocks to ids of kernel blocks, by group (vLLM's own).
    out : Descriptors, optional
        An earlier result, overwritten.

    Returns
    -------
    Built or None
        None where the plan refuses ids that vLLM's loop would take (a block given twice, an id out of 64 bits).
    """
    requests = [
        Request(number, plan.take(expand(src)), plan.take(expand(dst)))
        for number, (src, dst) in enumerate(zip(checked.src, checked.dst, strict=True))
    ]
    descriptors = plan.plan.build(requests, out=out)
    if descriptors.failed:
        return None
    return Built(descriptors, checked.failed)
