"""Past Mooncake's Python interface: when it is used and when not, and what its transfers leave behind."""

import contextlib
import ctypes
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvcompile import KVCompileError, TransferError, _jit
from kvcompile.engines import MooncakeEngine
from kvcompile.engines import native as past
from kvcompile.engines.attempts import BatchError
from tests.peer import CANARY, Peer, copies, mapped, peer, whole

mooncake = pytest.importorskip("mooncake.engine", reason="needs the extra mooncake", exc_type=ImportError)

NBYTES = 1 << 20
ROW = 256
ROWS = 900


@pytest.fixture(scope="module")
def ours(memory: np.ndarray) -> Iterator[MooncakeEngine]:
    engine = MooncakeEngine("127.0.0.1", native="require")
    engine.register(whole(memory))
    yield engine
    engine.unregister()


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A machine on which no trial has been made; what is remembered lies in the folder returned."""
    monkeypatch.setattr(_jit, "cache_folder", lambda: tmp_path)
    past._verdict.cache_clear()
    yield tmp_path
    past._verdict.cache_clear()


def trial(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(past, "TRIAL", (sys.executable, "-c", code))


def refused(engine: object) -> str:
    """Return why a running engine is not called past its interface, which nobody notices who does not require it."""
    assert MooncakeEngine.wrap(engine, "127.0.0.1:1", native="auto")._native is None
    with pytest.raises(KVCompileError, match="native is 'require', but ") as caught:
        MooncakeEngine.wrap(engine, "127.0.0.1:1", native="require")
    return str(caught.value)


def test_off_unless_wanted(ours: MooncakeEngine) -> None:
    assert MooncakeEngine("127.0.0.1")._native is None
    assert MooncakeEngine.wrap(ours._engine, ours.session)._native is None
    assert MooncakeEngine("127.0.0.1", native="auto")._native is not None
    assert MooncakeEngine.wrap(ours._engine, ours.session, native="auto")._native is not None
    for make in (lambda: MooncakeEngine("127.0.0.1", native="on"), lambda: past.find(None, True, lambda: True)):
        with pytest.raises(ValueError, match=r"native is .*, expected one of"):
            make()


def test_unknown_builds_are_refused(ours: MooncakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = past.digest_of(ours._engine)
    assert digest in past.BUILDS
    monkeypatch.setattr(past, "BUILDS", {digest[:-1] + "g": "another build"})
    assert f"engine.so has the digest {digest}, expected one of another build" in refused(ours._engine)
    with pytest.raises(KVCompileError, match="digest"):
        MooncakeEngine("127.0.0.1", native="require")


def test_other_engines_are_refused(ours: MooncakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        pass

    assert "Other does not tell where its C++ engine is" in refused(Other())
    monkeypatch.setattr("kvcompile.engines.mooncake._devices", lambda engine: {"mlx5_0"})
    assert "it was tried over TCP only" in refused(ours._engine)


def test_the_trial_passes_and_is_remembered(
    ours: MooncakeEngine, nothing_known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MooncakeEngine.wrap(ours._engine, ours.session, native="require")._native is not None
    assert [file.read_text() for file in nothing_known.glob("native-*")] == ["passed"]
    trial(monkeypatch, "raise SystemExit('tried again')")
    past._verdict.cache_clear()
    assert MooncakeEngine.wrap(ours._engine, ours.session, native="auto")._native is not None


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os; os.kill(os.getpid(), 11)", "killed by signal 11"),
        ("import ctypes; ctypes.string_at(1)", "killed by signal 11"),
        ("import os; os.abort()", "killed by signal 6"),
        ("raise SystemExit('wrong bytes')", "exit status 1, wrong bytes"),
        ("print('0' * 64)", "exit status 0, 0000"),
        ("", "exit status 0, nothing"),
        ("import time; time.sleep(60)", "timed out after 0.5 seconds"),
    ],
)
def test_a_trial_that_fails_is_remembered(
    code: str, why: str, ours: MooncakeEngine, nothing_known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial(monkeypatch, code)
    if "sleep" in code:
        monkeypatch.setattr(past, "TRIAL_S", 0.5)
    message = refused(ours._engine)
    (file,) = nothing_known.glob("native-*")
    assert why in message
    assert f"remembered in {file}" in message
    monkeypatch.setattr(past, "TRIAL_S", 60.0)
    trial(monkeypatch, f"print({past.digest_of(ours._engine)!r})")
    past._verdict.cache_clear()
    assert why in refused(ours._engine), "another process asked again"
    file.unlink()
    past._verdict.cache_clear()
    assert MooncakeEngine.wrap(ours._engine, ours.session, native="require")._native is not None


def test_the_trial_sees_what_goes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcompile.engines import trial as tried  # noqa: PLC0415

    right = past.Native.move

    def without_a_row(self: past.Native, kind: str, session: str, batch: object) -> None:
        right(self, kind, session, next(batch.batches(tried.ROWS - 1)))  # type: ignore[attr-defined]

    def only_writes(self: past.Native, kind: str, session: str, batch: object) -> None:
        right(self, "write", session, batch)  # type: ignore[arg-type]

    def another_list(self: past.Native, kind: str, session: str, batch: object) -> None:
        try:
            right(self, kind, session, batch)  # type: ignore[arg-type]
        except BatchError as error:
            raise BatchError(str(error), np.roll(error.arrived, 1)) from None

    def silent(self: past.Native, kind: str, session: str, batch: object) -> None:
        with contextlib.suppress(BatchError):
            right(self, kind, session, batch)  # type: ignore[arg-type]

    for wrong in (without_a_row, only_writes, another_list, silent):
        monkeypatch.setattr(past.Native, "move", wrong)
        with pytest.raises(KVCompileError, match=r"wrong|did not move|cannot succeed did"):
            tried.run()


def pieces(memory: np.ndarray, other: int, count: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Return src and dst addresses of rows, each side in an order of its own."""
    rng = np.random.default_rng(2)
    places = [rng.permutation(NBYTES // ROW)[:count].astype(np.uint64) * np.uint64(ROW) for _ in range(2)]
    return places[0] + np.uint64(memory.ctypes.data), places[1] + np.uint64(other)


def landed(there: np.ndarray, base: int, memory: np.ndarray, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
    """Return which rows hold the bytes of their src."""
    cells, mine = there.reshape(-1, ROW), memory.reshape(-1, ROW)
    inside = dst < base + NBYTES
    at = np.where(inside, dst - base, 0) // ROW
    same = (cells[at] == mine[(src - memory.ctypes.data) // ROW]).all(1)
    return same & inside  # type: ignore[no-any-return]


@pytest.mark.parametrize("bad", [[0], [ROWS - 1], [450], [3, 4, 5, 600], list(range(0, ROWS, 150))])
def test_just_what_failed_is_named(bad: list[int], ours: MooncakeEngine, theirs: Peer, memory: np.ndarray) -> None:
    """One request a row, so that the lists say it of each."""
    theirs.ask("clear")
    src, dst = pieces(memory, theirs.address)
    dst[bad] = theirs.address + NBYTES
    with pytest.raises(TransferError, match=f"did not move {len(bad)} of {ROWS}") as caught:
        ours.write(theirs.session, copies(src, dst, ROW, range(ROWS + 1), range(ROWS)), 60)
    assert caught.value.requests == tuple(bad)
    np.testing.assert_array_equal(
        landed(theirs.memory(), theirs.address, memory, src, dst), ~np.isin(np.arange(ROWS), bad)
    )
    assert not ours._native._late  # type: ignore[union-attr]
    ours.lift(theirs.session)
    ours.write(theirs.session, copies(src[:1], [theirs.address], ROW))


def test_what_is_not_over_in_time_counts_as_failed(
    ours: MooncakeEngine, theirs: Peer, memory: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for the rows behind one that failed here. They are named, barred, and freed when they are over."""
    monkeypatch.setattr(past, "SETTLE_US", 0)
    theirs.ask("clear")
    src, dst = pieces(memory, theirs.address)
    dst[:5] = theirs.address + NBYTES
    with pytest.raises(TransferError) as caught:
        ours.write(theirs.session, copies(src, dst, ROW, range(ROWS + 1), range(ROWS)), 60)
    complete = np.array(caught.value.complete, int)
    assert set(caught.value.requests) > set(range(5))
    assert landed(theirs.memory(), theirs.address, memory, src, dst)[complete].all()
    assert len(ours._native._late) == 1  # type: ignore[union-attr]
    deadline = time.monotonic() + 60
    while ours._native._late:  # type: ignore[union-attr]
        assert time.monotonic() < deadline
        time.sleep(0.1)
        ours.read(theirs.session, copies([theirs.address], [memory.ctypes.data], 1))
    assert landed(theirs.memory(), theirs.address, memory, src, dst)[5:].all()
    ours.lift(theirs.session)


def test_a_peer_killed_within_a_batch(tmp_path: Path) -> None:
    """Its memory is a file: every row that is said to be there is. It is frozen first, to be sure that some are not."""
    file, size = tmp_path / "memory", 1 << 14
    nbytes = ROWS * size
    np.full(nbytes, CANARY, np.uint8).tofile(file)
    there = mapped(str(file), nbytes).reshape(ROWS, size)
    mine = np.random.default_rng(3).integers(0, 250, (ROWS, size), np.uint8)
    engine = MooncakeEngine("127.0.0.1", native="require")
    engine.register(whole(mine))
    with peer(nbytes, file=str(file)) as other:
        at = np.arange(ROWS) * size
        rows = copies(at + mine.ctypes.data, at + other.address, size, range(ROWS + 1), range(ROWS))
        for _ in range(50):
            there[:] = CANARY
            ticket = engine.write_async(other.session, rows)
            while np.count_nonzero(there[:, 0] != CANARY) < ROWS // 20:
                assert not ticket.done() or (there[:, 0] != CANARY).all()
            other.signal(signal.SIGSTOP)
            if not ticket.done():
                break
            other.signal(signal.SIGCONT)
        other.signal(signal.SIGKILL)
        with pytest.raises(TransferError, match="did not move") as caught:
            ticket.wait(60)
        assert caught.value.complete
        assert caught.value.requests
        said = np.isin(np.arange(ROWS), caught.value.complete)
        np.testing.assert_array_equal(there[said], mine[said])
        assert not engine._native._late  # type: ignore[union-attr]


def test_a_frozen_peer(memory: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads run meanwhile; when Mooncake's time is over its memory stays, and goes once the peer has thawed."""
    monkeypatch.setattr(past, "_timeout_us", lambda: 500_000)
    engine = MooncakeEngine("127.0.0.1", native="require")
    engine.register(whole(memory))
    with peer(NBYTES) as other:
        src, dst = pieces(memory, other.address)
        engine.write(other.session, copies(src[:1], dst[:1], ROW))
        other.signal(signal.SIGSTOP)
        ticket = engine.write_async(other.session, copies(src, dst, ROW))
        turns = 0
        while not ticket.done():
            turns += 1
            time.sleep(0.001)
        assert turns > 20
        with pytest.raises(TransferError, match=f"did not move {ROWS} of {ROWS}") as caught:
            ticket.wait()
        assert caught.value.requests == ("request",)
        assert engine.barred(other.session)
        assert len(engine._native._late) == 1  # type: ignore[union-attr]
        other.signal(signal.SIGCONT)
        free = [other.address + NBYTES - 1]
        deadline = time.monotonic() + 60
        while engine._native._late:  # type: ignore[union-attr]
            assert time.monotonic() < deadline
            time.sleep(0.1)
            engine.read(other.session, copies(free, [memory.ctypes.data], 1))
        assert landed(other.memory(), other.address, memory, src, dst).all()


@contextmanager
def instead(native: past.Native, replaced: dict[int, tuple[int, Callable[..., int]]]) -> Iterator[None]:
    """Replace methods, by index, for a while: each gets the real one, and then so many arguments."""
    functions, keep = native._functions.copy(), []
    for index, (count, function) in replaced.items():
        kind = ctypes.CFUNCTYPE(*[ctypes.c_uint64] * (1 + count))
        keep.append(kind(partial(function, kind(int(functions[index])))))
        functions[index] = ctypes.cast(keep[-1], ctypes.c_void_p).value
    was, native._functions = native._functions, functions
    try:
        yield
    finally:
        native._functions = was


def test_every_batch_is_freed(ours: MooncakeEngine, theirs: Peer, memory: np.ndarray) -> None:
    calls: list[str] = []
    native = ours._native
    assert native is not None

    def noted(name: str) -> Callable[..., int]:
        def forward(real: Callable[..., int], *arguments: int) -> int:
            calls.append(name)
            return real(*arguments)

        return forward

    records = native._records
    with instead(native, {records.ALLOCATE: (2, noted("new")), records.FREE: (3, noted("free"))}):
        src, dst = pieces(memory, theirs.address)
        ours.write(theirs.session, copies(src, dst, ROW))
        dst[7] = theirs.address + NBYTES
        with pytest.raises(TransferError):
            ours.write(theirs.session, copies(src, dst, ROW))
        with pytest.raises(TransferError, match=f"did not move {ROWS} of {ROWS}"):
            ours.write("127.0.0.1:1", copies(src, dst, ROW))
        ours.lift(theirs.session)
    assert calls == ["new", "free"] * 2, "and none for a peer that does not exist"


def test_what_mooncake_refuses_has_not_arrived(ours: MooncakeEngine, theirs: Peer, memory: np.ndarray) -> None:
    """A batch with room for one row refuses all, and its state is then that of an empty one: completed."""
    theirs.ask("clear")
    native = ours._native
    assert native is not None

    def too_small(real: Callable[..., int], engine: int, count: int) -> int:
        return real(engine, 1)

    src, dst = pieces(memory, theirs.address)
    with (
        instead(native, {native._records.ALLOCATE: (2, too_small)}),
        pytest.raises(TransferError, match=f"did not move {ROWS} of {ROWS}") as caught,
    ):
        ours.write(theirs.session, copies(src, dst, ROW, range(ROWS + 1), range(ROWS)))
    assert caught.value.complete == ()
    assert (theirs.memory() == CANARY).all()
    assert not native._late
    ours.lift(theirs.session)
    ours.write(theirs.session, copies(src, dst, ROW))
    assert landed(theirs.memory(), theirs.address, memory, src, dst).all()


def test_several_peers_at_once(ours: MooncakeEngine, theirs: Peer, memory: np.ndarray) -> None:
    theirs.ask("clear")
    with peer(NBYTES) as other:
        both, faults = (theirs, other), []

        def send(to: Peer) -> None:
            try:
                src, dst = pieces(memory, to.address, 3000)
                ours.write(to.session, copies(src, dst, ROW), 60)
            except TransferError as error:
                faults.append(error)

        threads = [threading.Thread(target=send, args=(to,)) for to in both]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
        assert not faults
        for to in both:
            assert landed(to.memory(), to.address, memory, *pieces(memory, to.address, 3000)).all()


@pytest.mark.parametrize(
    ("given", "seconds"), [(None, 30), ("7", 7), ("2", 5), ("-9", 5), ("nonsense", 5), (" 12s", 12), ("", 5)]
)
def test_mooncakes_time_is_ours(given: str | None, seconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its calls read MC_TRANSFER_TIMEOUT: by ``atoi``, five at least."""
    monkeypatch.delenv("MC_TRANSFER_TIMEOUT", raising=False)
    if given is not None:
        monkeypatch.setenv("MC_TRANSFER_TIMEOUT", given)
    assert past._timeout_us() == seconds * 1_000_000
