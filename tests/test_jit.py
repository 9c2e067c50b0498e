"""Compiled once and for all inputs, no Python work that grows with blocks or layers, the same from many threads."""

import array
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import numpy as np
import pytest

import kvcompile
from kvcompile import Cache, Field, Group, Plan, Region, Request, arena
from tests import replay
from tests.lists import PLAIN, UNEQUAL, A, B


def model(base: int, layers: int, *, heads: int = 2, rank: int = 0, size: int = 1, blocks: int = 40_000) -> Cache:
    """Make a model of equal layers, K and V apart."""
    k, v = (Field.hnd(name, heads=heads, tokens=4, cell_nbytes=2) for name in "kv")
    stride = heads // size * 8
    regions = []
    for number in range(layers):
        for half, field in enumerate((k, v)):
            place = base + (2 * number + half) * 2**24
            regions.append(Region(f"layers.{number}", 0, place, stride, blocks, [field]))
    return Cache(regions, [Group(4, null_block=0)], tp_rank=rank, tp_size=size)


def line_events(call: Callable[[], object]) -> int:
    """Count the lines of Python that a call runs, everywhere."""
    counted = 0

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., object]:
        nonlocal counted
        counted += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return counted


def batch(count: int, form: str) -> list[Request]:
    """Two requests of ``count`` blocks: scattered, in runs, or with nulls."""
    if form == "runs":
        src = [8 * (block // 8 * 2) + block % 8 + 1 for block in range(count)]
    else:
        src = list(range(1, 2 * count, 2))
    if form == "nulls":
        src[count // 2] = 0
    return [
        Request("a", [src], [list(range(1, count + 1))]),
        Request("b", [src], [list(range(count + 1, 2 * count + 1))]),
    ]


@pytest.mark.parametrize("form", ["scattered", "runs"])
@pytest.mark.parametrize("split", [False, True])
def test_lines_do_not_grow(form: str, split: bool) -> None:
    """As many lines for 1 layer as for 128, for 16 blocks as for 16,384; whole blocks or one head of two.

    Where no memory is at hand: where it is, a small result takes one call of the kernel and a large one two.
    """
    counts = {}
    for layers in (1, 128):
        dst = model(B, layers, size=2, rank=1) if split else model(B, layers)
        plan = kvcompile.compile(model(A, layers), dst)
        for blocks in (16, 16_384):
            requests = batch(blocks, form)
            plan.build(requests)
            arena.clear()
            counts[layers, blocks] = line_events(lambda plan=plan, requests=requests: plan.build(requests))
    assert len(set(counts.values())) == 1, counts
    assert 0 < counts[1, 16] < 200


def test_lines_do_not_grow_with_phases() -> None:
    """Blocks of 4 into blocks of 4 and of 64 cost the same Python."""
    counts = []
    for size in (4, 64):
        field = Field.hnd("k", heads=1, tokens=size, cell_nbytes=2)
        dst = Cache([Region("0", 0, B, size * 2, 2_000, [field])], [Group(size)])
        small = Field.hnd("k", heads=1, tokens=4, cell_nbytes=2)
        plan = kvcompile.compile(Cache([Region("0", 0, A, 8, 2_000, [small])], [Group(4)]), dst)
        ids = list(range(512 * 4 // size))
        requests = [Request("r", [list(range(512))], [ids], [0], [0])]
        assert len(plan.build(requests)) == 1
        counts.append(line_events(lambda plan=plan, requests=requests: plan.build(requests)))
    assert counts[0] == counts[1]


def test_lines_of_a_batch_are_of_its_requests() -> None:
    """Python may walk over requests, to gather their lists: so many lines for each, and no more."""
    plan = kvcompile.compile(model(A, 4), model(B, 4))
    counts = []
    for requests in (1, 2, 3):
        made = [Request(n, [[3 * n + 1, 3 * n + 2]], [[3 * n + 1, 3 * n + 3]]) for n in range(requests)]
        plan.build(made)
        counts.append(line_events(lambda made=made: plan.build(made)))
    assert counts[1] - counts[0] == counts[2] - counts[1] < 100


def dispatchers() -> dict[str, object]:
    """Every compiled function in the package, wherever it hangs."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("kvcompile"):
            for key, value in list(vars(module).items()):
                if hasattr(value, "nopython_signatures"):
                    found[f"{value.__module__}.{key}"] = value
    return found


def signatures() -> dict[str, int]:
    return {name: len(value.nopython_signatures) for name, value in dispatchers().items()}


KINDS: list[Callable[[list[int]], object]] = [
    list,
    tuple,
    lambda ids: np.array(ids, np.int64),
    lambda ids: np.array(ids, np.int32),
    lambda ids: np.array(ids, np.uint64),
    lambda ids: np.array(ids, ">i2"),
    lambda ids: np.repeat(np.array(ids, np.int64), 2)[::2],
    lambda ids: np.broadcast_to(np.array(ids, np.int64), (2, len(ids)))[0],
    lambda ids: np.frombuffer(np.array(ids, np.int64).tobytes(), np.int64),
    lambda ids: array.array("q", ids),
    lambda ids: array.array("I", ids),
    lambda ids: [np.int64(block) for block in ids],
]


def test_nothing_compiles_after_warmup() -> None:
    """Whatever kind the ids are of, whatever the request lacks or gets wrong, whatever the plan looks like."""
    kvcompile.warmup()
    before = signatures()
    assert len(before) >= 3
    assert sum(before.values()) > 0
    plans = [PLAIN, kvcompile.compile(model(A, 3), model(B, 3)), kvcompile.compile(model(A, 2), model(B, 2, size=2))]
    out = None
    for make in KINDS:
        for plan in plans:
            for options in ({}, {"max_length": 5}, {"out": out}):
                out = plan.build([Request("r", [make([5, 1, 2])], [make([7, 8])])], **options)
                assert out.failed == {}
                assert len(out) > 0
        built = UNEQUAL.build([Request("r", [make([5, 1])], [make([7, 8, 9])], [0], np.array([0]), np.int16(6))])
        assert built.failed == {}
    for bad in ([1.5], None, [99], [-1]):
        assert len(PLAIN.build([Request("r", [bad], [[1]])]).failed) == 1
    PLAIN.build([])
    PLAIN.build([Request("a", [[1]], [[5]]), Request("b", [[1]], [[5]])])
    PLAIN.build([Request("r", [[]], [[]])], sort=True)
    list(PLAIN.build([Request("r", [[1, 3]], [[5, 6]])]).batches(max_descriptors=1, max_nbytes=40))
    assert signatures() == before


def test_torch_compiles_nothing() -> None:
    torch = pytest.importorskip("torch")
    kvcompile.warmup()
    before = signatures()
    for kind in (torch.int64, torch.int32):
        src, dst = torch.tensor([5, 1, 2], dtype=kind), torch.tensor([[7, 0], [8, 0]], dtype=kind)[:, 0]
        assert replay.triples(PLAIN.build([Request("r", [src], [dst])])) == [(A + 32, B + 7 * 32, 64)]
    assert signatures() == before


def test_every_kernel_releases_the_gil() -> None:
    """nopython and nogil, each."""
    kvcompile.warmup()
    found = {name: kernel.targetoptions for name, kernel in dispatchers().items()}
    assert len(found) >= 3
    assert [name for name, options in found.items() if not options.get("nogil") or options.get("forceobj")] == []


def test_import_takes_no_compiler() -> None:
    """Whoever only describes caches, or has Cache bytes to send, does not wait for Numba."""
    code = "import sys, kvcompile, kvcompile.fields, kvcompile.models; print('numba' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.split() == ["False"]


def test_warmup_is_known_to_another_process() -> None:
    """Kernels come from the cache on disk: a new process loads what this one compiled, and compiles nothing."""
    kvcompile.warmup()
    code = (
        "import sys, kvcompile; kvcompile.warmup();"
        "found = [v for n, m in list(sys.modules.items()) if n.startswith('kvcompile')"
        " for v in vars(m).values() if hasattr(v, 'stats')];"
        "print(*(sum(sum(getattr(v.stats, k).values()) for v in found) for k in ('cache_hits', 'cache_misses')))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    hits, misses = map(int, found.stdout.split())
    assert hits > 0
    assert misses == 0


def test_kernels_load_without_all_that_numba_can_compile() -> None:
    """That takes longer than to load them; and whatever the process compiles afterwards, it can."""
    kvcompile.warmup()
    code = (
        "import sys, numba, numpy as np, kvcompile; kvcompile.warmup(); print('numba.np.linalg' in sys.modules);"
        "f = numba.njit(lambda x: np.sort(x).sum()); print(f(np.array([4.0, 3.0])));"
        "from kvcompile import backend; print(len(backend.cpu.build.signatures), len(backend.cpu.write.signatures));"
        "again = numba.njit(backend.descriptors.outside.py_func); none = np.empty(0, np.uint64);"
        "print(again(none, none, none, none))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.split() == ["False", "7.0", "1", "0", "-1"]


def run(plan: Plan, requests: list[Request]) -> tuple[object, ...]:
    built = plan.build(requests)
    return (
        replay.triples(built),
        built.spans.tolist(),
        built.uncovered,
        {name: (str(error), error.position) for name, error in built.failed.items()},
    )


def test_many_threads_give_the_results_of_one() -> None:
    """Shared plans, batches of their own, errors among them; and each thread its own ``out``."""
    plans = [
        kvcompile.compile(model(A, 8), model(B, 8)),
        kvcompile.compile(model(A, 8), model(B, 8, size=2, rank=1)),
        kvcompile.compile(model(A, 3), model(B, 8)),
    ]
    jobs = []
    for number in range(48):
        requests = batch(50 + 7 * number, ("scattered", "runs", "nulls")[number % 3])
        if number % 4 == 0:
            requests += [Request("bad", [[-1]], [[39_999]]), Request("worse", [[2.5]], [[39_998]])]
        jobs.append((plans[number // 3 % 3], requests))
    expected = [run(*job) for job in jobs]
    assert sum(len(result[0]) for result in expected) > 10_000
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            assert list(pool.map(lambda job: run(*job), jobs)) == expected

        def reuse(number: int) -> bool:
            out = None
            for step in range(12):
                plan, requests = jobs[(number * 5 + step * 7) % len(jobs)]
                out = plan.build(requests, out=out)
                if replay.triples(out) != expected[(number * 5 + step * 7) % len(jobs)][0]:
                    return False
            return True

        assert all(pool.map(reuse, range(8)))
