"""What is done with finished descriptors on a device, the twin of `descriptors`: cut them, bring them home, copy bytes.

How many descriptors there are is the last of the spans, which only the device knows: grids are as large as can be.
"""

import numpy as np
from numba import cuda, int64

from kvcompile.kernels import item, known
from kvcompile.kernels.cuda_memory import begin, get, load, load16, part, store, store16, words
from kvcompile.kernels.cuda_scan import THREADS, WIDE, Run, blocks, here, launch, scan, scan_block, threads

to_edge = cuda.jit(device=True)(item.to_edge)
widest = cuda.jit(device=True)(item.widest)

TEAM = 32
"""Threads that copy a tile together, at most: a warp. Short descriptors have smaller teams, so that none is idle."""

EACH = 64
"""Bytes that a thread copies before the next tile: four loads of 16 bytes, under way at once."""

TILE = 2 * TEAM * EACH
"""Bytes of a descriptor that a team copies at a time."""

COPY_BLOCKS = 4096
"""Thread blocks of one copy at most: some for each multiprocessor, and each goes on to the next tile."""


def launch_cut(
    run: Run,
    program: int,
    work: int,
    columns: int,
    size: int,
    cut_columns: int,
    cut_size: int,
    most: int,
    report: int,
) -> None:
    """Enqueue the cutting of descriptors at ``most`` bytes and at the edges of chunks, into other columns.

    Parameters
    ----------
    run : callable
        See `cuda_scan.Run`.
    program, work, columns, cut_columns : int
        Addresses on the device.
    size, cut_size : int
        How many descriptors there are at most, before and after cutting.
    most : int
        Bytes; 2**63 - 1 for only the edges.
    report : int
        Address of pinned memory for ``work`` from `known.SPANS` on.
    """
    launch_offsets(run, program, work, columns, size, most)
    launch(run, cut, max(size, 1), program, work, columns, size, cut_columns, cut_size, most, blocks(size), report)


def launch_bring(run: Run, work: int, columns: int, out: int, size: int, number: int) -> None:
    """Enqueue the copying of descriptors, as many as the spans in part ``number`` say, to pinned host memory."""
    launch(run, bring, size, work, columns, out, size, number)


