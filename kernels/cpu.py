"""The loops of one build on the CPU, in the order in which they run: read, check, conflict, cover, mark, count, write.

Python passes the arrays of a `Program` (what a plan compiled) and one memory: of a `Batch` (what the requests gave),
and behind it of a `Work` (what the kernels hand to each other). The columns are `item`'s.
"""

import numpy as np

from kvcompile._jit import bare, entry, jit
from kvcompile.kernels import arrays, item
from kvcompile.kernels.arrays import Program
from kvcompile.kernels.check import check, conflict, window
from kvcompile.kernels.columns import write_column, write_lengths
from kvcompile.kernels.ids import read
from kvcompile.kernels.order import sort, sorted_already

given_size = jit(arrays.given_size)
batch_of = jit(arrays.batch_of)
work_of = jit(arrays.work_of)
fill = jit(item.fill)
src_blocks_of = jit(item.src_blocks_of)
is_null = jit(item.is_null)
touches = jit(item.touches)
address = jit(item.address)


@entry
def build(
    rows, lanes, classes, pairs, src_groups, dst_groups, src_lists, dst_lists, sorts,
    packed, memory, spans, out, src_most, dst_most, limit, steps,
):  # fmt: skip
    """Read a batch, measure it, write its descriptors: the steps asked for, as far as they go.

    Parameters
    ----------
    rows, lanes, classes, pairs, src_groups, dst_groups : int64 arrays
        The `Program`; not looked at to read.
    src_lists, dst_lists : int64
        Lists a request.
    sorts : int64
        1 to sort pieces.
    packed : uint8 array
        The requests; not looked at unless they are to be read.
    memory : int64 array
        See `arrays.batch_of`, and behind that, to measure, `arrays.work_of`; as an earlier step left it.
    spans : int64 array [requests + 1]
        Which descriptors are whose.
    out : uint64 array
        Memory of three columns, one behind the other: nothing is written where it is too small.
    src_most, dst_most, limit : int64
        See `ids.read`; not looked at unless the requests are to be read.
    steps : int64
        READ, MEASURE and WRITE of `item`, as a sum.

    Returns
    -------
    src_ids, dst_ids : int64
        As `ids.read` returns them: -1 first if the batch cannot be read.
    descriptors, failed, uncovered : int64
        Descriptors of the batch; when measuring, also requests whose status is not OK, and dst blocks not covered.
    """
    memory, spans, out = bare(memory), bare(spans), bare(out.view(np.int64))
    requests = len(spans) - 1
    if steps & item.READ != 0:
        src_ids, dst_ids = read(bare(packed), memory, requests, src_lists, dst_lists, src_most, dst_most, limit)
        if src_ids < 0 or steps == item.READ:
            return src_ids, dst_ids, 0, 0, 0
    program = Program(bare(rows), bare(lanes), bare(classes), bare(pairs), bare(src_groups), bare(dst_groups))
    status, batch = batch_of(memory, requests, src_lists, dst_lists)
    src_ids, dst_ids = len(batch.src_ids), len(batch.dst_ids)
    rest = memory[given_size(requests, src_lists, dst_lists) + src_ids + dst_ids :]
    work = work_of(rest, status, spans, len(pairs), len(classes), src_ids, dst_ids, sorts)
    failed, uncovered = 0, 0
    if steps & item.MEASURE != 0:
        failed, uncovered = measure(program, batch, work)
    size, third = spans[-1], len(out) // 3
    if steps & item.WRITE != 0 and size <= third:
        write(program, batch, work, out[:size], out[third : third + size], out[2 * third : 2 * third + size])
    return src_ids, dst_ids, size, failed, uncovered


@jit
def measure(program, batch, work):
    """Check a batch, find its pairs and runs, count its descriptors; return how many fail, and dst blocks uncovered."""
    fill(work.uncovered, 0)
    check(program, batch, work)
    conflict(program, batch, work)
    failed = 0
    for r in range(len(batch.num_tokens)):
        if work.status[r, item.CODE] == item.OK and batch.twice[r] != 0:
            work.status[r, item.CODE] = item.TWICE
        failed += work.status[r, item.CODE] != item.OK
    uncovered = cover(program, batch, work)
    mark(program, batch, work)
    count(program, batch, work)
    return failed, uncovered


