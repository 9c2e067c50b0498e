"""Requests, and how a batch of them becomes arrays. It checks what ids *are*; what they mean is checked by kernels."""

import itertools
import operator
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvcompile import backend
from kvcompile.backend import Batch
from kvcompile.errors import RequestError
from kvcompile.kernels import item

__all__ = ["Request", "gather"]

Int64 = npt.NDArray[np.int64]

LARGEST = 2**63 - 1
MAX_TOKENS = 2**60
"""Positions, in tokens, lie below this, so that no sum of them can leave 64 bits."""

_NOTHING = np.empty(0, np.int64)
_ENCODER = msgspec.msgpack.Encoder()


class Request(msgspec.Struct, frozen=True, eq=False):
    """One request's block ids on both sides. Nothing is checked here; `Plan.build` does.

    Parameters
    ----------
    id : hashable
    src_blocks, dst_blocks : sequence, one item a group of that side's own cache
        Each a sequence of block ids: list, tuple, or integer array of numpy, ``array`` or torch on the CPU; 1-D, any
        integer dtype and stride.
    src_first, dst_first : sequence of int, optional
        Per group, the position of the first block given, in blocks of that side from the request's first token.
        Both or neither. With positions, blocks pair by position; without, the lists end together.
    num_tokens : int, optional
        Tokens of the request; blocks that start at or past it are taken off both lists first. Needs positions.
    """

    id: Hashable
    src_blocks: Sequence[Any]
    dst_blocks: Sequence[Any]
    src_first: Sequence[int] | None = None
    dst_first: Sequence[int] | None = None
    num_tokens: int | None = None


class _WrongKindError(Exception):
    """What an id list is instead of one: (expected, position or None, value)."""


def gather(
    requests: Sequence[Request], src_sizes: Sequence[int], dst_sizes: Sequence[int]
) -> tuple[Batch, Int64, dict[int, RequestError]]:
    """Gather the ids of a batch into flat arrays: one Python step a list, none an id.

    Parameters
    ----------
    requests : sequence of Request
    src_sizes, dst_sizes : sequence of int
        Block sizes in tokens, one a group.

    Returns
    -------
    batch : Batch
    status : int64 array [requests, STATUS_COLUMNS]
        REFUSED for those in ``errors``, whose ids mean nothing; else OK.
    errors : dict
        Index of a request -> its first error, in the order kinds (src, dst, positions), lists.
    """
    src, dst = _Side("src", src_sizes), _Side("dst", dst_sizes)
    num_tokens, twice = [], [0] * len(requests)
    seen: dict[Hashable, int] = {}
    errors: dict[int, RequestError] = {}
    for number, request in enumerate(requests):
        if not isinstance(request, Request):
            raise ValueError(f"requests[{number}] is a {type(request).__name__}, expected a Request")
        first = seen.setdefault(request.id, number)
        if first != number:
            twice[first] = twice[number] = 1
        tokens = -1
        try:
            src_lists, dst_lists = src.take(request, request.src_blocks), dst.take(request, request.dst_blocks)
            if request.num_tokens is not None:
                tokens = _tokens(request)
            src.place(request, request.src_first)
            dst.place(request, request.dst_first)
            src.count(request, src_lists, request.src_first)
            dst.count(request, dst_lists, request.dst_first)
            _positions(request)
        except RequestError as error:
            errors[number] = error
        num_tokens.append(tokens)
        src.close(number)
        dst.close(number)
    src_ids, src_at = src.flat()
    dst_ids, dst_at = dst.flat()
    for number in sorted({*src.wrong, *dst.wrong}):
        found = src.find_wrong(requests[number]) or dst.find_wrong(requests[number])
        if found is not None:  # kinds come before what else was found
            errors[number] = found
    status = np.zeros((len(requests), item.STATUS_COLUMNS), np.int64)
    if errors:
        status[list(errors), item.CODE] = item.REFUSED
    tokens_of, twice_of = np.array(num_tokens, np.int64), np.array(twice, np.int64)
    batch = Batch(src_ids, src_at, dst_ids, dst_at, src.firsts(), dst.firsts(), tokens_of, twice_of)
    return batch, status, errors


