"""The grids of one build on a device, twins of `check` and `cpu`: check, conflict, cover, mark, scan, write.

One thread, one item, one phase: what a phase needs of another thread block's results, it gets in a later launch. All
data of a build is in two arrays of int64 words, `program` and `work`, whose parts and columns `known` names, and comes
out in a third, `columns`: all src addresses, then all dst addresses, then all lengths.
"""

from typing import Any

import numpy as np
from numba import cuda

from kvcompile.kernels import item, known
from kvcompile.kernels.cuda_check import check, conflict, contest, group_of, settle
from kvcompile.kernels.cuda_scan import blocks, here, launch, part, scan, scan_block

src_blocks_of = cuda.jit(device=True)(item.src_blocks_of)
address = cuda.jit(device=True)(item.address)
is_null = cuda.jit(device=True)(item.is_null)
touches = cuda.jit(device=True)(item.touches)
candidate = cuda.jit(device=True)(item.candidate)
last_start = cuda.jit(device=True)(item.last_start)


def launch_build(
    stream: Any,
    program: Any,
    work: Any,
    columns: Any,
    ids: int,
    requests: int,
    candidates: int,
    covered: int,
    gaps: int,
    merges: int,
) -> None:
    """Enqueue one build.

    Parameters
    ----------
    stream : stream of `numba.cuda`
    program, work, columns : int64 arrays on the device
    ids, requests : int
        How many.
    candidates, covered, gaps, merges : int
        As `known.count_candidates` found.
    """
    launch(check, ids, stream, program, work)
    launch(conflict, ids, stream, program, work)
    launch(contest, ids, stream, program, work)
    launch(settle, requests, stream, program, work)
    launch(cover, covered, stream, program, work)
    turns = blocks(candidates + 1)  # the item after the last closes what is open
    if gaps:
        launch(mark, candidates + 1, stream, program, work)
        launch(scan, 1, stream, work, known.LASTS, turns, 1)
    launch(count, candidates + 1, stream, program, work, gaps)
    launch(scan, 1, stream, work, known.SUMS, turns, 0)
    launch(write, candidates + 1, stream, program, work, columns, gaps, merges)
    if merges:
        launch(close, candidates, stream, work, columns)


@cuda.jit(device=True)
def is_good(work, r):
    """Return whether a request's status is OK."""
    return part(work, known.STATUS)[r * item.STATUS_COLUMNS + item.CODE] == item.OK


@cuda.jit(device=True)
def base_of(program, work, side, r, group):
    """Return where the ids of a list begin."""
    src_groups = len(part(program, known.SRC_GROUPS)) // item.GROUP_COLUMNS
    dst_groups = len(part(program, known.DST_GROUPS)) // item.GROUP_COLUMNS
    number = r * src_groups + group
    if side != 0:
        number = len(part(work, known.NUM_TOKENS)) * src_groups + r * dst_groups + group
    return part(work, known.AT)[number]


@cuda.jit
def cover(program, work):
    """Mark every dst block of a good request whose tokens are not wholly given, not null, on the src side."""
    covers, pairs = part(work, known.COVERS), part(program, known.PAIRS)
    k = here()
    if k >= covers[len(covers) - 1]:
        return
    line_number = last_start(covers, 1, k)
    count = len(pairs) // item.PAIR_COLUMNS
    r, p = line_number // count, line_number % count
    if not is_good(work, r):
        return
    j = k - covers[line_number]
    pair = pairs[p * item.PAIR_COLUMNS : (p + 1) * item.PAIR_COLUMNS]
    line = part(work, known.ALIGNED)[line_number * item.ALIGN_COLUMNS : (line_number + 1) * item.ALIGN_COLUMNS]
    src_group, dst_group = group_of(program, 0, pair[item.SRC_GROUP]), group_of(program, 1, pair[item.DST_GROUP])
    # A block of state is one unit: it has no tokens to be cut at.
    src_size, dst_size, num_tokens = pair[item.SRC_SIZE], pair[item.DST_SIZE], part(work, known.NUM_TOKENS)[r]
    if pair[item.STATE] != 0:
        src_size, dst_size, num_tokens = np.int64(1), np.int64(1), np.int64(-1)
    ids, marks = part(work, known.IDS), part(work, known.MARKS)
    s = base_of(program, work, 0, r, pair[item.SRC_GROUP])
    d = base_of(program, work, 1, r, pair[item.DST_GROUP]) + j
    if is_null(ids[d], dst_group[item.HAS_NULL], dst_group[item.NULL]):
        return
    start, stop = src_blocks_of(j - line[item.DST_SHIFT], src_size, dst_size, num_tokens)
    start, stop = start + line[item.SRC_SHIFT], stop + line[item.SRC_SHIFT]
    covered = start >= line[item.SRC_START] and stop <= line[item.SRC_STOP]
    if covered and src_group[item.HAS_NULL] != 0:
        for i in range(start, stop):
            covered = covered and ids[s + i] != src_group[item.NULL]
    if not covered:
        marks[d - (len(ids) - len(marks))] = 1


