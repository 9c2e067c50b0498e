"""What is done with finished descriptors on a device, the twin of `descriptors`: cut them, bring them home, copy bytes.

How many descriptors there are is the last of the spans, which only the device knows: grids are as large as can be.
"""

from typing import Any

import numpy as np
from numba import cuda

from kvcompile.kernels import item, known
from kvcompile.kernels.cuda_memory import load, load16, store, store16
from kvcompile.kernels.cuda_scan import THREADS, blocks, here, launch, part, scan, scan_block

to_edge = cuda.jit(device=True)(item.to_edge)
widest = cuda.jit(device=True)(item.widest)

WARP = 32
TILE = 4096
"""Bytes that a warp copies at a time."""

COPY_BLOCKS = 4096
"""Thread blocks of one copy at most: some for each multiprocessor, and each goes on to the next tile."""


def launch_cut(
    stream: Any, program: Any, work: Any, columns: Any, cut_columns: Any, descriptors: int, requests: int, most: int
) -> None:
    """Enqueue the cutting of descriptors at ``most`` bytes and at the edges of chunks, into other columns.

    Parameters
    ----------
    stream : stream of `numba.cuda`
    program, work, columns, cut_columns : int64 arrays on the device
    descriptors, requests : int
        How many descriptors there are at most before cutting; requests.
    most : int
        Bytes; 2**63 - 1 for only the edges.
    """
    launch_offsets(stream, program, work, columns, descriptors, requests, most)
    launch(cut, descriptors, stream, program, work, columns, cut_columns, most)


def launch_bring(stream: Any, work: Any, columns: Any, out: Any, number: int, descriptors: int) -> None:
    """Enqueue the copying of descriptors, as many as the spans in part ``number`` say, to pinned host memory."""
    launch(bring, descriptors, stream, work, columns, out, number)


