"""Build descriptors on a device; the result. Nothing here waits for the device before a result is asked for."""

import threading
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvcompile.descriptors import Descriptors
from kvcompile.device_job import Job
from kvcompile.device_memory import Memory
from kvcompile.errors import RequestError
from kvcompile.kernels import item, known
from kvcompile.request import Request

if TYPE_CHECKING:
    from kvcompile.plan import Plan

__all__ = ["DeviceDescriptors", "Report", "build"]

Int64 = npt.NDArray[np.int64]


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
        columns, spans = job.columns, known.SPANS
        if cuts:
            columns, spans = memory.empty(3 * job.descriptors), known.CUT_SPANS
            arrays = map(memory.for_kernels, (job.program, job.work, job.columns, columns))
            sizes = job.candidates, len(requests), most or 2**63 - 1
            cuda_descriptors.launch_cut(memory.launches_on, *arrays, *sizes)
        held = columns
        if pinned:
            columns = memory.pinned(3 * job.descriptors)
            arrays = map(memory.for_kernels, (job.work, held, columns))
            cuda_descriptors.launch_bring(memory.launches_on, *arrays, spans, job.descriptors)
        report = Report(job, spans, held, columns)
    result = DeviceDescriptors() if out is None else out
    result._hold(report, columns)
    return result


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
        self._job, self._spans_part, self._lock = job, spans, threading.Lock()
        stop = job.starts[known.MARKS + (1 if job.covers else 0)]
        self._words = job.memory.pinned(stop - job.starts[known.SPANS])
        job.memory.download(self._words, job.work, job.starts[known.SPANS])
        self._event = job.memory.mark(*job.kept, *kept, self._words)

    def wait(self) -> None:
        """Wait until the job is done; the first time, read what it found."""
        with self._lock:
            job = self._job
            if job is None:
                return
            self.memory.wait(self._event)
            self.spans = job.part(self._words, self._spans_part).copy()
            status = job.part(self._words, known.STATUS).reshape(-1, item.STATUS_COLUMNS)
            self.failed: dict[Hashable, RequestError] = {}
            self.uncovered: dict[Hashable, list[tuple[int, int]]] = {}
            if status[:, item.CODE].any():
                shown = self._shown(job, status, job.part(self._words, known.VALUES))
                self.failed = job.plan._failed(shown, status, job.errors)
            if job.covers:
                marks = job.part(self._words, known.MARKS)
                self.uncovered = job.plan._uncovered(job.requests, job.batch, status, marks)
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
        self._memory = None

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
        columns = (self._report.memory.on_host(column) for column in (self.src, self.dst, self.length))
        return Descriptors(*columns, self.spans, self.requests, self.failed, self.uncovered)

    def _batches(self, max_descriptors: int | None, max_nbytes: int | None) -> Iterator[Descriptors]:
        return self.on_host()._batches(max_descriptors, max_nbytes)

    def _column(self, number: int) -> Any:
        return self._report.memory.as_uint64(self._columns, number * (len(self._columns) // 3), len(self))
