"""Build a batch over several plans: a request that any of them refuses is sent by none."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, overload

import numpy as np

from kvcompile.descriptors import Descriptors
from kvcompile.errors import RequestError
from kvcompile.plan import Plan
from kvcompile.request import Request

__all__ = ["build_all"]

Key = TypeVar("Key", bound=Hashable)


@overload
def build_all(
    plans: Mapping[Key, Plan],
    requests: Mapping[Key, Iterable[Request]],
    *,
    sort: bool = False,
    max_length: int | None = None,
) -> dict[Key, Descriptors]: ...
@overload
def build_all(
    plans: Sequence[Plan],
    requests: Sequence[Iterable[Request]] | Mapping[int, Iterable[Request]],
    *,
    sort: bool = False,
    max_length: int | None = None,
) -> list[Descriptors]: ...
def build_all(
    plans: Mapping[Key, Plan] | Sequence[Plan],
    requests: Any,
    *,
    sort: bool = False,
    max_length: int | None = None,
) -> dict[Key, Descriptors] | list[Descriptors]:
    """Build requests that span several plans: the ranks of a deployment, or its pipeline stages.

    The ids of a request differ from plan to plan (each pair of ranks has its own block tables), so each plan gets its
    own requests; those with equal ``id`` are parts of one.

    Parameters
    ----------
    plans : mapping of key to Plan, or sequence of Plan
    requests : mapping of key to requests, or sequence of requests
        For each plan. Plans without requests may be left out of a mapping.
    sort, max_length
        As for `Plan.build`.

    Returns
    -------
    dict of key to Descriptors, or list
        One for each plan. A request that one plan refuses owns no rows in any: ``failed`` says why in all that have
        it, with the plan's own error where it was refused.

    Raises
    ------
    ValueError
        Requests for a plan that is not there; another number of requests than plans; and as `Plan.build`.
    """
    keyed: dict[Any, Plan] = dict(plans) if isinstance(plans, Mapping) else dict(enumerate(plans))
    given: dict[Any, Iterable[Request]]
    if isinstance(requests, Mapping):
        given = dict(requests)
        if unknown := [key for key in given if key not in keyed]:
            raise ValueError(f"requests: no plan has key {unknown[0]!r}, expected one of {list(keyed)[:5]}")
    elif isinstance(plans, Mapping):
        raise ValueError(f"requests is a {type(requests).__name__}, expected a mapping with the keys of plans")
    else:
        given = dict(enumerate(requests))
        if len(given) != len(keyed):
            raise ValueError(f"requests has {len(given)} items, expected {len(keyed)}, one for each plan")
    built = {key: plan.build(given.get(key, ()), sort=sort, max_length=max_length) for key, plan in keyed.items()}
    refused: dict[Hashable, tuple[Any, RequestError]] = {}
    for key, descriptors in built.items():
        for request, error in descriptors.failed.items():
            refused.setdefault(request, (key, error))
    if refused:
        for key, descriptors in built.items():
            _withdraw(key, descriptors, refused)
    return built if isinstance(plans, Mapping) else list(built.values())


def _withdraw(key: Any, descriptors: Descriptors, refused: dict[Hashable, tuple[Any, RequestError]]) -> None:
    """Take out of one plan's descriptors what another plan refused."""
    taken = np.array([name in refused and name not in descriptors.failed for name in descriptors.requests], bool)
    if not taken.any():
        return
    for name in np.flatnonzero(taken).tolist():
        request = descriptors.requests[name]
        where, error = refused[request]
        descriptors.failed[request] = RequestError(
            f"request {request!r}: refused by plan {where!r}, so plan {key!r} sends nothing of it: {error}",
            request=request, side=error.side, group=error.group, position=error.position, value=error.value,
            bound=error.bound,
        )  # fmt: skip
        descriptors.uncovered.pop(request, None)
    sizes = np.diff(descriptors.spans)
    stays = np.repeat(~taken, sizes)
    kept = int(stays.sum())
    for name in ("src", "dst", "length"):
        column = getattr(descriptors, name)
        column[:kept] = column[stays]
        setattr(descriptors, name, column[:kept])
    descriptors.spans = np.concatenate([[0], np.cumsum(np.where(taken, 0, sizes))]).astype(np.int64)
