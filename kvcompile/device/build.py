"""Build descriptors on a device; the result. Nothing here waits for the device before a result is asked for."""

import threading
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvcompile.descriptors import Descriptors
from kvcompile.device.ids import int64, span_of
from kvcompile.device.job import Job
from kvcompile.device.memory import Memory, open_device
from kvcompile.errors import RequestError
from kvcompile.kernels import item, known
from kvcompile.request import Request
from kvcompile.staging import Packed, too_small

if TYPE_CHECKING:
    from kvcompile.plan import Plan

__all__ = ["DeviceDescriptors", "Report", "build", "build_on", "pack", "pack_on", "warm", "warmup"]

Int64 = npt.NDArray[np.int64]

_NO_MARKS = np.empty(0, np.int64)


def warmup(device: str = "cuda", stream: Any = None) -> None:
    """Compile all that runs on a device of this machine, so that no build waits for a compiler; some seconds."""
    warm(open_device(device, stream))


def warm(memory: Memory) -> None:
    """Launch every grid on a build of nothing."""
    from kvcompile.kernels import cuda, cuda_descriptors  # noqa: PLC0415

    words = {known.AT: 1, known.SEGMENTS: known.SEGMENT_COLUMNS, known.COVERS: 1, known.SUMS: 2, known.LASTS: 2}
    words |= {known.OFFSETS: 1, known.SPANS: 1, known.CUT_SPANS: 1}
    sizes = [words.get(part, 0) for part in range(known.WORK_PARTS)]
    with memory:
        arrays, kept = [], []
        for parts in ([0] * known.PROGRAM_PARTS, sizes):
            upload = memory.pinned(len(parts) + 1 + sum(parts))
            upload[:] = 0
            upload[: len(parts) + 1] = len(parts) + 1 + np.cumsum([0, *parts])
            arrays.append(memory.empty(len(upload)))
            memory.upload(arrays[-1], upload)
            kept.append(upload)
        arrays += [memory.empty(3), memory.empty(3)]
        program, work, columns, others = map(memory.for_kernels, arrays)
        cuda.launch_build(memory.launches_on, program, work, columns, 1, 1, 1, 1, 1, 1)
        cuda_descriptors.launch_cut(memory.launches_on, program, work, columns, others, 1, 0, 1)
        cuda_descriptors.launch_bring(memory.launches_on, work, columns, others, known.SPANS, 1)
        cuda_descriptors.launch_copy(memory.launches_on, program, work, columns, 1, 0, 0, 1, 0)
        memory.wait(memory.mark(arrays, kept))


def build_on(
    plan: "Plan",
    requests: Sequence[Request],
    device: str,
    stream: Any,
    sort: bool,
    max_length: int | None,
    pinned: bool,
    out: Descriptors | None,
) -> "DeviceDescriptors":
    """Check the arguments of `Plan.build`, and enqueue a build on a device of this machine."""
    if sort:
        raise ValueError("sort=True is not built for a device: leave device out, or sort out")
    if out is not None and not isinstance(out, DeviceDescriptors):
        raise ValueError(f"out is {out!r}, expected an earlier result of a build on a device")
    return build(plan, requests, open_device(device, stream), max_length, pinned, out)