def launch_copy(
    stream: Any,
    program: Any,
    work: Any,
    columns: Any,
    descriptors: int,
    requests: int,
    staging: int,
    longest: int,
    unpacks: int,
) -> None:
    """Enqueue the copying of all src bytes into a staging buffer, in order and without gaps; or out of it, to dst.

    Parameters
    ----------
    stream : stream of `numba.cuda`
    program, work, columns : int64 arrays on the device
    descriptors, requests : int
        How many descriptors there are at most; requests.
    staging : int
        Address of the buffer, as int64.
    longest : int
        Bytes of the longest descriptor.
    unpacks : int
        0: from src into the buffer; 1: from the buffer to dst.
    """
    launch_offsets(stream, program, work, columns, descriptors, requests, 0)
    tiles = -(-longest // TILE)
    items = min(descriptors * tiles * WARP, COPY_BLOCKS * THREADS)
    launch(copy, items, stream, work, columns, staging, tiles, unpacks)


def launch_offsets(stream, program, work, columns, descriptors, requests, most):
    """Enqueue a scan of what descriptors are cut into or, if ``most`` is 0, of their bytes."""
    launch(weigh, descriptors, stream, program, work, columns, most)
    launch(scan, 1, stream, work, known.SUMS, blocks(descriptors), 0)
    launch(locate, descriptors, stream, program, work, columns, most)
    launch(respan, requests + 1, stream, work, blocks(descriptors))


@cuda.jit(device=True)
def total_of(work):
    """Return the number of descriptors."""
    spans = part(work, known.SPANS)
    return spans[len(spans) - 1]


@cuda.jit(device=True)
def buffer_of(edges, at):
    """Return the buffer that holds an address."""
    for buffer in range(len(edges) // item.EDGE_COLUMNS):
        offset = at - edges[buffer * item.EDGE_COLUMNS + item.EDGE_BASE]
        if 0 <= offset < edges[buffer * item.EDGE_COLUMNS + item.EDGE_NBYTES]:
            return buffer
    return 0


@cuda.jit(device=True)
def to_next(edges, buffer, at):
    """Return the bytes from an address to the next edge of its buffer."""
    if len(edges) == 0:
        return np.int64(2**63 - 1)
    edge = edges[buffer * item.EDGE_COLUMNS : (buffer + 1) * item.EDGE_COLUMNS]
    return to_edge(at - edge[item.EDGE_BASE], edge[item.EDGE_CHUNK])


@cuda.jit(device=True)
def cut_one(program, columns, i, most, cut_columns, at):
    """Cut one descriptor, into columns from ``at`` on unless they are empty; return how many it is then."""
    size, cut_size = len(columns) // 3, len(cut_columns) // 3
    src, dst, length = columns[i], columns[size + i], columns[2 * size + i]
    src_edges, dst_edges = part(program, known.SRC_EDGES), part(program, known.DST_EDGES)
    src_buffer, dst_buffer = buffer_of(src_edges, src), buffer_of(dst_edges, dst)
    done, made = np.int64(0), np.int64(0)
    while done < length:
        nbytes = min(most, length - done)
        nbytes = min(nbytes, to_next(src_edges, src_buffer, src + done))
        nbytes = min(nbytes, to_next(dst_edges, dst_buffer, dst + done))
        if cut_size > 0:
            cut_columns[at + made], cut_columns[cut_size + at + made] = src + done, dst + done
            cut_columns[2 * cut_size + at + made] = nbytes
        done += nbytes
        made += 1
    return made


@cuda.jit(device=True)
def weight(program, work, columns, i, most):
    """Return what a descriptor adds to the offsets: into how many it is cut, or its bytes; 0 beyond the last one."""
    if i >= total_of(work):
        return np.int64(0)
    if most == 0:
        return columns[2 * (len(columns) // 3) + i]
    return cut_one(program, columns, i, most, columns[:0], 0)


@cuda.jit
def weigh(program, work, columns, most):
    """Write the sum of each thread block's weights."""
    _, total = scan_block(weight(program, work, columns, here(), most), 0)
    if cuda.threadIdx.x == 0:
        part(work, known.SUMS)[cuda.blockIdx.x] = total


@cuda.jit
def locate(program, work, columns, most):
    """Write the offset of each descriptor: the sum of the weights before it."""
    i = here()
    before, _ = scan_block(weight(program, work, columns, i, most), 0)
    if i < total_of(work):
        part(work, known.OFFSETS)[i] = part(work, known.SUMS)[cuda.blockIdx.x] + before


@cuda.jit
def respan(work, turns):
    """Write the spans of what the offsets count; ``turns`` is where the scanned sums end."""
    r, spans = here(), part(work, known.SPANS)
    if r >= len(spans):
        return
    offset = part(work, known.SUMS)[turns]
    if spans[r] < total_of(work):
        offset = part(work, known.OFFSETS)[spans[r]]
    part(work, known.CUT_SPANS)[r] = offset


@cuda.jit
def cut(program, work, columns, cut_columns, most):
    """Write descriptors cut at ``most`` bytes and at the edges of chunks."""
    i = here()
    if i < total_of(work):
        cut_one(program, columns, i, most, cut_columns, part(work, known.OFFSETS)[i])


@cuda.jit
def bring(work, columns, out, number):
    """Copy the columns of all descriptors."""
    i, size, room, spans = here(), len(columns) // 3, len(out) // 3, part(work, number)
    if i < spans[len(spans) - 1]:
        for column in range(3):
            out[column * room + i] = columns[column * size + i]


@cuda.jit
def copy(work, columns, staging, tiles, unpacks):
    """Copy the bytes of all descriptors: warp by warp a tile, every tile of every descriptor."""
    size, offsets = len(columns) // 3, part(work, known.OFFSETS)
    thread, lane = here(), here() % WARP
    for n in range(thread // WARP, total_of(work) * tiles, np.int64(cuda.gridDim.x) * (THREADS // WARP)):
        i, begin = n // tiles, n % tiles * TILE
        nbytes = min(columns[2 * size + i] - begin, np.int64(TILE))
        staged = staging + offsets[i] + begin
        if unpacks != 0:
            copy_tile(columns[size + i] + begin, staged, nbytes, lane)
        else:
            copy_tile(staged, columns[i] + begin, nbytes, lane)


@cuda.jit(device=True)
def copy_tile(dst, src, nbytes, lane):
    """Copy bytes with one warp, as wide as can be aligned on both sides; the ends byte by byte."""
    width = widest(dst, src)
    head = min(-dst & (width - 1), nbytes)
    body = max(nbytes - head, 0) // width * width
    if lane < head:
        store(dst + lane, load(src + lane, 1), 1)
    if lane < nbytes - head - body:
        store(dst + head + body + lane, load(src + head + body + lane, 1), 1)
    at, step = head + lane * width, WARP * width
    if width == 16:
        # Four loads under way at a time: one would leave the memory idle.
        while at + 3 * step < head + body:
            a, b = load16(src + at)
            c, d = load16(src + at + step)
            e, f = load16(src + at + 2 * step)
            g, h = load16(src + at + 3 * step)
            store16(dst + at, a, b)
            store16(dst + at + step, c, d)
            store16(dst + at + 2 * step, e, f)
            store16(dst + at + 3 * step, g, h)
            at += 4 * step
        while at < head + body:
            a, b = load16(src + at)
            store16(dst + at, a, b)
            at += step
    else:
        while at < head + body:
            store(dst + at, load(src + at, width), width)
            at += step
