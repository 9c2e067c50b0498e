"""A device in the simulator: its memory is this process's, its stream is the order of the calls."""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvcompile import Buffer, Cache, Field, Group, Region, Request

Int64 = npt.NDArray[np.int64]


class SimulatedMemory:
    """What `kvcompile.device.memory.Memory` does with CuPy, on arrays of numpy.

    A wait counts: a build may not wait before its result is asked for. So do launches, by name.
    """

    key = 0

    def __init__(self) -> None:
        self.waits = 0
        self.uploads = 0
        self.launches: list[str] = []

    def __enter__(self) -> "SimulatedMemory":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def empty(self, words: int) -> Int64:
        # What a device holds before anything is written: here, numbers that are wrong wherever they are used.
        return np.full(max(words, 1), -0x5A5A5A5A5A5A5A5B, np.int64)

    pinned = empty

    def address(self, array: Int64) -> int:
        return array.ctypes.data

    def run(self, kernel: Any, blocks: int, threads: int, *args: int) -> None:
        self.launches.append(kernel.fn.__name__)
        kernel[blocks, threads](*args)

    def upload(self, to: Int64, words: Int64) -> None:
        self.uploads += 1
        to[: len(words)] = words

    def as_uint64(self, array: Int64, start: int, size: int) -> npt.NDArray[np.uint64]:
        return array[start : start + size].view(np.uint64)

    def on_host(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array

    def follow(self, stream: int) -> None:
        pass

    def mark(self, *kept: Any) -> object:
        return kept

    def wait(self, event: object) -> None:
        self.waits += 1

    def wait_on_device(self, event: object) -> None:
        pass


class OnDevice:
    """An array with a ``__cuda_array_interface__``, in the simulator's memory."""

    def __init__(self, ids: npt.NDArray[Any]) -> None:
        self.ids = ids

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.ids.shape,
            "typestr": self.ids.dtype.str,
            "data": (self.ids.ctypes.data, False),
            "strides": self.ids.strides,
            "version": 3,
            "stream": None,
        }


def cache(
    base: int,
    heads: int = 4,
    tokens: int = 4,
    cell: int = 8,
    layers: int = 2,
    blocks: int = 300,
    padding: int = 0,
    nhd: bool = False,
    null: int | None = None,
    chunk: int | None = None,
    **place: int,
) -> Cache:
    """Make one rank: layers one after the other, blocks of one field each."""
    make = Field.nhd if nhd else Field.hnd
    local = max(heads // place.get("tp_size", 1), 1)
    flags = {"local_heads": local} if nhd else {}
    field = make("kv", heads=heads, tokens=tokens, cell_nbytes=cell, **flags)
    payload = local * tokens * cell
    stride = payload + padding
    regions = [Region(layer, 0, base + layer * stride * blocks, stride, blocks, [field]) for layer in range(layers)]
    buffers = [Buffer(base, layers * stride * blocks, chunk)] if chunk else None
    return Cache(regions, [Group(tokens, null_block=null)], buffers, **place)


def on_host(request: Request) -> Request:
    lists = [
        [ids.ids if isinstance(ids, OnDevice) else ids for ids in given]
        for given in (request.src_blocks, request.dst_blocks)
    ]
    return msgspec.structs.replace(request, src_blocks=lists[0], dst_blocks=lists[1])