def build(
    plan: "Plan",
    requests: Sequence[Request],
    memory: Memory,
    max_length: int | None = None,
    pinned: bool = False,
    out: "DeviceDescriptors | None" = None,
) -> "DeviceDescriptors":
    """Enqueue one build.

    Parameters
    ----------
    plan : Plan
    requests : sequence of Request
        Ids on the device, in host memory, or some here and some there.
    memory : Memory
        The device and the stream.
    max_length : int, optional
        Descriptors are cut at so many bytes.
    pinned : bool
        Bring the descriptors to pinned host memory.
    out : DeviceDescriptors, optional
        An earlier result, which is replaced by this one. (CuPy's pools keep the memory.)

    Returns
    -------
    DeviceDescriptors
    """
    from kvcompile.kernels import cuda_descriptors  # noqa: PLC0415 (numba.cuda is for those alone who ask for it)

    cuts = max_length is not None or any(plan.src.chunks) or any(plan.dst.chunks)
    most = min(max_length or 0, 2**63 - 1)
    with memory:
        job = Job(plan, plan._program, requests, memory, most, cuts)
        made, columns, spans = job.made, job.columns, known.SPANS
        if cuts:
            made, spans = memory.empty(3 * job.descriptors), known.CUT_SPANS
            columns = memory.for_kernels(made)
            cuda_descriptors.launch_cut(
                memory.launches_on,
                job.program,
                job.work,
                job.columns,
                columns,
                job.candidates,
                len(requests),
                most or 2**63 - 1,
            )
        kept = made
        if pinned:
            made = memory.pinned(3 * job.descriptors)
            cuda_descriptors.launch_bring(
                memory.launches_on, job.work, columns, memory.for_kernels(made), spans, job.descriptors
            )
        report = Report(job, spans, kept, made)
    result = DeviceDescriptors() if out is None else out
    result._hold(report, made)
    return result


def pack_on(plan: "Plan", requests: Sequence[Request], staging: Any, device: str, stream: Any, unpacks: bool) -> Packed:
    """Enqueue what `Plan.pack` or `Plan.unpack` does, on a device of this machine."""
    return pack(plan, requests, staging, open_device(device, stream), unpacks)


def pack(plan: "Plan", requests: Sequence[Request], staging: Any, memory: Memory, unpacks: bool) -> Packed:
    """Enqueue the copying of all pieces that can never merge into a buffer on the device, or out of it.

    Parameters
    ----------
    plan : Plan
    requests : sequence of Request
    staging : CUDA array
        Contiguous, of any type and shape.
    memory : Memory
        The device and the stream.
    unpacks : bool
        From the buffer to dst, instead of from src into the buffer.

    Raises
    ------
    ValueError
        No such buffer, or one that is too small.
    """
    from kvcompile.kernels import cuda_descriptors  # noqa: PLC0415

    address, nbytes, follows = span_of(staging)
    program = plan._apart.program
    with memory:
        if follows is not None:
            memory.follow(follows)
        job = Job(plan, program, requests, memory, 0, True)
        if nbytes < job.nbytes:
            raise too_small(nbytes, job.nbytes)
        cuda_descriptors.launch_copy(
            memory.launches_on,
            job.program,
            job.work,
            job.columns,
            job.candidates,
            len(requests),
            int64(address),
            int(program.rows[program.lanes[:, item.LANE_START], item.LENGTH].max(initial=0)),
            int(unpacks),
        )
        report = Report(job, known.CUT_SPANS, staging)
    return Packed(report.ids, report)


