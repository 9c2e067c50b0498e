"""Requests, and how a batch of them becomes one array. It checks what ids *are*; what they mean, kernels check."""

import operator
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from types import NoneType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvcompile import backend
from kvcompile.backend import Elsewhere, Given, Target
from kvcompile.errors import RequestError
from kvcompile.kernels import item

__all__ = ["Request", "gather"]

LARGEST = 2**63 - 1
_NOTHING = np.empty(0, np.int64)


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


class _WrongKindError(TypeError):
    """What an id list is instead of one: (expected, position or None, value)."""


def gather(
    requests: Sequence[Request], target: Target, out: npt.NDArray[np.uint64] | None = None
) -> tuple[Given, tuple[Hashable, ...], dict[int, RequestError]]:
    """Gather what a batch gives into one array: no Python step an id, and an array's ids are copied as they are.

    msgspec packs all lists at once and a kernel reads them, which costs a fourth of ``numpy.array`` and finds whatever
    is no integer. A batch in which something is odd is gone through once more, item by item, and each fault named.

    Parameters
    ----------
    requests : sequence of Request
    target : Target
        What the batch is read for.
    out : uint64 array, optional
        Memory of columns: the batch is measured and written at once where nothing is left to be said of its requests.

    Returns
    -------
    given : Given
        Its status is REFUSED for those in ``errors``, which give nothing; else OK.
    ids : tuple
        The id of each request.
    errors : dict
        Index of a request -> its first error, in the order kinds (src, dst, positions), lists.
    """
    if not _REQUEST.issuperset(map(type, requests)):  # else nobody need look at each
        for number, request in enumerate(requests):
            if not isinstance(request, Request):
                raise ValueError(f"requests[{number}] is a {type(request).__name__}, expected a Request")
    ids, *columns = zip(*map(_GIVEN, requests), strict=True) if requests else [()] * 6
    try:
        distinct = len(set(ids)) == len(ids)
    except TypeError as error:  # no key of `failed`: the caller's error, not the request's
        raise ValueError(f"requests have ids {[*ids]!r:.200}, expected hashable ones: {error}") from error
    errors: dict[int, RequestError] = {}
    given = _read(columns, target, out if distinct else None)
    if given is None:
        exact = []
        for number, request in enumerate(requests):
            try:
                exact.append(_exact(request, *target.sizes))
            except RequestError as error:
                errors[number] = error
                exact.append(Request(None, [[]] * target.groups[0], [[]] * target.groups[1]))
        _, *columns = zip(*map(_GIVEN, exact), strict=True)
        given = _read(columns, target, None, item.MOST_TOKENS)
        if given is None:
            raise AssertionError("requests of exact kinds were not understood")
        if errors:
            given.status[list(errors), item.CODE] = item.REFUSED
    if not distinct:
        seen = Counter(ids)
        given.batch.twice[:] = [seen[one] > 1 for one in ids]
    return given, ids, errors


FEW_NBYTES = 512
"""Packed requests up to this size have room for an id in every byte: their ids need not be counted."""

_REQUEST = frozenset({Request})
_GIVEN = attrgetter("id", "src_blocks", "dst_blocks", "src_first", "dst_first", "num_tokens")
_KEPT = frozenset(np.typecodes["Integer"] + "BHI")  # what every value of fits int64
_KNOWN = frozenset({list, tuple, int, NoneType, np.ndarray, Elsewhere})


def _read(
    columns: Sequence[Sequence[Any]], target: Target, out: npt.NDArray[np.uint64] | None, limit: int | None = None
) -> Given | None:
    """Pack the columns of `_GIVEN` but for ids, and have them read; None if something there is odd."""
    src, dst, *_ = columns
    try:
        # What msgspec packs as what it is not: a set as a list, for one. All else the kernel sees.
        kinds = set(map(type, chain(*columns, *src, *dst)))
        if not kinds <= _KNOWN:
            return None
        packed = msgspec.msgpack.encode(columns, enc_hook=_ids)
        if len(packed) <= FEW_NBYTES and Elsewhere not in kinds:
            most = len(packed), len(packed)
        else:
            most = sum(map(len, chain(*src))), sum(map(len, chain(*dst)))
    except (TypeError, OverflowError, ValueError, RecursionError):
        return None
    return backend.read(packed, len(src), most, target, out, limit)


