"""What is done with finished descriptors: cut, find strays, copy bytes. Columns are int64 views of uint64 arrays."""

import numpy as np

from kvcompile._jit import entry, jit, move
from kvcompile.kernels import item

__all__ = ["copy", "cut", "outside"]


to_edge = jit(item.to_edge)
last_start = jit(item.last_start)


@entry
def cut(src, dst, length, spans, most, src_edges, dst_edges, cut_src, cut_dst, cut_length, cut_spans):
    """Cut descriptors at ``most`` bytes and at the edges of chunks on either side; return how many there are then.

    Parameters
    ----------
    src, dst, length : int64 arrays [n]
    spans, cut_spans : int64 arrays [requests + 1]
    src_edges, dst_edges : int64 arrays [buffers, 3]
        Base, bytes, and bytes of a chunk (0: none) of each buffer of that side; empty: no edges.
    cut_src, cut_dst, cut_length : int64 arrays
        Of the size that a first call returned, given arrays of size 0: those are not written.
    """
    writes = len(cut_src) > 0
    at, src_buffer, dst_buffer = 0, 0, 0
    for r in range(len(spans) - 1):
        cut_spans[r] = at
        for i in range(spans[r], spans[r + 1]):
            src_buffer = buffer_of(src_edges, src_buffer, src[i])
            dst_buffer = buffer_of(dst_edges, dst_buffer, dst[i])
            done = np.int64(0)
            while done < length[i]:
                nbytes = min(most, length[i] - done)
                if len(src_edges) > 0:
                    edge = src_edges[src_buffer]
                    nbytes = min(nbytes, to_edge(src[i] + done - edge[0], edge[2]))
                if len(dst_edges) > 0:
                    edge = dst_edges[dst_buffer]
                    nbytes = min(nbytes, to_edge(dst[i] + done - edge[0], edge[2]))
                if writes:
                    cut_src[at], cut_dst[at], cut_length[at] = src[i] + done, dst[i] + done, nbytes
                done += nbytes
                at += 1
    cut_spans[len(spans) - 1] = at
    return at


@jit
def buffer_of(edges, guess, address):
    """Return the buffer that holds an address, which mostly is the one that held the last."""
    for k in range(len(edges)):
        buffer = (guess + k) % len(edges)
        offset = address - edges[buffer, 0]
        if 0 <= offset < edges[buffer, 1]:
            return buffer
    return 0


@entry
def outside(address, length, base, nbytes):
    """Return the first row that lies in no single buffer, -1 if there is none.

    Parameters
    ----------
    address, length : uint64 arrays [n]
    base, nbytes : uint64 arrays [buffers]
        Disjoint spans, ascending.
    """
    buffer = 0
    for i in range(len(address)):
        if len(base) > 0 and address[i] - base[buffer] >= nbytes[buffer]:  # not where the last one lay: search
            buffer = last_start(base, 1, address[i])
        # Below the base the difference wraps around, and is above every size.
        if len(base) == 0 or address[i] - base[buffer] > nbytes[buffer]:
            return i
        if length[i] > nbytes[buffer] - (address[i] - base[buffer]):
            return i
    return -1


@entry
def copy(src, dst, length):
    """Copy the bytes of every descriptor: int64 views of uint64 arrays; addresses of this process."""
    for i in range(len(src)):
        move(dst[i], src[i], length[i])
