"""As much of CuPy as `kvcompile.device.memory` and `bench/gpu_check.py` use, on this process's memory.

The names and arguments are CuPy 14's; the order of a stream is the order of the calls. With the simulator it lets code
run that otherwise only a GPU runs.
"""

import ctypes
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

import kvcompile.device.memory


class ndarray(np.ndarray):  # noqa: N801 (CuPy's name)
    """An array "on the device"."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface = dict(self.__array_interface__)
        return {key: interface[key] for key in ("shape", "typestr", "data", "strides")} | {"version": 3, "stream": 1}

    def get(self) -> Any:
        return np.array(self)


class Device:
    """A device; there is one."""

    def __init__(self, number: int = 0) -> None:
        self.id = number

    def __enter__(self) -> "Device":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Stream:
    """A stream."""

    def __init__(self, null: bool = False, non_blocking: bool = False, ptr: int = 0) -> None:
        self.ptr = ptr

    @classmethod
    def from_external(cls, given: Any) -> "Stream":
        return cls(ptr=given.__cuda_stream__()[1])

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait_event(self, event: "Event") -> None:
        if not event.done:
            raise RuntimeError("waits for an event that nobody has recorded")

    def synchronize(self) -> None:
        pass


class Event:
    """An event; it is over once it is recorded."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.done, self.at = False, 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.done, self.at = True, time.perf_counter()

    def synchronize(self) -> None:
        if not self.done:
            raise RuntimeError("waits for an event that nobody has recorded")


class Pinned:
    """Pinned memory, as a buffer."""

    def __new__(cls, nbytes: int) -> Any:
        return (ctypes.c_uint8 * nbytes)()


def as_device(array: Any) -> ndarray:
    return np.array(array).view(ndarray)


def module() -> ModuleType:
    """Make the module."""
    cupy = ModuleType("cupy")
    runtime = SimpleNamespace(
        memcpyHostToDevice=1,
        memcpyDeviceToHost=2,
        memcpyDeviceToDevice=3,
        memcpyAsync=lambda to, source, nbytes, kind, stream: ctypes.memmove(to, source, nbytes),
        getDeviceProperties=lambda number: {"name": b"no GPU, the simulator"},
        driverGetVersion=lambda: 13000,
    )
    cupy.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        Device=Device,
        Stream=Stream,
        Event=Event,
        get_current_stream=Stream,
        alloc_pinned_memory=Pinned,
        get_elapsed_time=lambda start, stop: 1e3 * (stop.at - start.at),
        runtime=runtime,
    )
    cupy.ndarray = ndarray  # type: ignore[attr-defined]
    cupy.asarray = as_device  # type: ignore[attr-defined]
    cupy.empty = lambda size, kind: np.full(size, 0x5A, kind).view(ndarray)  # type: ignore[attr-defined]
    return cupy


def install(patch: Any) -> None:
    """Let this process have CuPy and a GPU, as far as `kvcompile.device` can see."""
    patch.setitem(__import__("sys").modules, "cupy", module())
    patch.setattr(kvcompile.device.memory, "_require", lambda: 1)
