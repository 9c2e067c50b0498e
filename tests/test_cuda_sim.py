"""The CUDA kernels in Numba's simulator, against the CPU's, bit for bit. It proves indexing, not concurrency.

It runs in a process of its own (`make sim`): the simulator is chosen before Numba is imported.
"""

import random
import resource
from collections.abc import Iterator, Sequence
from typing import Any

import hypothesis
import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st
from numba import config

import kvcompile
from kvcompile import Cache, Descriptors, Field, Group, Plan, Region, Request, backend, device
from kvcompile.device import job
from kvcompile.device.ids import Lists, stand_in
from kvcompile.kernels import cuda as grids
from kvcompile.kernels import cuda_check, cuda_descriptors, cuda_scan, item
from kvcompile.request import gather
from tests import batches, strategies
from tests.simulated import OnDevice, SimulatedMemory, cache, on_host

# int64 wraps around, as it should
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

HIGH = 0xFF00000000000000
FAR = 2**63 - 4096


def test_this_is_the_simulator() -> None:
    assert config.ENABLE_CUDASIM
    assert cuda_scan.THREADS == 32


def both(plan: Plan, requests: Sequence[Request], max_length: int | None = None, pinned: bool = False) -> Descriptors:
    """Build on the device and on the CPU; compare all of it; return the CPU's."""
    memory = SimulatedMemory()
    built = device.build(plan, requests, memory, max_length, pinned)
    assert memory.waits == 0
    expected = plan.build([on_host(request) for request in requests], max_length=max_length)
    for name in ("src", "dst", "length", "spans"):
        np.testing.assert_array_equal(getattr(built, name), getattr(expected, name), name)
        assert getattr(built, name).dtype == getattr(expected, name).dtype
    assert memory.waits == 1
    assert built.requests == expected.requests
    assert list(built.failed) == list(expected.failed)
    for key, error in expected.failed.items():
        assert str(built.failed[key]) == str(error)
        assert vars(built.failed[key]) == vars(error)
    assert built.uncovered == expected.uncovered
    if max_length is None and not pinned:
        for column in built.room:
            poison = SimulatedMemory().empty(1).view(np.uint64)
            assert (column[len(built) :] == poison).all(), "written beyond the last descriptor"
    return expected