def _ids(value: Any) -> object:
    """Return how `kernels.ids.read` takes ids that msgspec does not know."""
    if isinstance(value, Elsewhere):
        return {0: len(value)}
    if not isinstance(value, np.ndarray):
        raise TypeError
    if value.ndim != 1 or value.dtype.char not in _KEPT:
        value = _integers(value)
    return np.ascontiguousarray(value, np.int64).data


def _exact(request: Request, src_sizes: Sequence[int], dst_sizes: Sequence[int]) -> Request:
    """Return the same request as arrays and integers, or raise what is wrong with it."""
    src, dst = _arrays(request, "src", request.src_blocks), _arrays(request, "dst", request.dst_blocks)
    num_tokens = None if request.num_tokens is None else _tokens(request)
    src_first = _firsts(request, "src", request.src_first, src_sizes)
    dst_first = _firsts(request, "dst", request.dst_first, dst_sizes)
    for side, first, arrays, sizes in (("src", src_first, src, src_sizes), ("dst", dst_first, dst, dst_sizes)):
        for what, given in (("blocks", len(arrays)), ("first", len(sizes) if first is None else len(first))):
            if given != len(sizes):
                message = f"{side}_{what} has {given} items, expected {len(sizes)}, one a group of {side}"
                raise _refused(request, side, message, given, bound=len(sizes))
    _positions(request)
    return Request(request.id, src, dst, src_first, dst_first, num_tokens)


def _arrays(request: Request, side: str, lists: Any) -> list[Any]:
    """Return one request's id lists of a side, with every id of a kind that is one."""
    if isinstance(lists, (str, bytes, dict, set)) or not isinstance(lists, Iterable):
        raise _refused(request, side, f"{side}_blocks is {_kind(lists)}, expected one id list a group", lists)
    arrays = []
    for group, ids in enumerate(lists):
        try:
            arrays.append(_integers(ids))
        except _WrongKindError as wrong:
            expected, position, value = wrong.args
            where = "" if position is None else f", position {position}"
            message = f"{side} ids of group {group}{where}: got {_kind(value)}, expected {expected}"
            raise _refused(request, side, message, value, group, position=position) from None
    return arrays


def _firsts(request: Request, side: str, firsts: Any, sizes: Sequence[int]) -> list[int] | None:
    """Return one request's positions of a side."""
    if firsts is None:
        return None
    if isinstance(firsts, (str, bytes, dict, set)) or not isinstance(firsts, Iterable):
        raise _refused(request, side, f"{side}_first is {_kind(firsts)}, expected one position a group", firsts)
    found = []
    for group, value in enumerate(firsts):
        position = _whole(value)
        size = sizes[group] if group < len(sizes) else 1
        if position is None or not 0 <= position * size < item.MOST_TOKENS:
            bound = item.MOST_TOKENS // size
            message = f"{side}_first of group {group} is {_kind(value)}, expected 0 <= position < {bound}"
            raise _refused(request, side, message, value, group, bound)
        found.append(position)
    return found


def _refused(
    request: Request,
    side: str,
    message: str,
    value: object,
    group: int | None = None,
    bound: int | None = None,
    position: int | None = None,
) -> RequestError:
    return RequestError(
        f"request {request.id!r}: {message}",
        request=request.id, side=side, group=group, position=position, value=value, bound=bound,
    )  # fmt: skip


def _integers(ids: Any) -> Any:
    """Return ids as a 1-D integer array whose values survive a cast to int64, or raise what they are instead."""
    if isinstance(ids, Elsewhere):
        return ids
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
    if tokens is None or not 0 <= tokens < item.MOST_TOKENS:
        raise RequestError(
            f"request {request.id!r}: num_tokens is {_kind(request.num_tokens)}, expected 0 <= it < {item.MOST_TOKENS}",
            request=request.id, value=request.num_tokens, bound=item.MOST_TOKENS,
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
