"""Compile two caches into a plan; build a batch of requests into descriptors. The plan is its table of slices."""

from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcompile import arena, backend, shapes, topology
from kvcompile import staging as staging_of
from kvcompile.backend import Batch, Target
from kvcompile.cache import Cache
from kvcompile.descriptors import Descriptors, positive
from kvcompile.errors import LayoutError, RequestError
from kvcompile.explain import explain
from kvcompile.kernels import item
from kvcompile.lowering import GroupPair
from kvcompile.program import Side, assemble, fault
from kvcompile.request import Request, gather
from kvcompile.table import TABLE

__all__ = ["Plan", "compile"]

Int64 = npt.NDArray[np.int64]


def compile(  # noqa: A001 (the field's word)
    src: Cache,
    dst: Cache,
    *,
    election: str = "nearest",
    layers: Iterable[str | int] | None = None,
    bridge_padding: bool = False,
) -> "Plan":
    """Compile what one src rank sends to one dst rank.

    Parameters
    ----------
    src, dst : Cache
        One rank of each side.
    election : "nearest", "balanced" or "striped"
        Which of several src ranks that hold a head sends it: the lowest one paired with the dst rank, one by turns
        over all consumers, or all that are paired, each a part of the blocks. Both sides compute it from sizes and
        ranks alone.
    layers : iterable of layer names, optional
        Only these, for layer-wise senders.
    bridge_padding : bool
        Copy padding along where it is the same on both sides and no field lies in it: fewer descriptors, more bytes.

    Returns
    -------
    Plan
        Empty, and successful, where the two ranks share nothing.

    Raises
    ------
    LayoutError
        A layer that both hold, with other fields, heads, cell bytes, rows of state or state flags.
    ValueError
        Arguments that are no caches, an unknown election, a layer that neither side holds.
    """
    for name, cache in (("src", src), ("dst", dst)):
        if not isinstance(cache, Cache):
            raise ValueError(f"{name} is a {type(cache).__name__}, expected a Cache")
    if election not in topology.ELECTIONS:
        raise ValueError(f"election is {election!r}, expected one of {topology.ELECTIONS}")
    chosen = None
    if layers is not None:
        if isinstance(layers, str):
            raise ValueError(f"layers is the string {layers!r}, expected a collection of layer names")
        try:
            chosen = frozenset(layers)
        except TypeError:  # no collection, or one of what is no name
            raise ValueError(f"layers is {layers!r:.80}, expected a collection of layer names") from None
        unknown = chosen - {region.layer for cache in (src, dst) for region in cache.regions}
        if unknown:
            raise ValueError(f"layers: neither side holds {sorted(map(repr, unknown))[:5]}")
    table, pairs = shapes.lowered(src, dst, election, chosen, bridge_padding)
    plan = Plan(table, pairs, Side.of(src), Side.of(dst))
    plan._caches = (src, dst)
    return plan