@jit
def cover(program, batch, work):
    """Mark every dst block of a good request whose tokens are not wholly given, not null, on the src side."""
    marked = 0
    for r in range(len(batch.num_tokens)):
        if work.status[r, item.CODE] != item.OK:
            continue
        for p in range(len(program.pairs)):
            pair, line = program.pairs[p], work.aligned[r, p]
            if line[item.DST_STOP] == 0:
                continue
            src_group, dst_group = program.src_groups[pair[item.SRC_GROUP]], program.dst_groups[pair[item.DST_GROUP]]
            # A block of state is one unit: it has no tokens to be cut at.
            src_size, dst_size, num_tokens = pair[item.SRC_SIZE], pair[item.DST_SIZE], batch.num_tokens[r]
            if pair[item.STATE] != 0:
                src_size, dst_size, num_tokens = 1, 1, -1
            s = batch.src_at[r * len(program.src_groups) + pair[item.SRC_GROUP]]
            d = batch.dst_at[r * len(program.dst_groups) + pair[item.DST_GROUP]]
            src_ids = batch.src_ids[s : s + line[item.SRC_STOP]]
            nulls = 0
            if src_group[item.HAS_NULL] != 0:
                for block in src_ids:
                    nulls += block == src_group[item.NULL]
            # What is given is one range: without nulls, all between two covered blocks is covered.
            ends = 0
            for j in (0, line[item.DST_STOP] - 1):
                start, stop = src_blocks_of(j - line[item.DST_SHIFT], src_size, dst_size, num_tokens)
                ends += (
                    start + line[item.SRC_SHIFT] >= line[item.SRC_START]
                    and stop + line[item.SRC_SHIFT] <= line[item.SRC_STOP]
                )
            if nulls == 0 and ends == 2:
                continue
            for j in range(line[item.DST_STOP]):
                if is_null(batch.dst_ids[d + j], dst_group[item.HAS_NULL], dst_group[item.NULL]):
                    continue
                start, stop = src_blocks_of(j - line[item.DST_SHIFT], src_size, dst_size, num_tokens)
                start, stop = start + line[item.SRC_SHIFT], stop + line[item.SRC_SHIFT]
                covered = start >= line[item.SRC_START] and stop <= line[item.SRC_STOP]
                if covered and nulls != 0:
                    for i in range(start, stop):
                        covered &= src_ids[i] != src_group[item.NULL]
                if not covered and work.uncovered[d + j] == 0:
                    work.uncovered[d + j] = 1
                    marked += 1
    return marked


@jit
def mark(program, batch, work):
    """Write, for every good request and class, the pairs of ids without nulls, and where their runs open."""
    at, runs_at = 0, 0
    for r in range(len(batch.num_tokens)):
        for c in range(len(program.classes)):
            extent = work.extent[r, c]
            extent[item.PAIRS_AT], extent[item.PAIRS], extent[item.RUNS_AT], extent[item.RUNS] = at, 0, runs_at, 0
            extent[item.PERIOD_START], extent[item.PERIOD_STOP] = 0, 0
            if work.status[r, item.CODE] == item.OK:
                mark_class(program, batch, work, r, c, extent)
            at += extent[item.PAIRS]
            runs_at += extent[item.RUNS]


@jit
def mark_class(program, batch, work, r, c, extent):
    kind = program.classes[c]
    pair, line = program.pairs[kind[item.CLASS_PAIR]], work.aligned[r, kind[item.CLASS_PAIR]]
    src_step, src_phase, dst_step, dst_phase = (
        kind[item.SRC_STEP],
        kind[item.SRC_PHASE],
        kind[item.DST_STEP],
        kind[item.DST_PHASE],
    )
    start, stop = window(kind, line)
    if stop <= start:
        return
    extent[item.PERIOD_START], extent[item.PERIOD_STOP] = start, stop
    src_null, dst_null = program.src_groups[pair[item.SRC_GROUP]], program.dst_groups[pair[item.DST_GROUP]]
    nulls = src_null[item.HAS_NULL] != 0 or dst_null[item.HAS_NULL] != 0
    i = (
        batch.src_at[r * len(program.src_groups) + pair[item.SRC_GROUP]]
        + start * src_step
        + src_phase
        + line[item.SRC_SHIFT]
    )
    j = (
        batch.dst_at[r * len(program.dst_groups) + pair[item.DST_GROUP]]
        + start * dst_step
        + dst_phase
        + line[item.DST_SHIFT]
    )
    src, dst = work.src[extent[item.PAIRS_AT] :], work.dst[extent[item.PAIRS_AT] :]
    pairs = stop - start
    if nulls:
        pairs = drop_nulls(batch, i, j, src_step, dst_step, src_null, dst_null, src[:pairs], dst[:pairs])
    else:
        take(batch.src_ids[i:], src_step, src[:pairs])
        take(batch.dst_ids[j:], dst_step, dst[:pairs])
    extent[item.PAIRS] = pairs
    if pairs > 1 and work.scratch.shape[1] > 0:
        sort_pairs(src[:pairs], dst[:pairs], kind[item.SRC_UNIT], kind[item.DST_UNIT], work.scratch)
    if kind[item.DENSE_LANES] != 0:
        at = extent[item.RUNS_AT]
        extent[item.RUNS] = mark_runs(
            src[:pairs], dst[:pairs], work.run_src[at:], work.run_dst[at:], work.run_blocks[at:]
        )


