"""One build on a device: what the host knows goes up in one copy, the grids are launched behind it."""

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

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
    pinned : bool
        Whether descriptors are wanted in pinned memory; the caller brings them there if ``direct`` is not set.

    Attributes
    ----------
    program, work, columns, report : int
        Addresses, as kernels take them.
    made : array of `Memory`
        What ``columns`` is; it has room for ``candidates`` descriptors.
    told : int64 array
        Pinned memory, for what the host reads once the job is done: the parts from `known.SPANS` on.
    direct : bool
        Whether ``made`` is in pinned memory.
    candidates, descriptors, nbytes : int
        Candidates; no more than so many descriptors after cutting, and bytes, come out.
    requests : list of Request
        With only their number in the place of ids on the device.
    """

    def __init__(
        self,
        plan: "Plan",
        program: Program,
        requests: Sequence[Request],
        memory: Memory,
        most: int,
        weighs: bool,
        pinned: bool,
    ) -> None:
        from kvcompile.kernels import cuda, cuda_scan  # noqa: PLC0415 (numba.cuda is for those alone who ask for it)

        self.plan, self.memory = plan, memory
        self.requests, self.arrays = stand_in(requests)
        gathered, _, self.errors = gather(self.requests, plan.src.block_size, plan.dst.block_size)
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

        work, host_ids, first = memory.empty(self.starts[-1]), self.starts[known.HOST_IDS], self.starts[known.SPANS]
        upload[: len(self.starts)] = self.starts
        self.work, given = memory.address(work), memory.address(upload)
        lists.put(given + 8 * host_ids)
        of_requests = parts[known.GIVEN].reshape(count, known.GIVEN_COLUMNS)
        of_requests[:, : known.GIVEN_TWICE], of_requests[:, known.GIVEN_TWICE] = self.status, self.batch.twice
        parts[known.AT][:], parts[known.LISTS][:] = lists.at, lists.table.ravel()
        parts[known.NUM_TOKENS][:], parts[known.HOST_IDS][:] = self.batch.num_tokens, lists.host_ids
        parts[known.REFUSED_ID][:] = parts[known.CONTESTED][:] = known.NONE
        for stream in {array.stream for array in self.arrays.values() if array.stream is not None}:
            memory.follow(stream)
        program_on_device = _upload(plan, program, memory)
        self.direct = pinned and not (weighs or gaps or merges)
        self.made = (memory.pinned if self.direct else memory.empty)(3 * self.candidates)
        self.told = memory.pinned(self.starts[known.MARKS + (1 if self.covers else 0)] - first)
        self.kept = (upload, work, program_on_device, self.made, self.told, self.arrays)
        self.program, self.columns, self.report = map(memory.address, (program_on_device, self.made, self.told))
        cuda.launch_build(
            memory.run,
            self.program,
            self.work,
            given,
            host_ids,
            self.columns,
            self.report,
            len(self.told),
            int(lists.at[-1]),
            self.candidates,
            covered,
            gaps,
            merges,
        )

    def part(self, number: int) -> Int64:
        """Return a part of what the host reads."""
        first = self.starts[known.SPANS]
        return self.told[self.starts[number] - first : self.starts[number + 1] - first]


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
