"""The compiled kernels of the CPU, ready to call. It knows arrays, no plan and no request."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from kvcompile._later import later
from kvcompile.kernels import arrays, item
from kvcompile.kernels.arrays import Batch, Program

if TYPE_CHECKING:
    from kvcompile import _jit
    from kvcompile.kernels import check, cpu, descriptors, ids, known, order
    from kvcompile.kernels import pack as packing
else:  # Numba, and what it costs to declare a kernel, are for a process that builds something
    _jit = later("kvcompile._jit")
    check, cpu, descriptors, ids, known, order, packing = (
        later(f"kvcompile.kernels.{name}") for name in ("check", "cpu", "descriptors", "ids", "known", "order", "pack")
    )

__all__ = [
    "Batch",
    "Elsewhere",
    "Given",
    "Measured",
    "Program",
    "copy",
    "cut",
    "kernels",
    "measure",
    "most_nbytes",
    "outside",
    "pack",
    "read",
    "warmup",
    "write",
]

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

_lock = threading.Lock()
_ready: set[str] = set()


class Elsewhere:
    """Stands for ids that are not in host memory: here only their number is known, and what they are is left open."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


class Given(msgspec.Struct, frozen=True, gc=False):
    """What the requests of a batch give, and how many there are of each."""

    flat: Int64  # see `kernels.arrays.batch_of`
    requests: int
    src_groups: int
    dst_groups: int
    src_ids: int
    dst_ids: int

    @property
    def status(self) -> Int64:
        """What is wrong with each request, int64 [requests, STATUS_COLUMNS]; it shares memory."""
        return self.flat[: self.requests * item.STATUS_COLUMNS].reshape(-1, item.STATUS_COLUMNS)

    @property
    def batch(self) -> Batch:
        """The batch by names; it shares memory."""
        return arrays.batch_of(self.flat, self.requests, self.src_groups, self.dst_groups)[1]


class Measured(msgspec.Struct, frozen=True, gc=False):
    """What `measure` found, and hands to `write`."""

    memory: Int64  # of a `kernels.arrays.Work`
    sizes: tuple[int, int]  # its slots, and the columns of its scratch
    spans: Int64  # [requests + 1]
    descriptors: int
    failed: int  # requests
    uncovered: int  # dst ids


def warmup() -> None:
    """Compile every kernel, or load it from the cache on disk, so that no later call waits for a compiler.

    Takes seconds the first time on a machine and a fraction of one afterwards. Processes that start together wait for
    the one that compiles. Kernels that are used without it are compiled or loaded by themselves, by then.
    """
    for name in _WARM:
        _warm(name)


def _warm(name: str) -> None:
    if name in _ready:
        return
    with _lock:
        if name not in _ready:
            with _jit.locked():
                _WARM[name]()
            _ready.add(name)


def kernels() -> dict[str, object]:
    """Return every compiled kernel by name, for tests that count compilations."""
    modules = (check, cpu, descriptors, ids, known, order, packing)
    found = (entry for module in modules for entry in vars(module).items())
    return {name: value for name, value in found if hasattr(value, "signatures")}


def read(
    packed: bytes,
    count: int,
    lists: list[npt.NDArray[np.integer] | Elsewhere],
    requests: int,
    groups: tuple[int, int],
    limit: int,
) -> Given | None:
    """Read what requests give, packed as `kernels.ids.read` says; id lists that are arrays come apart, in order.

    Parameters
    ----------
    packed : bytes
    count : int
        The number of all ids, or more.
    lists : list of integer arrays [n] or Elsewhere
    requests : int
    groups : (int, int)
        Of src and dst.
    limit : int
        Positions lie below it, in blocks.

    Returns
    -------
    Given or None
        None if something there is not as it should be.
    """
    _warm("build")
    start = arrays.given_size(requests, *groups)
    flat = np.empty(start + count, np.int64)
    starts = np.empty(len(lists), np.int64) if lists else _NONE
    src_ids, dst_ids = ids.read(np.frombuffer(packed, np.uint8), flat, starts, requests, *groups, limit)
    if src_ids < 0:
        return None
    if lists:
        for at, array in zip(starts.tolist(), lists, strict=True):
            if not isinstance(array, Elsewhere):
                flat[at : at + len(array)] = array
    return Given(flat, requests, *groups, src_ids, dst_ids)


def measure(program: Program, given: Given, sort: bool = False) -> Measured:
    """Check and count a batch. See `kernels.cpu.measure`."""
    requests, pairs, classes = given.requests, len(program.pairs), len(program.classes)
    slots, scratch = 2 << given.dst_ids.bit_length(), 0
    if sort:
        kind = program.lanes[:, item.LANE_KIND]
        rows = (program.lanes[:, item.LANE_STOP] - program.lanes[:, item.LANE_START])[kind == item.CHAIN]
        most = classes * min(given.src_ids, given.dst_ids)
        scratch = max(most * int(rows.max(initial=1)), 1 << order.RADIX)
    words = arrays.work_size(requests, pairs, classes, given.src_ids, given.dst_ids, slots, scratch)
    memory = np.empty(words, np.int64)
    found = cpu.measure(*program, given.flat, memory, requests, slots, scratch)
    # A copy: the rest of the memory need not live as long as the result.
    return Measured(memory, (slots, scratch), memory[: requests + 1].copy(), *found)