@jit
def take(ids, step, out):
    """Take every ``step``-th id; a step of 1 has a loop of its own, which alone vectorizes."""
    if step == 1:
        for k in range(len(out)):
            out[k] = ids[k]
    else:
        for k in range(len(out)):
            out[k] = ids[k * step]


@jit
def drop_nulls(batch, i, j, src_step, dst_step, src_null, dst_null, src, dst):
    """Take the pairs of which neither is a null; return how many."""
    pairs = 0
    for _ in range(len(src)):
        src[pairs], dst[pairs] = batch.src_ids[i], batch.dst_ids[j]
        pairs += not (
            is_null(src[pairs], src_null[item.HAS_NULL], src_null[item.NULL])
            or is_null(dst[pairs], dst_null[item.HAS_NULL], dst_null[item.NULL])
        )
        i += src_step
        j += dst_step
    return pairs


@jit
def sort_pairs(src, dst, src_unit, dst_unit, scratch):
    delta, by_src = scratch[0, : len(src)], scratch[1, : len(src)]
    for k in range(len(src)):
        delta[k], by_src[k] = src[k] * src_unit - dst[k] * dst_unit, src[k]
    if sorted_already(delta, by_src):
        return
    order = sort(delta, by_src, scratch[4:])
    for k in range(len(order)):
        delta[k] = dst[k]  # sorted by now
    for k in range(len(order)):
        src[k], dst[k] = by_src[order[k]], delta[order[k]]


@jit
def mark_runs(src, dst, run_src, run_dst, run_blocks):
    """Write the first pair and the size of each run; return how many runs there are.

    Without a branch on where one ends, which nobody can foretell: it took twice as long. An unsigned index needs no
    look at its sign.
    """
    if len(src) > 0:
        run_src[0] = 1
    for k in range(1, len(src)):
        run_src[k] = ((src[k] - src[k - 1] - 1) | (dst[k] - dst[k - 1] - 1)) != 0
    opened = np.uint64(0)
    for k in range(len(src)):
        run_blocks[opened] = k  # stays if it opens a run
        opened += np.uint64(run_src[k])
    runs = np.int64(opened)
    for n in range(runs):
        k, end = run_blocks[n], run_blocks[n + 1] if n + 1 < runs else len(src)
        run_src[n], run_dst[n], run_blocks[n] = src[k], dst[k], end - k
    return runs


@jit
def count(program, batch, work):
    """Write how many descriptors each request makes, as spans."""
    none, chained = work.run_src[:0], chains(program)
    work.spans[0] = 0
    for r in range(len(batch.num_tokens)):
        total = 0
        if work.status[r, item.CODE] == item.OK:
            for c in range(len(program.classes)):
                total += program.classes[c, item.DENSE_LANES] * work.extent[r, c, item.RUNS]
                total += program.classes[c, item.APART_SLICES] * work.extent[r, c, item.PAIRS]
            for number in range(len(program.lanes) if chained else 0):
                if program.lanes[number, item.LANE_KIND] == item.CHAIN:
                    total += chain(program, batch, work, r, program.lanes[number], none, none, none)
        work.spans[r + 1] = work.spans[r] + total


@jit
def write(program, batch, work, src, dst, length):
    """Write the descriptors of a measured batch."""
    lanes, chained = program.lanes, chains(program)
    for r in range(len(batch.num_tokens)):
        at, number = work.spans[r], 0
        if work.spans[r + 1] == at:
            continue
        extent = work.extent[r]
        while number < len(lanes):
            if lanes[number, item.LANE_KIND] == item.CHAIN:
                at += chain(program, batch, work, r, lanes[number], src[at:], dst[at:], length[at:])
                number += 1
                continue
            begin, number = number, number if chained else len(lanes)
            while number < len(lanes) and lanes[number, item.LANE_KIND] != item.CHAIN:
                number += 1
            # Column by column, each in one sweep: as fast as memory takes them.
            columns = item.SRC_ORIGIN, item.SRC_STRIDE, item.SRC_INNER
            write_column(program, extent, begin, number, src[at:], work.src, work.run_src, item.SRC_AGAIN, columns)
            columns = item.DST_ORIGIN, item.DST_STRIDE, item.DST_INNER
            write_column(program, extent, begin, number, dst[at:], work.dst, work.run_dst, item.DST_AGAIN, columns)
            at += write_lengths(program, extent, begin, number, length[at:], work.run_blocks)


