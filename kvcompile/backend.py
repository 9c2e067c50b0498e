"""The compiled kernels of the CPU, ready to call. It knows arrays, no plan and no request."""

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvcompile._later import later
from kvcompile.kernels import arrays, item
from kvcompile.kernels.arrays import Batch, Program

if TYPE_CHECKING:
    from kvcompile import _jit
    from kvcompile.kernels import check, cpu, descriptors, known, order
    from kvcompile.kernels import pack as packing
else:  # Numba, and what it costs to declare a kernel, are for a process that builds something
    _jit = later("kvcompile._jit")
    check, cpu, descriptors, known, order, packing = (
        later(f"kvcompile.kernels.{name}") for name in ("check", "cpu", "descriptors", "known", "order", "pack")
    )

__all__ = [
    "Batch",
    "Elsewhere",
    "Given",
    "Program",
    "Target",
    "copy",
    "cut",
    "kernels",
    "measure",
    "most_nbytes",
    "outside",
    "pack",
    "read",
    "reading",
    "target",
    "warmup",
    "write",
]

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

_NONE, _ONE, _NO_COLUMNS = np.empty(0, np.int64), np.zeros(1, np.int64), np.empty(0, np.uint64)
_NO_BYTES = np.frombuffer(bytes(8), np.uint8)  # read-only, as those of bytes are
_COLUMNS = item.ROW_COLUMNS, item.LANE_COLUMNS, item.CLASS_COLUMNS, item.PAIR_COLUMNS, *[item.GROUP_COLUMNS] * 2
_NO_PROGRAM = Program(*(np.zeros((0, count), np.int64) for count in _COLUMNS))

_lock = threading.Lock()
_ready: set[str] = set()


