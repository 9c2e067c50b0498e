"""The compiled kernels of the CPU, ready to call. It knows arrays, no plan and no request."""

import threading

import numpy as np
import numpy.typing as npt

from kvcompile import _jit
from kvcompile.kernels import check, cpu, descriptors, ids, item, known, order
from kvcompile.kernels import pack as packing
from kvcompile.kernels.arrays import SCRATCH_ROWS, Batch, Program, Work

__all__ = [
    "Batch",
    "Program",
    "Work",
    "copy",
    "cut",
    "decode",
    "empty_work",
    "kernels",
    "measure",
    "most_nbytes",
    "outside",
    "pack",
    "warmup",
    "write",
]

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

_lock = threading.Lock()
_warm = False


def warmup() -> None:
    """Compile every kernel, or load it from the cache on disk, so that no later call waits for a compiler.

    Takes seconds the first time on a machine and a fraction of one afterwards. Processes that start together wait for
    the one that compiles. Called by itself before the first build.
    """
    global _warm  # noqa: PLW0603
    if _warm:
        return
    with _lock:
        if not _warm:
            with _jit.locked():
                _run_once()
            _warm = True


def kernels() -> dict[str, object]:
    """Return every compiled kernel by name, for tests that count compilations."""
    modules = (check, cpu, descriptors, ids, known, order, packing)
    found = (entry for module in modules for entry in vars(module).items())
    return {name: value for name, value in found if hasattr(value, "signatures")}


def measure(program: Program, batch: Batch, work: Work) -> tuple[int, int]:
    """Check and count a batch; return (failed requests, uncovered dst blocks). See `kernels.cpu.measure`."""
    warmup()
    return cpu.measure(tuple(program), tuple(batch), tuple(work))  # type: ignore[no-any-return]


def write(program: Program, batch: Batch, work: Work, src: UInt64, dst: UInt64, length: UInt64) -> None:
    """Write the descriptors of a measured batch into uint64 arrays of ``work.spans[-1]`` items."""
    cpu.write(tuple(program), tuple(batch), tuple(work), src.view(np.int64), dst.view(np.int64), length.view(np.int64))


def cut(
    columns: tuple[UInt64, UInt64, UInt64], spans: Int64, most: int | None, src_edges: Int64, dst_edges: Int64
) -> tuple[tuple[UInt64, UInt64, UInt64], Int64]:
    """Return the descriptors cut at ``most`` bytes and at chunk edges, and their spans (`kernels.descriptors.cut`)."""
    given = tuple(column.view(np.int64) for column in columns)
    cut_spans, none = np.empty_like(spans), np.empty(0, np.int64)
    limits = (2**63 - 1 if most is None else min(most, 2**63 - 1), src_edges, dst_edges)
    total = descriptors.cut(*given, spans, *limits, none, none, none, cut_spans)
    if total == len(columns[0]):
        return columns, spans
    made = (np.empty(total, np.uint64), np.empty(total, np.uint64), np.empty(total, np.uint64))
    descriptors.cut(*given, spans, *limits, *(column.view(np.int64) for column in made), cut_spans)
    return made, cut_spans


def decode(packed: bytearray, offsets: Int64, at: Int64, out: Int64) -> int:
    """Read integer lists out of msgpack into ``out``; return how many are none. See `kernels.ids.decode`."""
    warmup()
    return ids.decode(np.frombuffer(packed, np.uint8), offsets, at, out)  # type: ignore[no-any-return]


def outside(address: UInt64, length: UInt64, base: UInt64, nbytes: UInt64) -> int:
    """Return the first row that lies in no single buffer, -1 if there is none. See `kernels.descriptors.outside`."""
    warmup()
    columns = (np.ascontiguousarray(column, np.uint64) for column in (address, length, base, nbytes))
    return descriptors.outside(*columns)  # type: ignore[no-any-return]


def copy(src: UInt64, dst: UInt64, length: UInt64) -> None:
    """Copy the bytes of every descriptor within this process; the caller has checked the addresses."""
    warmup()
    descriptors.copy(src.view(np.int64), dst.view(np.int64), length.view(np.int64))


