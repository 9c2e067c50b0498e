"""The real Mooncake Transfer Engine over TCP between two processes: bytes compared, limits kept, failures named."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import kvcompile
from kvcompile import KVCompileError, Request, TransferError
from kvcompile.engines import MooncakeEngine
from kvcompile.engines.mooncake import BATCH_DESCRIPTORS
from tests.peer import CANARY, Peer, copies, peer, rank, whole

mooncake = pytest.importorskip("mooncake.engine", reason="needs the extra mooncake", exc_type=ImportError)

pytestmark = pytest.mark.usefixtures("native")

NBYTES = 1 << 22


@pytest.fixture(scope="module")
def ours(memory: np.ndarray, native: str) -> Iterator[MooncakeEngine]:
    engine = MooncakeEngine("127.0.0.1")
    engine.register(whole(memory))
    yield engine
    engine.unregister()


def scattered(here: int, there: int, count: int, length: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray, int]:
    """Pieces of one length, in an order of their own on each side."""
    rng = np.random.default_rng(seed)
    places = np.arange(NBYTES // length, dtype=np.uint64) * np.uint64(length)
    return (here + rng.permutation(places)[:count], there + rng.permutation(places)[:count], length)


def test_write_and_read_a_plan() -> None:
    """GQA TP 4 to TP 2 over two processes, caches exchanged as bytes, every byte of the destination compared."""
    requests = [Request("a", [[3, 4, 5, 9]], [[9, 10, 2, 3]]), Request("b", [[1, 0]], [[0, 1]])]
    shard = 4 * 64  # bytes of one head of four tokens
    with peer(1 << 17, {"tp": (1, 2)}) as decode:
        expected = np.full(1 << 17, CANARY, np.uint8)
        plans = []
        for tp_rank in range(4):
            memory = np.random.default_rng(tp_rank).integers(0, 250, 1 << 16, np.uint8)
            engine = MooncakeEngine("127.0.0.1")
            cache = engine.register(rank(memory.ctypes.data, tp=(tp_rank, 4)))
            plan = kvcompile.compile(cache, decode.cache)
            built = plan.build(requests)
            engine.write(decode.session, built, timeout=30)
            plans.append((plan, engine, memory))
            if tp_rank < 2:
                assert len(built) == 0
                continue
            for layer in range(3):
                for half in range(2):
                    for src_block, dst_block in [(3, 9), (4, 10), (5, 2), (9, 3), (1, 0), (0, 1)]:
                        here = 512 + layer * (32 * 2 * shard + 512) + (src_block * 2 + half) * shard
                        there = 512 + layer * (32 * 4 * shard + 512) + (dst_block * 4 + 2 * half + tp_rank - 2) * shard
                        expected[there:][:shard] = memory[here:][:shard]
        np.testing.assert_array_equal(decode.memory(), expected)

        # And back: this process is the dst side and reads.
        back = np.full(1 << 16, CANARY, np.uint8)
        engine = MooncakeEngine("127.0.0.1")
        mine = engine.register(rank(back.ctypes.data, tp=(3, 4)))
        reverse = [Request("a", [[9, 10]], [[7, 8]])]
        engine.read(decode.session, kvcompile.compile(decode.cache, mine).build(reverse), timeout=30)
        wanted = np.full(1 << 16, CANARY, np.uint8)
        for layer in range(3):
            for half in range(2):
                for src_block, dst_block in [(9, 7), (10, 8)]:
                    here = 512 + layer * (32 * 4 * shard + 512) + (src_block * 4 + 2 * half + 1) * shard
                    there = 512 + layer * (32 * 2 * shard + 512) + (dst_block * 2 + half) * shard
                    wanted[there:][:shard] = expected[here:][:shard]
        np.testing.assert_array_equal(back, wanted)


def test_more_than_the_queue_takes(ours: MooncakeEngine, theirs: Peer, memory: np.ndarray) -> None:
    """6,000 descriptors in one call, and from four threads at once: without batches and turns both fail for good."""
    theirs.ask("clear")
    src, dst, length = scattered(memory.ctypes.data, theirs.address, 6000, 256)
    ours.write(theirs.session, copies(src, dst, length), timeout=60)
    expected = np.full(NBYTES, CANARY, np.uint8)
    cells = expected.reshape(-1, 256)
    cells[(dst - theirs.address) // 256] = memory.reshape(-1, 256)[(src - memory.ctypes.data) // 256]
    np.testing.assert_array_equal(theirs.memory(), expected)

    theirs.ask("clear")
    faults: list[TransferError] = []

    def part(number: int) -> None:
        mine = slice(number * 1500, (number + 1) * 1500)
        try:
            ours.write(theirs.session, copies(src[mine], dst[mine], length), timeout=60)
        except TransferError as error:
            faults.append(error)

    threads = [threading.Thread(target=part, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert not faults
    np.testing.assert_array_equal(theirs.memory(), expected)


def test_failure_names_the_requests(ours: MooncakeEngine, theirs: Peer, memory: np.ndarray, native: str) -> None:
    """Row 1,700 leaves the peer's memory, so the second batch fails, and with it all that began or ended there.

    Past Mooncake's Python interface just the request of that row fails.
    """
    theirs.ask("clear")
    src, dst, length = scattered(memory.ctypes.data, theirs.address, 3000, 256)
    dst[1700] = theirs.address + NBYTES
    spans, requests = [0, 500, BATCH_DESCRIPTORS, 1600, 1650, 1650, 3000], ["a", "b", "c", "d", "empty", "e"]
    with pytest.raises(TransferError, match=r"Mooncake (answered -1 for|did not move 1 of) 1000 descriptors") as caught:
        ours.write(theirs.session, copies(src, dst, length, spans, requests))
    assert caught.value.requests == (("c", "d", "e") if native == "off" else ("e",))
    assert caught.value.complete == (("a", "b", "empty") if native == "off" else ("a", "b", "c", "d", "empty"))
    cells = theirs.memory().reshape(-1, 256)
    there = np.arange(1000 if native == "off" else 2000) != 1700
    wanted = memory.reshape(-1, 256)[(src[: len(there)][there] - memory.ctypes.data) // 256]
    np.testing.assert_array_equal(cells[(dst[: len(there)][there] - theirs.address) // 256], wanted)
    ours.write(theirs.session, copies(src[:1], dst[:1], 256))  # such a failure does not spoil the peer


def test_local_addresses_are_checked(ours: MooncakeEngine, theirs: Peer, memory: np.ndarray) -> None:
    theirs.ask("clear")
    here, there = memory.ctypes.data, theirs.address
    for src in (here - 1, here + NBYTES - 3):
        with pytest.raises(TransferError, match="descriptor 1: src is 4 bytes"):
            ours.write(theirs.session, copies([here, src], [there, there + 8], 4))
        with pytest.raises(TransferError, match="descriptor 1: dst is 4 bytes"):
            ours.read(theirs.session, copies([there, there + 8], [here, src], 4))
    assert (theirs.memory() == CANARY).all()


def test_unregistered_memory_is_out_of_reach(ours: MooncakeEngine, memory: np.ndarray) -> None:
    with peer(4096) as other:
        one = copies([memory.ctypes.data], [other.address], 16)
        ours.write(other.session, one)
        other.ask("unregister")
        with pytest.raises(TransferError):
            ours.write(other.session, one)


def test_dead_peer(ours: MooncakeEngine, memory: np.ndarray) -> None:
    with peer(4096) as other:
        one = copies([memory.ctypes.data], [other.address], 16)
        ours.write(other.session, one)
        other.signal(signal.SIGKILL)
        other.process.join(10)
        with pytest.raises(TransferError) as caught:
            ours.write(other.session, one, timeout=10)
        assert caught.value.requests == ("request",)


@contextmanager
def stranger(answer: bytes) -> Iterator[str]:
    """A peer that answers the engine's handshake with bytes of its own; yields its session."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        size = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")
                        kind = connection.recv(size, socket.MSG_WAITALL)[:1]
                        connection.sendall((len(answer) + 1).to_bytes(8, "little") + kind + answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(30)


@pytest.mark.parametrize(
    "answer",
    [
        *(b"", b"{", b"{}", b"null", b"[]", b"5", b"[" * 100_000, b'{"name":{},"protocol":"tcp"}'),
        *(b'{"name":"a","protocol":[]}', b'{"name":"a","protocol":"tcp","tcp_data_port":"x","buffers":[]}'),
        b'{"name":"a","protocol":"tcp","tcp_data_port":1,"buffers":[{"name":"a","addr":-1,"length":1}]}',
        b'{"name":"a:x","protocol":"tcp","tcp_data_port":1,"tcp_proto_version":2,"buffers":[]}',
        b'{"name":"a","protocol":"rdma","devices":5,"buffers":[],"priority_matrix":7}',
    ],
    ids=lambda answer: answer[:60].decode(),
)
def test_a_stranger_fails_the_transfer_and_no_more(ours: MooncakeEngine, memory: np.ndarray, answer: bytes) -> None:
    """Many of these make Mooncake throw: where nobody catches that, it is the end of the process."""
    with stranger(answer) as session:
        one = copies([memory.ctypes.data], [memory.ctypes.data], 16)
        for _ in range(2):
            with pytest.raises(TransferError, match="the peer") as caught:
                ours.write(session, one)
            assert caught.value.requests == ("request",)
            ours.lift(session)


def test_frozen_peer_costs_the_timeout(ours: MooncakeEngine, memory: np.ndarray) -> None:
    with peer(NBYTES) as other:
        src, dst, length = scattered(memory.ctypes.data, other.address, 2000, 1024)
        ours.write(other.session, copies(src[:1], dst[:1], length))
        other.signal(signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(TransferError, match="not over after 1 s") as caught:
            ours.write(other.session, copies(src, dst, length, [0, 5, 2000], ["a", "b"]), timeout=1)
        assert time.monotonic() - started < 5
        assert caught.value.requests == ("a", "b")


def test_wrap_leaves_the_owners_memory_alone(theirs: Peer) -> None:
    theirs.ask("clear")
    memory = np.arange(8192).astype(np.uint8)
    own = np.arange(4096).astype(np.uint8)[::-1].copy()
    owner = mooncake.TransferEngine()
    assert owner.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    session = f"127.0.0.1:{owner.get_rpc_port()}"
    assert owner.register_memory(memory.ctypes.data, 8192) == 0
    engine = MooncakeEngine.wrap(owner, session)
    cache = engine.register(whole(memory[:4096]))  # part of what the owner registered
    assert cache.instance
    engine.register(whole(own))
    pieces = copies([memory.ctypes.data + 4096, own.ctypes.data], [theirs.address, theirs.address + 4096], 4096)
    engine.write(theirs.session, pieces, timeout=30)
    np.testing.assert_array_equal(theirs.memory()[:8192], np.concatenate([memory[4096:], own]))

    def into(array: np.ndarray) -> object:
        """Have the peer write into memory of this process: None, or what went wrong."""
        return theirs.ask("write", session, ([theirs.address + 4096], [array.ctypes.data], [4096]))

    assert into(memory) is None
    assert into(own) is None
    engine.unregister()
    assert into(memory) is None, "the owner's registration is gone"
    assert "Mooncake answered -1" in str(into(own))
    assert owner.unregister_memory(memory.ctypes.data) == 0


def test_own_engine_refuses_what_is_registered_behind_its_back() -> None:
    engine = MooncakeEngine("127.0.0.1")
    memory = np.zeros(8192, np.uint8)
    assert engine._engine.register_memory(memory.ctypes.data, 8192) == 0
    with pytest.raises(TransferError, match="Mooncake answered -7"):
        engine.register(whole(memory[:4096]))


def test_unregister_and_register_again(theirs: Peer) -> None:
    engine = MooncakeEngine("127.0.0.1")
    memory = np.zeros(4096, np.uint8)
    first = engine.register(whole(memory))
    engine.unregister()
    with pytest.raises(TransferError, match="descriptor 0: src"):
        engine.write(theirs.session, copies([memory.ctypes.data], [theirs.address], 16))
    second = engine.register(whole(memory))
    assert first.instance != second.instance
    engine.write(theirs.session, copies([memory.ctypes.data], [theirs.address], 16))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("",), "host"),
        (("127.0.0.1:80",), "host"),
        ((None,), "host"),
        (("127.0.0.1", "udp"), "protocol is 'udp', expected one of"),
        (("127.0.0.1", "tcp", "mlx5_0"), "device"),
        (("127.0.0.1", "rdma", None), "device"),
    ],
)
def test_arguments(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MooncakeEngine(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="session"):
        MooncakeEngine.wrap(None, "127.0.0.1")


def test_rdma_is_not_silently_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KVCompileError, match=r"found the devices .* on this machine: without one it silently uses TCP"):
        MooncakeEngine("127.0.0.1", "rdma", "no_such_device")
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    with pytest.raises(KVCompileError, match="MC_FORCE_TCP is set"):
        MooncakeEngine("127.0.0.1", "rdma")


def test_environment_is_as_it_was() -> None:
    before = dict(os.environ)
    engine = MooncakeEngine("127.0.0.1")
    assert engine.session.startswith("127.0.0.1:")
    assert dict(os.environ) == before


def test_without_mooncake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(
        KVCompileError, match=r"install the extra, pip install 'kvcompile\[mooncake\]'.*apt-get install"
    ):
        MooncakeEngine("127.0.0.1")
