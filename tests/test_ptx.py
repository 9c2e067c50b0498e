"""Every CUDA kernel is compiled to PTX and assembled for real GPUs, without one: registers are shown, a spill fails.

It runs apart from the other tests (`make ptx`), where the packages of the extra `cuda-check` are installed.
"""

import inspect
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nvidia
import pytest
from numba import types
from numba.cuda import compiler, dispatcher

from kvcompile.kernels import cuda as grids
from kvcompile.kernels import cuda_check, cuda_descriptors, cuda_memory, cuda_scan

ARCHITECTURES = ((8, 0), (9, 0), (10, 0), (12, 0))
MODULES = (grids, cuda_check, cuda_descriptors, cuda_memory, cuda_scan)
KERNELS = {
    name: kernel
    for module in MODULES
    for name, kernel in vars(module).items()
    if isinstance(kernel, dispatcher.CUDADispatcher) and not kernel.targetoptions.get("device")
}
# A multiprocessor has 65,536 registers: of more than 64 a thread, a block of 1,024 cannot run at all; of more than 80,
# fewer than three blocks of 256 are there at a time.
MOST_REGISTERS = {"settle": 64, "scan": 64}
MOST = 80


@pytest.fixture(autouse=True, scope="module")
def no_device() -> Iterator[None]:
    """Stand in for the one call that asks the driver: which GPU helpers are for. Their IR is the same for all."""
    patch = pytest.MonkeyPatch()
    patch.setattr(dispatcher, "get_current_device", lambda: SimpleNamespace(compute_capability=ARCHITECTURES[0]))
    yield
    patch.undo()


def ptxas() -> Path:
    """Find the assembler of the package nvidia-cuda-nvcc."""
    found = [path for root in nvidia.__path__ for path in Path(root).glob("*/bin/ptxas")]
    assert len(found) == 1
    return found[0]


def signature(kernel: Any) -> Any:
    """Return the types that a kernel is launched with: int64, all of them."""
    return types.void(*[types.int64] * len(inspect.signature(kernel.py_func).parameters))


def test_all_kernels_are_here() -> None:
    assert {"settle", "cover", "spread", "mark", "count", "write", "close"} <= KERNELS.keys()
    assert {"scan", "weigh", "locate", "cut", "bring", "copy"} <= KERNELS.keys()


@pytest.mark.parametrize("name", KERNELS)
def test_kernel(name: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    # `cuda.compile_ptx`, of which only the last step differs from one GPU to the next.
    kernel = KERNELS[name]
    bounds = kernel.targetoptions.get("launch_bounds")
    library, _ = compiler._compile_pyfunc_with_fixup(
        kernel.py_func, signature(kernel), device=False, abi="numba", cc=ARCHITECTURES[0], launch_bounds=bounds
    )
    shown = []
    for architecture in ARCHITECTURES:
        code = "".join(map(str, architecture))
        (ptx,) = library.get_asm_strs(cc=architecture)
        assert f".target sm_{code}" in ptx
        file = tmp_path / f"{code}.ptx"
        file.write_text(ptx)
        command = [ptxas(), "-v", f"-arch=sm_{code}", "-o", tmp_path / f"{code}.cubin", file]
        report = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert report.returncode == 0, report.stderr
        registers = int(re.search(r"Used (\d+) registers", report.stderr)[1])
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report.stderr, report.stderr
        assert registers <= MOST_REGISTERS.get(name, MOST)
        assert not re.search(r"\.(f32|f64)\b", ptx), "floating point: uint64 and int64 were mixed"
        shown.append(f"sm_{code} {registers}")
    record_property("shares", f"{', '.join(shown)} registers, no spill, no stack")


def test_wide_copies() -> None:
    """Bytes are copied 16 at a time, from and to global memory."""
    library, _ = compiler._compile_pyfunc_with_fixup(
        cuda_descriptors.copy.py_func, signature(cuda_descriptors.copy), device=False, abi="numba", cc=(9, 0)
    )
    (ptx,) = library.get_asm_strs(cc=(9, 0))
    assert len(re.findall(r"ld\.global\.v2\.(?:u|b)64", ptx)) >= 5
    assert len(re.findall(r"st\.global\.v2\.(?:u|b)64", ptx)) >= 5


def test_blocks_are_not_the_simulators() -> None:
    assert (cuda_scan.THREADS, cuda_scan.WIDE, cuda_check.FEW) == (256, 1024, 8192)
