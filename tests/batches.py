"""Hypothesis strategy for batches of requests on a deployment.

Block ids are built from runs: independent random ids hardly ever merge, so they would not notice a build that never
merges.
"""

import array
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from kvcompile import Request
from tests.strategies import Deployment, Draw, Rank


class Ids:
    """Hands out block ids of one id space, ascending; where they run out, dst lists end and src lists start over."""

    def __init__(self, bound: int, nulls: set[int | None], reusable: bool) -> None:
        self.free = [block for block in range(bound) if block not in nulls]
        self.at, self.reusable = 0, reusable

    def take(self, count: int) -> list[int]:
        if self.reusable and self.free and self.at + count > len(self.free):
            self.at = 0
            return [self.free[number % len(self.free)] for number in range(count)]
        taken = self.free[self.at : self.at + count]
        self.at += len(taken)
        return taken


def block_list(draw: Draw, ids: Ids, count: int, null: int | None) -> list[int]:
    """A list of at most ``count`` ids made of runs: ascending (most), descending or of nulls, with gaps between."""
    runs: list[list[int]] = []
    while count > 0:
        size = min(count, draw(st.sampled_from([3, 4, 6, 8, 2, 1])))
        kind = draw(st.sampled_from(["up", "up", "up", "up", "up", "gap", "gap", "down", "null"]))
        if kind == "null" and null is not None:
            size = min(size, 2)
            runs.append([null] * size)
        else:
            if kind == "gap":
                ids.take(1)
            taken = ids.take(size)
            runs.append(taken[::-1] if kind == "down" else taken)
        count -= size
    if draw(st.integers(0, 3)) == 0:
        runs.reverse()
    return [block for run in runs for block in run]


CONTAINERS: list[Callable[[list[int]], object]] = [
    list,
    list,
    lambda ids: np.array(ids, np.int64),
    lambda ids: np.array(ids, np.int32),
    lambda ids: array.array("q", ids),
    lambda ids: np.repeat(np.array(ids, np.int64), 2)[::2],
]


@dataclass(frozen=True)
class Draft:
    """A request in the group numbers of the sides; `project` turns it into the request of one pair of ranks."""

    id: str
    src_blocks: dict[int, list]
    dst_blocks: dict[int, list]
    src_first: dict[int, int] | None
    dst_first: dict[int, int] | None
    num_tokens: int | None
    contained: Callable[[list[int]], object]

    def project(self, src: Rank, dst: Rank) -> Request:
        return Request(
            self.id,
            [self.contained(self.src_blocks[group]) for group in src.groups],
            [self.contained(self.dst_blocks[group]) for group in dst.groups],
            None if self.src_first is None else [self.src_first[group] for group in src.groups],
            None if self.dst_first is None else [self.dst_first[group] for group in dst.groups],
            self.num_tokens,
        )


@st.composite
def batches(draw: Draw, deployment: Deployment) -> list[Draft]:
    """One to four requests; dst blocks are given once unless a conflict is drawn."""
    src, dst = deployment.sides
    spaces = [[Ids(style.bound, {style.null}, side is src) for style in side.groups] for side in deployment.sides]
    if dst.overlay:
        nulls = {style.null for style in dst.groups}
        spaces[1] = [Ids(min(style.bound for style in dst.groups), nulls, False)] * 2
    drafts: list[Draft] = []
    for number in range(draw(st.integers(1, 4))):
        drafts.append(draw(draft(deployment, f"r{number}", spaces)))
        if number and draw(st.integers(0, 3)) == 0:  # a shared prefix: the same src blocks again
            mine, theirs = drafts[-1].src_blocks, drafts[-2].src_blocks
            shared = {group: theirs[group][: len(mine[group])][:2] + mine[group][2:] for group in mine}
            drafts[-1] = replace(drafts[-1], src_blocks=shared)
    if draw(st.integers(0, 5)) == 0:
        number = draw(st.integers(0, len(drafts) - 1))
        drafts[number] = spoil(draw, drafts[number], drafts[number - 1], deployment)
    return drafts


