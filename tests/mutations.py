"""Plans with one number changed, a row dropped or doubled; and whether such a change alters what a request copies.

The judge is tests/replay.py, byte by byte on concrete block ids: it knows tables and the oracle's field bytes, and
shares nothing with the proof.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from typing import NamedTuple

import hypothesis
import numpy as np
from hypothesis import strategies as st

import kvcompile
from kvcompile import Cache, LayoutError, Plan, Proof, Request, prove
from tests import oracle, replay, strategies

Plans = Mapping[tuple[int, int], Plan]


class Mutant(NamedTuple):
    """A table with one change; ``what`` is the column, "drop" or "double"."""

    what: str
    row: int
    old: int | None
    new: int | None
    table: np.ndarray


def mutate(table: np.ndarray, random: Random) -> Mutant | None:
    """Change a table that has rows at one place; None where the drawn number is the old one."""
    row = random.randrange(len(table))
    what = random.choice([*table.dtype.names, "drop", "double"])
    if what == "drop":
        return Mutant(what, row, None, None, np.delete(table, row))
    if what == "double":
        return Mutant(what, row, None, None, np.insert(table, random.randrange(len(table) + 1), table[row]))
    old, other = int(table[what][row]), int(table[what][random.randrange(len(table))])
    near = random.randrange(1, 64)
    new = random.choice(
        [
            old + 1,
            old - 1,
            old + near,
            old - near,
            old * 2,
            0,
            1,
            other,
            old ^ (1 << random.randrange(64)),
            random.randrange(2**63),
        ]
    )
    new = new % 2**64 if table.dtype[what].kind == "u" else (new + 2**63) % 2**64 - 2**63
    if new == old:
        return None
    changed = table.copy()
    changed[what][row] = new
    return Mutant(what, row, old, new, changed)


class Judge:
    """Tells whether plans of one pair of ranks copy the same field bytes."""

    def __init__(self, src: Cache, dst: Cache, random: Random) -> None:
        self.src, self.dst = src, dst
        self.requests = [full_request(src, dst, random, shuffled) for shuffled in (False, True)]
        self.fields = [
            (bytes_of(src, request.src_blocks), bytes_of(dst, request.dst_blocks)) for request in self.requests
        ]

    def copies(self, plan: Plan) -> list[Counter[tuple[int, int]]]:
        """How often each (src byte, dst byte) is copied for each request, padding to padding aside."""
        rows, found = replay.rows(plan, self.src, self.dst), []
        for request, (theirs, ours) in zip(self.requests, self.fields, strict=True):
            lanes = replay.emission(rows, request, self.src, self.dst)
            found.append(Counter(p for lane in lanes for p in replay.moved(lane) if p[0] in theirs or p[1] in ours))
        return found

    def alike(self, plan: Plan, mutant: Plan) -> bool:
        """Return whether a mutant is the plan; one that `build` refuses copies nothing and is not."""
        try:
            mutant.build([])
        except LayoutError:
            return False
        return self.copies(plan) == self.copies(mutant)


def bytes_of(cache: Cache, given: list[list[int]]) -> set[int]:
    """Every byte that a block keeps in a field; of groups that overlay each other, those that are given the block."""
    found = set()
    groups = range(len(cache.groups))
    spaces = [[other for other in groups if other == group or overlaid(cache, group, other)] for group in groups]
    used = [set(blocks) for blocks in given]
    for group in groups:
        for block in range(oracle.bound(cache, group) or 0):
            if block in used[group] or not any(block in used[other] for other in spaces[group]):
                found |= oracle.block_addresses(cache, group, block)
    return found


def full_request(src: Cache, dst: Cache, random: Random, shuffled: bool) -> Request:
    """Make a request of 6 blocks of the largest size, where there are so many; overlaid groups share no id."""
    tokens = 6 * max(group.block_size for cache in (src, dst) for group in cache.groups)
    lists: list[list[list[int]]] = []
    for cache in (src, dst):
        lists.append([])
        for number, group in enumerate(cache.groups):
            taken = {id_ for other, ids in enumerate(lists[-1]) if overlaid(cache, number, other) for id_ in ids}
            ids = [
                block for block in range(oracle.bound(cache, number) or 0) if block not in {group.null_block, *taken}
            ]
            if shuffled:
                random.shuffle(ids)
            lists[-1].append(ids[: -(-tokens // group.block_size)])
    return Request("r", *lists, [0] * len(src.groups), [0] * len(dst.groups))


def overlaid(cache: Cache, a: int, b: int) -> bool:
    """Whether two groups share bytes."""
    low, high = sorted((a, b))
    return low != high and oracle.overlaid(cache, low, high)


def try_mutants(
    srcs: Sequence[Cache], dst: Cache, plans: Plans, random: Random, count: int
) -> tuple[Counter[str], list[Mutant]]:
    """Prove ``count`` mutants of exact plans for one dst rank.

    Returns
    -------
    (fate, faults)
        How many the proof caught, how many are equivalent by the judge; those that are neither: faults of the proof.
    """
    sending = [pair for pair, plan in plans.items() if len(plan.table)]
    fate: Counter[str] = Counter()
    faults, judges = [], {}
    for _ in range(count if sending else 0):
        pair = random.choice(sending)
        mutant = mutate(plans[pair].table, random)
        if mutant is None:
            continue
        changed = plans[pair].with_table(mutant.table)
        if not prove(srcs, [dst], {**plans, pair: changed}).exact:
            fate["caught"] += 1
            fate[f"caught {mutant.what}"] += 1
            continue
        if pair not in judges:
            judges[pair] = Judge(srcs[pair[0]], dst, random)
        if judges[pair].alike(plans[pair], changed):
            fate["equivalent"] += 1
        else:
            faults.append(mutant)
    return fate, faults


def random_deployments(examples: int, mutants: int, seed: int = 0) -> Counter[str]:
    """Prove random deployments, and so many mutants of each that is exact. AssertionError for a fault of the proof."""
    fate: Counter[str] = Counter()
    elections = st.sampled_from(["nearest", "balanced", "striped"])

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],  # a fault is printed whole: no time is spent on making it smaller
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategies.deployments(), st.integers(0, 2**32), elections, st.booleans())
    def check(deployment: strategies.Deployment, number: int, election: str, bridge: bool) -> None:
        srcs, dst = [rank.cache for rank in deployment.srcs], deployment.dst.cache
        plans = {
            (index, 0): kvcompile.compile(src, dst, election=election, bridge_padding=bridge)
            for index, src in enumerate(srcs)
        }
        proof = prove(srcs, [dst], plans)
        check_exact(proof, srcs, dst)
        if proof.exact:
            seen, faults = try_mutants(srcs, dst, plans, Random(number), mutants)
            assert not faults, faults
            fate.update(seen)
        fate["deployments"] += 1

    check()
    return fate


def check_exact(proof: Proof, srcs: Sequence[Cache], dst: Cache) -> None:
    """All there is to find are the layers that no src rank holds."""
    held = {key for src in srcs for key in oracle.tensors(src)}
    lost = {key for key in oracle.tensors(dst) if key not in held}
    assert {(one.layer, one.field) for one in proof.missing} == lost, str(proof)
    assert not proof.duplicated, str(proof)
    assert not proof.misplaced, str(proof)


def figures(fate: Counter[str]) -> str:
    """Say how many deployments were proved, and what became of the mutants."""
    return ", ".join(f"{fate[name]:,} {name}" for name in ("deployments", "caught", "equivalent"))
