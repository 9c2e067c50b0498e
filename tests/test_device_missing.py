"""Asking for a device where there is none says what is missing; nobody else needs any of it."""

import ctypes
import importlib.util
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import kvcompile
from bench import gpu_check
from kvcompile import Cache, Field, Group, KVCompileError, Plan, Region, Request
from kvcompile.device import memory

REQUESTS = [Request("a", [[1]], [[2]])]


@pytest.fixture
def plan() -> Plan:
    field = Field.hnd("kv", heads=1, tokens=4, cell_nbytes=8)
    cache = Cache([Region(0, 0, 4096, 32, 10, [field])], [Group(4)])
    return kvcompile.compile(cache, cache)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine whose packages, driver and GPUs are what a test says."""
    told = SimpleNamespace(packages={"numba_cuda", "cupy"}, driver=True, code=0, gpus=1)
    find, load = importlib.util.find_spec, ctypes.CDLL

    def find_spec(name: str, package: str | None = None) -> Any:
        return (name in told.packages or None) if name in ("numba_cuda", "cupy") else find(name, package)

    class Driver:
        def cuInit(self, flags: int) -> int:  # noqa: N802 (NVIDIA's name)
            return told.code

        def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
            count._obj.value = told.gpus
            return 0

    def open_library(name: str, *args: Any) -> Any:
        if name != "libcuda.so.1":
            return load(name, *args)
        if not told.driver:
            raise OSError("libcuda.so.1: cannot open shared object file")
        return Driver()

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(ctypes, "CDLL", open_library)
    memory._require.cache_clear()
    yield told
    memory._require.cache_clear()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({"packages": {"cupy"}}, r"numba-cuda, which is not installed: pip install 'kvcompile\[cuda\]'"),
        ({"packages": {"numba_cuda"}}, r"CuPy, which is not installed: pip install 'kvcompile\[cuda\]'"),
        ({"driver": False}, "NVIDIA driver, and its library cannot be loaded.*install the driver"),
        ({"code": 100}, "needs a GPU: the driver answered 100.*nvidia-smi"),
        ({"gpus": 0}, "needs a GPU: the driver answered 0 and sees 0 devices"),
    ],
)
def test_says_what_is_missing(plan: Plan, machine: SimpleNamespace, what: dict[str, Any], words: str) -> None:
    vars(machine).update(what)
    with pytest.raises(KVCompileError, match=words):
        plan.build(REQUESTS, device="cuda")
    with pytest.raises(KVCompileError, match=words):
        plan.unpack(REQUESTS, bytearray(100), device="cuda")
    with pytest.raises(KVCompileError, match=words):
        kvcompile.device.warmup()
    assert len(plan.build(REQUESTS)) == 1  # the CPU has all it needs


def test_what_makes_no_sense(plan: Plan, machine: SimpleNamespace) -> None:
    """Found before anything is asked of the machine."""
    machine.packages = set()
    for arguments, words in (
        ({"device": "cuda", "sort": True}, "sort=True is not built for a device"),
        ({"device": "gpu"}, "device is 'gpu', expected None, 'cuda' or 'cuda:N'"),
        ({"device": "cuda:x"}, "device is 'cuda:x'"),
        ({"device": 0}, "device is 0"),
        ({"device": "cuda", "stream": "s"}, "stream is 's', expected a cudaStream_t"),
        (
            {"device": "cuda", "out": plan.build(REQUESTS)},
            "out is .*, expected an earlier result of a build on a device",
        ),
        ({"device": "cuda", "max_length": 0}, "max_length is 0"),
        ({"stream": 0}, "stream and pinned go with device='cuda'"),
        ({"pinned": True}, "stream and pinned go with device='cuda'"),
    ):
        with pytest.raises(ValueError, match=words):
            plan.build(REQUESTS, **arguments)  # type: ignore[arg-type]
    machine.packages = {"numba_cuda", "cupy"}
    with pytest.raises(ValueError, match="expected one of the 1 that CUDA sees"):
        plan.build(REQUESTS, device="cuda:1")


def test_streams() -> None:
    """A stream of each library is known by its handle."""
    assert memory._handle(7) == 7
    assert memory._handle(SimpleNamespace(ptr=8)) == 8  # CuPy
    assert memory._handle(SimpleNamespace(cuda_stream=9)) == 9  # torch
    assert memory._handle(SimpleNamespace(handle=ctypes.c_void_p(10))) == 10  # Numba
    assert memory._handle(SimpleNamespace(handle=ctypes.c_void_p(None))) == 0
    assert memory._handle(SimpleNamespace(__cuda_stream__=lambda: (0, 11))) == 11
    assert memory._handle(SimpleNamespace(__cuda_stream__=(0, 12))) == 12


def test_gpu_check_says_so_too(machine: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    machine.driver = False
    assert gpu_check.main([]) == 2
    assert "needs the NVIDIA driver" in capsys.readouterr().err


PROBE = """
import sys
import kvcompile
from bench import gpu_check
from kvcompile import Cache, Field, Group, Region, Request, device, engines
cache = Cache([Region(0, 0, 4096, 64, 10, [Field.hnd("kv", heads=2, tokens=4, cell_nbytes=8)])], [Group(4)])
half = Cache([Region(0, 0, 4096, 32, 10, [Field.hnd("kv", heads=2, tokens=4, cell_nbytes=8)])], [Group(4)], tp_size=2)
plan = kvcompile.compile(cache, half)
requests = [Request("a", [[1, 2]], [[2, 3]])]
print(len(plan.build(requests)), plan.packed_nbytes(requests))
print(sorted(name for name in sys.modules if name.split(".")[0] in ("cupy", "numba_cuda", "cuda", "torch")
             or name.startswith("numba.cuda") or name.startswith("kvcompile.kernels.cuda")))
"""


def test_the_cpus_path_imports_nothing_of_cuda() -> None:
    ran = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.splitlines() == ["2 64", "[]"]
