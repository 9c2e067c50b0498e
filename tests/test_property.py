"""On generated deployments and batches, what is emitted is the oracle's copy, merged and in order."""

from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import kvcompile
from kvcompile import Cache, Descriptors, Plan, Request
from tests import batches, oracle, replay, strategies

ELECTIONS = ("nearest", "balanced", "striped")

# What the examples must contain, as least shares. Without runs, for one, a build that never merges would pass.
LEAST = {
    "runs": 0.25,
    "prefix trims": 0.3,
    "nulls": 0.25,
    "unequal blocks": 0.1,
    "replicas": 0.3,
    "non-divisible TP": 0.4,
    "state": 0.1,
    "errors": 0.1,
    "positions": 0.3,
    "num_tokens": 0.1,
    "kernel blocks": 0.12,
    "pipeline stages": 0.2,
    "overlaid groups": 0.05,
    "packed rows": 0.08,
    "far heads": 0.08,
    "HND to NHD": 0.1,
    "bit 63": 0.3,
}


@st.composite
def scenes(draw: strategies.Draw) -> tuple[strategies.Deployment, list[batches.Draft]]:
    """A deployment and a batch for it."""
    deployment = draw(strategies.deployments())
    return deployment, draw(batches.batches(deployment))


@pytest.mark.parametrize("election", ELECTIONS)
def test_every_wanted_byte_moves_once(election: str, record_property: Callable[[str, object], None]) -> None:
    """Over all src ranks of a deployment; and each plan by itself emits what its table says, merged, in order."""
    seen: Counter[str] = Counter()

    @seed(ELECTIONS.index(election))  # other examples for each
    @settings(max_examples=250)
    @given(scenes())
    def check(scene: tuple[strategies.Deployment, list[batches.Draft]]) -> None:
        deployment, drafts = scene
        dst = deployment.dst.cache
        written: dict[int, list[tuple[int, int]]] = defaultdict(list)  # dst byte -> (src rank, src byte) sent there
        wanted: dict[int, set[tuple[int, int]]] = defaultdict(set)  # dst byte -> (src rank, src byte) that hold it
        shown: set[str] = set()
        for number, rank in enumerate(deployment.srcs):
            src = rank.cache
            requests = [draft.project(rank, deployment.dst) for draft in drafts]
            plan = kvcompile.compile(src, dst, election=election)
            built = plan.build(requests)
            failed = oracle.faults(requests, src, dst)
            check_table(plan, src, dst)
            check_result(built, requests, failed, src, dst)
            table = replay.rows(plan, src, dst)
            check_emission(built, table, requests, failed, src, dst)
            check_apart(built)
            for index, request in enumerate(requests):
                for source, target in replay.moved(replay.triples(built, index)):
                    written[target].append((number, source))
                if request.id not in failed:
                    for source, target in oracle.copies(request, src, dst):
                        wanted[target].add((number, source))
            shown |= features(deployment, rank, requests, failed, table)
        assert written.keys() == wanted.keys()
        for target, senders in written.items():
            assert len(senders) == 1
            assert senders[0] in wanted[target]
        seen.update(shown)
        seen["examples"] += 1

    check()
    shares = {name: round(seen[name] / seen["examples"], 2) for name in LEAST}
    record_property("shares", f"of {seen['examples']} examples " + ", ".join(f"{n} {s:.0%}" for n, s in shares.items()))
    assert {name: share for name, share in shares.items() if share < LEAST[name]} == {}


def check_table(plan: Plan, src: Cache, dst: Cache) -> None:
    """The table has the columns of section 4, in order; no row could be joined; none reaches into a next block."""
    table = plan.table
    assert table.dtype.names == replay.COLUMNS
    unsigned = {"src_origin", "dst_origin", "length"}
    assert all(table.dtype[name] == (np.uint64 if name in unsigned else np.int64) for name in table.dtype.names)
    assert not table.flags.writeable
    rows = replay.rows(plan, src, dst)
    keys = [(r.dst_group, r.src_group, r.src_phase, r.dst_phase, r.src_buffer, r.src_origin) for r in rows]
    assert keys == sorted(keys)
    slices = [one for row in rows for one in row.slices()]
    begins = {(r.kind, r.src_phase, r.dst_phase, r.src_origin, r.dst_origin) for r in slices}
    assert len(begins) == len(slices)
    for row in slices:
        joined = (row.src_origin + row.length, row.dst_origin + row.length)
        assert (row.kind, row.src_phase, row.dst_phase, *joined) not in begins
        assert row.length > 0
        for side, cache in (("src", src), ("dst", dst)):
            group, stride = getattr(row, f"{side}_group"), getattr(row, f"{side}_stride")
            bound = oracle.bound(cache, group)
            last = getattr(row, f"{side}_origin") + (bound - 1) * stride
            buffer = getattr(row, f"{side}_buffer")
            assert buffer >= 0
            assert replay.buffer_of(cache, last, row.length) == buffer
            assert row.length <= stride or bound == 1


