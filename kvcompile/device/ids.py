"""Block ids that lie in device memory, alone or beside others in host memory: found, described, never read here."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvcompile.backend import Batch, Elsewhere
from kvcompile.kernels import known
from kvcompile.request import Request

__all__ = ["DeviceArray", "Lists", "describe", "int64", "span_of", "stand_in"]

Int64 = npt.NDArray[np.int64]


class DeviceArray(NamedTuple):
    """A 1-D array in device memory.

    Attributes
    ----------
    address : int
        Of its first item.
    stride : int
        Bytes from one item to the next.
    dtype : dtype of numpy
    size : int
        Items.
    stream : int or None
        The stream on which its contents may still be under way; None: no need to care.
    held : object
        What its memory lives as long as.
    """

    address: int
    stride: int
    dtype: np.dtype[Any]
    size: int
    stream: int | None
    held: Any


class NoIds:
    """Stands for an array on a device that holds no ids, so that the error about it can say what it is."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __repr__(self) -> str:
        return self.what


def describe(array: Any) -> DeviceArray | str | None:
    """Describe what has a ``__cuda_array_interface__`` (versions 0 to 3).

    Returns
    -------
    DeviceArray, str or None
        None if it has no such interface; words, if it isn't a plain 1-D array.
    """
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        return None
    shape, dtype = tuple(interface["shape"]), np.dtype(interface["typestr"])
    if len(shape) != 1 or interface.get("mask") is not None or not dtype.isnative:
        return f"a CUDA array of shape {shape} and type {interface['typestr']}"
    strides = interface.get("strides")
    stride = dtype.itemsize if strides is None else strides[0]
    return DeviceArray(interface["data"][0] or 0, stride, dtype, shape[0], interface.get("stream"), array)


def span_of(array: Any) -> tuple[int, int, int | None]:
    """Return address, bytes and stream of a contiguous CUDA array of any type and shape.

    Raises
    ------
    ValueError
        It is none.
    """
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        raise ValueError(f"staging is a {type(array).__name__}, expected a CUDA array")
    shape, size = tuple(interface["shape"]), np.dtype(interface["typestr"]).itemsize
    nbytes = size * math.prod(shape)
    strides = interface.get("strides")
    if strides is not None and nbytes:
        expected = [size * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        if any(n > 1 and given != stride for n, given, stride in zip(shape, strides, expected, strict=True)):
            raise ValueError(f"staging has shape {shape} and strides {tuple(strides)}, expected a contiguous array")
    return interface["data"][0] or 0, nbytes, interface.get("stream")


def stand_in(requests: Sequence[Any]) -> tuple[list[Any], dict[tuple[int, int, int], DeviceArray]]:
    """Put only their number in the place of ids in device memory.

    Parameters
    ----------
    requests : sequence of Request
        Anything else is passed on: `gather` refuses it.

    Returns
    -------
    requests : list
        For `gather`.
    arrays : dict
        (side, index of the request, group) -> the array that gives these ids. Side 0 is src.
    """
    arrays: dict[tuple[int, int, int], DeviceArray] = {}
    changed = []
    for number, request in enumerate(requests):
        lists: dict[str, list[Any]] = {}
        if isinstance(request, Request):
            for side, name in enumerate(("src_blocks", "dst_blocks")):
                given = getattr(request, name)
                if not isinstance(given, (list, tuple)):
                    continue
                for group, ids in enumerate(given):
                    found = describe(ids)
                    if found is not None:
                        lists.setdefault(name, list(given))[group] = _counted(found, (side, number, group), arrays)
        changed.append(msgspec.structs.replace(request, **lists) if lists else request)
    return changed, arrays


def _counted(
    found: DeviceArray | str, key: tuple[int, int, int], arrays: dict[tuple[int, int, int], DeviceArray]
) -> Elsewhere | NoIds:
    if isinstance(found, str):
        return NoIds(found)
    if found.dtype.kind not in "iu" and found.size:
        return NoIds(f"a CUDA array of {found.dtype}")
    if found.size and (found.address % found.dtype.itemsize or found.stride % found.dtype.itemsize):
        return NoIds(f"a CUDA array of {found.dtype} that is not aligned")
    arrays[key] = found
    return Elsewhere(found.size)


class Lists:
    """Where each id list of a batch is to be read from.

    Parameters
    ----------
    batch : Batch
    arrays : dict
        As `stand_in` made it.
    src_groups, dst_groups : int

    Attributes
    ----------
    at : int64 array [lists + 1]
        All src lists, then all dst lists.
    host_ids : int64 array
        The ids that were given in host memory.
    table : int64 array [lists, LIST_COLUMNS]
        As `known.LISTS`; `put` completes it.
    """

    def __init__(
        self, batch: Batch, arrays: dict[tuple[int, int, int], DeviceArray], src_groups: int, dst_groups: int
    ) -> None:
        src_lists, dst_lists = len(batch.src_at) - 1, len(batch.dst_at) - 1
        self.at = np.concatenate([batch.src_at, batch.src_at[-1] + batch.dst_at[1:]])
        self.table = np.full((src_lists + dst_lists, known.LIST_COLUMNS), 8, np.int64)
        for side, groups, lists in (
            (0, src_groups, self.table[:src_lists]),
            (1, dst_groups, self.table[src_lists:]),
        ):
            lists[:, known.LIST_SIDE] = side
            if len(lists):
                numbers = np.arange(len(lists))
                lists[:, known.LIST_REQUEST], lists[:, known.LIST_GROUP] = np.divmod(numbers, groups)
        sizes = np.diff(self.at)
        self._on_host = np.ones(len(sizes), bool)
        for (side, number, group), array in arrays.items():
            at = src_lists + number * dst_groups + group if side else number * src_groups + group
            if group < (dst_groups if side else src_groups) and sizes[at] == array.size:  # else its request is refused
                nbytes = array.dtype.itemsize if array.dtype.kind == "i" else -array.dtype.itemsize
                self._on_host[at] = False
                self.table[at, : known.LIST_SIDE] = int64(array.address), array.stride, nbytes
        # Those ids alone: what stands in for ids on the device is never looked at.
        ends, src_count = self.at.tolist(), len(batch.src_ids)
        pieces = [batch.src_ids[:0]]
        for number in np.flatnonzero(self._on_host).tolist():
            ids, before = (batch.src_ids, 0) if number < src_lists else (batch.dst_ids, src_count)
            pieces.append(ids[ends[number] - before : ends[number + 1] - before])
        self.host_ids = np.concatenate(pieces)
        sizes[~self._on_host] = 0
        self._starts = np.cumsum(sizes) - sizes

    def put(self, address: int) -> None:
        """Complete the table, given where the host's ids are for the device."""
        self.table[self._on_host, known.LIST_ADDRESS] = int64(address) + 8 * self._starts[self._on_host]


def int64(address: int) -> int:
    """Return an unsigned address as kernels take it, wrapped around."""
    return (address + 2**63) % 2**64 - 2**63
