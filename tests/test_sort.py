"""``sort=True``: the fewest descriptors over all orders of the pieces of each lane, and the same bytes."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcompile
from kvcompile import Cache, Field, Group, Plan, Region, Request
from tests import batches, oracle, replay, strategies
from tests.helpers import Triple, one_region

A, B = 2**40, 2**50


def cache(base: int, *, tokens: int = 4, null: int | None = None, blocks: int = 64) -> Cache:
    """Make one layer of 8 bytes a token, packed."""
    field = Field.hnd("k", heads=1, tokens=tokens, cell_nbytes=8)
    return one_region(field, base=base, stride=8 * tokens, blocks=blocks, null=null)


def pieces_of_lanes(plan: Plan, request: Request, src: Cache, dst: Cache) -> list[list[Triple]]:
    """Return the unmerged pieces of each lane, in no order that matters."""
    return [
        [piece for row in lane for made in replay.pieces(row, request, src, dst).values() for piece in made]
        for lane in replay.lanes(replay.rows(plan, src, dst))
    ]


def merged(pieces: tuple[Triple, ...] | list[Triple]) -> list[Triple]:
    """Merge each piece into the one before it where they touch on both sides."""
    found: list[Triple] = []
    for src, dst, length in pieces:
        if found and (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2]) == (src, dst):
            found[-1] = (*found[-1][:2], found[-1][2] + length)
        else:
            found.append((src, dst, length))
    return found


def fewest(pieces: list[Triple]) -> int:
    """The least number over all orders: a piece opens a descriptor unless another one ends where it begins."""
    ends = {(src + length, dst + length) for src, dst, length in pieces}
    return sum((src, dst) not in ends for src, dst, _ in pieces)


def in_order(pieces: list[Triple]) -> list[Triple]:
    """Sort as design.md section 6 says, and merge."""
    return merged(sorted(pieces, key=lambda piece: (piece[0] - piece[1], piece[0])))


def test_case_38_sorted() -> None:
    plan = kvcompile.compile(cache(A), cache(B))
    five = plan.build([Request("r", [[5, 4, 3, 2, 1]], [[1, 2, 3, 4, 5]])], sort=True)
    assert sorted(replay.triples(five)) == [(A + a * 32, B + (6 - a) * 32, 32) for a in (1, 2, 3, 4, 5)]
    one = plan.build([Request("r", [[5, 4, 3]], [[15, 14, 13]])], sort=True)
    assert replay.triples(one) == [(A + 3 * 32, B + 13 * 32, 96)]


def packed(base: int, spare: int) -> Cache:
    """Make two layers in one row of 24 bytes and ``spare``, four tokens a block."""
    fields = (Field.hnd("k", heads=1, tokens=4, cell_nbytes=2), Field.hnd("k", heads=1, tokens=4, cell_nbytes=4))
    regions = [Region(n, 0, base + 8 * n, 24 + spare, 32, [field]) for n, field in enumerate(fields)]
    return Cache(regions, [Group(4, null_block=0)])


SHAPES = {  # caches, and how many blocks of each side make at most six pieces a lane
    "dense": (cache(A), cache(B), 6, 6),
    "dense, nulls": (cache(A, null=0), cache(B, null=1), 6, 6),
    "2 into 4": (cache(A, tokens=2), cache(B, tokens=4), 6, 3),
    "4 into 2": (cache(A, tokens=4), cache(B, tokens=2), 3, 6),
    "2 into 3": (cache(A, tokens=2), cache(B, tokens=3, null=1), 4, 3),
    "packed rows": (packed(A, 0), packed(B, 0), 6, 6),
    "packed rows apart": (packed(A, 0), packed(B, 8), 6, 6),
    "apart": (cache(A), one_region(Field.hnd("k", heads=1, tokens=4, cell_nbytes=8), base=B, stride=40), 6, 6),
}


@pytest.mark.parametrize("name", SHAPES)
def test_no_order_makes_fewer(name: str) -> None:
    """By brute force: every order of up to six pieces a lane."""
    src, dst, src_count, dst_count = SHAPES[name]
    plan, random, shrunk = kvcompile.compile(src, dst), np.random.default_rng(0), 0
    for _ in range(30):
        lists = [random.permutation(np.arange(count + 1))[:count] for count in (src_count, dst_count)]
        request = Request("r", [lists[0]], [lists[1]], [0], [0])
        built = plan.build([request], sort=True)
        assert built.failed == {}
        lanes = pieces_of_lanes(plan, request, src, dst)
        assert max(map(len, lanes)) <= 6
        least = [min(len(merged(order)) for order in itertools.permutations(lane)) for lane in lanes]
        assert least == [fewest(lane) for lane in lanes]
        assert replay.triples(built) == [triple for lane in lanes for triple in in_order(lane)]
        assert len(built) == sum(least)
        shrunk += len(built) < len(plan.build([request]))
    assert (shrunk > 0) == (name not in ("packed rows apart", "apart"))


@settings(max_examples=60)
@given(st.data())
def test_any_deployment(data: st.DataObject) -> None:
    """Lane by lane the fewest, in the order of section 6; the bytes of an unsorted build; spans and faults alike."""
    deployment = data.draw(strategies.deployments())
    drafts = data.draw(batches.batches(deployment))
    election = data.draw(st.sampled_from(["nearest", "balanced", "striped"]))
    rank = data.draw(st.sampled_from(deployment.srcs))
    src, dst = rank.cache, deployment.dst.cache
    requests = [draft.project(rank, deployment.dst) for draft in drafts]
    plan = kvcompile.compile(src, dst, election=election)
    plain, built = plan.build(requests), plan.build(requests, sort=True)
    assert built.failed.keys() == plain.failed.keys() == oracle.faults(requests, src, dst).keys()
    assert built.uncovered == plain.uncovered
    table = replay.lanes(replay.rows(plan, src, dst))
    for index, request in enumerate(requests):
        found = replay.triples(built, index)
        assert Counter(replay.moved(found)) == Counter(replay.moved(replay.triples(plain, index)))
        if request.id in plain.failed:
            assert found == []
            continue
        for lane, pieces in zip(table, pieces_of_lanes(plan, request, src, dst), strict=True):
            here, found = found[: fewest(pieces)], found[fewest(pieces) :]
            if lane[0].count > 1:  # its pieces never touch, and stay block by block
                assert sorted(here) == sorted(pieces)
            else:
                assert here == in_order(pieces)
        assert found == []


def test_ids_in_order_give_the_same_either_way() -> None:
    """Then nothing is sorted, and nothing moves."""
    plan = kvcompile.compile(cache(A), cache(B))
    request = Request("r", [[3, 4, 5, 9, 10, 20]], [[1, 2, 3, 7, 8, 9]])
    assert replay.triples(plan.build([request], sort=True)) == replay.triples(plan.build([request]))


@pytest.mark.parametrize("blocks", [2, 3, 2047, 2048, 2049, 5000])
def test_many_blocks_in_any_order(blocks: int) -> None:
    """Sizes around the radix, both sides shuffled alike: one descriptor; shuffled apart: as few as there can be."""
    plan = kvcompile.compile(cache(A, blocks=8192), cache(B, blocks=8192))
    random = np.random.default_rng(blocks)
    order = random.permutation(blocks)
    alike = plan.build([Request("r", [order + 7], [order + 100])], sort=True)
    assert replay.triples(alike) == [(A + 7 * 32, B + 100 * 32, 32 * blocks)]
    other = random.permutation(blocks)
    apart = plan.build([Request("r", [order], [other])], sort=True)
    pieces = [(A + int(a) * 32, B + int(b) * 32, 32) for a, b in zip(order, other, strict=True)]
    assert replay.triples(apart) == in_order(pieces)
