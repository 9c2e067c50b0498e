"""One pair of ranks: is what vLLM would send right, and what to send where it is not. It builds and sends nothing.

vLLM's own answer (its regions and its sender plan) is turned into a table and *proved* against the two caches. Where
the proof is exact vLLM is right, and exact mode keeps its descriptors. Where it is not, or vLLM refuses, the plan
compiled from the two caches is the correction, under the name of the override that it takes.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvcompile.adapters.vllm_table import SHARED
from kvcompile.cache import Cache
from kvcompile.errors import LayoutError
from kvcompile.layout import Field, Group, Region
from kvcompile.plan import Plan
from kvcompile.plan import compile as compile_plan
from kvcompile.proof import Proof, prove
from kvcompile.table import TABLE

__all__ = ["Answer", "Pair", "Regions", "partners", "signatures", "verdict"]

logger = logging.getLogger("vllm.kvcompile")


class Pair(NamedTuple):
    """A compiled plan between this rank (src) and a peer's (dst), and the correction that it is; "" for none."""

    plan: Plan
    own: Cache
    peer: Cache
    correction: str


class Regions(list):  # type: ignore[type-arg]
    """vLLM's list of aligned regions, with the pair that takes their place."""

    pair: Pair | None = None


class Answer(NamedTuple):
    """What vLLM itself says about a pair.

    Attributes
    ----------
    local, remote : sequence of regions
        Aligned, as its builder would get them.
    aligned : callable
        Makes the same before neighbours are merged.
    error : str or None
    override : str
        The override that the error comes from, "" where it is none of ours to correct.
    by_lengths : bool
        The error comes from the check of lengths, which vLLM makes when it sends.
    sender_plan : callable
        (src rank, local region, remote region) -> vLLM's sender plan.
    """

    local: Sequence[Any]
    remote: Sequence[Any]
    aligned: Callable[[], tuple[Sequence[Any], Sequence[Any]]]
    error: str | None
    override: str
    by_lengths: bool
    sender_plan: Callable[[int, Any, Any], tuple[bool, int, int, int]]


def verdict(own: Cache, peer: Cache, answer: Answer, ratios: Sequence[int]) -> str | None:
    """Return the override that vLLM's answer needs, None where the answer is right.

    Parameters
    ----------
    own, peer : Cache
        The src and the dst rank.
    answer : Answer
    ratios : sequence of int
        Kernel blocks of a block, one a group, that vLLM multiplies ids with: this side's, on both sides.

    Returns
    -------
    str or None
        "" where vLLM's error is none that an override answers.
    """
    if answer.error is not None:
        return answer.override
    if _proof(own, peer, answer, (answer.local, answer.remote), ratios).exact:
        return None
    if _proof(own, peer, answer, answer.aligned(), ratios).exact:
        return "prepare_transfer_regions"
    return "sender_plan"


def shared_layers(own: Cache, peer: Cache) -> Cache:
    """Return the peer's cache without the layers that this pipeline stage does not hold."""
    held = {region.layer for region in own.regions}
    return msgspec.structs.replace(peer, regions=tuple(region for region in peer.regions if region.layer in held))


def _proof(
    own: Cache, peer: Cache, answer: Answer, regions: tuple[Sequence[Any], Sequence[Any]], ratios: Sequence[int]
) -> Proof:
    ranks = range(own.tp_size)
    sources = [own.at_rank(rank) for rank in ranks]
    wanted = shared_layers(own, peer)
    plans = {}
    for rank in ranks:
        paired = (
            rank * peer.tp_size // own.tp_size == peer.tp_rank or peer.tp_rank * own.tp_size // peer.tp_size == rank
        )
        table = _table(answer, rank, *regions, ratios) if paired else np.empty(0, TABLE)
        plans[rank, 0] = compile_plan(sources[rank], wanted).with_table(table)
    return prove(sources, [wanted], plans)


def _table(
    answer: Answer, rank: int, local: Sequence[Any], remote: Sequence[Any], ratios: Sequence[int]
) -> np.ndarray[Any, np.dtype[np.void]]:
    """Say vLLM's answer as a table by block id: a row a region, group and kernel block."""
    rows = []
    for a, b in zip(local, remote, strict=True):
        sends, src_offset, dst_offset, nbytes = answer.sender_plan(rank, a, b)
        groups = a.shared_group_ids if a.group_index == SHARED else (a.group_index,)
        for group in groups if sends else ():
            for kernel_block in range(ratios[group]):
                row = np.zeros((), TABLE)
                for name, region, offset in (("src", a, src_offset), ("dst", b, dst_offset)):
                    row[f"{name}_group"], row[f"{name}_step"] = group, 1
                    row[f"{name}_origin"] = region.base_addr + offset + kernel_block * region.block_len
                    row[f"{name}_stride"] = region.block_len * ratios[group]
                row["length"], row["count"], row["parts"] = nbytes, 1, 1
                rows.append(row)
    return np.array(rows, TABLE)