def most_nbytes(program: Program, batch: Batch, status: Int64) -> int:
    """Return the bytes of all pieces if no request fails at its ids and none is null."""
    warmup()
    return _count(program, batch, status.copy())[3]


def _count(program: Program, batch: Batch, status: Int64) -> tuple[int, ...]:
    requests, pairs, classes, lanes = len(status), len(program.pairs), len(program.classes), max(len(program.lanes), 1)
    return known.count_candidates(  # type: ignore[no-any-return]
        *(tuple(program), tuple(batch), status),
        np.empty((requests, pairs, item.ALIGN_COLUMNS), np.int64),
        np.empty((requests, classes, known.WINDOW_COLUMNS), np.int64),
        np.empty((requests * lanes + 1, known.SEGMENT_COLUMNS), np.int64),
        *(np.empty(requests * pairs + 1, np.int64), 0, 0, 0),
    )


def pack(address: UInt64, length: UInt64, spans: Int64, staging: int, unpacks: bool) -> Int64:
    """Copy the bytes of descriptors into a buffer or out of it; return the spans of bytes. See `kernels.pack`."""
    byte_spans = np.empty_like(spans)
    packing.pack(address.view(np.int64), length.view(np.int64), spans, staging, int(unpacks), byte_spans)
    return byte_spans


def empty_work(program: Program, batch: Batch, status: Int64, sort: bool) -> Work:
    """Allocate the arrays that the kernels of one build hand to each other.

    A class pairs each id at most once. (Classes of one group pair may have equal phases: other strides, other parts.)
    """
    requests, pairs, classes = len(status), len(program.pairs), len(program.classes)
    dst_ids = len(batch.dst_ids)
    most = classes * min(len(batch.src_ids), dst_ids)
    scratch = 0
    if sort:
        kind = program.lanes[:, item.LANE_KIND]
        rows = (program.lanes[:, item.LANE_STOP] - program.lanes[:, item.LANE_START])[kind == item.CHAIN]
        scratch = max(most * int(rows.max(initial=1)), 1 << order.RADIX)
    return Work(
        status,
        np.empty((requests, pairs, item.ALIGN_COLUMNS), np.int64),
        np.empty((requests, classes, item.EXTENT_COLUMNS), np.int64),
        np.empty(most, np.int64),
        np.empty(most, np.int64),
        np.empty(most, np.int64),
        np.empty(most, np.int64),
        np.empty(most, np.int64),
        np.zeros(dst_ids, np.uint8),
        np.empty(2 << dst_ids.bit_length(), np.int64),
        np.empty(requests + 1, np.int64),
        np.empty((SCRATCH_ROWS, scratch), np.int64),
    )


def _run_once() -> None:
    """Call each entry point on nothing: the argument types alone decide what is compiled."""

    def nothing(*columns: int) -> Int64:
        return np.zeros((0, *columns), np.int64)

    one = np.zeros(1, np.int64)
    program = Program(
        nothing(item.ROW_COLUMNS),
        nothing(item.LANE_COLUMNS),
        nothing(item.CLASS_COLUMNS),
        nothing(item.PAIR_COLUMNS),
        nothing(item.GROUP_COLUMNS),
        nothing(item.GROUP_COLUMNS),
    )
    batch = Batch(nothing(), one, nothing(), one, nothing(0), nothing(0), nothing(), nothing())
    work = empty_work(program, batch, nothing(item.STATUS_COLUMNS), False)
    cpu.measure(tuple(program), tuple(batch), tuple(work))
    cpu.write(tuple(program), tuple(batch), tuple(work), nothing(), nothing(), nothing())
    descriptors.cut(nothing(), nothing(), nothing(), one, 1, nothing(3), nothing(3), *(nothing(),) * 3, one)
    ids.decode(np.frombuffer(bytearray(1), np.uint8), nothing(), one, nothing())
    descriptors.copy(nothing(), nothing(), nothing())
    descriptors.outside(*(nothing().view(np.uint64),) * 4)
    _count(program, batch, nothing(item.STATUS_COLUMNS))
    packing.pack(nothing(), nothing(), one, 0, 0, one)
