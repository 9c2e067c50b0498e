"""Where a tensor of any framework lies: address, shape, strides, storage. No framework is imported, no byte read."""

import ctypes
from typing import Any, NamedTuple

from kvcompile.errors import LayoutError

__all__ = ["Strided", "strided"]


class Strided(NamedTuple):
    """A tensor's memory; strides in bytes, ``storage`` the (address, bytes) of what it is a view of, if known."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    storage: tuple[int, int] | None

    @property
    def span(self) -> tuple[int, int]:
        """Address of the first byte and of the one after the last."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.address, self.address + last + self.itemsize


def strided(tensor: Any, where: str) -> Strided:
    """Find out where a tensor lies.

    Parameters
    ----------
    tensor : torch tensor, array, or anything with ``__cuda_array_interface__``, ``__array_interface__`` or
    ``__dlpack__``
    where : str
        What to call it in errors.

    Raises
    ------
    LayoutError
        None of these, an empty tensor, or a negative stride.
    """
    if hasattr(tensor, "untyped_storage") and hasattr(tensor, "data_ptr"):
        found = _torch(tensor)
    elif hasattr(tensor, "__cuda_array_interface__"):
        found = _interface(tensor, tensor.__cuda_array_interface__)
    elif hasattr(tensor, "__array_interface__"):
        found = _interface(tensor, tensor.__array_interface__)
    elif hasattr(tensor, "__dlpack__"):
        found = _dlpack(tensor)
    else:
        raise LayoutError(
            f"{where}: a {type(tensor).__name__}, expected a torch tensor or something with __array_interface__, "
            "__cuda_array_interface__ or __dlpack__"
        )
    if 0 in found.shape or any(stride < 0 for stride in found.strides):
        raise LayoutError(
            f"{where}: shape {found.shape}, strides {found.strides}, expected no size of 0, no negative stride"
        )
    return found


def _torch(tensor: Any) -> Strided:
    itemsize = tensor.element_size()
    storage = tensor.untyped_storage()
    strides = tuple(stride * itemsize for stride in tensor.stride())
    return Strided(tensor.data_ptr(), tuple(tensor.shape), strides, itemsize, (storage.data_ptr(), storage.nbytes()))


def _interface(tensor: Any, interface: dict[str, Any]) -> Strided:
    """NumPy's array interface and CUDA's, which has the same keys."""
    shape = tuple(interface["shape"])
    itemsize = int(interface["typestr"][2:])
    strides = interface.get("strides") or _dense(shape, itemsize)
    # A view's owner is the last in a chain of bases that says its own address and size.
    owner, storage = tensor, None
    while owner is not None:
        if hasattr(owner, "nbytes") and hasattr(owner, "__array_interface__"):
            storage = owner.__array_interface__["data"][0], owner.nbytes
        owner = getattr(owner, "base", None)
    return Strided(interface["data"][0] or 0, shape, tuple(strides), itemsize, storage)


def _dense(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


class _DLTensor(ctypes.Structure):
    """DLPack's DLTensor (dlpack.h 0.8 and 1.0), the first member of DLManagedTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def _dlpack(tensor: Any) -> Strided:
    """Read the capsule without consuming it: it is freed with its own deleter here."""
    capsule = tensor.__dlpack__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    found = _DLTensor.from_address(pointer(capsule, b"dltensor"))
    itemsize = -(-found.bits * found.lanes // 8)
    shape = tuple(found.shape[: found.ndim])
    if found.strides:
        strides = tuple(stride * itemsize for stride in found.strides[: found.ndim])
    else:
        strides = _dense(shape, itemsize)
    return Strided((found.data or 0) + found.byte_offset, shape, strides, itemsize, None)