def check_result(
    built: Descriptors, requests: list[Request], failed: dict[object, oracle.Fault], src: Cache, dst: Cache
) -> None:
    """Arrays, spans, failed and uncovered."""
    columns = (built.src, built.dst, built.length)
    assert {column.dtype for column in columns} == {np.dtype(np.uint64)}
    assert all(column.shape == (len(built),) and column.flags.c_contiguous for column in columns)
    assert built.spans.dtype == np.int64
    assert built.spans.shape == (len(requests) + 1,)
    assert built.spans[0] == 0
    assert built.spans[-1] == len(built)
    assert built.nbytes == sum(built.length.tolist())
    assert built.failed.keys() == failed.keys()
    for name, fault in failed.items():
        error = built.failed[name]
        assert error.request == name
        if fault.stage == 2:
            assert (error.side, error.group, error.position, error.value, error.bound) == fault[1:]
        elif fault.stage == 0:
            assert (error.side, error.group) == fault[1:3]
    expected = {r.id: found for r in requests if r.id not in failed and (found := oracle.uncovered(r, src, dst))}
    assert {name: sorted(found) for name, found in built.uncovered.items() if name not in failed} == expected


def check_emission(
    built: Descriptors,
    table: list[replay.Row],
    requests: list[Request],
    failed: dict[object, oracle.Fault],
    src: Cache,
    dst: Cache,
) -> None:
    """Order, merging and maximality; every descriptor inside one buffer on each side."""
    for index, request in enumerate(requests):
        lanes = [] if request.id in failed else replay.emission(table, request, src, dst)
        assert replay.triples(built, index) == [descriptor for lane in lanes for descriptor in lane]
        for lane in lanes:
            for (a, b, length), after in pairwise(lane):
                assert (a + length, b + length) != after[:2]
    for source, target, length in replay.triples(built):
        assert length > 0
        assert replay.buffer_of(src, source, length) >= 0
        assert replay.buffer_of(dst, target, length) >= 0


def check_apart(built: Descriptors) -> None:
    """No two descriptors of a batch overlap on dst."""
    spans = sorted((target, target + length) for _, target, length in replay.triples(built))
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def features(
    deployment: strategies.Deployment,
    rank: strategies.Rank,
    requests: list[Request],
    failed: dict[object, oracle.Fault],
    table: list[replay.Row],
) -> set[str]:
    """What an example shows, of the names in `LEAST`."""
    src, dst = rank.cache, deployment.dst.cache
    pairs = [(pair, src.groups[pair[0]], dst.groups[pair[1]]) for pair in oracle.group_pairs(src, dst)]
    theirs = oracle.tensors(dst)
    shared = [(region, field, *theirs[key]) for key, (region, field) in oracle.tensors(src).items() if key in theirs]
    found = {
        "state": any(a.state for _, a, _ in pairs),
        "unequal blocks": any(a.block_size != b.block_size and not a.state for _, a, b in pairs),
        "replicas": any((field.replicated and src.tp_size > 1) or src.tp_size > field.heads for _, field, *_ in shared),
        "non-divisible TP": any(
            max(field.heads, cache.tp_size) % min(field.heads, cache.tp_size) and not field.replicated
            for _, field, *_ in shared
            for cache in (src, dst)
        ),
        "errors": bool(failed),
        "kernel blocks": any(a.kernel_blocks != b.kernel_blocks for a, _, b, _ in shared),
        "pipeline stages": any(len(half.stages) > 1 for half in deployment.sides) and bool(shared),
        "overlaid groups": any(half.overlay for half in deployment.sides) and bool(shared),
        "packed rows": any(row.length > max(b.cell_nbytes * b.tokens * b.heads for *_, b in shared) for row in table),
        "far heads": any(field.head_stride > region.block_stride for region, field, *_ in shared),
        "HND to NHD": any(
            (a.head_stride > a.token_stride) != (b.head_stride > b.token_stride) for _, a, _, b in shared
        ),
        "bit 63": any(region.base >= 2**63 for a, _, b, _ in shared for region in (a, b)),
    }
    for request in requests:
        if request.id in failed:
            continue
        emitted = sum(len(lane) for lane in replay.emission(table, request, src, dst))
        apart = sum(len(made) for row in table for made in replay.pieces(row, request, src, dst).values())
        found["runs"] = found.get("runs") or emitted < apart
        found["positions"] = found.get("positions") or (request.src_first is not None and emitted > 0)
        found["num_tokens"] = found.get("num_tokens") or (request.num_tokens is not None and emitted > 0)
        for pair, a, b in pairs:
            left, right, _ = oracle.place(request, src, dst, pair)
            blocks = [item.block for item in (*left, *right)]
            found["nulls"] = found.get("nulls") or bool({a.null_block, b.null_block} & set(blocks))
            trimmed = left and right and left[0].position * a.block_size < right[0].position * b.block_size
            found["prefix trims"] = found.get("prefix trims") or bool(trimmed)
    return {name for name, shows in found.items() if shows}


