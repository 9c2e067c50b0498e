"""Mooncake's C++ engine, called past its Python interface: no Python object a descriptor, and the state of each.

That is a bet on the ABI of one build of Mooncake. So it is made only with builds that are known by their digest, after
a trial with real bytes in a child process (`trial`), and only over TCP. `MooncakeEngine` decides; this moves one batch.
"""

import ctypes
import functools
import hashlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from kvcompile import _jit
from kvcompile.descriptors import Descriptors
from kvcompile.engines.attempts import BatchError
from kvcompile.errors import KVCompileError

__all__ = ["BUILDS", "Choice", "Native", "digest_of", "find"]

Int64 = npt.NDArray[np.int64]
Choice = Literal["auto", "off", "require"]

BUILDS = {
    "c90d0abca55ab45afc5005bc3cb17a93b373cf1c8b75ec76cc8d882c7c330baf": (
        "mooncake-transfer-engine-non-cuda 0.3.13.post1, CPython 3.11, x86-64"
    ),
}
"""SHA-256 of the ``engine.so`` of each build that this was written for and tried with."""

TRIAL_S = 120.0
"""Seconds for the trial, compilation included; it takes about five."""

TRIAL = (sys.executable, "-m", "kvcompile.engines.trial")

PASSED = "passed"

SETTLE_US = 5_000_000
"""Microseconds for another row to arrive once one of the batch has failed; without, all that are not over count as
failed. Mostly they need none: only where a peer refuses rows does it take time, for Mooncake connects anew, and four
of them a second."""

_CLASS = "_ZN8mooncake14TransferEngine"
_METHODS = (  # in the order of `records`
    "11openSegmentERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
    "15allocateBatchIDEm",
    "14submitTransferEmRKSt6vectorINS_9Transport15TransferRequestESaIS3_EE",
    "22getBatchTransferStatusEmRNS_9Transport14TransferStatusE",
    "17getTransferStatusEmmRNS_9Transport14TransferStatusE",
    "11freeBatchIDEm",
)


def find(engine: Any, choice: Choice, tcp: Callable[[], bool]) -> "Native | None":
    """Return the way past the Python interface of an engine, None where it is not to be used.

    Parameters
    ----------
    engine : mooncake.engine.TransferEngine
        Initialized.
    choice : "auto", "off" or "require"
    tcp : callable
        Whether its transport is TCP; asked of a Mooncake engine only.

    Raises
    ------
    KVCompileError
        It is required, and something is against it.
    """
    if choice not in get_args(Choice):
        raise ValueError(f"native is {choice!r}, expected one of {get_args(Choice)}")
    if choice == "off":
        return None
    against = _against(engine, tcp)
    if against and choice == "require":
        raise KVCompileError(f"native is 'require', but {against}")
    return None if against else Native(engine)


class Native:
    """One engine's batches, by way of its C++ methods.

    Parameters
    ----------
    engine : mooncake.engine.TransferEngine
        Initialized, of a build in `BUILDS`.
    """

    def __init__(self, engine: Any) -> None:
        from kvcompile.engines import records  # noqa: PLC0415 - it starts Numba's compiler, for those who want it

        self._records = records
        self._engine = engine
        self._pointer = engine.get_engine_ptr()
        self._functions = _functions(_file(engine))
        self._most_us = _timeout_us()
        self._segments: dict[str, int] = {}  # of peers that the engine has met
        self._late: list[tuple[Int64, int]] = []  # memory and rows of batches that nobody waits for any more
        self._lock = threading.Lock()
        # Compile, or load, before the first batch needs it.
        none = np.empty(0, np.uint64)
        memory = np.zeros(records.STATES, np.int64)
        records.carry(self._functions, self._pointer, 0, none, none, none, 0, memory, 0, 0)
        records.poll(self._functions, self._pointer, memory, 0)

    def move(self, kind: str, session: str, batch: Descriptors) -> None:
        """Move one batch without the GIL; BatchError if some of it failed, or is still under way when time is over."""
        here, there = (batch.src, batch.dst) if kind == "write" else (batch.dst, batch.src)
        states, rows = self._records.STATES, len(batch)
        memory = np.empty(states + (1 + self._records.RECORD) * rows, np.int64)
        segment = self._segment(session)
        if segment < 0:
            memory[: states + rows], missing = 0, rows
        else:
            missing = self._records.carry(
                *(self._functions, self._pointer, segment, here, there, batch.length, int(kind == "write")),
                *(memory, self._most_us, SETTLE_US),
            )
        if memory[self._records.BATCH] or self._late:
            self._keep(memory, rows)
        if missing:
            if missing == rows:
                self._segments.pop(session, None)
            raise BatchError(
                f"Mooncake did not move {missing} of {rows} descriptors: the peer is unreachable, has not registered "
                "that memory, or its queue was full; some of them may have been copied, or still be",
                memory[states : states + rows] == self._records.COMPLETED,
            )

    def _segment(self, session: str) -> int:
        """Return a peer's segment, less than 0 if it does not answer.

        The official interface meets it first, with no descriptors: an exception that its answer causes, which is the
        peer's to choose, would end the process anywhere else.
        """
        segment = self._segments.get(session, -1)
        if segment < 0 and self._engine.batch_transfer_sync_write(session, [], [], []) == 0:
            name = np.frombuffer(bytearray(session.encode() + b"\0"), np.uint8)
            memory = np.empty(self._records.STATES, np.int64)
            segment = self._records.opened(self._functions, self._pointer, name, memory)
            self._segments[session] = segment
        return segment

    def _keep(self, memory: Int64, rows: int) -> None:
        """Keep what the engine still uses, and free what it no longer does."""
        with self._lock:
            self._late = [
                (memory, rows)
                for memory, rows in [*self._late, (memory, rows)]
                if memory[self._records.BATCH] and self._records.poll(self._functions, self._pointer, memory, rows)
            ]


