"""The result of a build: columns of addresses and lengths, and which request owns which rows. It moves nothing."""

from collections.abc import Hashable, Iterator

import numpy as np
import numpy.typing as npt

from kvcompile.cache import Cache
from kvcompile.errors import RequestError

__all__ = ["Descriptors"]

UInt64 = npt.NDArray[np.uint64]
Int64 = npt.NDArray[np.int64]


class Descriptors:
    """Contiguous copies, in the order of their requests.

    Attributes
    ----------
    src, dst, length : uint64 arrays [n], contiguous
        Addresses, and bytes to copy.
    spans : int64 array [requests + 1]
        Request ``i`` owns rows ``spans[i]:spans[i+1]``.
    requests : tuple
        The id of each request, in order.
    failed : dict
        Request id -> `RequestError`; such a request owns no rows.
    uncovered : dict
        Request id -> list of (dst group, position) of dst blocks that are not wholly written; no entry: all are.
        Positions are absolute where the request gave positions, else indices in its ``dst_blocks``.
    """

    __slots__ = ("_caches", "_memory", "dst", "failed", "length", "requests", "spans", "src", "uncovered")

    def __init__(
        self,
        src: UInt64,
        dst: UInt64,
        length: UInt64,
        spans: Int64,
        requests: tuple[Hashable, ...],
        failed: dict[Hashable, RequestError] | None = None,
        uncovered: dict[Hashable, list[tuple[int, int]]] | None = None,
    ) -> None:
        self.src = src
        self.dst = dst
        self.length = length
        self.spans = spans
        self.requests = requests
        self.failed = {} if failed is None else failed
        self.uncovered = {} if uncovered is None else uncovered
        self._memory: UInt64 | None = None  # what the columns are thirds of, if `build` may write there again
        self._caches: tuple[Cache, Cache] | None = None

    def __len__(self) -> int:
        return len(self.length)

    def __repr__(self) -> str:
        return (
            f"Descriptors({len(self)} descriptors, {self.nbytes} bytes, {len(self.requests)} requests, "
            f"{len(self.failed)} failed)"
        )

    @property
    def digests(self) -> tuple[str, str] | None:
        """Digests of the src and dst caches that these were compiled for, None if made by hand."""
        return None if self._caches is None else (self._caches[0].digest, self._caches[1].digest)

    @property
    def nbytes(self) -> int:
        """Sum of all lengths, in bytes."""
        return int(self.length.sum(dtype=np.uint64))

    def batches(self, max_descriptors: int | None = None, max_nbytes: int | None = None) -> Iterator["Descriptors"]:
        """Cut into batches that an engine can take.

        Parameters
        ----------
        max_descriptors, max_nbytes : int, optional
            At most so many descriptors, and bytes, in a batch. A descriptor above ``max_nbytes`` stands alone.

        Yields
        ------
        Descriptors
            Zero-copy views in order, with all requests and spans cut to the batch.

        Raises
        ------
        ValueError
            A limit that is no positive integer.
        """
        for name, value in (("max_descriptors", max_descriptors), ("max_nbytes", max_nbytes)):
            positive(name, value)
        return self._batches(max_descriptors, max_nbytes)

    def _batches(self, max_descriptors: int | None, max_nbytes: int | None) -> Iterator["Descriptors"]:
        ends: UInt64 | None = None  # where each ends in bytes, from the first batch on that those limit
        start = 0
        while start < len(self):
            stop = len(self) if max_descriptors is None else min(len(self), start + max_descriptors)
            if max_nbytes is not None and (
                ends is not None or int(self.length[start:stop].sum(dtype=np.uint64)) > max_nbytes
            ):
                ends = np.cumsum(self.length, dtype=np.uint64) if ends is None else ends
                before = int(ends[start] - self.length[start])
                most = min(before + max_nbytes, 2**64 - 1)
                stop = min(stop, max(start + 1, int(np.searchsorted(ends, np.uint64(most), side="right"))))
            yield self._rows(start, stop, np.clip(self.spans, start, stop) - start)
            start = stop

    def _rows(self, start: int, stop: int, spans: Int64) -> "Descriptors":
        """Return a view of some rows, with the spans that belong to them."""
        columns = self.src[start:stop], self.dst[start:stop], self.length[start:stop]
        batch = Descriptors(*columns, spans, self.requests)
        batch._caches = self._caches
        return batch


def positive(name: str, value: int | None) -> None:
    """Refuse a limit that is neither None nor a positive integer (ValueError)."""
    if value is None:
        return
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name} is {value!r}, expected a positive integer or None")