def launch_copy(
    run: Run,
    program: int,
    work: int,
    columns: int,
    size: int,
    staging: int,
    longest: int,
    unpacks: int,
    report: int,
) -> None:
    """Enqueue the copying of all src bytes into a staging buffer, in order and without gaps; or out of it, to dst.

    Parameters
    ----------
    run : callable
        See `cuda_scan.Run`.
    program, work, columns : int
        Addresses on the device.
    size : int
        How many descriptors there are at most.
    staging : int
        Address of the buffer, as int64.
    longest : int
        Bytes of the longest descriptor.
    unpacks : int
        0: from src into the buffer; 1: from the buffer to dst.
    report : int
        Address of pinned memory for ``work`` from `known.SPANS` on.
    """
    launch_offsets(run, program, work, columns, size, 0)
    tiles, team = -(-longest // TILE), 4
    while team < TEAM and team * EACH < longest:
        team *= 2
    items = max(min(size * tiles * team, COPY_BLOCKS * THREADS), 1)
    launch(run, copy, items, work, columns, size, staging, tiles, team, unpacks, blocks(size), report)


def launch_offsets(run: Run, program: int, work: int, columns: int, size: int, most: int) -> None:
    """Enqueue a scan of what descriptors are cut into or, if ``most`` is 0, of their bytes."""
    launch(run, weigh, size, program, work, columns, size, most)
    run(scan, 1, WIDE, work, known.SUMS, blocks(size), 0)
    launch(run, locate, size, program, work, columns, size, most)


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
def cut_one(program, columns, size, i, most, cut_columns, cut_size, at):
    """Cut one descriptor, into columns from ``at`` on unless they are empty; return how many it is then."""
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
def weight(program, work, columns, size, i, most):
    """Return what a descriptor adds to the offsets: into how many it is cut, or its bytes; 0 beyond the last one."""
    if i >= total_of(work):
        return np.int64(0)
    given = words(columns, 3 * size)
    if most == 0:
        return given[2 * size + i]
    return cut_one(program, given, size, i, most, given, 0, 0)


@cuda.jit
def weigh(program, work, columns, size, most):
    """Write the sum of each thread block's weights."""
    shared = cuda.shared.array((2, THREADS), int64)
    _, total = scan_block(shared, weight(program, work, columns, size, here(), most), 0)
    if cuda.threadIdx.x == 0:
        part(work, known.SUMS)[cuda.blockIdx.x] = total


@cuda.jit
def locate(program, work, columns, size, most):
    """Write the offset of each descriptor: the sum of the weights before it."""
    shared, i = cuda.shared.array((2, THREADS), int64), here()
    before, _ = scan_block(shared, weight(program, work, columns, size, i, most), 0)
    if i < total_of(work):
        part(work, known.OFFSETS)[i] = part(work, known.SUMS)[cuda.blockIdx.x] + before


@cuda.jit(device=True)
def respan(work, turns, report):
    """Write the spans of what the offsets count, also for the host; ``turns`` is where the scanned sums end."""
    spans, offsets, cut_spans = part(work, known.SPANS), begin(work, known.OFFSETS), part(work, known.CUT_SPANS)
    told = words(report + begin(work, known.CUT_SPANS) - begin(work, known.SPANS), len(spans))
    for r in range(here(), len(spans), threads()):
        offset = get(begin(work, known.SUMS), turns)
        if spans[r] < total_of(work):
            offset = get(offsets, spans[r])
        cut_spans[r], told[r] = offset, offset


@cuda.jit
def cut(program, work, columns, size, cut_columns, cut_size, most, turns, report):
    """Write descriptors cut at ``most`` bytes and at the edges of chunks."""
    respan(work, turns, report)
    i = here()
    if i < total_of(work):
        out = words(cut_columns, 3 * cut_size)
        cut_one(program, words(columns, 3 * size), size, i, most, out, cut_size, part(work, known.OFFSETS)[i])


@cuda.jit
def bring(work, columns, out, size, number):
    """Copy the columns of all descriptors."""
    i, spans, source, to = here(), part(work, number), words(columns, 3 * size), words(out, 3 * size)
    if i < spans[len(spans) - 1]:
        for column in range(3):
            to[column * size + i] = source[column * size + i]


@cuda.jit
def copy(work, columns, size, staging, tiles, team, unpacks, turns, report):
    """Copy the bytes of all descriptors: team by team a tile, every tile of every descriptor."""
    respan(work, turns, report)
    offsets, total = begin(work, known.OFFSETS), total_of(work) * tiles
    lane = here() % team
    for n in range(here() // team, total, threads() // team):
        i, start = n, np.int64(0)
        if tiles > 1:
            i = n // tiles
            start = (n - i * tiles) * TILE
        nbytes = min(get(columns, 2 * size + i) - start, np.int64(TILE))
        staged = staging + get(offsets, i) + start
        if unpacks != 0:
            copy_tile(get(columns, size + i) + start, staged, nbytes, lane, team)
        else:
            copy_tile(staged, get(columns, i) + start, nbytes, lane, team)


@cuda.jit(device=True)
def copy_tile(dst, src, nbytes, lane, team):
    """Copy bytes with a team of threads, as wide as can be aligned on both sides; the ends byte by byte."""
    width = widest(dst, src)
    head = min(-dst & (width - 1), nbytes)
    body = max(nbytes - head, 0) & -width
    for at in range(lane, head, team):
        store(dst + at, load(src + at, 1), 1)
    for at in range(head + body + lane, nbytes, team):
        store(dst + at, load(src + at, 1), 1)
    at, step, end = head + lane * width, team * width, head + body
    if width == 16:
        # Four loads under way at a time: one would leave the memory idle.
        while at + 3 * step < end:
            a, b = load16(src + at)
            c, d = load16(src + at + step)
            e, f = load16(src + at + 2 * step)
            g, h = load16(src + at + 3 * step)
            store16(dst + at, a, b)
            store16(dst + at + step, c, d)
            store16(dst + at + 2 * step, e, f)
            store16(dst + at + 3 * step, g, h)
            at += 4 * step
        while at < end:
            a, b = load16(src + at)
            store16(dst + at, a, b)
            at += step
    else:
        while at < end:
            store(dst + at, load(src + at, width), width)
            at += step