@cuda.jit(device=True)
def piece(program, work, segment, i):
    """Return what a candidate of a segment is: (1 if its blocks are there, not null; src, dst, length, tail, kind)."""
    rows, lanes = part(program, known.ROWS), part(program, known.LANES)
    segments = part(work, known.SEGMENTS)
    count = max(len(lanes) // item.LANE_COLUMNS, 1)
    r, number = segment // count, segment % count
    lane = lanes[number * item.LANE_COLUMNS : (number + 1) * item.LANE_COLUMNS]
    at = lane[item.LANE_START] * item.ROW_COLUMNS
    row_number, inner, period = candidate(
        i - segments[segment * known.SEGMENT_COLUMNS + known.SEGMENT_AT],
        lane[item.LANE_STOP] - lane[item.LANE_START],
        rows[at + item.COUNT],
    )
    period += segments[segment * known.SEGMENT_COLUMNS + known.SEGMENT_PERIOD]
    at += row_number * item.ROW_COLUMNS
    row = rows[at : at + item.ROW_COLUMNS]
    classes = part(program, known.CLASSES)
    c = row[item.CLASS]
    kind = classes[c * item.CLASS_COLUMNS : (c + 1) * item.CLASS_COLUMNS]
    window = (r * (len(classes) // item.CLASS_COLUMNS) + c) * known.WINDOW_COLUMNS
    windows = part(work, known.WINDOWS)
    if period < windows[window + known.WINDOW_START] or period >= windows[window + known.WINDOW_STOP]:
        return 0, np.int64(0), np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    pairs, p = part(program, known.PAIRS), kind[item.CLASS_PAIR]
    pair = pairs[p * item.PAIR_COLUMNS : (p + 1) * item.PAIR_COLUMNS]
    line_number = r * (len(pairs) // item.PAIR_COLUMNS) + p
    line = part(work, known.ALIGNED)[line_number * item.ALIGN_COLUMNS : (line_number + 1) * item.ALIGN_COLUMNS]
    ids = part(work, known.IDS)
    s = base_of(program, work, 0, r, pair[item.SRC_GROUP]) + line[item.SRC_SHIFT]
    d = base_of(program, work, 1, r, pair[item.DST_GROUP]) + line[item.DST_SHIFT]
    src_block = ids[s + period * kind[item.SRC_STEP] + kind[item.SRC_PHASE]]
    dst_block = ids[d + period * kind[item.DST_STEP] + kind[item.DST_PHASE]]
    src_group, dst_group = group_of(program, 0, pair[item.SRC_GROUP]), group_of(program, 1, pair[item.DST_GROUP])
    exists = 1
    if is_null(src_block, src_group[item.HAS_NULL], src_group[item.NULL]):
        exists = 0
    if is_null(dst_block, dst_group[item.HAS_NULL], dst_group[item.NULL]):
        exists = 0
    src_at = address(row[item.SRC_ORIGIN], src_block, row[item.SRC_STRIDE]) + inner * row[item.SRC_INNER]
    dst_at = address(row[item.DST_ORIGIN], dst_block, row[item.DST_STRIDE]) + inner * row[item.DST_INNER]
    return exists, src_at, dst_at, row[item.LENGTH], row[item.TAIL], lane[item.LANE_KIND]


@cuda.jit(device=True)
def segment_of(work, i):
    """Return the segment, one lane of one request, that candidate ``i`` belongs to; the last one holds none."""
    return last_start(part(work, known.SEGMENTS), known.SEGMENT_COLUMNS, i)


@cuda.jit(device=True)
def request_of(program, segment):
    """Return the request of a segment."""
    return segment // max(len(part(program, known.LANES)) // item.LANE_COLUMNS, 1)


@cuda.jit(device=True)
def candidates_of(work):
    """Return the number of candidates."""
    segments = part(work, known.SEGMENTS)
    return segments[len(segments) - known.SEGMENT_COLUMNS + known.SEGMENT_AT]


@cuda.jit
def mark(program, work):
    """Note the last candidate of each thread block that exists."""
    i, found = here(), np.int64(-1)
    if i < candidates_of(work):
        exists, _, _, _, _, _ = piece(program, work, segment_of(work, i), i)
        if exists != 0:
            found = i
    _, last = scan_block(found, 1)
    if cuda.threadIdx.x == 0:
        part(work, known.LASTS)[cuda.blockIdx.x] = last


@cuda.jit(device=True)
def opens(program, work, i, gaps):
    """Look at a candidate and the one that exists before it, across requests. All threads of a block take part.

    Returns
    -------
    opened : int
        1 if it exists, its request is good, and it does not continue the one before it in its lane.
    segment, before : int64
        Its segment; the candidate before it, -1 if none.
    src, dst, length : int64
        What it copies.
    """
    segment, exists = segment_of(work, i), 0
    src_at, dst_at, length, kind = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    if i < candidates_of(work):
        exists, src_at, dst_at, length, _, kind = piece(program, work, segment, i)
    before = i - 1
    if gaps != 0:
        before, _ = scan_block(i if exists != 0 else np.int64(-1), 1)
        before = max(before, part(work, known.LASTS)[cuda.blockIdx.x])
    if exists == 0 or not is_good(work, request_of(program, segment)):
        return 0, segment, before, src_at, dst_at, length
    start = part(work, known.SEGMENTS)[segment * known.SEGMENT_COLUMNS + known.SEGMENT_AT]
    if kind != item.APART and before >= start:
        _, src_before, dst_before, nbytes, tail, _ = piece(program, work, segment, before)
        if touches(src_at, dst_at, src_before + nbytes, dst_before + nbytes, tail):
            return 0, segment, before, src_at, dst_at, length
    return 1, segment, before, src_at, dst_at, length


@cuda.jit
def count(program, work, gaps):
    """Write how many descriptors the candidates of each thread block open."""
    opened, _, _, _, _, _ = opens(program, work, here(), gaps)
    total = cuda.syncthreads_count(opened)
    if cuda.threadIdx.x == 0:
        part(work, known.SUMS)[cuda.blockIdx.x] = total


@cuda.jit
def write(program, work, columns, gaps, merges):
    """Write the descriptors, and the spans. If some may merge, lengths are still the src addresses of their ends."""
    i, size = here(), len(columns) // 3
    opened, segment, before, src_at, dst_at, length = opens(program, work, i, gaps)
    offset, _ = scan_block(np.int64(opened), 0)
    offset += part(work, known.SUMS)[cuda.blockIdx.x]
    if i > candidates_of(work):
        return
    if opened != 0:
        columns[offset], columns[size + offset] = src_at, dst_at
        if merges == 0:
            columns[2 * size + offset] = length
    segments, spans, r = part(work, known.SEGMENTS), part(work, known.SPANS), request_of(program, segment)
    first = i == segments[segment * known.SEGMENT_COLUMNS + known.SEGMENT_AT]
    # The piece before the one that opens, or that is the first of its lane, is the last of its descriptor.
    if merges != 0 and before >= 0 and (first or opened != 0):
        last = segment_of(work, before)
        if is_good(work, request_of(program, last)):
            _, src_before, _, nbytes, _, _ = piece(program, work, last, before)
            columns[2 * size + offset - 1] = src_before + nbytes
    # Requests that have no candidates begin where the next one does.
    columns_a_request = known.SEGMENT_COLUMNS * max(len(part(program, known.LANES)) // item.LANE_COLUMNS, 1)
    while first and r >= 0 and segments[r * columns_a_request + known.SEGMENT_AT] == i:
        spans[r] = offset
        r -= 1


@cuda.jit
def close(work, columns):
    """Turn the ends that `write` left into lengths."""
    i, size, spans = here(), len(columns) // 3, part(work, known.SPANS)
    if i < spans[len(spans) - 1]:
        columns[2 * size + i] -= columns[i]