class Plan:
    """What one src rank sends to one dst rank, for any request. Made by `compile`; safe to share between threads.

    Attributes
    ----------
    table : structured array [rows] of `TABLE`, read-only
        One row a slice, in the order dst group, src group, src phase, dst phase, src buffer, src_origin.
    pairs : tuple of GroupPair
        The groups that share a layer, elected or not.
    src, dst : Side
        Per group block size, state, id bound and null id; the buffers.
    """

    def __init__(self, table: npt.NDArray[np.void], pairs: tuple[GroupPair, ...], src: Side, dst: Side) -> None:
        table.flags.writeable = False
        self.table = table
        self.pairs = pairs
        self.src = src
        self.dst = dst
        self._fault: str | None = None
        self._caches: tuple[Cache, Cache] | None = None  # whose digests an engine asks for
        self._program = assemble(table, pairs, src, dst)
        self._src_edges, self._dst_edges = src.edges, dst.edges
        self._has_edges = len(self._src_edges) + len(self._dst_edges) > 0

    def __repr__(self) -> str:
        return f"Plan({len(self.table)} rows, {len(self._program.lanes)} lanes, {len(self.pairs)} group pairs)"

    @cached_property
    def _target(self) -> Target:
        """What `build` reads a batch for."""
        return backend.target(self._program, self.src.block_size, self.dst.block_size)

    @cached_property
    def _sorted(self) -> Target:
        """What `build` reads a batch for whose pieces are to be sorted."""
        return backend.target(self._program, self.src.block_size, self.dst.block_size, sort=True)

    @cached_property
    def _apart(self) -> Target:
        """What `pack` reads a batch for: the lanes whose pieces can never merge."""
        return backend.target(staging_of.apart(self._program), self.src.block_size, self.dst.block_size)

    def explain(self) -> str:
        """Tell in words what this plan does: bytes and descriptors a block, and of lanes that cannot merge why not."""
        return f"plan table, {self._fault}" if self._fault else explain(self._program, self.src, self.dst)

    def with_table(self, table: npt.NDArray[np.void]) -> "Plan":
        """Return the same plan over another table, for tests and tools.

        Any numbers are taken; what kernels could not run is refused by `build`.

        Raises
        ------
        ValueError
            Not a 1-D array of `TABLE`.
        """
        if not isinstance(table, np.ndarray) or table.dtype != TABLE or table.ndim != 1:
            raise ValueError(f"table is {getattr(table, 'dtype', type(table))}, expected a 1-D array of {TABLE}")
        plan = Plan(np.empty(0, TABLE), self.pairs, self.src, self.dst)
        plan._caches = self._caches
        plan.table = table.copy()
        plan.table.flags.writeable = False
        plan._fault = fault(plan.table, self.pairs, self.src, self.dst)
        if plan._fault is None:
            plan._program = assemble(plan.table, self.pairs, self.src, self.dst)
        return plan

    def build(
        self,
        requests: Iterable[Request],
        *,
        sort: bool = False,
        out: Descriptors | None = None,
        max_length: int | None = None,
        device: str | None = None,
        stream: Any = None,
        pinned: bool = False,
    ) -> Descriptors:
        """Expand, check and merge the block ids of a batch of requests.

        Parameters
        ----------
        requests : iterable of Request
        sort : bool
            Order the pieces of a lane by (src - dst, src) before merging: the fewest descriptors over all orders of the
            pairs; the bytes copied are the same.
        out : Descriptors, optional
            An earlier result of `build`, which is overwritten and returned: its memory is reused, and grown if needed.
            Without it, memory is reused as soon as nothing refers to an earlier result or a view of it.
        max_length : int, optional
            Descriptors are cut at so many bytes after merging.
        device : str, optional
            "cuda" or "cuda:N": build there, of ids that may be CUDA arrays, without waiting: see `device.build`.
        stream : optional
            The stream on that device, as an int or an object of CuPy, torch or Numba; default: CuPy's current one.
        pinned : bool
            Bring what was built on a device to pinned host memory, ready for an engine.

        Returns
        -------
        Descriptors
            Lane by lane, period by period, for each request in order. A bad request owns no rows and is in ``failed``.

        Raises
        ------
        ValueError
            Arguments that make no sense.
        LayoutError
            A table given to `with_table` that no ids can be run through.
        KVCompileError
            A device was asked for, and something that this needs is missing.
        """
        positive("max_length", max_length)
        if self._fault is not None:
            raise LayoutError(f"plan table, {self._fault}")
        if device is not None:
            from kvcompile import device as on_device  # noqa: PLC0415 (the CPU's path needs none of it)

            built = on_device.build_on(self, list(requests), device, stream, sort, max_length, pinned, out)
            built._caches = self._caches
            return built
        if stream is not None or pinned:
            raise ValueError("stream and pinned go with device='cuda', which is not given")
        if out is not None and (not isinstance(out, Descriptors) or out._memory is None):
            raise ValueError(f"out is {out!r}, expected an earlier result of build (not a batch of one)")
        batch_of = list(requests)
        # A few descriptors are written in the call that counts them, where memory is at hand.
        memory = arena.spare() if out is None or out._memory is None else out._memory
        given, ids, errors = gather(batch_of, self._sorted if sort else self._target, memory)
        if given.descriptors < 0:
            backend.measure(given, memory)
        if 3 * given.descriptors > len(memory):
            memory = arena.take(given.descriptors)
            backend.write(given, memory)
        columns, spans = arena.columns(memory, given.descriptors), given.spans
        if max_length is not None or self._has_edges:
            made, spans = backend.cut(columns, spans, max_length, self._src_edges, self._dst_edges)
            if made is not None:
                memory, columns = made, arena.columns(made, len(made) // 3)
        failed = self._failed(batch_of, given.status, errors) if given.failed else None
        uncovered = None
        if given.missing:
            uncovered = self._uncovered(batch_of, given.batch, given.uncovered)
        result = Descriptors.__new__(Descriptors) if out is None else out  # which becomes what it would be anew
        Descriptors.__init__(result, *columns, spans, ids, failed, uncovered)
        result._memory, result._caches = memory, self._caches
        return result

    def packed_nbytes(self, requests: Iterable[Request]) -> int:
        """Return the bytes that a staging buffer of `pack` needs, at most: nulls and failed requests make it fewer."""
        return staging_of.packed_nbytes(self, list(requests))

    def pack(
        self, requests: Iterable[Request], staging: Any, *, device: str | None = None, stream: Any = None
    ) -> staging_of.Packed:
        """Copy the pieces that can never merge from the src caches of this process into one buffer.

        In the order in which `build` emits them, without gaps; all others are not touched. `unpack`, with the same plan
        and requests on the other side, puts them in place.

        Parameters
        ----------
        requests : iterable of Request
        staging : buffer
            `packed_nbytes` at least: writable, contiguous, in host memory; or a CUDA array, with ``device``.
        device, stream : optional
            As for `build`: the copying is enqueued and not waited for.

        Returns
        -------
        Packed
            Its size, and which bytes of it belong to which request.

        Raises
        ------
        ValueError
            Arguments that make no sense; a buffer that is too small.
        LayoutError, KVCompileError
            As for `build`.
        """
        return self._pack(list(requests), staging, device, stream, False)

    def unpack(
        self, requests: Iterable[Request], staging: Any, *, device: str | None = None, stream: Any = None
    ) -> staging_of.Packed:
        """Copy what `pack` put into a buffer to the dst caches of this process. Arguments and errors are `pack`'s."""
        return self._pack(list(requests), staging, device, stream, True)

    def _pack(
        self, requests: list[Request], staging: Any, device: str | None, stream: Any, unpacks: bool
    ) -> staging_of.Packed:
        if self._fault is not None:
            raise LayoutError(f"plan table, {self._fault}")
        if device is not None:
            from kvcompile import device as on_device  # noqa: PLC0415

            return on_device.pack_on(self, requests, staging, device, stream, unpacks)
        if stream is not None:
            raise ValueError("stream goes with device='cuda', which is not given")
        return staging_of.pack(self, requests, staging, unpacks)

    def _failed(
        self, requests: Sequence[Request], status: Int64, errors: dict[int, RequestError]
    ) -> dict[Hashable, RequestError]:
        failed: dict[Hashable, RequestError] = {}
        for number in np.flatnonzero(status[:, item.CODE]).tolist():
            error = errors.get(number) or self._error(requests, number, status[number].tolist())
            failed.setdefault(requests[number].id, error)
        return failed

    def _error(self, requests: Sequence[Request], number: int, status: list[int]) -> RequestError:
        """Say in words what a kernel wrote into a request's status."""
        request = requests[number]
        code, side_number, group, position, other = status
        side = ("src", "dst")[side_number]
        where = f"request {request.id!r}: {side} group {group}"
        if code in (item.UNEQUAL, item.SHORTER, item.NO_STATE):
            have, want = len(request.src_blocks[group]), len(request.dst_blocks[other])
            sizes = self.src.block_size[group], self.dst.block_size[other]
            message = {
                item.UNEQUAL: f"blocks of {sizes[0]} tokens pair with dst group {other}, blocks of {sizes[1]}: "
                "expected src_first and dst_first, got neither",
                item.SHORTER: f"got {have} blocks, expected at least the {want} of dst group {other}",
                item.NO_STATE: f"got no block of state, expected one for dst group {other}",
            }[code]
            value, bound = (sizes[0], sizes[1]) if code == item.UNEQUAL else (have, want)
            return RequestError(
                f"{where}: {message}", request=request.id, side=side, group=group, value=value, bound=bound
            )
        if code == item.TWICE:
            return RequestError(
                f"request {request.id!r}: this id is given twice in the batch, expected each once",
                request=request.id, value=request.id,
            )  # fmt: skip
        value = int((request.src_blocks, request.dst_blocks)[side_number][group][position])
        if code == item.CONFLICT:
            return RequestError(
                f"{where}, position {position}: block {value} is also given by request {requests[other].id!r} (or "
                "twice), expected each dst block once in a batch",
                request=request.id, side=side, group=group, position=position, value=value,
            )  # fmt: skip
        most = (self.src, self.dst)[side_number].bound[group]
        reason = f"expected 0 <= id < {most}"
        if most is None or 0 <= value < most:
            reason = "a row of the table would leave the buffers there"
        return RequestError(
            f"{where}, position {position}: block id {value}, {reason}",
            request=request.id, side=side, group=group, position=position, value=value, bound=most,
        )  # fmt: skip

    def _uncovered(
        self, requests: Sequence[Request], batch: Batch, marks: npt.NDArray[np.integer]
    ) -> dict[Hashable, list[tuple[int, int]]]:
        groups = len(self.dst.block_size)
        found: dict[Hashable, list[tuple[int, int]]] = {}
        marked = np.flatnonzero(marks)
        lists = np.searchsorted(batch.dst_at, marked, side="right") - 1
        positions = marked - batch.dst_at[lists] + np.maximum(batch.dst_first.ravel()[lists], 0)
        # One step a list: its marks are neighbours.
        starts = np.flatnonzero(np.diff(lists, prepend=-1))
        for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(lists)], strict=True):
            number, group = divmod(int(lists[start]), groups)
            here = found.setdefault(requests[number].id, [])
            here.extend((group, position) for position in positions[start:stop].tolist())
        return found
