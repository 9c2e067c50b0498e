"""How connectors build descriptors today, written from their description: what the library is measured against.

For every region the block ids are grouped anew into contiguous runs, and each copy is appended to Python
lists.  One payload a region, contiguous and cut by the ratio of the TP sizes, is all it knows; nothing is checked.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvcompile import Cache, Region

__all__ = ["Span", "build", "payload", "spans"]


class Span(NamedTuple):
    """One region of both sides as a connector sees it: addresses and bytes, no heads and no tokens."""

    group: int
    src_base: int
    src_stride: int
    dst_base: int
    dst_stride: int
    src_offset: int
    dst_offset: int
    length: int


def payload(cache: Cache, region: Region) -> int:
    """Return the bytes of one block of a region, without padding."""
    total = 0
    for field in region.fields:
        start, stop = cache.shard(field)
        total += (stop - start) * field.tokens * field.cell_nbytes
    return total


def spans(src: Cache, dst: Cache) -> list[Span]:
    """Pair the regions by position and find each rank's piece of a block from the ratio of the TP sizes."""
    found = []
    for src_region, dst_region in zip(src.regions, dst.regions, strict=True):
        src_nbytes, dst_nbytes = payload(src, src_region), payload(dst, dst_region)
        src_offset = dst_offset = 0
        if src.tp_size > dst.tp_size:
            dst_offset = src.tp_rank % (src.tp_size // dst.tp_size) * src_nbytes
        elif src.tp_size < dst.tp_size:
            src_offset = dst.tp_rank % (dst.tp_size // src.tp_size) * dst_nbytes
        found.append(
            Span(
                src_region.group,
                src_region.base,
                src_region.block_stride,
                dst_region.base,
                dst_region.block_stride,
                src_offset,
                dst_offset,
                min(src_nbytes, dst_nbytes),
            )
        )
    return found


def contiguous_runs(src_ids: list[int], dst_ids: list[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Cut both id lists wherever either stops counting up by one; every NumPy call converts the lists anew."""
    cuts = np.nonzero((np.diff(src_ids) != 1) | (np.diff(dst_ids) != 1))[0] + 1
    return [run.tolist() for run in np.split(src_ids, cuts)], [run.tolist() for run in np.split(dst_ids, cuts)]


def build(
    regions: list[Span], src_lists: Sequence[list[int]], dst_lists: Sequence[list[int]]
) -> tuple[list[int], list[int], list[int]]:
    """Return source addresses, destination addresses and lengths of all copies, as lists; ids are one list a group."""
    src_addresses: list[int] = []
    dst_addresses: list[int] = []
    lengths: list[int] = []
    for span in regions:
        src_runs, dst_runs = contiguous_runs(src_lists[span.group], dst_lists[span.group])
        src_base, src_stride = span.src_base + span.src_offset, span.src_stride
        dst_base, dst_stride = span.dst_base + span.dst_offset, span.dst_stride
        length = span.length
        whole = length == src_stride == dst_stride
        for src_run, dst_run in zip(src_runs, dst_runs, strict=True):
            if whole:
                src_addresses.append(src_base + src_run[0] * src_stride)
                dst_addresses.append(dst_base + dst_run[0] * dst_stride)
                lengths.append(length * len(src_run))
            else:
                for src_id, dst_id in zip(src_run, dst_run, strict=True):
                    src_addresses.append(src_base + src_id * src_stride)
                    dst_addresses.append(dst_base + dst_id * dst_stride)
                    lengths.append(length)
    return src_addresses, dst_addresses, lengths
