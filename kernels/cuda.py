"""The grids of one build on a device, twins of `check` and `cpu`: settle, cover, then spread; or mark, count, write.

One thread, one item, one phase: what a phase needs of another thread block's results, it gets in a later launch. All
data of a build is in two arrays of int64 words, `program` and `work`, whose parts and columns `known` names, and comes
out in a third, `columns`: all src addresses, then all dst addresses, then all lengths, ``size`` of each. What the host
reads, the last launch writes to pinned memory. Kernels take addresses and other integers, no arrays.
"""

import numpy as np
from numba import cuda, int64

from kvcompile.kernels import item, known
from kvcompile.kernels.cuda_check import group_of, launch_check
from kvcompile.kernels.cuda_memory import begin, get, line, part, size_of, words
from kvcompile.kernels.cuda_scan import THREADS, WIDE, Run, blocks, here, launch, scan, scan_block, threads

src_blocks_of = cuda.jit(device=True)(item.src_blocks_of)
address = cuda.jit(device=True)(item.address)
is_null = cuda.jit(device=True)(item.is_null)
touches = cuda.jit(device=True)(item.touches)
candidate = cuda.jit(device=True)(item.candidate)
last_start = cuda.jit(device=True)(item.last_start)


def launch_build(
    run: Run,
    program: int,
    work: int,
    given: int,
    taken: int,
    columns: int,
    report: int,
    told: int,
    ids: int,
    candidates: int,
    covered: int,
    gaps: int,
    merges: int,
) -> None:
    """Enqueue one build.

    Parameters
    ----------
    run : callable
        See `cuda_scan.Run`.
    program, work, columns : int
        Addresses on the device; the columns have room for all candidates, and may be pinned memory if nothing merges.
    given, taken : int
        Address of what the host knows, in pinned memory; how many words of it ``work`` begins with.
    report, told : int
        Address of pinned memory for ``work`` from `known.SPANS` on; how many words of it.
    ids : int
        How many.
    candidates, covered, gaps, merges : int
        As `known.count_candidates` found.
    """
    launch_check(run, program, work, given, taken, ids)
    launch(run, cover, covered, program, work)
    if not gaps and not merges:
        launch(run, spread, max(candidates, 1), program, work, columns, candidates, report, told)
        return
    turns = blocks(candidates + 1)  # the item after the last closes what is open
    if gaps:
        launch(run, mark, candidates + 1, program, work)
        run(scan, 1, WIDE, work, known.LASTS, turns, 1)
    launch(run, count, candidates + 1, program, work, gaps)
    run(scan, 1, WIDE, work, known.SUMS, turns, 0)
    launch(run, write, candidates + 1, program, work, columns, candidates, gaps, merges)
    launch(run, close, candidates, work, columns, candidates, merges, report, told)


@cuda.jit(device=True)
def is_good(work, r):
    """Return whether a request's status is OK."""
    return get(begin(work, known.STATUS), r * item.STATUS_COLUMNS + item.CODE) == item.OK


@cuda.jit(device=True)
def tell(work, report, told):
    """Write what the host reads."""
    source, to = words(begin(work, known.SPANS), told), words(report, told)
    for k in range(here(), told, threads()):
        to[k] = source[k]


@cuda.jit(device=True)
def base_of(program, work, side, r, group):
    """Return the address of the ids of a list."""
    src_groups = size_of(program, known.SRC_GROUPS) // item.GROUP_COLUMNS
    dst_groups = size_of(program, known.DST_GROUPS) // item.GROUP_COLUMNS
    number = r * src_groups + group
    if side != 0:
        number = size_of(work, known.NUM_TOKENS) * src_groups + r * dst_groups + group
    return begin(work, known.IDS) + 8 * get(begin(work, known.AT), number)