def digest_of(engine: Any) -> str:
    """Return the SHA-256 of the file that an engine's code is in, in hex."""
    return _digest(_file(engine))


def _against(engine: Any, tcp: Callable[[], bool]) -> str:
    """Say what is against it; nothing if nothing is."""
    if not hasattr(engine, "get_engine_ptr"):
        return f"{type(engine).__name__} does not tell where its C++ engine is"
    if not tcp():
        return "it was tried over TCP only"
    digest = digest_of(engine)
    if digest not in BUILDS:
        return f"{_file(engine).name} has the digest {digest}, expected one of {', '.join(BUILDS.values())}"
    verdict, where = _verdict(digest)
    return "" if verdict == PASSED else f"its trial on this machine ended with: {verdict} (remembered in {where})"


@functools.cache
def _verdict(digest: str) -> tuple[str, Path | None]:
    """Return what the trial of a build came to, here or in an earlier process, and the file that remembers it."""
    folder = _jit.cache_folder()
    sources = (Path(__file__).with_name(f"{name}.py").read_bytes() for name in ("native", "records", "trial"))
    name = hashlib.sha256(digest.encode() + b"".join(sources)).hexdigest()
    file = None if folder is None else folder / f"native-{name[:16]}"
    with _jit.locked():
        if file is not None and file.exists():
            return file.read_text(), file
        verdict = _try(digest)
        if file is not None:
            file.write_text(verdict)
    return verdict, file


def _try(digest: str) -> str:
    """Move real bytes in a child process: what crashes there does not crash here."""
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": path, "MC_FORCE_TCP": "1", "GLOG_minloglevel": "3"}
    try:
        child = subprocess.run(
            TRIAL, env=environment, capture_output=True, text=True, errors="replace", timeout=TRIAL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"failed: {error}"
    if child.returncode < 0:
        return f"failed: killed by signal {-child.returncode}"
    if child.returncode or child.stdout.strip() != digest:
        said = (child.stderr.strip() or child.stdout.strip() or "nothing").splitlines()[-1]
        return f"failed: exit status {child.returncode}, {said:.300}"
    return PASSED


@functools.cache
def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _file(engine: Any) -> Path:
    return Path(getattr(sys.modules[type(engine).__module__], "__file__", None) or sys.executable)


@functools.cache
def _functions(file: Path) -> Int64:
    """Return the addresses that `records` calls."""
    library, libc = ctypes.CDLL(str(file)), ctypes.CDLL(None)
    found = [getattr(library, _CLASS + name) for name in _METHODS]
    found += [library._ZdaPv, libc.usleep, libc.clock_gettime]
    return np.array([ctypes.cast(function, ctypes.c_void_p).value for function in found], np.int64)


def _timeout_us() -> int:
    """Return how long Mooncake's own calls wait, as it reads that when an engine starts."""
    value = os.environ.get("MC_TRANSFER_TIMEOUT")
    if value is None:
        return 30_000_000
    number = re.match(r"\s*[+-]?\d+", value)
    return 1_000_000 * max(5, int(number[0]) if number else 0)
