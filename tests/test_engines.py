"""What every engine promises: registration, refusal before a byte moves, batches, deadlines, failure lists."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

import kvcompile
from kvcompile import Buffer, Cache, Descriptors, Request, TransferError, backend
from kvcompile.engines import Engine, LocalEngine
from kvcompile.engines.base import spans_of
from tests.peer import CANARY, copies, rank, whole


class Slow(Engine):
    """Moves a batch when it is told to, and remembers what it moved."""

    session = "slow"

    def __init__(self, max_descriptors: int | None = None, max_nbytes: int | None = None) -> None:
        super().__init__(max_descriptors, max_nbytes)
        self.go = threading.Semaphore(0)
        self.moved: list[tuple[str, str, int, int]] = []
        self.calls: list[tuple[str, Buffer]] = []
        self.bad: set[int] = set()
        self.refused: set[int] = set()
        self.at_once = 0

    def _register(self, buffer: Buffer) -> None:
        if buffer.base in self.refused:
            raise TransferError("register: refused")
        self.calls.append(("register", buffer))

    def _unregister(self, buffer: Buffer) -> None:
        self.calls.append(("unregister", buffer))

    def _check(self, kind: str, session: str, descriptors: Descriptors) -> None:
        pass

    def _move(self, kind: str, session: str, batch: Descriptors) -> None:
        mine = session != "other"  # which another thread may be in at the same time
        self.at_once += mine
        assert self.at_once == 1 or not mine
        assert self.go.acquire(timeout=30)
        self.at_once -= mine
        if self.bad & set(batch.src.tolist()):
            raise TransferError("a batch failed")
        self.moved.append((kind, session, len(batch), batch.nbytes))


def five_requests() -> Descriptors:
    """Rows 0-3, 4-6, none, 7-8, 9: batches of four end inside requests."""
    return copies(np.arange(10), np.arange(10), 1, [0, 4, 7, 7, 9, 10], "abcde")


def test_batches_and_order() -> None:
    engine = Slow(max_descriptors=4)
    engine.go.release(9)
    engine.write("peer", five_requests())
    engine.read("peer", five_requests())
    assert [moved[2] for moved in engine.moved] == [4, 4, 2, 4, 4, 2]
    assert [moved[0] for moved in engine.moved] == ["write"] * 3 + ["read"] * 3


def test_bytes_of_a_batch() -> None:
    engine = Slow(max_nbytes=100)
    engine.go.release(9)
    engine.write("peer", copies(np.arange(5), np.arange(5), [60, 40, 1, 250, 50]))
    assert [moved[3] for moved in engine.moved] == [100, 1, 250, 50]


@pytest.mark.parametrize(
    ("bad", "requests", "complete"),
    [
        (0, "abde", "c"),
        (3, "abde", "c"),
        (4, "bde", "ac"),
        (7, "bde", "ac"),
        (8, "de", "abc"),
        (9, "de", "abc"),
    ],
)
@pytest.mark.parametrize("timeout", [None, 10.0])
def test_failure_lists(bad: int, requests: str, complete: str, timeout: float | None) -> None:
    engine = Slow(max_descriptors=4)
    engine.go.release(9)
    engine.bad = {bad}
    with pytest.raises(TransferError, match="a batch failed") as caught:
        engine.write("peer", five_requests(), timeout)
    assert caught.value.requests == tuple(requests)
    assert caught.value.complete == tuple(complete)


def test_failed_requests_are_in_neither_list() -> None:
    src, dst = rank(1 << 20, tp=(0, 2)), rank(1 << 30)
    requests = [Request("good", [[1]], [[2]]), Request("bad", [[99]], [[3]]), Request("more", [[4]], [[5]])]
    built = kvcompile.compile(src, dst).build(requests)
    engine = Slow(max_descriptors=len(built) // 2)
    engine.go.release(9)
    engine.bad = {int(built.src[-1])}
    with pytest.raises(TransferError) as caught:
        engine.write("peer", built)
    assert (caught.value.requests, caught.value.complete) == (("more",), ("good",))


def test_timeout_leaves_the_rest_unsent() -> None:
    engine = Slow(max_descriptors=4)
    engine.go.release(1)
    started = time.monotonic()
    with pytest.raises(TransferError, match=r"not over after 0\.2 s; what is under way may still land") as caught:
        engine.write("peer", five_requests(), timeout=0.2)
    assert time.monotonic() - started < 2
    assert (caught.value.requests, caught.value.complete) == (("b", "d", "e"), ("a", "c"))
    with pytest.raises(TransferError, match="not over"):
        # The peer's turn is still taken: nothing of this one starts.
        engine.write("peer", copies(np.arange(10), np.arange(20, 30), 1), timeout=0.1)
    engine.go.release(9)
    engine.unregister()  # returns once what is under way is over
    deadline = time.monotonic() + 5
    while engine._flights and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [moved[2] for moved in engine.moved] == [4, 4]


def test_unregister_waits_for_transfers() -> None:
    engine = Slow()
    cache = rank(1 << 20)
    engine.register(cache)
    with pytest.raises(TransferError):
        engine.write("peer", five_requests(), timeout=0.05)
    thread = threading.Thread(target=engine.unregister)
    thread.start()
    time.sleep(0.1)
    assert all(call == "register" for call, _ in engine.calls)
    engine.go.release(1)
    thread.join(5)
    assert [buffer for call, buffer in engine.calls if call == "unregister"] == list(cache.buffers)


def test_one_peer_at_a_time() -> None:
    engine = Slow(max_descriptors=1)
    threads = [threading.Thread(target=engine.write, args=("peer", five_requests())) for _ in range(4)]
    for thread in threads:
        thread.start()
    engine.go.release(40)
    for thread in threads:
        thread.join(10)
    assert len(engine.moved) == 40


def test_another_peer_does_not_wait() -> None:
    engine = Slow()
    with pytest.raises(TransferError):
        engine.write("frozen", five_requests(), timeout=0.05)
    thread = threading.Thread(target=engine.write, args=("other", five_requests()))
    thread.start()
    engine.go.release(2)
    thread.join(5)
    assert ("write", "other", 10, 10) in engine.moved


def test_nothing_to_move() -> None:
    Slow().write("nobody", copies([], [], []), timeout=0)


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf")])
def test_timeout_must_make_sense(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        Slow().write("peer", five_requests(), timeout)


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "many"])
def test_limits_must_make_sense(limit: object) -> None:
    with pytest.raises(ValueError, match="max_descriptors"):
        Slow(max_descriptors=limit)  # type: ignore[arg-type]


def test_other_errors_come_out_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise TypeError("no such argument")

    monkeypatch.setattr(Slow, "_move", broken)
    for timeout in (None, 5.0):
        with pytest.raises(TypeError, match="no such argument"):
            Slow().write("peer", five_requests(), timeout)


def test_instance_is_new_at_each_registration() -> None:
    engine, cache = Slow(), rank(1 << 20)
    first, second = engine.register(cache), engine.register(cache)
    assert cache.instance == ""
    assert len({first.digest, second.digest, cache.digest}) == 3
    assert first.shape_digest == cache.shape_digest
    assert Cache.from_bytes(first.to_bytes()) == first


def test_each_buffer_is_registered_once() -> None:
    engine, cache = Slow(), rank(1 << 20)
    engine.register(cache)
    engine.register(cache)
    part = Cache(cache.regions[:1], cache.groups)
    engine.register(part)
    assert [buffer for _, buffer in engine.calls] == list(cache.buffers)


def test_partial_overlap_is_refused() -> None:
    engine, cache = Slow(), rank(1 << 20)
    engine.register(cache)
    with pytest.raises(TransferError, match="overlaps"):
        engine.register(rank((1 << 20) + 256))


def test_refused_registration_leaves_nothing() -> None:
    engine, cache = Slow(), rank(1 << 20)
    engine.refused = {cache.buffers[2].base}
    with pytest.raises(TransferError, match="refused"):
        engine.register(cache)
    assert engine.calls == [
        ("register", cache.buffers[0]),
        ("register", cache.buffers[1]),
        ("unregister", cache.buffers[0]),
        ("unregister", cache.buffers[1]),
    ]
    engine.refused = set()
    engine.register(cache)


def test_outside_against_plain_python() -> None:
    rng = np.random.default_rng(7)
    for high in (0, 0xFF00 << 48):
        edges = [high + int(edge) for edge in np.sort(rng.choice(200, 10, replace=False))]
        buffers = [Buffer(a, b - a) for a, b in zip(edges[::2], edges[1::2], strict=True)]
        rng.shuffle(buffers)  # type: ignore[arg-type]
        for _ in range(300):
            address = rng.integers(0, 200, 3).astype(np.uint64) + np.uint64(high)
            length = rng.choice(np.array([0, 1, 5, 60, 2**64 - 1], np.uint64), 3)
            bad = [
                not any(b.base <= int(a) and int(a) + int(n) <= b.end for b in buffers)
                for a, n in zip(address, length, strict=True)
            ]
            assert backend.outside(address, length, *spans_of(tuple(buffers))) == (bad.index(True) if any(bad) else -1)
    assert backend.outside(np.zeros(1, np.uint64), np.ones(1, np.uint64), *spans_of(())) == 0


@pytest.fixture
def two() -> Iterator[tuple[LocalEngine, np.ndarray, LocalEngine, np.ndarray]]:
    """Two local engines, each with 4 KiB of memory."""
    a, b = LocalEngine(), LocalEngine()
    src = np.arange(4096).astype(np.uint8)
    dst = np.full(4096, CANARY, np.uint8)
    a.register(whole(src))
    b.register(whole(dst))
    yield a, src, b, dst
    a.unregister()
    b.unregister()


def test_local_write_and_read(two: tuple[LocalEngine, np.ndarray, LocalEngine, np.ndarray]) -> None:
    a, src, b, dst = two
    here, there = src.ctypes.data, dst.ctypes.data
    a.write(b.session, copies([here + 16, here + 100], [there + 1000, there], [16, 3]))
    expected = np.full(4096, CANARY, np.uint8)
    expected[1000:1016], expected[:3] = src[16:32], src[100:103]
    np.testing.assert_array_equal(dst, expected)
    b.read(a.session, copies([here], [there], [4096]))
    np.testing.assert_array_equal(dst, src)


@pytest.mark.parametrize(
    ("src_at", "dst_at", "length"), [(-1, 0, 4), (4093, 0, 4), (0, -1, 4), (0, 4093, 4), (0, 0, 2**64 - 1)]
)
def test_local_refuses_before_a_byte_moves(
    two: tuple[LocalEngine, np.ndarray, LocalEngine, np.ndarray], src_at: int, dst_at: int, length: int
) -> None:
    a, src, b, dst = two
    here, there = src.ctypes.data, dst.ctypes.data
    bad = copies([here, here + src_at], [there, there + dst_at], [8, length], [0, 1, 2], ["good", "bad"])
    for engine, method in ((a, a.write), (b, b.read)):
        with pytest.raises(
            TransferError, match=r"descriptor 1: .* expected them inside one registered buffer"
        ) as caught:
            method(b.session if engine is a else a.session, bad)
        assert caught.value.requests == ("good", "bad")
        assert caught.value.complete == ()
    assert (dst == CANARY).all()


def test_local_refuses_unknown_sessions(two: tuple[LocalEngine, np.ndarray, LocalEngine, np.ndarray]) -> None:
    a, src, b, dst = two
    one = copies([src.ctypes.data], [dst.ctypes.data], [1])
    gone = LocalEngine().session
    for session in (gone, "127.0.0.1:1234", ""):
        with pytest.raises(TransferError, match="no LocalEngine of this process"):
            a.write(session, one)
    b.unregister()
    with pytest.raises(TransferError, match="descriptor 0: dst"):
        a.write(b.session, one)
    assert dst[0] == CANARY


def test_local_moves_what_a_plan_builds() -> None:
    """TP 2 to TP 1 through caches as bytes, with blocks in runs; every byte of the destination compared."""
    dst_memory = np.full(1 << 18, CANARY, np.uint8)
    dst_engine = LocalEngine()
    dst = dst_engine.register(rank(dst_memory.ctypes.data))
    expected = dst_memory.copy()
    requests = [Request("a", [[3, 4, 5]], [[9, 10, 2]]), Request("b", [[1]], [[0]])]
    keep = []
    for tp_rank in range(2):
        memory = np.random.default_rng(tp_rank).integers(0, 250, 1 << 17, np.uint8)
        engine = LocalEngine()
        src = engine.register(rank(memory.ctypes.data, tp=(tp_rank, 2)))
        keep.append((memory, engine))
        built = kvcompile.compile(src, Cache.from_bytes(dst.to_bytes())).build(requests)
        engine.write(dst_engine.session, built, timeout=30)
        for layer in range(3):
            for half in range(2):
                for src_block, dst_block in [(3, 9), (4, 10), (5, 2), (1, 0)]:
                    shard = 2 * 4 * 64  # bytes: two heads of four tokens
                    here = 512 + layer * (32 * 2 * shard + 512) + src_block * 2 * shard + half * shard
                    there = 512 + layer * (32 * 4 * shard + 512) + dst_block * 4 * shard + half * 2 * shard
                    expected[there + tp_rank * shard :][:shard] = memory[here:][:shard]
    np.testing.assert_array_equal(dst_memory, expected)


def test_importing_engines_imports_no_mooncake() -> None:
    probe = "import sys, kvcompile.engines; sys.exit(any(name.startswith('mooncake') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", probe], check=False, timeout=60).returncode == 0


def test_each_transfer_knows_what_is_registered_by_then() -> None:
    mine, later, there = (np.full(64, value, np.uint8) for value in (1, 2, 3))
    engine, peer = LocalEngine(), LocalEngine()
    peer.register(whole(there))
    engine.register(whole(mine))
    engine.write(peer.session, copies([mine.ctypes.data], [there.ctypes.data], 8))
    second = copies([later.ctypes.data], [there.ctypes.data], 8)
    with pytest.raises(TransferError, match="src"):
        engine.write(peer.session, second)
    engine.register(whole(later))
    engine.write(peer.session, second)
    assert there[:9].tolist() == [2] * 8 + [3]
    engine.unregister()
    with pytest.raises(TransferError, match="src"):
        engine.write(peer.session, second)