@cuda.jit
def cover(program, work):
    """Mark every dst block of a good request whose tokens are not wholly given, not null, on the src side."""
    covers, k = part(work, known.COVERS), here()
    if k >= covers[len(covers) - 1]:
        return
    line_number = last_start(covers, 1, k)
    count = size_of(program, known.PAIRS) // item.PAIR_COLUMNS
    r, p = line_number // count, line_number % count
    if not is_good(work, r):
        return
    j = k - covers[line_number]
    pair = line(begin(program, known.PAIRS), item.PAIR_COLUMNS, p)
    shifts = line(begin(work, known.ALIGNED), item.ALIGN_COLUMNS, line_number)
    src_group = group_of(program, 0, get(pair, item.SRC_GROUP))
    dst_group = group_of(program, 1, get(pair, item.DST_GROUP))
    # A block of state is one unit: it has no tokens to be cut at.
    src_size, dst_size = get(pair, item.SRC_SIZE), get(pair, item.DST_SIZE)
    num_tokens = get(begin(work, known.NUM_TOKENS), r)
    if get(pair, item.STATE) != 0:
        src_size, dst_size, num_tokens = np.int64(1), np.int64(1), np.int64(-1)
    s = base_of(program, work, 0, r, get(pair, item.SRC_GROUP))
    d = base_of(program, work, 1, r, get(pair, item.DST_GROUP)) + 8 * j
    if is_null(get(d, 0), get(dst_group, item.HAS_NULL), get(dst_group, item.NULL)):
        return
    start, stop = src_blocks_of(j - get(shifts, item.DST_SHIFT), src_size, dst_size, num_tokens)
    start, stop = start + get(shifts, item.SRC_SHIFT), stop + get(shifts, item.SRC_SHIFT)
    covered = start >= get(shifts, item.SRC_START) and stop <= get(shifts, item.SRC_STOP)
    if covered and get(src_group, item.HAS_NULL) != 0:
        for i in range(start, stop):
            covered = covered and get(s, i) != get(src_group, item.NULL)
    if not covered:
        marks = part(work, known.MARKS)
        marks[(d - begin(work, known.IDS)) // 8 - (size_of(work, known.IDS) - len(marks))] = 1


@cuda.jit(device=True)
def segment_of(work, i):
    """Return the segment, one lane of one request, that candidate ``i`` belongs to; the last one holds none."""
    return last_start(part(work, known.SEGMENTS), known.SEGMENT_COLUMNS, i)


@cuda.jit(device=True)
def lanes_of(program):
    """Return how many segments a request has."""
    return max(size_of(program, known.LANES) // item.LANE_COLUMNS, 1)


@cuda.jit(device=True)
def candidates_of(work):
    """Return the number of candidates."""
    size = size_of(work, known.SEGMENTS)
    return get(begin(work, known.SEGMENTS), size - known.SEGMENT_COLUMNS + known.SEGMENT_AT)


@cuda.jit(device=True)
def piece(program, work, number, r, i, gaps):
    """Return what a candidate of a segment is: (1 if its blocks are there, not null; src, dst, length, tail, kind)."""
    segment = line(begin(work, known.SEGMENTS), known.SEGMENT_COLUMNS, number)
    lane = line(begin(program, known.LANES), item.LANE_COLUMNS, number - r * lanes_of(program))
    first = get(lane, item.LANE_START)
    row = line(begin(program, known.ROWS), item.ROW_COLUMNS, first)
    row_number, inner, period = candidate(
        i - get(segment, known.SEGMENT_AT), get(lane, item.LANE_STOP) - first, get(row, item.COUNT)
    )
    period += get(segment, known.SEGMENT_PERIOD)
    row = line(row, item.ROW_COLUMNS, row_number)
    c = get(row, item.CLASS)
    kind = line(begin(program, known.CLASSES), item.CLASS_COLUMNS, c)
    c += r * (size_of(program, known.CLASSES) // item.CLASS_COLUMNS)
    window = line(begin(work, known.WINDOWS), known.WINDOW_COLUMNS, c)
    if gaps != 0 and (period < get(window, known.WINDOW_START) or period >= get(window, known.WINDOW_STOP)):
        return 0, np.int64(0), np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    ids, exists = begin(work, known.IDS), 1
    src_block = get(ids, get(window, known.WINDOW_SRC_AT) + period * get(kind, item.SRC_STEP))
    dst_block = get(ids, get(window, known.WINDOW_DST_AT) + period * get(kind, item.DST_STEP))
    if gaps != 0:
        pair = line(begin(program, known.PAIRS), item.PAIR_COLUMNS, get(kind, item.CLASS_PAIR))
        src_group = group_of(program, 0, get(pair, item.SRC_GROUP))
        dst_group = group_of(program, 1, get(pair, item.DST_GROUP))
        if is_null(src_block, get(src_group, item.HAS_NULL), get(src_group, item.NULL)):
            exists = 0
        if is_null(dst_block, get(dst_group, item.HAS_NULL), get(dst_group, item.NULL)):
            exists = 0
    src_at = address(get(row, item.SRC_ORIGIN), src_block, get(row, item.SRC_STRIDE))
    dst_at = address(get(row, item.DST_ORIGIN), dst_block, get(row, item.DST_STRIDE))
    if inner != 0:
        src_at += inner * get(row, item.SRC_INNER)
        dst_at += inner * get(row, item.DST_INNER)
    return exists, src_at, dst_at, get(row, item.LENGTH), get(row, item.TAIL), get(lane, item.LANE_KIND)


@cuda.jit
def spread(program, work, columns, size, report, told):
    """Write the descriptors where all candidates of good requests are some: places follow from the spans."""
    tell(work, report, told)
    i = here()
    if i >= candidates_of(work):
        return
    segment, lanes = segment_of(work, i), lanes_of(program)
    r = segment // lanes
    if not is_good(work, r):
        return
    _, src_at, dst_at, length, _, _ = piece(program, work, segment, r, i, 0)
    first = get(begin(work, known.SEGMENTS), r * lanes * known.SEGMENT_COLUMNS + known.SEGMENT_AT)
    offset, out = get(begin(work, known.SPANS), r) + i - first, words(columns, 3 * size)
    out[offset], out[size + offset], out[2 * size + offset] = src_at, dst_at, length


@cuda.jit
def mark(program, work):
    """Note the last candidate of each thread block that exists."""
    shared = cuda.shared.array((2, THREADS), int64)
    i, found = here(), np.int64(-1)
    if i < candidates_of(work):
        segment = segment_of(work, i)
        exists, _, _, _, _, _ = piece(program, work, segment, segment // lanes_of(program), i, 1)
        if exists != 0:
            found = i
    _, last = scan_block(shared, found, 1)
    if cuda.threadIdx.x == 0:
        part(work, known.LASTS)[cuda.blockIdx.x] = last


@cuda.jit(device=True)
def opens(program, work, i, gaps, shared, ends):
    """Look at a candidate and the one that exists before it, across requests. All threads of a block take part.

    Parameters
    ----------
    program, work, i, gaps : int64
    shared : int64 array [2, THREADS], shared
        For `scan_block`.
    ends : int64 array [4, THREADS], shared
        For what each thread tells the ones after it: where its piece ends in src and dst, its tail, its segment.

    Returns
    -------
    opened : int
        1 if it exists, its request is good, and it does not continue the one before it in its lane.
    segment, closed, src, dst, length : int64
        Its segment; that of the candidate before it, -1 if none; what it copies.
    src_end : int64
        Where the piece before ends in src.
    """
    segment, lanes, exists, t = segment_of(work, i), lanes_of(program), 0, cuda.threadIdx.x
    src_at, dst_at, length, tail, kind = np.int64(0), np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    if i < candidates_of(work):
        exists, src_at, dst_at, length, tail, kind = piece(program, work, segment, segment // lanes, i, gaps)
    ends[0, t], ends[1, t], ends[2, t], ends[3, t] = src_at + length, dst_at + length, tail, segment
    before = i - 1
    if gaps != 0:
        before, _ = scan_block(shared, i if exists != 0 else np.int64(-1), 1)
        before = max(before, get(begin(work, known.LASTS), cuda.blockIdx.x))
    else:
        cuda.syncthreads()
    closed, src_end, dst_end, tail = np.int64(-1), np.int64(0), np.int64(0), np.int64(0)
    if before >= i - t:
        of = before - (i - t)
        src_end, dst_end, tail, closed = ends[0, of], ends[1, of], ends[2, of], ends[3, of]
    elif before >= 0:
        closed = segment_of(work, before)
        _, src_end, dst_end, nbytes, tail, _ = piece(program, work, closed, closed // lanes, before, gaps)
        src_end, dst_end = src_end + nbytes, dst_end + nbytes
    opened = 1 if exists != 0 and is_good(work, segment // lanes) else 0
    if kind != item.APART and closed == segment and touches(src_at, dst_at, src_end, dst_end, tail):
        opened = 0
    return opened, segment, closed, src_at, dst_at, length, src_end


@cuda.jit
def count(program, work, gaps):
    """Write how many descriptors the candidates of each thread block open."""
    shared = cuda.shared.array((2, THREADS), int64)
    ends = cuda.shared.array((4, THREADS), int64)
    opened, _, _, _, _, _, _ = opens(program, work, here(), gaps, shared, ends)
    total = cuda.syncthreads_count(opened)
    if cuda.threadIdx.x == 0:
        part(work, known.SUMS)[cuda.blockIdx.x] = total


@cuda.jit
def write(program, work, columns, size, gaps, merges):
    """Write the descriptors, and the spans. If some may merge, lengths are still the src addresses of their ends."""
    shared = cuda.shared.array((2, THREADS), int64)
    ends = cuda.shared.array((4, THREADS), int64)
    i, out = here(), words(columns, 3 * size)
    opened, segment, closed, src_at, dst_at, length, src_end = opens(program, work, i, gaps, shared, ends)
    offset, _ = scan_block(shared, np.int64(opened), 0)
    offset += get(begin(work, known.SUMS), cuda.blockIdx.x)
    if i > candidates_of(work):
        return
    if opened != 0:
        out[offset], out[size + offset] = src_at, dst_at
        if merges == 0:
            out[2 * size + offset] = length
    segments, spans, lanes = begin(work, known.SEGMENTS), part(work, known.SPANS), lanes_of(program)
    first, r = i == get(segments, segment * known.SEGMENT_COLUMNS + known.SEGMENT_AT), segment // lanes
    # The piece before the one that opens, or that is the first of its lane, is the last of its descriptor.
    if merges != 0 and closed >= 0 and (first or opened != 0) and is_good(work, closed // lanes):
        out[2 * size + offset - 1] = src_end
    # Requests that have no candidates begin where the next one does.
    while first and r >= 0 and get(segments, r * lanes * known.SEGMENT_COLUMNS + known.SEGMENT_AT) == i:
        spans[r] = offset
        r -= 1


@cuda.jit
def close(work, columns, size, merges, report, told):
    """Turn the ends that `write` left into lengths."""
    tell(work, report, told)
    i, out, spans = here(), words(columns, 3 * size), part(work, known.SPANS)
    if merges != 0 and i < spans[len(spans) - 1]:
        out[2 * size + i] -= out[i]