@settings(max_examples=60)
@given(scenes(), st.integers(1, 40))
def test_max_length_cuts_what_was_merged(
    scene: tuple[strategies.Deployment, list[batches.Draft]], max_length: int
) -> None:
    """Cut after merging, from the start of each descriptor; spans follow."""
    deployment, drafts = scene
    src, dst = deployment.srcs[0], deployment.dst
    requests = [draft.project(src, dst) for draft in drafts]
    plan = kvcompile.compile(src.cache, dst.cache)
    whole, pieces = plan.build(requests), plan.build(requests, max_length=max_length)
    for index in range(len(requests)):
        assert replay.triples(pieces, index) == replay.cut(replay.triples(whole, index), max_length)
    assert pieces.nbytes == whole.nbytes


@settings(max_examples=60)
@given(scenes())
def test_layers_of_a_layerwise_sender_add_up(scene: tuple[strategies.Deployment, list[batches.Draft]]) -> None:
    """Plans of one layer each move the bytes of the plan of all layers."""
    deployment, drafts = scene
    src, dst = deployment.srcs[-1], deployment.dst
    requests = [draft.project(src, dst) for draft in drafts]
    names = sorted({region.layer for region in src.cache.regions})
    whole = kvcompile.compile(src.cache, dst.cache).build(requests)
    if whole.failed:
        return
    parts = [kvcompile.compile(src.cache, dst.cache, layers=[name]).build(requests) for name in names]
    assert sorted(b for part in parts for b in replay.moved(replay.triples(part))) == sorted(
        replay.moved(replay.triples(whole))
    )


@settings(max_examples=60)
@given(scenes(), st.randoms(use_true_random=False))
def test_another_table_is_another_plan(
    scene: tuple[strategies.Deployment, list[batches.Draft]], random: Random
) -> None:
    """``with_table``: the plan is the table. Rows left out, doubled, in another order emit what they say."""
    deployment, drafts = scene
    src, dst = deployment.srcs[0], deployment.dst
    requests = [draft.project(src, dst) for draft in drafts]
    plan = kvcompile.compile(src.cache, dst.cache)
    keep = [index for index in range(len(plan.table)) for _ in range(random.choice([0, 1, 1, 2]))]
    if random.random() < 0.3:
        random.shuffle(keep)
    other = plan.with_table(plan.table[keep])
    np.testing.assert_array_equal(other.table, plan.table[keep])
    built = other.build(requests)
    failed = oracle.faults(requests, src.cache, dst.cache)
    check_result(built, requests, failed, src.cache, dst.cache)
    table = replay.rows(other, src.cache, dst.cache)
    check_emission(built, table, requests, failed, src.cache, dst.cache)


@settings(max_examples=60)
@given(strategies.deployments())
def test_handshake_round_trip(deployment: strategies.Deployment) -> None:
    """What the peer decodes is what was sent, and compiles to the same table."""
    src, dst = deployment.srcs[-1].cache, deployment.dst.cache
    received = [Cache.from_bytes(cache.to_bytes()) for cache in (src, dst)]
    assert received == [src, dst]
    assert [cache.digest for cache in received] == [src.digest, dst.digest]
    assert [cache.shape_digest for cache in received] == [src.shape_digest, dst.shape_digest]
    np.testing.assert_array_equal(kvcompile.compile(*received).table, kvcompile.compile(src, dst).table)