Signature = tuple[int, bool]


def signatures(cache_: Cache) -> frozenset[Signature]:
    """Return the (heads, replicated) of all fields: all that elections depend on beside sizes and ranks."""
    return frozenset((field.heads, field.replicated) for region in cache_.regions for field in region.fields)


@cache
def partners(
    kinds: frozenset[Signature], src_size: int, dst_size: int, election: str, dp_rank: int = 0, dp_size: int = 1
) -> frozenset[tuple[int, int]]:
    """Return which (src rank, dst rank) talk: those that share bytes, and one for each src rank that sends nothing.

    Both sides know the same pairs from sizes alone. A src rank that nobody asks would keep its blocks until they
    expire, so the dst rank it would be paired with asks it, and gets nothing but the release.
    """
    pairs = set()
    for src in range(src_size):
        for dst in range(dst_size):
            if any(_sends(kind, src, src_size, dst, dst_size, election, dp_rank, dp_size) for kind in kinds):
                pairs.add((src, dst))
    idle = set(range(src_size)) - {src for src, _ in pairs}
    return frozenset(pairs | {(src, src * dst_size // src_size) for src in idle})


def _sends(
    kind: Signature, src: int, src_size: int, dst: int, dst_size: int, election: str, dp_rank: int, dp_size: int
) -> bool:
    """Whether a rank sends part of a field to another: asked of `compile` itself, with a token of one byte."""
    heads, replicated = kind
    field = Field("kv", heads, 1, 1, 0, 1, 1, replicated)
    regions = (Region(0, 0, 0, heads, 1, (field,)),)
    groups = (Group(1),)
    a = Cache(regions, groups, tp_rank=src, tp_size=src_size)
    b = Cache(regions, groups, tp_rank=dst, tp_size=dst_size, dp_rank=dp_rank, dp_size=dp_size)
    return bool(len(compile_plan(a, b, election=election).table))


def compile_pair(own: Cache, peer: Cache, election: str, correction: str, bounded: bool) -> Pair:
    """Compile a pair from its caches, and prove it over all src ranks.

    Parameters
    ----------
    own, peer : Cache
    election, correction : str
    bounded : bool
        The peer's numbers of blocks are its own; else nothing is known of them, and any id is taken on that side.

    Raises
    ------
    LayoutError
        The two caches do not hold the same tensors, blocks of other sizes pair, or the proof is not exact.
    """
    wanted = shared_layers(own, peer)
    plan = compile_plan(own, wanted, election=election)
    for pair in plan.pairs:
        sizes = own.groups[pair.src_group].block_size, peer.groups[pair.dst_group].block_size
        if sizes[0] != sizes[1] and not own.groups[pair.src_group].state:
            raise LayoutError(
                f"group {pair.src_group}: blocks of {sizes[0]} and {sizes[1]} tokens, and vLLM sends no positions"
            )
        if pair.src_group != pair.dst_group:
            raise LayoutError(
                f"group {pair.src_group} holds layers of the peer's group {pair.dst_group}: vLLM pairs groups by number"
            )
    proof = prove([own.at_rank(rank) for rank in range(own.tp_size)], [wanted], election=election)
    if not proof.exact:
        raise LayoutError(f"not every byte would be written once: {_first(proof)}")
    if not bounded:
        groups = len(peer.groups)
        anywhere = plan.dst._replace(
            bound=(2**62,) * groups, overlays=tuple(range(groups)), buffers=((0, 2**64 - 1),), chunks=(0,)
        )
        plan = Plan(plan.table.copy(), plan.pairs, plan.src, anywhere)
    return Pair(plan, own, peer, correction)


def _first(proof: Proof) -> str:
    findings: Iterable[Any] = [*proof.missing, *proof.duplicated, *proof.misplaced]
    return "; ".join(
        f"layer {one.layer!r}, field {one.field!r}, heads {one.heads}: {one.why}" for one in list(findings)[:3]
    )