@st.composite
def draft(draw: Draw, deployment: Deployment, name: str, spaces: list[list[Ids]]) -> Draft:
    """One request; with positions where block sizes differ (mostly), or by choice."""
    src, dst = deployment.sides
    sizes = {family: style.block_size for style in src.groups for family in style.families}
    uneven = any(
        sizes[family] != style.block_size and not deployment.families[family].state
        for style in dst.groups
        for family in style.families
    )
    positions = draw(st.integers(0, 15)) > 0 if uneven else draw(st.integers(0, 2)) == 0
    start, length = draw(st.integers(0, 20)), draw(st.sampled_from([32, 32, 24, 24, 16, 8, 3, 0]))
    firsts: list[dict[int, int]] = [{}, {}]
    counts: list[dict[int, int]] = [{}, {}]
    for number in (1, 0):
        for group, style in enumerate(deployment.sides[number].groups):
            size = style.block_size
            if positions:
                first = max(0, start // size + draw(st.sampled_from([0, 0, 0, 1, -1])))
                last = (start + length) // size + draw(st.sampled_from([0, 0, 0, 1, 2]))
                firsts[number][group], counts[number][group] = first, max(0, last - first)
            elif number:
                counts[1][group] = draw(st.sampled_from([4, 5, 8, 10, 3, 2, 1, 0]))
    blocks: list[dict[int, list]] = [{}, {}]
    for group, style in enumerate(dst.groups):
        blocks[1][group] = block_list(draw, spaces[1][group], counts[1][group], style.null)
    for group, style in enumerate(src.groups):
        if not positions:
            partners = [g for g, other in enumerate(dst.groups) if set(other.families) & set(style.families)]
            need = [len(blocks[1][partner]) for partner in partners]
            counts[0][group] = max(need, default=0) + draw(st.sampled_from([0, 0, 1, 3]))
        blocks[0][group] = block_list(draw, spaces[0][group], counts[0][group], style.null)
    num_tokens = start + draw(st.integers(0, length + 4)) if positions and draw(st.integers(0, 2)) == 0 else None
    contained = draw(st.sampled_from(CONTAINERS))
    return Draft(name, blocks[0], blocks[1], *(firsts if positions else (None, None)), num_tokens, contained)


def spoil(draw: Draw, good: Draft, other: Draft, deployment: Deployment) -> Draft:
    """Plant a fault."""
    number = draw(st.integers(0, 1))
    lists = [dict(good.src_blocks), dict(good.dst_blocks)]
    group = draw(st.integers(0, len(deployment.sides[number].groups) - 1))
    given = lists[number][group]
    at = draw(st.integers(0, len(given)))
    kind = draw(st.sampled_from(["high", "low", "kind", "short", "twice", "theirs"]))
    match kind:
        case "high":
            bound = deployment.sides[number].groups[group].bound
            lists[number][group] = [*given[:at], bound + draw(st.integers(0, 1)), *given[at:]]
        case "low":
            lists[number][group] = [*given[:at], draw(st.sampled_from([-2, -(2**40)])), *given[at:]]
        case "kind":
            lists[number][group] = [*given[:at], draw(st.sampled_from([None, 1.0, "1", True])), *given[at:]]
        case "short":
            lists[0] = {index: blocks[1:] for index, blocks in lists[0].items()}
        case "twice":
            lists[1] = {index: [*blocks, *blocks[:1]] for index, blocks in lists[1].items()}
        case "theirs":
            lists[1] = {index: [*blocks[:-1], *other.dst_blocks[index][:1]] for index, blocks in lists[1].items()}
    contained = list if kind in ("low", "kind", "high") else good.contained
    return replace(good, src_blocks=lists[0], dst_blocks=lists[1], contained=contained)
