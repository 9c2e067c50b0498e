"""What only a GPU runs, run on a stand-in for CuPy: the code around it, and `bench/gpu_check.py` from end to end."""

import re
import time
from typing import Any

import numpy as np
import pytest

import kvcompile
from bench import gpu_check
from kvcompile import Request
from kvcompile.device import memory
from tests import fake_cupy
from tests.simulated import cache

# int64 wraps around, as it should
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy.install(monkeypatch)


def test_build_on_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind what another stream does to the ids, on the caller's stream, into the memory that was asked for."""
    followed: list[int] = []
    follow = memory.Memory.follow
    monkeypatch.setattr(memory.Memory, "follow", lambda self, stream: (followed.append(stream), follow(self, stream)))
    plan = kvcompile.compile(cache(2**40, tp_size=2), cache(2**41))
    ids = fake_cupy.as_device(np.arange(3))
    requests = [Request("a", [ids], [ids])]
    expected = plan.build([Request("a", [[0, 1, 2]], [[0, 1, 2]])])
    for arguments in ({}, {"stream": 77}, {"stream": fake_cupy.Stream(ptr=78)}, {"pinned": True}, {"device": "cuda:0"}):
        built = plan.build(requests, **{"device": "cuda", **arguments})
        assert isinstance(built.src, fake_cupy.ndarray) is ("pinned" not in arguments)
        assert built.src.tolist() == expected.src.tolist()
        assert type(built.on_host().src) is np.ndarray or "pinned" not in arguments
        assert built.digests == expected.digests
    assert followed == [1] * 5


@pytest.mark.parametrize("what", ["build", "pinned", "merges", "cut", "cut, pinned", "pack", "too small"])
def test_what_flies_is_held(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All memory that a kernel is told of stays alive until its event is done, even if nobody keeps anything."""
    addresses: set[int] = set()
    kept: list[Any] = []
    run, upload, mark = memory.Memory.run, memory.Memory.upload, memory.Memory.mark

    def running(self: memory.Memory, kernel: Any, blocks: int, threads: int, *args: int) -> None:
        addresses.update(args)
        run(self, kernel, blocks, threads, *args)

    def uploading(self: memory.Memory, to: Any, words: Any) -> None:
        addresses.update((self.address(to), self.address(words)))
        upload(self, to, words)

    def marking(self: memory.Memory, *given: Any) -> Any:
        event = mark(self, *given)
        assert memory._flying[-1] == (event, given)
        kept.extend(given)
        return event

    monkeypatch.setattr(memory.Memory, "run", running)
    monkeypatch.setattr(memory.Memory, "upload", uploading)
    monkeypatch.setattr(memory.Memory, "mark", marking)
    bytes_of_src = np.zeros(2 * 300 * 128, np.uint8)
    merges = 1 if what == "merges" else 2
    plan = kvcompile.compile(cache(bytes_of_src.ctypes.data, tp_size=merges), cache(2**41))
    ids, staging = fake_cupy.as_device(np.arange(3)), fake_cupy.as_device(np.zeros(2 * 4 * 128, np.uint8))
    requests = [Request("a", [ids], [[4, 5, 6]]), Request("b", [[7]], [fake_cupy.as_device(np.arange(1))])]
    if what == "too small":
        with pytest.raises(ValueError, match="at least"):
            plan.pack(requests, staging[:3], device="cuda")
    elif what == "pack":
        plan.pack(requests, staging, device="cuda")
        addresses.add(staging.data.ptr)
    else:
        plan.build(requests, device="cuda", pinned="pinned" in what, max_length=50 if "cut" in what else None)
    on_device = [array.held for one in kept if isinstance(one, dict) for array in one.values()]
    held = {array.ctypes.data for array in kept + on_device if isinstance(array, np.ndarray)}
    assert {address for address in addresses if 2**20 < address < 2**60} <= held
    assert ids.data.ptr in held
    assert len(held) >= 7


def test_gpu_check(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_check.main(["--small"]) == 0
    printed = capsys.readouterr().out
    assert "nothing differs" in printed
    assert len(re.findall(r"^\|.* 0 differ +\| 0 differ", printed, re.MULTILINE)) == 4
    assert printed.count("GB/s") >= 6


def test_gpu_check_finds_differences(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that computes something else makes the exit code 1."""
    build = kvcompile.Plan.build

    def wrong(self: Any, *arguments: Any, device: str | None = None, **others: Any) -> Any:
        built = (
            build(self, *arguments, **others) if device is None else build(self, *arguments, device=device, **others)
        )
        if device is not None:
            built._columns[0] += 1
        return built

    monkeypatch.setattr(kvcompile.Plan, "build", wrong)
    for name in ("kinds", "races", "bytes_moved", "times"):
        monkeypatch.setattr(gpu_check.Check, name, lambda self, *arguments: iter(()))
    monkeypatch.setattr(time, "strftime", lambda form: "2026-01-01")
    assert gpu_check.main(["--small"]) == 1
    assert "DIFFERENCES" in capsys.readouterr().out
