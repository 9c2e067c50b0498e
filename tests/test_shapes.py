"""Tables by shape: each shape is lowered once, peers of one shape only shift origins; bounded in bytes."""

import threading
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcompile
from kvcompile import Buffer, Cache, Field, Group, Region, Request, shapes
from kvcompile.lowering import arrange, lower
from tests import replay, strategies

A, B = 2**40, 2**50
LAYERS = 4


@pytest.fixture(autouse=True)
def lowered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[object, ...]]]:
    """Begin with nothing kept; list what is lowered."""
    calls: list[tuple[object, ...]] = []

    def counting(*args: object) -> object:
        calls.append(args)
        return lower(*args)

    monkeypatch.setattr(shapes, "_kept", OrderedDict())
    monkeypatch.setattr(shapes, "lower", counting)
    return calls


def cache(bases: list[int], *, heads: int = 4, tp: tuple[int, int] = (0, 1), blocks: int = 32) -> Cache:
    """Make a rank with a buffer for each layer."""
    field = Field.nhd("kv", heads=heads, local_heads=heads // tp[1], tokens=4, cell_nbytes=8)
    nbytes = heads // tp[1] * 32
    regions = [Region(n, 0, base, nbytes, blocks, [field]) for n, base in enumerate(bases)]
    buffers = [Buffer(base, nbytes * blocks) for base in bases]
    return Cache(regions, [Group(4)], buffers, tp_rank=tp[0], tp_size=tp[1])


def apart(base: int, seed: int | None = None) -> list[int]:
    """Return addresses for each layer, ascending or in any order."""
    bases = [base + n * 2**24 for n in range(LAYERS)]
    return bases if seed is None else np.random.default_rng(seed).permutation(bases).tolist()


def same(src: Cache, dst: Cache, election: str = "nearest") -> None:
    """Compare with the table that lowering makes by itself."""
    rows, pairs = lower(src, dst, election)
    plan = kvcompile.compile(src, dst, election=election)
    np.testing.assert_array_equal(plan.table, arrange(rows))
    assert plan.pairs == pairs


def test_a_thousand_peers_of_one_shape_are_lowered_once(lowered: list[tuple[object, ...]]) -> None:
    src = cache(apart(A))
    for peer in range(1024):
        dst = cache(apart(B + peer * 2**32, seed=peer), tp=(1, 2))
        plan = kvcompile.compile(src, dst)
        if peer % 100 == 0:
            np.testing.assert_array_equal(plan.table, arrange(lower(src, dst, "nearest")[0]))
            found = replay.triples(plan.build([Request("r", [[3]], [[7]])]))
            assert [dst for _, dst, _ in found[:: len(found) // LAYERS]] == [
                region.base + 7 * 64 for region in sorted(dst.regions, key=lambda region: region.layer)
            ]
    assert len(lowered) == 1


def test_each_shape_is_lowered_by_itself(lowered: list[tuple[object, ...]]) -> None:
    src = cache(apart(A))
    for peer in range(3):
        for rank in range(2):
            kvcompile.compile(src, cache(apart(B + peer * 2**32), tp=(rank, 2)))
        kvcompile.compile(src, cache(apart(B), blocks=31))
        kvcompile.compile(src, cache(apart(B)), layers=[peer])
        kvcompile.compile(src, cache(apart(B)), layers=(peer,), election="balanced")
        kvcompile.compile(src, cache(apart(B)), bridge_padding=True)
    assert len(lowered) == 2 + 1 + 3 + 3 + 1


def test_errors_are_not_kept(lowered: list[tuple[object, ...]]) -> None:
    for _ in range(2):
        with pytest.raises(kvcompile.LayoutError, match="heads"):
            kvcompile.compile(cache(apart(A)), cache(apart(B), heads=8))
    assert len(lowered) == 2


def test_least_recently_used_goes_first(lowered: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    src, dst = cache(apart(A)), [cache(apart(B), blocks=blocks) for blocks in range(8, 12)]
    kvcompile.compile(src, dst[0])
    (shape,) = shapes._kept.values()
    monkeypatch.setattr(shapes, "MAX_NBYTES", 3 * shape.rows.nbytes)
    for number in (1, 2, 0, 3):  # keeping 3 drops 1: 0 was used after it
        kvcompile.compile(src, dst[number])
    assert sum(kept.rows.nbytes for kept in shapes._kept.values()) == shapes.MAX_NBYTES
    assert len(lowered) == 4
    for number in (0, 2, 3):
        kvcompile.compile(src, dst[number])
    assert len(lowered) == 4
    kvcompile.compile(src, dst[1])
    assert len(lowered) == 5


def test_a_table_above_the_bound_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "MAX_NBYTES", 1)
    for peer in range(3):
        same(cache(apart(A)), cache(apart(B + peer * 2**32, seed=peer)))
    assert len(shapes._kept) == 1


def test_a_plan_does_not_share_its_table() -> None:
    """The caller's plan is read-only, and no peer's origins are another's."""
    src, peers = cache(apart(A)), [cache(apart(B + n * 2**32)) for n in range(2)]
    one, other = (kvcompile.compile(src, dst) for dst in peers)
    assert not np.shares_memory(one.table, other.table)
    assert (other.table["dst_origin"] - one.table["dst_origin"] == 2**32).all()


def test_many_threads() -> None:
    src = cache(apart(A))
    peers = [cache(apart(B + n * 2**32, seed=n), blocks=16 + n % 3) for n in range(60)]
    tables: dict[int, np.ndarray] = {}

    def work(first: int) -> None:
        for n in range(first, 60, 4):
            tables[n] = kvcompile.compile(src, peers[n]).table

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(tables) == 60
    for n, table in tables.items():
        np.testing.assert_array_equal(table, arrange(lower(src, peers[n], "nearest")[0]))


@settings(max_examples=40)
@given(st.data())
def test_any_deployment_moved_elsewhere(data: st.DataObject) -> None:
    """Compiled from what was kept of one place, the table of another place is what lowering makes of it."""
    deployment = data.draw(strategies.deployments())
    election = data.draw(st.sampled_from(["nearest", "balanced", "striped"]))
    src, dst = data.draw(st.sampled_from(deployment.srcs)).cache, deployment.dst.cache
    same(src, dst, election)
    moved = Cache.from_bytes(dst.to_bytes())
    shift = data.draw(st.sampled_from([4096, -64, 8]))
    regions = [Region(r.layer, r.group, r.base + shift, *_rest(r)) for r in moved.regions]
    buffers = [Buffer(b.base + shift, b.nbytes, b.chunk_nbytes) for b in moved.buffers]
    elsewhere = Cache(
        regions,
        moved.groups,
        buffers,
        tp_rank=dst.tp_rank,
        tp_size=dst.tp_size,
        dp_rank=dst.dp_rank,
        dp_size=dst.dp_size,
    )
    assert elsewhere.shape_digest == dst.shape_digest
    kept = len(shapes._kept)
    same(src, elsewhere, election)
    assert len(shapes._kept) == kept


def _rest(region: Region) -> tuple[object, ...]:
    return region.block_stride, region.num_blocks, region.fields, region.kernel_blocks


@pytest.mark.parametrize("layers", ["0", 5, [["0"]]])
def test_layers_are_a_collection_of_names(layers: object) -> None:
    cache = Cache([], [])
    with pytest.raises(ValueError, match="expected a collection of layer names"):
        kvcompile.compile(cache, cache, layers=layers)