class Elsewhere:
    """Stands for ids that are not in host memory: here only their number is known, and what they are is left open."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


class Target(msgspec.Struct, frozen=True):
    """What a batch is read for: a program to run on it, and how. Made by `target`."""

    program: Program
    sizes: tuple[tuple[int, ...], tuple[int, ...]]  # tokens of a block of each src and dst group
    limit: int  # positions lie below it, in blocks of any group
    pieces: int  # of each pair of blocks, at most, if they are to be sorted; else 0
    groups: tuple[int, int]
    parts: tuple[int, int]  # group pairs and classes
    given: tuple[Any, ...]  # to every call of `kernels.cpu.build`, first


def target(program: Program, src_sizes: tuple[int, ...], dst_sizes: tuple[int, ...], sort: bool = False) -> Target:
    """Make the target of a program between groups whose blocks hold so many tokens; ``sort`` as for `Plan.build`."""
    pieces = 0
    if sort:
        kind = program.lanes[:, item.LANE_KIND]
        rows = (program.lanes[:, item.LANE_STOP] - program.lanes[:, item.LANE_START])[kind == item.CHAIN]
        pieces = len(program.classes) * int(rows.max(initial=1))
    limit = item.MOST_TOKENS // max((*src_sizes, *dst_sizes, 1))
    groups, parts = (len(src_sizes), len(dst_sizes)), (len(program.pairs), len(program.classes))
    return Target(program, (src_sizes, dst_sizes), limit, pieces, groups, parts, (*program, *groups, int(sort)))


@lru_cache
def reading(src_sizes: tuple[int, ...], dst_sizes: tuple[int, ...]) -> Target:
    """Return the target of a batch that is read and nothing else."""
    return target(_NO_PROGRAM, src_sizes, dst_sizes)


class Given(msgspec.Struct, gc=False):
    """What the requests of a batch give, and once measured, what comes of it. Arrays share its memory."""

    memory: Int64  # see `kernels.arrays.batch_of`; behind it, room for `kernels.arrays.work_of`
    spans: Int64  # [requests + 1]: which descriptors are whose, once measured
    target: Target
    ids: tuple[int, int]  # of src and dst
    descriptors: int = -1  # not measured
    failed: int = 0  # requests
    missing: int = 0  # dst ids that are not wholly written

    @property
    def requests(self) -> int:
        """How many there are."""
        return len(self.spans) - 1

    @property
    def status(self) -> Int64:
        """What is wrong with each request, int64 [requests, STATUS_COLUMNS]."""
        return self.memory[: self.requests * item.STATUS_COLUMNS].reshape(-1, item.STATUS_COLUMNS)

    @property
    def batch(self) -> Batch:
        """The batch by names."""
        return arrays.batch_of(self.memory, self.requests, *self.target.groups)[1]

    @property
    def uncovered(self) -> Int64:
        """Once measured, int64 [dst ids]: 1 where one is not wholly written."""
        start = arrays.given_size(self.requests, *self.target.groups) + self.ids[0] + self.ids[1]
        return self.memory[start : start + self.ids[1]]


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
    modules = (check, cpu, descriptors, known, order, packing)
    found = (entry for module in modules for entry in vars(module).items())
    return {name: value for name, value in found if hasattr(value, "signatures")}


def read(
    packed: bytes,
    requests: int,
    ids: tuple[int, int],
    target: Target,
    out: UInt64 | None = None,
    limit: int | None = None,
) -> Given | None:
    """Read what requests give, packed as `kernels.ids.read` says; with memory for columns, also measure and write it.

    Parameters
    ----------
    packed : bytes
    requests : int
    ids : (int, int)
        The number of all src ids and dst ids, or more.
    target : Target
    out : uint64 array, optional
        Three columns, one behind the other; nothing is written where it is too small.
    limit : int, optional
        Positions lie below it, if not below the target's.

    Returns
    -------
    Given or None
        None if something there is not as it should be.
    """
    _warm("build")
    scratch = max(target.pieces * min(ids), 1 << order.RADIX) if target.pieces else 0
    sizes = requests, *target.groups, *ids, *target.parts, scratch
    memory, spans = np.empty(arrays.memory_size(*sizes), np.int64), np.empty(requests + 1, np.int64)
    at = *target.given, np.frombuffer(packed, np.uint8), memory, spans
    if out is None:
        src_ids, dst_ids, *_ = cpu.build(*at, _NO_COLUMNS, *ids, limit or target.limit, item.READ)
        return None if src_ids < 0 else Given(memory, spans, target, (src_ids, dst_ids))
    steps = item.READ | item.MEASURE | item.WRITE
    src_ids, dst_ids, size, failed, missing = cpu.build(*at, out, *ids, limit or target.limit, steps)
    return None if src_ids < 0 else Given(memory, spans, target, (src_ids, dst_ids), size, failed, missing)


def measure(given: Given, out: UInt64 = _NO_COLUMNS) -> None:
    """Check and count a batch that was read, and write it where there is room. See `kernels.cpu.build`."""
    given.descriptors, given.failed, given.missing = _run(given, out, item.MEASURE | item.WRITE)


def write(given: Given, out: UInt64) -> None:
    """Write the descriptors of a batch that was measured, into three columns of so many at least."""
    _run(given, out, item.WRITE)


def _run(given: Given, out: UInt64, steps: int) -> list[int]:
    at = _NO_BYTES, given.memory, given.spans, out, 0, 0, 0, steps
    _, _, *found = cpu.build(*given.target.given, *at)
    return found  # type: ignore[no-any-return]


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
    address, length = np.ascontiguousarray(address, np.uint64), np.ascontiguousarray(length, np.uint64)
    return descriptors.outside(address, length, base, nbytes)  # type: ignore[no-any-return]


def copy(src: UInt64, dst: UInt64, length: UInt64) -> None:
    """Copy the bytes of every descriptor within this process; the caller has checked the addresses."""
    _warm("copy")
    descriptors.copy(src.view(np.int64), dst.view(np.int64), length.view(np.int64))


def most_nbytes(given: Given) -> int:
    """Return the bytes of all pieces if no request fails at its ids and none is null."""
    _warm("count")
    return _candidates(given)[3]


def _candidates(given: Given) -> tuple[int, ...]:
    program = given.target.program
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


def _build_nothing() -> None:
    memory = np.zeros(arrays.given_size(0, 0, 0), np.int64)
    cpu.build(*reading((), ()).given, _NO_BYTES, memory, _ONE, _NO_COLUMNS, 0, 0, 0, item.READ)


def _count_nothing() -> None:
    _candidates(Given(np.zeros(arrays.given_size(0, 0, 0), np.int64), _ONE, reading((), ()), (0, 0)))


# What calls each kernel on nothing: the types of its arguments alone decide what is compiled.
_WARM: dict[str, Callable[[], object]] = {
    "build": _build_nothing,
    "count": _count_nothing,
    "cut": lambda: descriptors.cut(*[_NONE] * 3, _ONE, 1, *[_NONE.reshape(0, 3)] * 2, *[_NONE] * 3, _ONE),
    "copy": lambda: descriptors.copy(_NONE, _NONE, _NONE),
    "outside": lambda: descriptors.outside(*[_NO_COLUMNS] * 4),
    "pack": lambda: packing.pack(_NONE, _NONE, _ONE, 0, 0, _ONE),
}