def scattered(seed: int, bound: int, count: int) -> list[int]:
    """Ids that never run on."""
    return [2 * int(half) for half in np.random.default_rng(seed).permutation(bound // 2)[:count]]


def runs(seed: int, bound: int, count: int) -> list[int]:
    """Ids in runs of one to nine, some of them descending."""
    generator, ids, free = random.Random(seed), [], list(range(bound))
    while len(ids) < count:
        at, size = generator.randrange(len(free)), generator.randint(1, 9)
        run, free = free[at : at + size], free[:at] + free[at + size :]
        ids += run[::-1] if generator.random() < 0.2 else run
    return ids[:count]


def test_pieces_apart() -> None:
    """Head slices: 2 layers of 130 blocks, in three requests, ids of several types and strides on the device."""
    plan = kvcompile.compile(cache(HIGH, tp_rank=1, tp_size=2), cache(FAR))
    src, dst = scattered(1, 300, 130), scattered(2, 300, 130)
    requests = [
        Request("strided", [OnDevice(np.repeat(np.array(src[:70], np.int32), 3)[::3])], [OnDevice(np.array(dst[:70]))]),
        Request("backwards", [OnDevice(np.array(src[70:101], np.uint16)[::-1])], [dst[70:101]]),
        Request("on the host", [src[101:]], [np.array(dst[101:], np.int16)]),
    ]
    assert len(both(plan, requests)) == 260


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"])
def test_every_integer_type(dtype: str) -> None:
    plan = kvcompile.compile(cache(HIGH, layers=1, tp_size=2), cache(FAR, layers=1))
    low = np.iinfo(dtype).min
    requests = [
        Request("good", [OnDevice(np.array([1, 2, 120], dtype))], [OnDevice(np.array([5, 127, 9], dtype))]),
        Request("low", [OnDevice(np.array([1, low, 7], dtype))], [OnDevice(np.array([33, 34, 35], dtype))]),
        Request("high", [[1]], [OnDevice(np.array([min(np.iinfo(dtype).max, 2**63 - 1)], dtype))]),
    ]
    both(plan, requests)


@pytest.mark.parametrize("padding", [0, 16])
def test_runs(padding: int) -> None:
    """Whole blocks: runs end and begin anywhere in a thread block, and go on over its edge; with padding, never."""
    plan = kvcompile.compile(cache(HIGH, padding=padding), cache(FAR, padding=padding))
    src = runs(3, 300, 150)
    requests = [
        Request("a", [OnDevice(np.array(src[:63]))], [runs(3, 200, 63)]),
        Request("b", [src[63:64]], [[290]]),
        Request("c", [OnDevice(np.arange(10, 80))], [OnDevice(np.arange(210, 280, dtype=np.int32))]),
    ]
    made = both(plan, requests)
    assert (len(made) == 2 * 134) == (padding > 0)
    assert len(made) > 20


def test_nulls_and_cover() -> None:
    """Nulls on both sides, more of them than a thread block is long; a run goes on behind them."""
    plan = kvcompile.compile(cache(HIGH, null=0), cache(FAR, null=7))
    src, dst = np.arange(20, 110), np.arange(20, 110)
    src[70:] -= 65
    src[5:70], src[75], dst[80:83] = 0, 0, 7
    dst[70:80] -= 65
    dst[5:70] += 100
    made = both(plan, [Request("a", [OnDevice(src)], [OnDevice(dst)]), Request("b", [[0, 0]], [[7, 9]])])
    assert len(made.uncovered["a"]) == 66
    assert made.uncovered["b"] == [(0, 1)]
    assert made.length.max() > 5 * 128


@pytest.mark.parametrize("sizes", [(4, 16), (16, 4), (12, 8)])
def test_chains(sizes: tuple[int, int]) -> None:
    """Blocks of other sizes on the other side: rows of a lane touch each other, with nulls and cut ends between."""
    src_size, dst_size = sizes
    plan = kvcompile.compile(
        cache(HIGH, tokens=src_size, heads=1, null=3), cache(FAR, tokens=dst_size, heads=1, null=0)
    )
    assert (plan._program.lanes[:, item.LANE_KIND] == item.CHAIN).all()
    src = np.concatenate([np.arange(10, 10 + 240 // src_size), [3, 3], np.arange(200, 200 + 120 // src_size)])
    dst = np.concatenate([np.arange(5, 5 + 160 // dst_size), np.arange(100, 100 + 200 // dst_size)])
    requests = [
        Request("a", [OnDevice(src)], [dst], [1], [2]),
        Request("b", [np.arange(50, 60)], [OnDevice(np.array([250, 251, 0, 253]))], [0], [1], 41),
        Request("c", [[1]], [[254]], [0], [40]),
    ]
    made = both(plan, requests)
    assert 0 < len(made) < 60


@pytest.mark.parametrize("election", ["nearest", "striped"])
def test_strided_rows(election: str) -> None:
    """Heads cut out of NHD blocks: rows of many slices; and stripes, which give each rank a part of the periods."""
    shape = {"nhd": True, "layers": 1, "blocks": 40}
    plan = kvcompile.compile(cache(HIGH, **shape), cache(FAR, tp_rank=1, tp_size=2, **shape), election=election)
    assert plan.table["count"].tolist() == [4]
    ids = scattered(4, 40, 19)
    made = both(plan, [Request("a", [OnDevice(np.array(ids))], [ids[::-1]]), Request("b", [[1]], [[39]])])
    assert len(made) == 80


def test_bridged_padding() -> None:
    plan = kvcompile.compile(cache(HIGH, padding=8), cache(FAR, padding=8), bridge_padding=True)
    ids = runs(5, 300, 75)
    made = both(plan, [Request("a", [ids], [OnDevice(np.array(ids))])])
    assert len(made) < 100


def faults() -> Iterator[tuple[str, list[Request]]]:
    def given(name: str, src: Any, dst: Any) -> Request:
        return Request(name, [src], [dst])

    def dev(*ids: int) -> OnDevice:
        return OnDevice(np.array(ids))

    good, clash = given("good", dev(1, 2, 3), dev(4, 5, 6)), given("clash", dev(1, 2), dev(20, 6))
    yield "src bound", [good, given("bad", dev(1, 300, -1), dev(10, 11, 999))]
    yield "dst bound", [given("bad", [1, 2], dev(10, -5)), good]
    yield "conflict", [given("first", [1], [6]), clash, given("good", [9], [21]), given("last", [1], [20])]
    yield "twice in one", [given("bad", dev(1, 2, 3), dev(30, 31, 30)), good]
    yield "thrice", [*(given(name, [1], dev(30)) for name in "abc"), good]
    yield "same id", [good, given("x", [1], dev(30)), given("x", [1], dev(31))]
    yield "same id, conflict", [given("x", [1], dev(30)), given("x", [1], dev(30)), good]
    yield "no conflict with the bad", [given("bad", [999], dev(4)), good]
    yield "kinds", [given("bad", [1.5], dev(4)), good, given("none", None, dev(40)), given("b", dev(1), dev(41, 42))]
    yield "lists", [Request("two", [dev(1), dev(2)], [dev(41)]), good, Request("first", [dev(1)], [dev(42)], [0], None)]
    yield "nothing", [given("a", [], []), given("b", dev(), dev()), given("c", dev(1), [])]
    yield "no requests", []


FAULTS = dict(faults())


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str) -> None:
    """The first error of each request, in the same words; its neighbours are whole."""
    plan = kvcompile.compile(cache(HIGH, layers=1), cache(FAR, layers=1))
    made = both(plan, FAULTS[name])
    assert "good" not in made.failed


def test_overlaid_groups() -> None:
    """Two groups share one id space: a block of one conflicts with the same block of the other, nulls aside."""
    regions = [
        Region(number, number, HIGH, 64, 60, [Field.hnd("kv", heads=1, tokens=4, cell_nbytes=16)]) for number in (0, 1)
    ]
    dst = Cache(regions, [Group(4, null_block=0), Group(4, null_block=1)])
    src = Cache(
        [msgspec.structs.replace(region, base=FAR + 8192 * region.layer) for region in regions], [Group(4), Group(4)]
    )
    plan = kvcompile.compile(src, dst)
    both(
        plan,
        [
            Request("a", [[1, 2], [3, 4]], [OnDevice(np.array([10, 0])), [0, 12]]),
            Request("b", [[1, 2], [3]], [[13, 12], OnDevice(np.array([1]))]),
            Request("c", [[1], [3]], [[14], [14]]),
            Request("d", [[1], [3]], [[20], OnDevice(np.array([21]))]),
        ],
    )


def test_ids_of_no_kind() -> None:
    """What is on the device and holds no ids is refused with words that say what it is."""
    plan = kvcompile.compile(cache(HIGH, layers=1), cache(FAR, layers=1))
    for array, words in (
        (np.ones(3, np.float32), "a CUDA array of float32"),
        (np.ones(3, bool), "a CUDA array of bool"),
        (np.ones((2, 2), np.int64), r"a CUDA array of shape \(2, 2\)"),
        (np.ones(17, np.uint8)[1:].view(np.int64), "not aligned"),
    ):
        built = device.build(
            plan, [Request("a", [OnDevice(array)], [[1]]), Request("b", [[1]], [[2]])], SimulatedMemory()
        )
        with pytest.raises(kvcompile.RequestError, match=words):
            raise built.failed["a"]
        assert built.spans.tolist() == [0, 0, 1]


@pytest.mark.parametrize("max_length", [None, 100, 2**70])
def test_cutting(max_length: int | None) -> None:
    """At a length, and at the edges of chunks on either side."""
    for chunk in (None, 1000):
        plan = kvcompile.compile(cache(HIGH, chunk=chunk), cache(FAR, chunk=chunk and 777))
        requests = [Request("a", [runs(6, 300, 40)], [OnDevice(np.arange(40))]), Request("b", [[5]], [[300]])]
        made = both(plan, requests, max_length)
        assert max_length != 100 or made.length.max() == 100


def test_pinned() -> None:
    plan = kvcompile.compile(cache(HIGH, tp_size=2), cache(FAR))
    requests = [Request("a", [scattered(1, 300, 40)], [OnDevice(np.array(scattered(2, 300, 40)))])]
    both(plan, requests, pinned=True)
    both(plan, requests, 30, pinned=True)


def test_ids_on_the_device_cost_the_host_nothing() -> None:
    """Only their number is known here, and their place in no page of memory. Those given on the host are kept."""

    class Many:
        __cuda_array_interface__ = {"shape": (2**27,), "typestr": "<i4", "data": (64, False), "version": 3}  # noqa: RUF012

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    changed, arrays = stand_in([Request("a", [Many()], [[1, 2]]), Request("b", [[3]], [Many()])])
    given, *_ = gather(changed[:1], backend.reading((4,), (4,)))
    batch = given.batch
    assert (batch.src_at.tolist(), given.status[0, item.CODE]) == ([0, 2**27], item.OK)
    assert len(arrays) == 2
    lists = Lists(batch, {(0, 0, 0): arrays[0, 0, 0]}, 1, 1)
    assert lists.host_ids.tolist() == [1, 2]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18, "kibibytes"
    assert lists.table(640).tolist() == [[64, 4, 4], [640, 8, 8]]


def test_result() -> None:
    """It is a `Descriptors`, waits once, is replaced where it is given as ``out``, and comes in batches."""
    plan, memory = kvcompile.compile(cache(HIGH, tp_size=2), cache(FAR)), SimulatedMemory()
    requests = [Request("a", [[3, 1, 2]], [[1, 2, 3]]), Request("b", [[9]], [OnDevice(np.array([9]))])]
    built = device.build(plan, requests, memory)
    assert isinstance(built, Descriptors)
    assert memory.waits == 0
    expected = plan.build([on_host(request) for request in requests])
    assert (len(built), built.nbytes, str(built)) == (8, expected.nbytes, str(expected))
    assert memory.waits == 1
    cut = [(part.src.tolist(), part.spans.tolist()) for part in built.batches(max_descriptors=3)]
    assert cut == [(part.src.tolist(), part.spans.tolist()) for part in expected.batches(max_descriptors=3)]
    assert memory.waits == 1
    again = device.build(plan, requests[:1], memory, out=built)
    assert again is built
    assert len(built) == 6
    assert memory.waits == 2
    with pytest.raises(ValueError, match="out is"):
        plan.build(requests, out=built)


def test_a_plan_is_uploaded_once() -> None:
    plan, memory = kvcompile.compile(cache(HIGH, tp_size=2), cache(FAR)), SimulatedMemory()
    for _ in range(3):
        device.build(plan, [Request("a", [[1]], [[2]])], memory)
    assert memory.uploads == 4
    device.build(plan.with_table(plan.table[:1]), [Request("a", [[1]], [[2]])], memory)
    assert memory.uploads == 6
    assert len(job._uploaded[plan]) == 1


def test_nothing_to_send() -> None:
    """A plan without rows still checks ids."""
    plan = kvcompile.compile(cache(HIGH, tp_rank=1, tp_size=8), cache(FAR))
    assert len(plan.table) == 0
    both(plan, [Request("a", [OnDevice(np.array([1, 2]))], [[1, 300]]), Request("b", [[1]], [[2]])])


def test_warm() -> None:
    """Every grid is launched, on nothing, and touches nothing."""
    device.warm(SimulatedMemory())


@st.composite
def scenes(draw: strategies.Draw) -> tuple[strategies.Deployment, list[batches.Draft], random.Random]:
    deployment = draw(strategies.deployments())
    return deployment, draw(batches.batches(deployment)), random.Random(draw(st.integers(0, 2**32)))


def test_generated() -> None:
    """Deployments and batches of the main property: all kinds of lanes, errors, cover."""
    seen = {"examples": 0, "descriptors": 0, "failed": 0, "uncovered": 0, "merged": 0}

    @hypothesis.settings(max_examples=30)
    @hypothesis.given(scenes())
    def check(scene: tuple[strategies.Deployment, list[batches.Draft], random.Random]) -> None:
        deployment, drafts, generator = scene
        rank = generator.choice(deployment.srcs)
        election, bridge = generator.choice(["nearest", "balanced", "striped"]), generator.random() < 0.3
        plan = kvcompile.compile(rank.cache, deployment.dst.cache, election=election, bridge_padding=bridge)
        requests = [draft.project(rank, deployment.dst) for draft in drafts]
        expected = plan.build(requests)
        if len(expected) > 100 or (len(expected) < 4 and not expected.failed):
            return  # a large build takes long, one of nothing shows little
        placed = [somewhere(request, generator) for request in requests]
        made = both(plan, placed, generator.choice([None, None, 5, 64]))
        seen["examples"] += 1
        seen["descriptors"] += len(made)
        seen["failed"] += len(made.failed)
        seen["uncovered"] += len(made.uncovered)
        seen["merged"] += not (plan._program.lanes[:, item.LANE_KIND] == item.APART).all()

    check()
    assert all(value >= 3 for value in seen.values()), seen


def somewhere(request: Request, generator: random.Random) -> Request:
    """Put some lists of a request onto the device."""

    def place(ids: Any) -> Any:
        array = np.asarray(ids)
        whole = array.ndim == 1 and array.dtype.kind in "iu" and not any(isinstance(value, bool) for value in ids)
        return OnDevice(array) if whole and generator.random() < 0.6 else ids

    lists = [[place(ids) for ids in given] for given in (request.src_blocks, request.dst_blocks)]
    return msgspec.structs.replace(request, src_blocks=lists[0], dst_blocks=lists[1])


def test_bodies_are_the_cpus() -> None:
    """The device compiles the functions of `item`, no copies of them, under the same names."""
    for module in (grids, cuda_check, cuda_descriptors, cuda_scan):
        for name, function in vars(module).items():
            body = getattr(item, name, None)
            if callable(body) and hasattr(function, "py_func"):
                assert function.py_func is body
    assert grids.touches.py_func is item.touches
