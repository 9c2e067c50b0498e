"""Every error that kvcompile raises on purpose. Each raiser says what, where, expected and got."""

from collections.abc import Hashable, Iterable

__all__ = ["HandshakeError", "KVCompileError", "LayoutError", "RequestError", "TransferError"]


class KVCompileError(Exception):
    """Base of all errors of this library."""


class LayoutError(KVCompileError):
    """A layout that contradicts itself, or two layouts that do not hold the same tensors."""


class RequestError(KVCompileError):
    """A request that cannot be built; its neighbours in the batch are not affected.

    Attributes
    ----------
    request : hashable
        ``Request.id``.
    side : "src", "dst" or None
    group : int or None
        Group number of that side's own cache.
    position : int or None
        Index in the list that was given.
    value : object
        What was found there.
    bound : int or None
        What the value had to stay below, or the count that was expected.
    """

    def __init__(
        self,
        message: str,
        *,
        request: Hashable = None,
        side: str | None = None,
        group: int | None = None,
        position: int | None = None,
        value: object = None,
        bound: int | None = None,
    ) -> None:
        super().__init__(message)
        self.request = request
        self.side = side
        self.group = group
        self.position = position
        self.value = value
        self.bound = bound


class HandshakeError(KVCompileError):
    """Bytes of a peer that are no valid cache of this version, or a peer that is not the one a plan was compiled for.

    Attributes
    ----------
    requests, complete : tuple
        Where a transfer was refused, as for `TransferError`: ids that may be incomplete, and those that are not.
    """

    def __init__(self, message: str, requests: Iterable[Hashable] = (), complete: Iterable[Hashable] = ()) -> None:
        super().__init__(message)
        self.requests = tuple(requests)
        self.complete = tuple(complete)


class TransferError(KVCompileError):
    """A transfer that failed or was not attempted in full.

    Attributes
    ----------
    requests : tuple
        Ids of the requests whose bytes may be incomplete.
    complete : tuple
        Ids of the requests that are certainly complete.
    barred : tuple of (int, int)
        Where nothing was sent because of it: half-open ranges of dst addresses at which bytes of an earlier attempt may
        still land.
    """

    def __init__(
        self,
        message: str,
        requests: Iterable[Hashable] = (),
        complete: Iterable[Hashable] = (),
        barred: Iterable[tuple[int, int]] = (),
    ) -> None:
        super().__init__(message)
        self.requests = tuple(requests)
        self.complete = tuple(complete)
        self.barred = tuple(barred)