class _Side:
    """The id lists of one side as they come in: Python lists packed as msgpack, arrays kept as they are.

    Packing and decoding a list costs a fourth of ``numpy.array``, and finds bools and floats on the way.
    """

    def __init__(self, side: str, sizes: Sequence[int]) -> None:
        self.side = side
        self.sizes = sizes
        self.packed = bytearray()
        self.offsets: list[int] = []  # into packed, one a list; -1 for an array
        self.arrays: dict[int, npt.NDArray[Any]] = {}  # by number of the list
        self.counts: list[int] = []
        self.positions: list[int] = []
        self.wrong: list[int] = []  # requests with a packed list that holds no integers

    def take(self, request: Request, lists: Any) -> int:
        """Take one request's lists; return how many there are."""
        if isinstance(lists, (str, bytes, dict, set)) or not isinstance(lists, Iterable):
            raise self._refused(request, f"{self.side}_blocks is {_kind(lists)}, expected one id list a group", lists)
        given = 0
        for ids in lists:
            offset = len(self.packed)
            if isinstance(ids, (list, tuple)) and self._pack(ids):
                self.offsets.append(offset)
            else:
                try:
                    ids = _integers(ids)  # noqa: PLW2901
                except _WrongKindError as wrong:
                    raise self._wrong_kind(request, given, wrong) from None
                self.arrays[len(self.offsets)] = ids
                self.offsets.append(-1)
            self.counts.append(len(ids))
            given += 1
        return given

    def place(self, request: Request, firsts: Any) -> None:
        """Take one request's positions."""
        if firsts is None:
            return
        if isinstance(firsts, (str, bytes, dict, set)) or not isinstance(firsts, Iterable):
            raise self._refused(request, f"{self.side}_first is {_kind(firsts)}, expected one position a group", firsts)
        for group, value in enumerate(firsts):
            position = _whole(value)
            size = self.sizes[group] if group < len(self.sizes) else 1
            if position is None or not 0 <= position * size < MAX_TOKENS:
                bound = MAX_TOKENS // size
                message = f"{self.side}_first of group {group} is {_kind(value)}, expected 0 <= position < {bound}"
                raise self._refused(request, message, value, group, bound)
            self.positions.append(position)

    def count(self, request: Request, lists: int, firsts: Any) -> None:
        """Refuse another number of lists, or of positions, than this side has groups."""
        groups = len(self.sizes)
        for what, given in (("blocks", lists), ("first", groups if firsts is None else len(firsts))):
            if given != groups:
                message = f"{self.side}_{what} has {given} items, expected {groups}, one a group of {self.side}"
                raise self._refused(request, message, given, bound=groups)

    def close(self, number: int) -> None:
        """End a request: one list and one position a group, also where it was refused half-way."""
        end = (number + 1) * len(self.sizes)
        for values, filler in ((self.offsets, -1), (self.counts, 0), (self.positions, -1)):
            if len(values) != end:
                del values[end:]
                values.extend([filler] * (end - len(values)))

    def flat(self) -> tuple[Int64, Int64]:
        """Return all ids as one fresh contiguous writable int64 array, and where each list begins and the last ends."""
        ends = [0, *itertools.accumulate(self.counts)]
        at, ids = np.array(ends, np.int64), np.empty(ends[-1], np.int64)
        if self.packed:
            offsets = np.array(self.offsets, np.int64)
            wrong = backend.decode(self.packed, offsets, at, ids)
            if wrong:
                self.wrong = [number // len(self.sizes) for number in np.flatnonzero(offsets == -2).tolist()]
        for number, array in self.arrays.items():
            if number < len(self.counts) and self.counts[number]:
                ids[ends[number] : ends[number + 1]] = array
        return ids, at

    def firsts(self) -> Int64:
        """Return the positions, int64 [requests, groups]; -1 for none."""
        return np.array(self.positions, np.int64).reshape(-1, len(self.sizes)) if self.sizes else _NO_GROUPS

    def find_wrong(self, request: Request) -> RequestError | None:
        """Return the first error of kind among one request's lists."""
        for group, ids in enumerate(request.src_blocks if self.side == "src" else request.dst_blocks):
            try:
                _integers(ids)
            except _WrongKindError as wrong:
                return self._wrong_kind(request, group, wrong)
        return None

    def _pack(self, ids: Any) -> bool:
        try:
            _ENCODER.encode_into(ids, self.packed, len(self.packed))
        except (TypeError, OverflowError, ValueError, RecursionError):  # numpy's integers, or no integers at all
            return False
        return True

    def _wrong_kind(self, request: Request, group: int, wrong: _WrongKindError) -> RequestError:
        expected, position, value = wrong.args
        where = "" if position is None else f", position {position}"
        message = f"{self.side} ids of group {group}{where}: got {_kind(value)}, expected {expected}"
        return self._refused(request, message, value, group, position=position)

    def _refused(
        self,
        request: Request,
        message: str,
        value: object,
        group: int | None = None,
        bound: int | None = None,
        position: int | None = None,
    ) -> RequestError:
        return RequestError(
            f"request {request.id!r}: {message}",
            request=request.id, side=self.side, group=group, position=position, value=value, bound=bound,
        )  # fmt: skip


def _integers(ids: Any) -> npt.NDArray[Any]:
    """Return ids as a 1-D integer array whose values survive a cast to int64, or raise what they are instead."""
    if isinstance(ids, (list, tuple)):
        return np.fromiter(_each(ids), np.int64, len(ids))
    if isinstance(ids, (str, bytes, dict, set)) or not hasattr(ids, "__len__"):
        raise _WrongKindError("a sequence of ids", None, ids)
    try:
        array: npt.NDArray[Any] = np.asarray(ids)
    except (TypeError, ValueError, RuntimeError):  # what a tensor on a device raises
        raise _WrongKindError("integer ids in host memory", None, ids) from None
    if array.ndim != 1:
        raise _WrongKindError("a 1-D sequence of ids", None, ids)
    if array.dtype == object:
        return np.fromiter(_each(array), np.int64, len(array))
    if array.dtype.kind not in "iu":
        if not len(array):
            return _NOTHING
        raise _WrongKindError(f"integer ids, not {array.dtype}", 0, array[0])
    if array.dtype.kind == "u" and array.dtype.itemsize == 8:
        array = np.minimum(array, np.uint64(LARGEST))  # would wrap to a negative id, or to the null one
    return array


def _each(ids: Iterable[Any]) -> Iterator[int]:
    for position, value in enumerate(ids):
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise _WrongKindError("an integer id", position, value)
        yield min(max(int(value), -LARGEST - 1), LARGEST)  # beyond 64 bits: out of every bound, and refused as that


def _tokens(request: Request) -> int:
    tokens = _whole(request.num_tokens)
    if tokens is None or not 0 <= tokens < MAX_TOKENS:
        raise RequestError(
            f"request {request.id!r}: num_tokens is {_kind(request.num_tokens)}, expected 0 <= it < {MAX_TOKENS}",
            request=request.id, value=request.num_tokens, bound=MAX_TOKENS,
        )  # fmt: skip
    return tokens


def _positions(request: Request) -> None:
    if (request.src_first is None) != (request.dst_first is None):
        missing = "src" if request.src_first is None else "dst"
        raise RequestError(
            f"request {request.id!r}: {missing}_first is None, expected positions on both sides or on neither",
            request=request.id, side=missing,
        )  # fmt: skip
    if request.num_tokens is not None and request.src_first is None:
        raise RequestError(
            f"request {request.id!r}: num_tokens is {request.num_tokens} without positions, expected src_first and "
            "dst_first",
            request=request.id, value=request.num_tokens,
        )  # fmt: skip


def _whole(value: Any) -> int | None:
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _kind(value: Any) -> str:
    return f"{value!r:.60} ({type(value).__name__})"


_NO_GROUPS = np.empty((0, 0), np.int64)
