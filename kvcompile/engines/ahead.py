"""Make the next batch ready while one is on the wire. It knows no engine."""

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["ahead"]

_Batch = TypeVar("_Batch")
_Ready = TypeVar("_Ready")


def ahead(batches: Iterable[_Batch], convert: Callable[[_Batch], _Ready]) -> Iterator[_Ready]:
    """Yield what ``convert`` makes of each batch, in order.

    The first is yielded as soon as it is made; every other one is made in another thread while the caller works on the
    one before. So the caller's work has to leave the GIL alone, as the calls of an engine do. A single batch needs no
    thread.
    """
    rest = iter(batches)
    for first in rest:
        ready, following = convert(first), next(rest, None)
        while following is not None:
            later = _pool(os.getpid()).submit(convert, following)
            yield ready
            ready, following = later.result(), next(rest, None)
        yield ready


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Return the one thread that all transfers share: to start one costs more than it saves. A fork has its own."""
    return ThreadPoolExecutor(1, "kvcompile-convert")
