"""Requests, and how a batch of them becomes arrays. It checks what ids *are*; what they mean is checked by the kernels."""

import operator
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvcompile.backend import Batch
from kvcompile.errors import RequestError
from kvcompile.kernels import item

__all__ = ["Request", "gather"]

Int64 = npt.NDArray[np.int64]

LARGEST = 2**63 - 1
MAX_TOKENS = 2**60
"""Positions are counted in tokens below this, so that no sum of them can leave 64 bits."""


class Request(msgspec.Struct, frozen=True, eq=False):
    """One request's block ids on both sides. Nothing is checked here; `Plan.build` does.

    Parameters
    ----------
    id : hashable
    src_blocks, dst_blocks : sequence, one item a group of that side's own cache
        Each a sequence of block ids: list, tuple, integer array of numpy, ``array``, or torch on the CPU; 1-D, any
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


class _Refusedkind(Exception):
    """What is wrong with one id list: (what was got, position or None, value)."""


def gather(
    requests: Sequence[Request], src_sizes: Sequence[int], dst_sizes: Sequence[int]
) -> tuple[Batch, Int64, dict[int, RequestError]]:
    """Gather the ids of a batch into flat arrays, one Python step a list and none an id.

    Parameters
    ----------
    requests : sequence of Request
    src_sizes, dst_sizes : sequence of int
        Block sizes in tokens, one a group.

    Returns
    -------
    batch : Batch
        Requests in `errors` have empty lists.
    status : int64 array [requests, STATUS_COLUMNS]
        REFUSED for those in `errors`, else OK.
    errors : dict
        Index of a request -> its first error of kind or list.
    """
    status = np.zeros((len(requests), item.STATUS_COLUMNS), np.int64)
    errors: dict[int, RequestError] = {}
    src_lists: list[npt.NDArray[Any]] = []
    dst_lists: list[npt.NDArray[Any]] = []
    src_first = np.full((len(requests), len(src_sizes)), -1, np.int64)
    dst_first = np.full((len(requests), len(dst_sizes)), -1, np.int64)
    num_tokens = np.full(len(requests), -1, np.int64)
    seen: dict[Hashable, int] = {}
    twice = np.zeros(len(requests), np.int64)
    for number, request in enumerate(requests):
        if not isinstance(request, Request):
            raise ValueError(f"requests[{number}] is a {type(request).__name__}, expected a Request")
        first = seen.setdefault(request.id, number)
        if first != number:
            twice[first] = twice[number] = 1
        try:
            src = _lists(request, "src", request.src_blocks)
            dst = _lists(request, "dst", request.dst_blocks)
            tokens = _tokens(request)
            src_at = _firsts(request, "src", request.src_first, src_sizes)
            dst_at = _firsts(request, "dst", request.dst_first, dst_sizes)
            _count(request, "src", src, src_at, src_sizes)
            _count(request, "dst", dst, dst_at, dst_sizes)
            _positions(request)
        except RequestError as error:
            errors[number] = error
            status[number, item.CODE] = item.REFUSED
            src, dst = [_NOTHING] * len(src_sizes), [_NOTHING] * len(dst_sizes)
        else:
            if src_at is not None:
                src_first[number], dst_first[number] = src_at, dst_at
            if tokens is not None:
                num_tokens[number] = tokens
        src_lists += src
        dst_lists += dst
    batch = Batch(*_flat(src_lists), *_flat(dst_lists), src_first, dst_first, num_tokens, twice)
    return batch, status, errors


_NOTHING = np.empty(0, np.int64)


def _flat(lists: list[npt.NDArray[Any]]) -> tuple[Int64, Int64]:
    """Return all ids as one fresh contiguous writable int64 array, and where each list begins and the last ends."""
    at = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(ids) for ids in lists], out=at[1:])
    # A read-only, strided or other-typed array would make Numba compile another signature.
    return np.concatenate([_NOTHING, *lists], dtype=np.int64, casting="unsafe"), at


def _lists(request: Request, side: str, lists: Any) -> list[npt.NDArray[Any]]:
    if isinstance(lists, (str, bytes, dict, set)) or not isinstance(lists, Iterable):
        raise RequestError(
            f"request {request.id!r}: {side}_blocks is {_kind(lists)}, expected a sequence with one id list a group",
            request=request.id, side=side, value=lists,
        )  # fmt: skip
    found = []
    for group, ids in enumerate(lists):
        try:
            found.append(_ids(ids))
        except _Refusedkind as refused:
            expected, position, value = refused.args
            where = "" if position is None else f", position {position}"
            raise RequestError(
                f"request {request.id!r}: {side} ids of group {group}{where}: got {_kind(value)}, expected {expected}",
                request=request.id, side=side, group=group, position=position, value=value,
            ) from None  # fmt: skip
    return found


def _ids(ids: Any) -> npt.NDArray[Any]:
    """Return ids as a 1-D integer array whose values survive a cast to int64, or raise what they are instead."""
    if isinstance(ids, (list, tuple)):
        if not ids:
            return _NOTHING
        try:
            # The one check of a whole list that costs less than reading it: bools and floats are refused.
            return np.array(msgspec.convert(ids, list[int]), np.int64)
        except (msgspec.ValidationError, OverflowError):
            return _mixed(ids)
    if hasattr(ids, "__cuda_array_interface__"):
        raise _Refusedkind("ids in host memory", None, ids)
    if isinstance(ids, (str, bytes, dict, set)) or not hasattr(ids, "__len__"):
        raise _Refusedkind("a sequence of ids", None, ids)
    try:
        array = np.asarray(ids)
    except (TypeError, ValueError, RuntimeError):  # what a tensor on a device raises
        raise _Refusedkind("ids in host memory", None, ids) from None
    if array.ndim != 1:
        raise _Refusedkind("a 1-D sequence of ids", None, ids)
    if array.dtype == object:
        return _mixed(array.tolist())
    if array.dtype.kind not in "iu":
        if not len(array):
            return _NOTHING
        raise _Refusedkind(f"integer ids, not {array.dtype}", 0, array[0])
    if array.dtype.kind == "u" and array.dtype.itemsize == 8:
        return np.minimum(array, np.uint64(LARGEST))  # would wrap to a negative id, or to the null one
    return array


def _mixed(ids: Sequence[Any]) -> npt.NDArray[Any]:
    """Convert a list that is not plain Python ints of 64 bits, one by one: numpy's ints are fine, others are not."""
    values = []
    for position, value in enumerate(ids):
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise _Refusedkind("an integer id", position, value)
        values.append(min(max(int(value), -(2**63)), LARGEST))  # out of every bound, and said so later
    return np.array(values, np.int64)


