"""One device and one stream of the caller: memory, copies, order. CuPy allocates; nothing here waits for the device."""

import collections
import ctypes
import functools
import importlib
import importlib.util
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcompile.errors import KVCompileError

__all__ = ["Memory", "open_device"]

Int64 = npt.NDArray[np.int64]

HOW = "pip install 'kvcompile[cuda]'"
_flying: collections.deque[tuple[Any, tuple[Any, ...]]] = collections.deque()
_lock = threading.Lock()


def open_device(device: object, stream: Any) -> "Memory":
    """Take hold of a device and of the caller's stream.

    Parameters
    ----------
    device : str
        "cuda" (CuPy's current one) or "cuda:N".
    stream : optional
        An int (a ``cudaStream_t``), or a stream of CuPy, torch, Numba or anything with ``__cuda_stream__``. None:
        CuPy's current stream, which is the default stream unless one was chosen.

    Raises
    ------
    ValueError
        Another device or stream than that.
    KVCompileError
        No GPU, driver, CuPy or numba-cuda; it says which, and how to get it.
    """
    name, _, number = device.partition(":") if isinstance(device, str) else ("", "", "")
    if name != "cuda" or (number and not number.isdecimal()):
        raise ValueError(f"device is {device!r}, expected None, 'cuda' or 'cuda:N'")
    handle = None if stream is None else _handle(stream)
    count = _require()
    if number and int(number) >= count:
        raise ValueError(f"device is {device!r}, expected one of the {count} that CUDA sees")
    return Memory(int(number) if number else None, handle)


@functools.cache
def _require() -> int:
    """Return how many devices there are; raise if something that is needed is not there."""
    for module, package in (("numba_cuda", "numba-cuda"), ("cupy", "CuPy")):
        if importlib.util.find_spec(module) is None:
            raise KVCompileError(f"device='cuda' needs {package}, which is not installed: {HOW}")
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise KVCompileError(
            f"device='cuda' needs the NVIDIA driver, and its library cannot be loaded ({error}): install the driver of "
            "this machine's GPU, or in a container start it with the GPU (docker run --gpus all)"
        ) from error
    code, count = driver.cuInit(0), ctypes.c_int(0)
    if code == 0:
        code = driver.cuDeviceGetCount(ctypes.byref(count))
    if code or not count.value:
        raise KVCompileError(
            f"device='cuda' needs a GPU: the driver answered {code} and sees {count.value} devices; look at nvidia-smi "
            "and CUDA_VISIBLE_DEVICES"
        )
    return count.value


def _handle(stream: Any) -> int:
    """Return a stream's ``cudaStream_t``."""
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        found = stream.__cuda_stream__
        return int((found() if callable(found) else found)[1])
    for name in ("ptr", "cuda_stream", "handle"):  # CuPy, torch, Numba
        value = getattr(stream, name, None)
        if value is not None:
            return int(getattr(value, "value", value) or 0)
    raise ValueError(f"stream is {stream!r}, expected a cudaStream_t as int, or a stream of CuPy, torch or Numba")


class _Given:
    """A stream of somebody else, as CUDA's stream protocol wants it."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


class Memory:
    """What a build needs of one device, in the order of one stream."""

    def __init__(self, number: int | None, handle: int | None) -> None:
        self._cupy = importlib.import_module("cupy")
        self._runtime = self._cupy.cuda.runtime
        self._device = self._cupy.cuda.Device() if number is None else self._cupy.cuda.Device(number)
        self.key = int(self._device.id)
        with self._device:
            current = self._cupy.cuda.get_current_stream()
            self._stream = current if handle is None else self._external(handle)
            self._launches_on = importlib.import_module("kvcompile.kernels.cuda_memory").stream(self._stream.ptr)

    def __enter__(self) -> "Memory":
        self._device.__enter__()
        self._stream.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.__exit__(*error)
        self._device.__exit__(*error)

    def empty(self, words: int) -> Any:
        """Allocate int64 words on the device, in the order of the stream."""
        return self._cupy.empty(max(words, 1), np.int64)

    def pinned(self, words: int) -> Int64:
        """Allocate int64 words of pinned host memory, which the device sees at the same address."""
        memory = self._cupy.cuda.alloc_pinned_memory(max(words, 1) * 8)
        return np.frombuffer(memory, np.int64, max(words, 1))

    def address(self, array: Any) -> int:
        """Return where an array of either memory begins."""
        return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)

    def run(self, kernel: Any, blocks: int, threads: int, *args: int) -> None:
        """Enqueue a kernel on the stream."""
        kernel[blocks, threads, self._launches_on](*args)

    def upload(self, to: Any, words: Int64) -> None:
        """Enqueue a copy from pinned memory to the start of a device array; pinned memory is to be kept till then."""
        self._runtime.memcpyAsync(
            self.address(to), self.address(words), words.nbytes, self._runtime.memcpyHostToDevice, self._stream.ptr
        )

    def as_uint64(self, array: Any, start: int, size: int) -> Any:
        """Return part of an array of either memory as a uint64 array that numpy, or CuPy and torch, take."""
        return array[start : start + size].view(np.uint64)

    def on_host(self, array: Any) -> npt.NDArray[np.uint64]:
        """Return an array of either memory as one of numpy."""
        return array if isinstance(array, np.ndarray) else array.get()

    def follow(self, stream: int) -> None:
        """Let this stream wait for what another one has been given so far."""
        if stream not in (self._stream.ptr, self._stream.ptr or 1):  # 1 is the default stream's other name
            event = self._cupy.cuda.Event(disable_timing=True)
            event.record(self._external(stream))
            self._stream.wait_event(event)

    def mark(self, *kept: Any) -> Any:
        """Return an event that is done when all that was enqueued is; ``kept`` is held at least till then."""
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(self._stream)
        with _lock:
            while _flying and _flying[0][0].done:
                _flying.popleft()
            _flying.append((event, kept))
        return event

    def wait(self, event: Any) -> None:
        """Block until an event is done, without the GIL."""
        event.synchronize()

    def wait_on_device(self, event: Any) -> None:
        """Let this stream wait for an event."""
        if not event.done:
            self._stream.wait_event(event)

    def _external(self, handle: int) -> Any:
        return self._cupy.cuda.Stream.from_external(_Given(handle))