def write(program: Program, given: Given, measured: Measured, src: UInt64, dst: UInt64, length: UInt64) -> None:
    """Write the descriptors of a measured batch into arrays of so many items."""
    cpu.write(*program, given.flat, measured.memory, given.requests, *measured.sizes, src, dst, length)


def uncovered(given: Given, measured: Measured) -> Int64:
    """Return the marks of the dst ids that are not wholly written."""
    start = given.requests + 1
    return measured.memory[start : start + given.dst_ids]


def cut(
    columns: tuple[UInt64, UInt64, UInt64], spans: Int64, most: int | None, src_edges: Int64, dst_edges: Int64
) -> tuple[UInt64 | None, Int64]:
    """Cut descriptors at ``most`` bytes and at chunk edges: see `kernels.descriptors.cut`.

    Returns
    -------
    made : uint64 array [3 * descriptors] or None
        Columns, one behind the other; None: there was nothing to cut.
    spans : int64 array [requests + 1]
    """
    _warm("cut")
    given = tuple(column.view(np.int64) for column in columns)
    cut_spans, none = np.empty_like(spans), np.empty(0, np.int64)
    limits = (2**63 - 1 if most is None else min(most, 2**63 - 1), src_edges, dst_edges)
    total = descriptors.cut(*given, spans, *limits, none, none, none, cut_spans)
    if total == len(columns[0]):
        return None, spans
    made = np.empty(3 * total, np.uint64)
    descriptors.cut(*given, spans, *limits, *made.view(np.int64).reshape(3, total), cut_spans)
    return made, cut_spans


def outside(address: UInt64, length: UInt64, base: UInt64, nbytes: UInt64) -> int:
    """Return the first row that lies in no single buffer, -1 if there is none. See `kernels.descriptors.outside`."""
    _warm("outside")
    columns = (np.ascontiguousarray(column, np.uint64) for column in (address, length, base, nbytes))
    return descriptors.outside(*columns)  # type: ignore[no-any-return]


def copy(src: UInt64, dst: UInt64, length: UInt64) -> None:
    """Copy the bytes of every descriptor within this process; the caller has checked the addresses."""
    _warm("copy")
    descriptors.copy(src.view(np.int64), dst.view(np.int64), length.view(np.int64))


def most_nbytes(program: Program, given: Given) -> int:
    """Return the bytes of all pieces if no request fails at its ids and none is null."""
    _warm("count")
    return _candidates(program, given)[3]


def _candidates(program: Program, given: Given) -> tuple[int, ...]:
    requests, pairs, classes = given.requests, len(program.pairs), len(program.classes)
    lanes = max(len(program.lanes), 1)
    return known.count_candidates(  # type: ignore[no-any-return]
        *(tuple(program), tuple(given.batch), given.status.copy()),
        np.empty((requests, pairs, item.ALIGN_COLUMNS), np.int64),
        np.empty((requests, classes, known.WINDOW_COLUMNS), np.int64),
        np.empty((requests * lanes + 1, known.SEGMENT_COLUMNS), np.int64),
        *(np.empty(requests * pairs + 1, np.int64), 0, 0, 0),
    )


def pack(address: UInt64, length: UInt64, spans: Int64, staging: int, unpacks: bool) -> Int64:
    """Copy the bytes of descriptors into a buffer or out of it; return the spans of bytes. See `kernels.pack`."""
    _warm("pack")
    byte_spans = np.empty_like(spans)
    packing.pack(address.view(np.int64), length.view(np.int64), spans, staging, int(unpacks), byte_spans)
    return byte_spans


_NONE, _ONE, _ADDRESSES = np.empty(0, np.int64), np.zeros(1, np.int64), np.empty(0, np.uint64)


def _empty_program() -> Program:
    columns = (item.ROW_COLUMNS, item.LANE_COLUMNS, item.CLASS_COLUMNS, item.PAIR_COLUMNS, *[item.GROUP_COLUMNS] * 2)
    return Program(*(np.zeros((0, count), np.int64) for count in columns))


def _build_nothing() -> None:
    program = _empty_program()
    given, memory = np.zeros(arrays.given_size(0, 0, 0), np.int64), np.zeros(3, np.int64)
    ids.read(np.frombuffer(bytes(16), np.uint8), given, _NONE, 0, 0, 0, 0)
    cpu.measure(*program, given, memory, 0, 2, 0)
    cpu.write(*program, given, memory, 0, 2, 0, _ADDRESSES, _ADDRESSES, _ADDRESSES)


def _count_nothing() -> None:
    given = Given(np.zeros(arrays.given_size(0, 0, 0), np.int64), 0, 0, 0, 0, 0)
    _candidates(_empty_program(), given)


# What calls each kernel on nothing: the types of its arguments alone decide what is compiled.
_WARM: dict[str, Callable[[], object]] = {
    "build": _build_nothing,
    "count": _count_nothing,
    "cut": lambda: descriptors.cut(*[_NONE] * 3, _ONE, 1, *[_NONE.reshape(0, 3)] * 2, *[_NONE] * 3, _ONE),
    "copy": lambda: descriptors.copy(_NONE, _NONE, _NONE),
    "outside": lambda: descriptors.outside(*[_ADDRESSES] * 4),
    "pack": lambda: packing.pack(_NONE, _NONE, _ONE, 0, 0, _ONE),
}
