"""The demo's ranks, each in a process of its own or all in this one: asked alike, ended on every path."""

import contextlib
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import IO, Any, Protocol

import msgspec

from kvcompile import KVCompileError
from kvcompile.cli.demo_rank import Rank, decode, encode

__all__ = ["Inline", "Processes", "Team"]

STALLED = 150.0
"""Seconds without a word from any rank before the demo gives up: above the longest wait of a rank."""


class Team(Protocol):
    """Ranks by name."""

    def ask(self, method: str, parameters: Mapping[str, Any], kind: Any) -> dict[str, Any]:
        """Have each named rank do something, all at once; return what each answered, as ``kind``."""


class Inline:
    """All ranks in this process, one after the other."""

    def __init__(self, names: list[str], progress: Callable[[int], None]) -> None:
        self.ranks = {name: Rank(progress) for name in names}

    def __enter__(self) -> "Inline":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""

    def ask(self, method: str, parameters: Mapping[str, Any], kind: Any) -> dict[str, Any]:
        """See `Team`."""
        return {name: getattr(self.ranks[name], method)(parameter) for name, parameter in parameters.items()}


class Processes:
    """Each rank in a process of its own, spoken to over pipes.

    A rank that dies, answers with an error or says nothing for `STALLED` seconds ends the demo with a KVCompileError.
    """

    def __init__(self, names: list[str], progress: Callable[[int], None]) -> None:
        self.progress = progress
        self.selector = selectors.DefaultSelector()
        self.children: dict[str, _Child] = {}
        self.names = names

    def __enter__(self) -> "Processes":
        try:
            for name in self.names:
                child = self.children[name] = _Child(name)
                self.selector.register(child.stdout, selectors.EVENT_READ, child)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for child in self.children.values():
            child.process.kill()
        for child in self.children.values():
            child.close()
        self.selector.close()

    def ask(self, method: str, parameters: Mapping[str, Any], kind: Any) -> dict[str, Any]:
        """See `Team`."""
        for name, parameter in parameters.items():
            self.children[name].send(method, parameter)
        results: dict[str, Any] = {}
        heard = time.monotonic()
        while len(results) < len(parameters):
            ready = self.selector.select(1.0)
            if ready:
                heard = time.monotonic()
            elif time.monotonic() > heard + STALLED:
                waiting = sorted(set(parameters) - set(results))
                raise KVCompileError(f"no answer to {method!r} from {', '.join(waiting)} for {STALLED:.0f} s")
            for key, _ in ready:
                for word, *rest in key.data.receive():
                    if word == "error":
                        raise KVCompileError(f"{key.data.name}: {rest[0]}")
                    self.progress(rest[0])
                    if word == "result":
                        results[key.data.name] = msgspec.convert(rest[1], kind)
        return {name: results[name] for name in parameters}


class _Child:
    def __init__(self, name: str) -> None:
        self.name = name
        # A file, not a pipe: what nobody reads must not block the engine's logging.
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        quiet = {"GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvcompile.cli.demo_rank"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env={**quiet, **os.environ},
            start_new_session=True,  # an interrupt from the keyboard is for the demo, which then ends its ranks
        )
        self.stdin: IO[bytes] = self.process.stdin  # type: ignore[assignment]
        self.stdout: IO[bytes] = self.process.stdout  # type: ignore[assignment]
        self.buffer = bytearray()

    def send(self, method: str, parameter: Any) -> None:
        try:
            self.stdin.write(encode(method, parameter))
            self.stdin.flush()
        except BrokenPipeError:
            raise self.death() from None

    def receive(self) -> list[list[Any]]:
        data = os.read(self.stdout.fileno(), 1 << 20)
        if not data:
            raise self.death()
        self.buffer += data
        messages = []
        while message := decode(self.buffer):
            messages.append(message[0])
            del self.buffer[: message[1]]
        return messages

    def death(self) -> KVCompileError:
        code = self.process.wait(10)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self.log.seek(0)
        last = self.log.read().decode(errors="replace").strip().splitlines()[-5:]
        return KVCompileError(
            "\n".join([f"{self.name} {how}; the last it printed:", *last] if last else [f"{self.name} {how}"])
        )

    def close(self) -> None:
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.close()
        self.log.close()
