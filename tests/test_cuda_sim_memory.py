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


def test_what_flies_is_held() -> None:
    """Memory in use stays alive until its event is done, even if nobody keeps the result."""
    plan = kvcompile.compile(cache(2**40, tp_size=2), cache(2**41))
    before = len(memory._flying)
    plan.build([Request("a", [[0]], [[0]])], device="cuda")
    assert 0 < len(memory._flying) <= before + 2
    _, kept = memory._flying[-1]
    assert len(kept) >= 6


def test_ids_in_flight_are_held_whatever_the_caller_does_to_its_list() -> None:
    plan = kvcompile.compile(cache(2**40, tp_size=2), cache(2**41))
    ids = fake_cupy.as_device(np.arange(3))
    requests = [Request("a", [ids], [[4, 5, 6]])]
    plan.build(requests, device="cuda")
    requests.clear()
    _, kept = memory._flying[-1]
    assert any(array.held is ids for one in kept if isinstance(one, dict) for array in one.values())


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