class Report:
    """What comes back of a job: statuses and counts, in one copy. Whoever asks waits for it.

    Parameters
    ----------
    job : Job
    spans : int
        Which part has the spans of the result.
    kept
        Arrays that are in use until then.
    """

    def __init__(self, job: Job, spans: int, *kept: Any) -> None:
        self.ids = tuple(request.id for request in job.requests)
        self.memory = job.memory
        self._job: Job | None = job
        self._spans_part, self._lock = spans, threading.Lock()
        stop = job.starts[known.MARKS + (1 if job.covers else 0)]
        self._words = job.memory.pinned(stop - job.starts[known.SPANS])
        job.memory.download(self._words, job.on_device, job.starts[known.SPANS])
        self._event = job.memory.mark(*job.kept, *kept, self._words)

    def wait(self) -> None:
        """Wait until the job is done; the first time, read what it found."""
        with self._lock:
            job = self._job
            if job is None:
                return
            self.memory.wait(self._event)
            self.spans: Int64 = job.part(self._words, self._spans_part).copy()
            status = job.part(self._words, known.STATUS).reshape(-1, item.STATUS_COLUMNS)
            self.failed: dict[Hashable, RequestError] = {}
            self.uncovered: dict[Hashable, list[tuple[int, int]]] = {}
            if status[:, item.CODE].any():
                shown = self._shown(job, status, job.part(self._words, known.VALUES))
                self.failed = job.plan._failed(shown, status, job.errors)
            marks = job.part(self._words, known.MARKS) if job.covers else _NO_MARKS
            if marks.any():
                self.uncovered = job.plan._uncovered(job.requests, job.batch, marks)
            self._job = None

    def _shown(self, job: Job, status: Int64, values: Int64) -> list[Request]:
        """Return the requests with the id that an error is about in the place of ids on the device."""
        shown = list(job.requests)
        for number in np.flatnonzero(np.isin(status[:, item.CODE], (item.OUT_OF_BOUND, item.CONFLICT))).tolist():
            side, group = status[number, item.SIDE].item(), status[number, item.GROUP].item()
            if (side, number, group) in job.arrays:
                name = ("src_blocks", "dst_blocks")[side]
                lists = list(getattr(shown[number], name))
                lists[group] = np.broadcast_to(values[number], len(lists[group]))
                shown[number] = replace(shown[number], **{name: lists})
        return shown


class DeviceDescriptors(Descriptors):
    """Descriptors that a device makes, on its own time: what is asked of them waits for it.

    Attributes
    ----------
    src, dst, length : uint64 arrays [n]
        CuPy's, on the device (torch takes them without a copy), or numpy's, in pinned host memory.
    """

    __slots__ = ("_columns", "_report")

    def __init__(self) -> None:
        self._memory = self._caches = None

    def _hold(self, report: Report, columns: Any) -> None:
        self._report, self._columns, self.requests = report, columns, report.ids

    def __len__(self) -> int:
        return int(self.spans[-1])

    @property
    def src(self) -> Any:  # type: ignore[override]
        """Src addresses."""
        return self._column(0)

    @property
    def dst(self) -> Any:  # type: ignore[override]
        """Dst addresses."""
        return self._column(1)

    @property
    def length(self) -> Any:  # type: ignore[override]
        """Bytes to copy."""
        return self._column(2)

    @property
    def spans(self) -> Int64:  # type: ignore[override]
        """Request ``i`` owns rows ``spans[i]:spans[i+1]``."""
        self._report.wait()
        return self._report.spans

    @property
    def failed(self) -> dict[Hashable, RequestError]:  # type: ignore[override]
        """Request id -> `RequestError`."""
        self._report.wait()
        return self._report.failed

    @property
    def uncovered(self) -> dict[Hashable, list[tuple[int, int]]]:  # type: ignore[override]
        """Request id -> list of (dst group, position)."""
        self._report.wait()
        return self._report.uncovered

    @property
    def room(self) -> tuple[Any, Any, Any]:
        """Src, dst and length as `src` and so on, but all that there is room for, and without waiting.

        For work enqueued behind the build: how many there are is not known before, and what lies beyond is undefined.
        """
        size = len(self._columns) // 3
        src, dst, length = (self._report.memory.as_uint64(self._columns, at * size, size) for at in range(3))
        return src, dst, length

    def on_host(self) -> Descriptors:
        """Return the same in host memory: copied there, unless it already is."""
        src, dst, length = (self._report.memory.on_host(column) for column in (self.src, self.dst, self.length))
        brought = Descriptors(src, dst, length, self.spans, self.requests, self.failed, self.uncovered)
        brought._caches = self._caches
        return brought

    def _batches(self, max_descriptors: int | None, max_nbytes: int | None) -> Iterator[Descriptors]:
        return self.on_host()._batches(max_descriptors, max_nbytes)

    def _column(self, number: int) -> Any:
        return self._report.memory.as_uint64(self._columns, number * (len(self._columns) // 3), len(self))
