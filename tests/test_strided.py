"""Strided rows: pieces of a field that nothing can touch, evenly apart, are one row; bytes are the same as without."""

from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcompile
from kvcompile import Cache, Field, Group, Plan, Region, Request
from tests import batches, replay, strategies

A, B = 2**40, 2**50


def layers(base: int, field: Field, nbytes: int, count: int, tp: tuple[int, int] = (0, 1)) -> Cache:
    """Make equal layers of 4 blocks, apart."""
    regions = [Region(n, 0, base + n * 2**32, nbytes, 4, [field]) for n in range(count)]
    return Cache(regions, [Group(field.tokens)], tp_rank=tp[0], tp_size=tp[1])


def unfolded(plan: Plan) -> Plan:
    """Return the same plan with a row for each slice."""
    table = np.repeat(plan.table, plan.table["count"])
    starts = np.cumsum(plan.table["count"]) - plan.table["count"]
    number = (np.arange(len(table)) - np.repeat(starts, plan.table["count"])).astype(np.uint64)
    for side in ("src", "dst"):
        table[f"{side}_origin"] += number * table[f"{side}_inner"].astype(np.uint64)
        table[f"{side}_inner"] = 0
    table["count"] = 1
    return plan.with_table(table)


def same_slices(plan: Plan, request: Request) -> None:
    assert Counter(replay.triples(plan.build([request]))) == Counter(replay.triples(unfolded(plan).build([request])))


@pytest.mark.parametrize("dst_rank", [0, 1])
def test_head_slices_of_nhd_are_one_row_a_layer(dst_rank: int) -> None:
    """94 layers, 8 heads, blocks of 16 tokens, TP1 to TP2: a row for the sixteen slices of a block, not sixteen."""
    src = layers(A, Field.nhd("kv", heads=8, local_heads=8, tokens=16, cell_nbytes=256), 32_768, 94)
    dst = layers(B, Field.nhd("kv", heads=8, local_heads=4, tokens=16, cell_nbytes=256), 16_384, 94, (dst_rank, 2))
    plan = kvcompile.compile(src, dst)
    assert len(plan.table) == 94
    row = plan.table[1]
    assert (row["count"], row["src_inner"], row["dst_inner"], row["length"]) == (16, 2_048, 1_024, 1_024)
    assert row["src_origin"] == A + 2**32 + dst_rank * 1_024
    built = plan.build([Request("r", [[3]], [[1]])])
    expected = [
        (A + n * 2**32 + 3 * 32_768 + dst_rank * 1_024 + t * 2_048, B + n * 2**32 + 16_384 + t * 1_024, 1_024)
        for n in range(94)
        for t in range(16)
    ]
    assert replay.triples(built) == expected


@pytest.mark.parametrize("turned", [False, True])
def test_blocks_of_768_tokens_between_memory_orders(turned: bool) -> None:
    """HND against NHD: a row a head, not a row a cell, of which there are 577,536.

    The first cell of a block touches the last of the block before it on both sides: they make a lane of their own.
    """
    hnd = Field.hnd("kv", heads=8, tokens=768, cell_nbytes=256)
    nhd = Field.nhd("kv", heads=8, local_heads=8, tokens=768, cell_nbytes=256)
    nbytes = 8 * 768 * 256
    caches = layers(A, nhd if turned else hnd, nbytes, 94), layers(B, hnd if turned else nhd, nbytes, 94)
    plan = kvcompile.compile(*caches)
    assert plan.table.nbytes <= 4 << 20
    assert sorted(plan.table["count"].tolist()) == [1, 1] * 94 + [767, 767] * 94 + [768] * 6 * 94
    one = kvcompile.compile(*caches, layers=[93])
    built = one.build([Request("r", [[2]], [[3]])])
    moved = {
        (src - A - 93 * 2**32 - 2 * nbytes, dst - B - 93 * 2**32 - 3 * nbytes) for src, dst, _ in replay.triples(built)
    }
    cells = {((h * 768 + t) * 256, (t * 8 + h) * 256) for h in range(8) for t in range(768)}
    assert moved == ({(b, a) for a, b in cells} if turned else cells)
    assert set(built.length.tolist()) == {256}


def test_whole_blocks_stay_rows_that_merge() -> None:
    """Between alike orders nothing is strided, and runs of blocks are one descriptor."""
    field = Field.nhd("kv", heads=8, local_heads=8, tokens=16, cell_nbytes=256)
    plan = kvcompile.compile(layers(A, field, 32_768, 3), layers(B, field, 32_768, 3))
    assert plan.table["count"].tolist() == [1, 1, 1]
    assert len(plan.build([Request("r", [[0, 1, 2]], [[1, 2, 3]])])) == 3


def test_only_even_distances_fold() -> None:
    """Fields of their own distances stay apart; what two fields cut unevenly is not one progression."""
    both = [Field.nhd(n, heads=4, local_heads=4, tokens=4, cell_nbytes=8, offset=o) for n, o in (("k", 0), ("v", 200))]
    half = [Field.nhd(n, heads=4, local_heads=2, tokens=4, cell_nbytes=8, offset=o) for n, o in (("k", 0), ("v", 64))]
    src = Cache([Region(0, 0, A, 328, 8, both)], [Group(4)])
    dst = Cache([Region(0, 0, B, 128, 8, half)], [Group(4)], tp_rank=1, tp_size=2)
    plan = kvcompile.compile(src, dst)
    rows = [(int(r["src_origin"]) - A, int(r["dst_origin"]) - B, int(r["count"])) for r in plan.table]
    assert rows == [(16, 0, 4), (216, 64, 4)]
    same_slices(plan, Request("r", [[5, 6, 2]], [[0, 1, 7]]))


@settings(max_examples=40)
@given(st.data())
def test_any_deployment(data: st.DataObject) -> None:
    """The slices of a folded plan, sorted or not, are those of the plan with a row a slice."""
    deployment = data.draw(strategies.deployments())
    drafts = data.draw(batches.batches(deployment))
    rank = data.draw(st.sampled_from(deployment.srcs))
    plan = kvcompile.compile(rank.cache, deployment.dst.cache, election="striped")
    requests = [draft.project(rank, deployment.dst) for draft in drafts]
    for sort in (False, True):
        built, plain = plan.build(requests, sort=sort), unfolded(plan).build(requests, sort=sort)
        for index in range(len(requests)):
            assert Counter(replay.triples(built, index)) == Counter(replay.triples(plain, index))


def test_a_table_that_counts_wrong_is_refused() -> None:
    src = layers(A, Field.nhd("kv", heads=8, local_heads=8, tokens=16, cell_nbytes=256), 32_768, 1)
    dst = layers(B, Field.nhd("kv", heads=8, local_heads=4, tokens=16, cell_nbytes=256), 16_384, 1, (0, 2))
    plan = kvcompile.compile(src, dst)
    for name, value in (("count", 0), ("src_inner", -1), ("part", 1), ("parts", 0), ("count", 2**31)):
        table = plan.table.copy()
        table[name] = value
        with pytest.raises(kvcompile.LayoutError, match="row 0"):
            plan.with_table(table).build([Request("r", [[3]], [[1]])])
    table = plan.table.copy()
    table["count"] = 17 + Random(0).randrange(10)  # beyond the buffer at the last block
    built = plan.with_table(table).build([Request("r", [[3]], [[3]])])
    assert len(built) == 0
    assert built.failed.keys() == {"r"}