@jit
def chains(program):
    """Return whether any lane is a chain."""
    found = False
    for kind in program.classes:
        found |= kind[item.CHAIN_ROWS] > 0
    return found


@jit
def chain(program, batch, work, r, lane, src, dst, length):
    """Walk a lane whose rows touch each other, period by period; return how many descriptors it makes.

    They are written into the columns given, unless those are empty.
    """
    writes = len(src) > 0
    rows = program.rows[lane[item.LANE_START] : lane[item.LANE_STOP]]
    start, stop = np.int64(2**62), np.int64(-(2**62))
    for row in rows:
        extent = work.extent[r, row[item.CLASS]]
        if extent[item.PERIOD_START] < extent[item.PERIOD_STOP]:
            start, stop = min(start, extent[item.PERIOD_START]), max(stop, extent[item.PERIOD_STOP])
    sorts = work.scratch.shape[1] > 0
    made, found, tail, src_end, dst_end = 0, 0, np.int64(0), np.int64(0), np.int64(0)
    for period in range(start, stop):
        for row in rows:
            extent, kind = work.extent[r, row[item.CLASS]], program.classes[row[item.CLASS]]
            if period < extent[item.PERIOD_START] or period >= extent[item.PERIOD_STOP]:
                continue
            pair, line = program.pairs[kind[item.CLASS_PAIR]], work.aligned[r, kind[item.CLASS_PAIR]]
            i = batch.src_at[r * len(program.src_groups) + pair[item.SRC_GROUP]] + line[item.SRC_SHIFT]
            j = batch.dst_at[r * len(program.dst_groups) + pair[item.DST_GROUP]] + line[item.DST_SHIFT]
            src_block = batch.src_ids[i + period * kind[item.SRC_STEP] + kind[item.SRC_PHASE]]
            dst_block = batch.dst_ids[j + period * kind[item.DST_STEP] + kind[item.DST_PHASE]]
            src_group, dst_group = program.src_groups[pair[item.SRC_GROUP]], program.dst_groups[pair[item.DST_GROUP]]
            if is_null(src_block, src_group[item.HAS_NULL], src_group[item.NULL]):
                continue
            if is_null(dst_block, dst_group[item.HAS_NULL], dst_group[item.NULL]):
                continue
            src_at = address(row[item.SRC_ORIGIN], src_block, row[item.SRC_STRIDE])
            dst_at = address(row[item.DST_ORIGIN], dst_block, row[item.DST_STRIDE])
            if sorts:
                # Relative to the lane's first row: within its buffers no difference leaves 64 bits.
                by_src = src_at - rows[0, item.SRC_ORIGIN]
                work.scratch[0, found] = by_src - (dst_at - rows[0, item.DST_ORIGIN])
                work.scratch[1, found] = by_src
                work.scratch[2, found], work.scratch[3, found] = row[item.LENGTH], row[item.TAIL]
                found += 1
                continue
            merges = made > 0 and touches(src_at, dst_at, src_end, dst_end, tail)
            made += emit(merges, writes, made, tail, src_at, dst_at, row[item.LENGTH], src, dst, length)
            tail, src_end, dst_end = row[item.TAIL], src_at + row[item.LENGTH], dst_at + row[item.LENGTH]
    if found == 0:
        return made
    delta, by_src = work.scratch[0, :found], work.scratch[1, :found]
    for k in sort(delta, by_src, work.scratch[4:]):
        src_at = rows[0, item.SRC_ORIGIN] + by_src[k]
        dst_at = rows[0, item.DST_ORIGIN] + by_src[k] - delta[k]
        merges = made > 0 and touches(src_at, dst_at, src_end, dst_end, tail)
        made += emit(merges, writes, made, tail, src_at, dst_at, work.scratch[2, k], src, dst, length)
        tail, src_end, dst_end = work.scratch[3, k], src_at + work.scratch[2, k], dst_at + work.scratch[2, k]
    return made


@jit
def emit(merges, writes, made, tail, src_at, dst_at, nbytes, src, dst, length):
    """Add a piece to the descriptor before it, or open one; return how many were opened."""
    if merges:
        if writes:
            length[made - 1] += tail + nbytes
        return 0
    if writes:
        src[made], dst[made], length[made] = src_at, dst_at, nbytes
    return 1
