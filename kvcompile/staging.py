"""Pieces that can never merge, copied into one buffer and out of it: many small copies here, one transfer between.

Both sides compute the same order and the same place of every byte from the same two caches and requests. Whether to
stage at all, and handing the buffer over, is the caller's.
"""

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcompile import arena, backend
from kvcompile.backend import Program
from kvcompile.errors import RequestError
from kvcompile.kernels import item
from kvcompile.program import with_lanes
from kvcompile.request import Request, gather

if TYPE_CHECKING:
    from kvcompile.plan import Plan

__all__ = ["Packed", "apart", "pack", "packed_nbytes", "too_small"]

Int64 = npt.NDArray[np.int64]


class Found(NamedTuple):
    """What a build on the CPU found; a `device.Report` has the same names, and waits."""

    spans: Int64
    failed: dict[Hashable, RequestError]
    uncovered: dict[Hashable, list[tuple[int, int]]]

    def wait(self) -> None:
        """Return at once."""


class Packed:
    """What lies in a staging buffer, or has been taken out of it. On a device, what is asked of it waits.

    Attributes
    ----------
    requests : tuple
        The id of each request, in order.
    """

    def __init__(self, requests: tuple[Hashable, ...], found: Any) -> None:
        self.requests = requests
        self._found = found

    def __repr__(self) -> str:
        return f"Packed({self.nbytes} bytes, {len(self.requests)} requests, {len(self.failed)} failed)"

    def wait(self) -> None:
        """Wait until all bytes are there."""
        self._found.wait()

    @property
    def spans(self) -> Int64:
        """Request ``i`` owns bytes ``spans[i]:spans[i+1]`` of the buffer, int64 [requests + 1]."""
        self.wait()
        return self._found.spans  # type: ignore[no-any-return]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer in use, from its start."""
        return int(self.spans[-1])

    @property
    def failed(self) -> dict[Hashable, RequestError]:
        """As `Descriptors.failed`: such a request has no bytes in the buffer, on neither side."""
        self.wait()
        return self._found.failed  # type: ignore[no-any-return]

    @property
    def uncovered(self) -> dict[Hashable, list[tuple[int, int]]]:
        """As `Descriptors.uncovered`."""
        self.wait()
        return self._found.uncovered  # type: ignore[no-any-return]


def apart(program: Program) -> Program:
    """Return a program with those of its lanes whose pieces can never merge."""
    return with_lanes(program, program.lanes[program.lanes[:, item.LANE_KIND] == item.APART])


def packed_nbytes(plan: "Plan", requests: Sequence[Request]) -> int:
    """Return the bytes that a staging buffer needs; nulls and failed requests make it fewer."""
    given, *_ = gather(requests, plan._apart)
    return backend.most_nbytes(given)


def pack(plan: "Plan", requests: Sequence[Request], staging: Any, unpacks: bool) -> Packed:
    """Copy pieces into a buffer in host memory, or out of it.

    Parameters
    ----------
    plan : Plan
    requests : sequence of Request
    staging : buffer
        Contiguous; of any type.
    unpacks : bool
        From the buffer to dst, instead of from src into the buffer.

    Raises
    ------
    ValueError
        The buffer is too small, not contiguous, or cannot be written to.
    """
    given, ids, errors = gather(requests, plan._apart)
    room = span(staging)
    if not unpacks and not room.flags.writeable:
        raise ValueError("staging is read-only, expected writable memory")
    if room.nbytes < (need := backend.most_nbytes(given)):
        raise too_small(room.nbytes, need)
    backend.measure(given)
    memory = arena.take(given.descriptors)
    backend.write(given, memory)
    src, dst, length = arena.columns(memory, given.descriptors)
    spans = backend.pack(dst if unpacks else src, length, given.spans, room.ctypes.data, unpacks)
    found = Found(
        spans,
        plan._failed(requests, given.status, errors) if given.failed else {},
        plan._uncovered(requests, given.batch, given.uncovered) if given.missing else {},
    )
    return Packed(ids, found)


def span(staging: Any) -> npt.NDArray[Any]:
    """Return the memory of a buffer, or of an array of numpy or torch, as an array that shares it.

    Raises
    ------
    ValueError
        It has none in this process, or not in one piece.
    """
    try:
        given = np.asarray(memoryview(staging))
    except TypeError:
        if not hasattr(staging, "__array__"):
            raise ValueError(f"staging is a {type(staging).__name__}, expected a buffer in host memory") from None
        try:
            given = np.asarray(staging)  # shares the memory of a tensor
        except (TypeError, ValueError, RuntimeError) as error:  # what a tensor on a device raises
            raise ValueError(f"staging has no bytes in host memory: {error}") from error
    if not given.flags.c_contiguous:
        raise ValueError("staging is not contiguous, expected one span of memory")
    return given


def too_small(given: int, need: int) -> ValueError:
    """Make the error about a staging buffer that may not hold all pieces."""
    return ValueError(f"staging has {given} bytes, expected at least {need}: see Plan.packed_nbytes")