def _tokens(request: Request) -> int | None:
    tokens = request.num_tokens
    if tokens is None:
        return None
    count = _whole(tokens)
    if count is None or not 0 <= count < MAX_TOKENS:
        raise RequestError(
            f"request {request.id!r}: num_tokens is {tokens!r}, expected an integer from 0 to {MAX_TOKENS - 1}",
            request=request.id, value=tokens, bound=MAX_TOKENS,
        )  # fmt: skip
    return count


def _firsts(request: Request, side: str, firsts: Any, sizes: Sequence[int]) -> list[int] | None:
    if firsts is None:
        return None
    if isinstance(firsts, (str, bytes, dict, set)) or not isinstance(firsts, Iterable):
        raise RequestError(
            f"request {request.id!r}: {side}_first is {_kind(firsts)}, expected one position a group",
            request=request.id, side=side, value=firsts,
        )  # fmt: skip
    found = []
    for group, value in enumerate(firsts):
        position = _whole(value)
        size = sizes[group] if group < len(sizes) else 1
        if position is None or not 0 <= position * size < MAX_TOKENS:
            raise RequestError(
                f"request {request.id!r}: {side}_first of group {group} is {value!r}, expected a position from 0, "
                f"below {MAX_TOKENS} tokens",
                request=request.id, side=side, group=group, value=value, bound=MAX_TOKENS // size,
            )  # fmt: skip
        found.append(position)
    return found


def _count(
    request: Request, side: str, lists: Sequence[Any], firsts: Sequence[int] | None, sizes: Sequence[int]
) -> None:
    for what, given in (("blocks", lists), ("first", firsts)):
        if given is not None and len(given) != len(sizes):
            raise RequestError(
                f"request {request.id!r}: {side}_{what} has {len(given)} items, expected {len(sizes)}, one a group of {side}",
                request=request.id, side=side, value=len(given), bound=len(sizes),
            )  # fmt: skip


def _positions(request: Request) -> None:
    if (request.src_first is None) != (request.dst_first is None):
        missing = "src" if request.src_first is None else "dst"
        raise RequestError(
            f"request {request.id!r}: {missing}_first is None, expected positions on both sides or on neither",
            request=request.id, side=missing,
        )  # fmt: skip
    if request.num_tokens is not None and request.src_first is None:
        raise RequestError(
            f"request {request.id!r}: num_tokens is {request.num_tokens} without src_first and dst_first, expected positions",
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
