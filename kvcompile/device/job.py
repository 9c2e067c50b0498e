"""One build on a device: what the host knows goes up in one copy, the grids are launched behind it."""

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvcompile import backend
from kvcompile.backend import Program
from kvcompile.device.ids import Lists, stand_in
from kvcompile.device.memory import Memory
from kvcompile.kernels import item, known
from kvcompile.request import Request, gather

if TYPE_CHECKING:
    from kvcompile.plan import Plan

__all__ = ["Job"]

Int64 = npt.NDArray[np.int64]

_uploaded: weakref.WeakKeyDictionary[Any, dict[tuple[int, int], tuple[Any, Any]]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class Job:
    """One build, enqueued: statuses, spans and descriptors come to be on the device.

    Parameters
    ----------
    plan : Plan
    program : Program
        The plan's, or one with fewer of its lanes.
    requests : sequence of Request
    memory : Memory
    most : int
        Bytes at which descriptors will be cut; 0: none.
    weighs : bool
        Whether descriptors will be cut or copied, which takes more room.

    Attributes
    ----------
    program, work, columns : arrays as kernels take them
    on_device, made : arrays of `Memory`
        What ``work`` and ``columns`` are; the latter has room for ``candidates`` descriptors.
    candidates, descriptors, nbytes : int
        Candidates; no more than so many descriptors after cutting, and bytes, come out.
    requests : list of Request
        With only their number in the place of ids on the device.
    """

    def __init__(
        self, plan: "Plan", program: Program, requests: Sequence[Request], memory: Memory, most: int, weighs: bool
    ) -> None:
        from kvcompile.kernels import cuda, cuda_scan  # noqa: PLC0415 (numba.cuda is for those alone who ask for it)

        self.plan, self.memory = plan, memory
        self.requests, self.arrays = stand_in(requests)
        gathered, _, self.errors = gather(self.requests, backend.reading(plan.src.block_size, plan.dst.block_size))
        self.batch, self.status = gathered.batch, gathered.status
        lists = Lists(self.batch, self.arrays, len(program.src_groups), len(program.dst_groups))
        count = len(requests)
        sizes = _given_sizes(program, count, len(lists.at) - 1, len(lists.host_ids))
        upload = memory.pinned(known.WORK_PARTS + 1 + sum(sizes))
        parts = _split(upload, sizes)
        found = known.count_candidates(
            *(tuple(program), tuple(self.batch), self.status),
            parts[known.ALIGNED].reshape(count, len(program.pairs), item.ALIGN_COLUMNS),
            parts[known.WINDOWS].reshape(count, len(program.classes), known.WINDOW_COLUMNS),
            *(parts[known.SEGMENTS].reshape(-1, known.SEGMENT_COLUMNS), parts[known.COVERS]),
            *(most, _least_chunk(plan.src.chunks), _least_chunk(plan.dst.chunks)),
        )
        self.candidates, covered, self.descriptors, self.nbytes, gaps, merges = found
        dst_ids, blocks = len(self.batch.dst_ids), cuda_scan.blocks(self.candidates + 1)
        slots = len(program.dst_groups) * (2 << dst_ids.bit_length())
        sizes += [int(lists.at[-1]), slots, blocks + 1, blocks + 1 if gaps else 0, self.candidates + 1 if weighs else 0]
        sizes += [count + 1, count + 1 if weighs else 0, count * item.STATUS_COLUMNS, count, dst_ids]
        self.starts = [known.WORK_PARTS + 1]
        for size in sizes:
            self.starts.append(self.starts[-1] + size)
        self.covers = covered > 0

        self.on_device = memory.empty(self.starts[-1])
        upload[: len(self.starts)] = self.starts
        table = lists.table(memory.address(self.on_device) + 8 * self.starts[known.HOST_IDS])
        given = np.column_stack([self.status, self.batch.twice])
        none = np.full(count, known.NONE)
        for part, values in (
            *((known.AT, lists.at), (known.LISTS, table), (known.NUM_TOKENS, self.batch.num_tokens)),
            *((known.GIVEN, given), (known.REFUSED_ID, none), (known.CONTESTED, none)),
            (known.HOST_IDS, lists.host_ids),
        ):
            parts[part][:] = values.ravel()
        memory.upload(self.on_device, upload)
        for stream in {array.stream for array in self.arrays.values() if array.stream is not None}:
            memory.follow(stream)
        program_on_device = _upload(plan, program, memory)
        self.made = memory.empty(3 * self.candidates)
        self.kept = (upload, self.on_device, program_on_device, self.made, self.arrays)
        self.program, self.work, self.columns = map(memory.for_kernels, (program_on_device, self.on_device, self.made))
        cuda.launch_build(
            memory.launches_on,
            self.program,
            self.work,
            self.columns,
            int(lists.at[-1]),
            count,
            self.candidates,
            covered,
            gaps,
            merges,
        )

    def part(self, report: Int64, number: int) -> Int64:
        """Return a part of the report, which begins with the spans."""
        first = self.starts[known.SPANS]
        return report[self.starts[number] - first : self.starts[number + 1] - first]


def _given_sizes(program: Program, requests: int, lists: int, host_ids: int) -> list[int]:
    """Return the words of each part that the host writes, in order."""
    pairs, classes, lanes = len(program.pairs), len(program.classes), max(len(program.lanes), 1)
    return [
        *(lists + 1, lists * known.LIST_COLUMNS, requests, requests * known.GIVEN_COLUMNS),
        *(requests * pairs * item.ALIGN_COLUMNS, requests * classes * known.WINDOW_COLUMNS),
        *((requests * lanes + 1) * known.SEGMENT_COLUMNS, requests * pairs + 1, requests, requests, host_ids),
    ]


def _split(upload: Int64, sizes: list[int]) -> list[Int64]:
    ends = np.cumsum(sizes) + known.WORK_PARTS + 1
    return [upload[end - size : end] for size, end in zip(sizes, ends.tolist(), strict=True)]


def _least_chunk(chunks: tuple[int, ...]) -> int:
    return min((chunk for chunk in chunks if chunk), default=0)


def _upload(plan: "Plan", program: Program, memory: Memory) -> Any:
    """Return a program on the device: a plan is uploaded once a device, and once more without the lanes that merge."""
    key = memory.key, len(program.lanes)
    with _lock:
        found = _uploaded.setdefault(plan, {}).get(key)
        if found is None:
            arrays = [array.ravel() for array in (*program, plan._src_edges, plan._dst_edges)]
            words = memory.pinned(known.PROGRAM_PARTS + 1 + sum(map(len, arrays)))
            words[: known.PROGRAM_PARTS + 1] = known.PROGRAM_PARTS + 1 + np.cumsum([0, *map(len, arrays)])
            words[known.PROGRAM_PARTS + 1 :] = np.concatenate(arrays)
            array = memory.empty(len(words))
            memory.upload(array, words)
            found = _uploaded[plan][key] = array, memory.mark(words)
            return array
    memory.wait_on_device(found[1])
    return found[0]
