"""The loops of one build on the CPU, in the order in which they run: check, conflict, mark, count, write, cut.

Arguments come as named tuples of int64 arrays: `Program` (what a plan compiled), `Batch` (what the requests gave) and
`Work` (what the kernels hand to each other; the host owns it). The columns are `item`'s.
"""

from typing import NamedTuple

import numpy as np

from kvcompile._jit import jit, move
from kvcompile.kernels import item
from kvcompile.kernels.item import (
    APART,
    BOUND,
    CHAIN,
    CLASS,
    CLASS_PAIR,
    CODE,
    CONFLICT,
    COUNT,
    DENSE,
    DST_GROUP,
    DST_INNER,
    DST_ORIGIN,
    DST_PHASE,
    DST_SHIFT,
    DST_SIZE,
    DST_START,
    DST_STEP,
    DST_STOP,
    DST_STRIDE,
    FROM,
    GROUP,
    HAS_DENSE,
    HAS_NULL,
    LANE_KIND,
    LANE_START,
    LANE_STOP,
    LENGTH,
    NULL,
    OK,
    OTHER,
    OUT_OF_BOUND,
    OVERLAY,
    PAIRS,
    PAIR_DST_STEP,
    PAIR_SRC_STEP,
    PAIRS_AT,
    PART,
    PARTS,
    PERIOD_START,
    PERIOD_STOP,
    POSITION,
    RUNS,
    RUNS_AT,
    SIDE,
    SRC_GROUP,
    SRC_INNER,
    SRC_ORIGIN,
    SRC_PHASE,
    SRC_SHIFT,
    SRC_SIZE,
    SRC_START,
    SRC_STEP,
    SRC_STOP,
    SRC_STRIDE,
    STATE,
    TAIL,
    TO,
    TWICE,
)

refuses = jit(item.refuses)
align = jit(item.align)
first_period = jit(item.first_period)
overlap_start = jit(item.overlap_start)
overlap_stop = jit(item.overlap_stop)
part_start = jit(item.part_start)
src_blocks_of = jit(item.src_blocks_of)
opens_run = jit(item.opens_run)
address = jit(item.address)
slot = jit(item.slot)
array_header = jit(item.array_header)
integer = jit(item.integer)


class Program(NamedTuple):
    """What a plan compiled: int64 arrays, one row an item, columns as `item` names them."""

    rows: np.ndarray
    lanes: np.ndarray
    classes: np.ndarray
    pairs: np.ndarray
    src_groups: np.ndarray
    dst_groups: np.ndarray


class Batch(NamedTuple):
    """What the requests gave. List (r, g) of a side is ``ids[at[r*groups + g]:at[r*groups + g + 1]]``."""

    src_ids: np.ndarray
    src_at: np.ndarray
    dst_ids: np.ndarray
    dst_at: np.ndarray
    src_first: np.ndarray  # [requests, groups], -1: no positions
    dst_first: np.ndarray
    num_tokens: np.ndarray  # [requests], -1: not given
    twice: np.ndarray  # [requests], 1: the request id is given twice


class Work(NamedTuple):
    """What the kernels hand on.

    status [requests, STATUS_COLUMNS]; aligned [requests, pairs, ALIGN_COLUMNS]; extent [requests, classes,
    EXTENT_COLUMNS]; src, dst: the pairs of blocks; run_src, run_dst, run_blocks: the first pair and the size of each
    run; uncovered uint8 [dst ids]; slots: hash table, a power of two above twice the dst ids; spans [requests + 1].
    """

    status: np.ndarray
    aligned: np.ndarray
    extent: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    run_src: np.ndarray
    run_dst: np.ndarray
    run_blocks: np.ndarray
    uncovered: np.ndarray
    slots: np.ndarray
    spans: np.ndarray


@jit
def measure(program, batch, work):
    """Check a batch, find its pairs and runs, count its descriptors into ``work.spans``.

    Arguments are plain tuples: Numba takes twice as long to look at a named one.

    Returns
    -------
    failed, uncovered : int64
        Requests whose status is not OK; dst blocks marked uncovered.
    """
    program, batch, work = Program(*program), Batch(*batch), Work(*work)
    check(program, batch, work)
    conflict(program, batch, work)
    failed = 0
    for r in range(len(batch.num_tokens)):
        if work.status[r, CODE] == OK and batch.twice[r] != 0:
            work.status[r, CODE] = TWICE
        failed += work.status[r, CODE] != OK
    uncovered = cover(program, batch, work)
    mark(program, batch, work)
    count(program, batch, work)
    return failed, uncovered


@jit
def check(program, batch, work):
    """Write the alignment of every (request, group pair), or the first error of a request into its status."""
    for r in range(len(batch.num_tokens)):
        status = work.status[r]
        if status[CODE] == OK:
            check_lists(program, batch, r, status, work.aligned[r])
        if status[CODE] == OK:
            check_ids(program.src_groups, batch.src_ids, batch.src_at, r, 0, status)
        if status[CODE] == OK:
            check_ids(program.dst_groups, batch.dst_ids, batch.dst_at, r, 1, status)


@jit
def check_lists(program, batch, r, status, aligned):
    for p in range(len(program.pairs)):
        pair = program.pairs[p]
        s = r * len(program.src_groups) + pair[SRC_GROUP]
        d = r * len(program.dst_groups) + pair[DST_GROUP]
        code, src_shift, src_start, src_stop, dst_shift, dst_start, dst_stop = align(
            pair[STATE],
            pair[SRC_SIZE],
            pair[DST_SIZE],
            batch.src_at[s + 1] - batch.src_at[s],
            batch.dst_at[d + 1] - batch.dst_at[d],
            batch.src_first[r, pair[SRC_GROUP]],
            batch.dst_first[r, pair[DST_GROUP]],
            batch.num_tokens[r],
        )
        if code != OK:
            status[CODE], status[SIDE], status[GROUP], status[OTHER] = code, 0, pair[SRC_GROUP], pair[DST_GROUP]
            return
        line, src_step, dst_step = aligned[p], pair[PAIR_SRC_STEP], pair[PAIR_DST_STEP]
        line[SRC_SHIFT], line[SRC_START], line[SRC_STOP] = src_shift, src_start, src_stop
        line[DST_SHIFT], line[DST_START], line[DST_STOP] = dst_shift, dst_start, dst_stop
        line[FROM] = overlap_start(src_start - src_shift, dst_start - dst_shift, src_step, dst_step)
        line[TO] = overlap_stop(src_stop - src_shift, dst_stop - dst_shift, src_step, dst_step)


@jit
def check_ids(groups, ids, at, r, side, status):
    for g in range(len(groups)):
        bound, has_null, null = groups[g, BOUND], groups[g, HAS_NULL], groups[g, NULL]
        given = ids[at[r * len(groups) + g] : at[r * len(groups) + g + 1]]
        refused = 0
        for i in range(len(given)):
            refused += refuses(given[i], bound, has_null, null)
        if refused == 0:
            continue
        for i in range(len(given)):
            if refuses(given[i], bound, has_null, null):
                status[CODE], status[SIDE], status[GROUP], status[POSITION] = OUT_OF_BOUND, side, g, i
                return


@jit
def conflict(program, batch, work):
    """Fail every request that gives a dst block which it or another good request gives too.

    Groups that overlay each other share one id space, and one pass over the hash table.
    """
    groups, at, ids, slots = program.dst_groups, batch.dst_at, batch.dst_ids, work.slots
    mask = len(slots) - 1
    for space in range(len(groups)):
        if groups[space, OVERLAY] != space or ascend(program, batch, space):
            continue
        slots[:] = -1
        for r in range(len(batch.num_tokens)):
            if work.status[r, CODE] != OK and work.status[r, CODE] != CONFLICT:
                continue
            for g in range(space, len(groups)):
                if groups[g, OVERLAY] != space:
                    continue
                has_null, null = groups[g, HAS_NULL], groups[g, NULL]
                begin = at[r * len(groups) + g]
                for k in range(begin, at[r * len(groups) + g + 1]):
                    block = ids[k]
                    if has_null != 0 and block == null:
                        continue
                    place = slot(block, mask)
                    while slots[place] >= 0 and ids[slots[place]] != block:
                        place = (place + 1) & mask
                    if slots[place] < 0:
                        slots[place] = k
                        continue
                    # The list that came first is known by its place among all ids.
                    first = slots[place]
                    other = np.searchsorted(at, first, side="right") - 1
                    fail(work.status, r, g, k - begin, other // len(groups))
                    fail(work.status, other // len(groups), other % len(groups), first - at[other], r)


@jit
def ascend(program, batch, space):
    """Return whether all ids of a space ascend from list to list, nulls aside: then none is given twice."""
    groups, before = program.dst_groups, np.int64(-1)
    for k in range(len(batch.dst_at) - 1):
        group = groups[k % len(groups)]
        if group[OVERLAY] == space:
            for block in batch.dst_ids[batch.dst_at[k] : batch.dst_at[k + 1]]:
                if group[HAS_NULL] != 0 and block == group[NULL]:
                    continue
                if block <= before:
                    return False
                before = block
    return True


@jit
def fail(status, r, group, position, other):
    if status[r, CODE] == OK:
        status[r, CODE], status[r, SIDE], status[r, GROUP] = CONFLICT, 1, group
        status[r, POSITION], status[r, OTHER] = position, other


@jit
def cover(program, batch, work):
    """Mark every dst block of a good request whose tokens are not wholly given, not null, on the src side."""
    marked = 0
    for r in range(len(batch.num_tokens)):
        if work.status[r, CODE] != OK:
            continue
        for p in range(len(program.pairs)):
            pair, line = program.pairs[p], work.aligned[r, p]
            if line[DST_STOP] == 0:
                continue
            src_group, dst_group = program.src_groups[pair[SRC_GROUP]], program.dst_groups[pair[DST_GROUP]]
            # A block of state is one unit: it has no tokens to be cut at.
            src_size, dst_size, num_tokens = pair[SRC_SIZE], pair[DST_SIZE], batch.num_tokens[r]
            if pair[STATE] != 0:
                src_size, dst_size, num_tokens = 1, 1, -1
            s = batch.src_at[r * len(program.src_groups) + pair[SRC_GROUP]]
            d = batch.dst_at[r * len(program.dst_groups) + pair[DST_GROUP]]
            src_ids = batch.src_ids[s : s + line[SRC_STOP]]
            nulls = 0
            if src_group[HAS_NULL] != 0:
                for block in src_ids:
                    nulls += block == src_group[NULL]
            # What is given is one range: without nulls, all between two covered blocks is covered.
            ends = 0
            for j in (0, line[DST_STOP] - 1):
                start, stop = src_blocks_of(j - line[DST_SHIFT], src_size, dst_size, num_tokens)
                ends += start + line[SRC_SHIFT] >= line[SRC_START] and stop + line[SRC_SHIFT] <= line[SRC_STOP]
            if nulls == 0 and ends == 2:
                continue
            for j in range(line[DST_STOP]):
                if dst_group[HAS_NULL] != 0 and batch.dst_ids[d + j] == dst_group[NULL]:
                    continue
                start, stop = src_blocks_of(j - line[DST_SHIFT], src_size, dst_size, num_tokens)
                start, stop = start + line[SRC_SHIFT], stop + line[SRC_SHIFT]
                covered = start >= line[SRC_START] and stop <= line[SRC_STOP]
                if covered and nulls != 0:
                    for i in range(start, stop):
                        covered &= src_ids[i] != src_group[NULL]
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
            extent[PAIRS_AT], extent[PAIRS], extent[RUNS_AT], extent[RUNS] = at, 0, runs_at, 0
            extent[PERIOD_START], extent[PERIOD_STOP] = 0, 0
            if work.status[r, CODE] == OK:
                mark_class(program, batch, work, r, c, extent)
            at += extent[PAIRS]
            runs_at += extent[RUNS]


@jit
def mark_class(program, batch, work, r, c, extent):
    kind = program.classes[c]
    pair, line = program.pairs[kind[CLASS_PAIR]], work.aligned[r, kind[CLASS_PAIR]]
    src_step, src_phase, dst_step, dst_phase = kind[SRC_STEP], kind[SRC_PHASE], kind[DST_STEP], kind[DST_PHASE]
    start = max(
        first_period(line[SRC_START], line[SRC_SHIFT], src_phase, src_step),
        first_period(line[DST_START], line[DST_SHIFT], dst_phase, dst_step),
    )
    stop = min(
        first_period(line[SRC_STOP], line[SRC_SHIFT], src_phase, src_step),
        first_period(line[DST_STOP], line[DST_SHIFT], dst_phase, dst_step),
    )
    if kind[PARTS] > 1:
        start = max(start, part_start(line[FROM], line[TO], kind[PART], kind[PARTS]))
        stop = min(stop, part_start(line[FROM], line[TO], kind[PART] + 1, kind[PARTS]))
    if stop <= start:
        return
    extent[PERIOD_START], extent[PERIOD_STOP] = start, stop
    src_null, dst_null = program.src_groups[pair[SRC_GROUP]], program.dst_groups[pair[DST_GROUP]]
    nulls = src_null[HAS_NULL] != 0 or dst_null[HAS_NULL] != 0
    i = batch.src_at[r * len(program.src_groups) + pair[SRC_GROUP]] + start * src_step + src_phase + line[SRC_SHIFT]
    j = batch.dst_at[r * len(program.dst_groups) + pair[DST_GROUP]] + start * dst_step + dst_phase + line[DST_SHIFT]
    src, dst = work.src[extent[PAIRS_AT] :], work.dst[extent[PAIRS_AT] :]
    pairs = 0
    for _ in range(stop - start):
        src[pairs], dst[pairs] = batch.src_ids[i], batch.dst_ids[j]
        null = nulls and (
            (src_null[HAS_NULL] != 0 and src[pairs] == src_null[NULL])
            or (dst_null[HAS_NULL] != 0 and dst[pairs] == dst_null[NULL])
        )
        pairs += not null
        i += src_step
        j += dst_step
    extent[PAIRS] = pairs
    if kind[HAS_DENSE] != 0:
        at = extent[RUNS_AT]
        extent[RUNS] = mark_runs(src[:pairs], dst[:pairs], work.run_src[at:], work.run_dst[at:], work.run_blocks[at:])


@jit
def mark_runs(src, dst, run_src, run_dst, run_blocks):
    opened = 0
    for k in range(len(src)):
        if opens_run(src, dst, k):
            run_src[opened], run_dst[opened], run_blocks[opened] = src[k], dst[k], 0
            opened += 1
        run_blocks[opened - 1] += 1
    return opened


@jit
def count(program, batch, work):
    """Write how many descriptors each request makes, as spans."""
    none = work.run_src[:0]
    work.spans[0] = 0
    for r in range(len(batch.num_tokens)):
        total = 0
        if work.status[r, CODE] == OK:
            for lane in program.lanes:
                extent = work.extent[r, program.rows[lane[LANE_START], CLASS]]
                if lane[LANE_KIND] == APART:
                    total += extent[PAIRS] * program.rows[lane[LANE_START], COUNT]
                elif lane[LANE_KIND] == DENSE:
                    total += extent[RUNS]
                else:
                    total += chain(program, batch, work, r, lane, False, none, none, none)
        work.spans[r + 1] = work.spans[r] + total


@jit
def write(program, batch, work, src, dst, length):
    """Write the descriptors: int64 views of uint64 arrays of ``work.spans[-1]`` items each."""
    program, batch, work = Program(*program), Batch(*batch), Work(*work)
    for r in range(len(batch.num_tokens)):
        at = work.spans[r]
        if work.spans[r + 1] == at:
            continue
        for lane in program.lanes:
            row = program.rows[lane[LANE_START]]
            extent = work.extent[r, row[CLASS]]
            # Columns apart and through views: only this form vectorizes.
            if lane[LANE_KIND] == APART:
                begin, end = extent[PAIRS_AT], extent[PAIRS_AT] + extent[PAIRS]
                for k in range(row[COUNT]):
                    spread(src[at:], work.src[begin:end], row[SRC_ORIGIN] + k * row[SRC_INNER], row[SRC_STRIDE])
                    spread(dst[at:], work.dst[begin:end], row[DST_ORIGIN] + k * row[DST_INNER], row[DST_STRIDE])
                    length[at : at + extent[PAIRS]] = row[LENGTH]
                    at += extent[PAIRS]
            elif lane[LANE_KIND] == DENSE:
                begin, end = extent[RUNS_AT], extent[RUNS_AT] + extent[RUNS]
                spread(src[at:], work.run_src[begin:end], row[SRC_ORIGIN], row[SRC_STRIDE])
                spread(dst[at:], work.run_dst[begin:end], row[DST_ORIGIN], row[DST_STRIDE])
                spread(length[at:], work.run_blocks[begin:end], -row[TAIL], row[LENGTH] + row[TAIL])
                at += extent[RUNS]
            else:
                at += chain(program, batch, work, r, lane, True, src[at:], dst[at:], length[at:])


@jit
def spread(out, blocks, origin, stride):
    for i in range(len(blocks)):
        out[i] = address(origin, blocks[i], stride)


@jit
def chain(program, batch, work, r, lane, writes, src, dst, length):
    """Walk a lane whose rows touch each other, period by period; return, and if asked write, its descriptors."""
    rows = program.rows[lane[LANE_START] : lane[LANE_STOP]]
    start, stop = np.int64(2**62), np.int64(-(2**62))
    for row in rows:
        extent = work.extent[r, row[CLASS]]
        if extent[PERIOD_START] < extent[PERIOD_STOP]:
            start, stop = min(start, extent[PERIOD_START]), max(stop, extent[PERIOD_STOP])
    made, tail, src_end, dst_end = 0, np.int64(0), np.int64(0), np.int64(0)
    for period in range(start, stop):
        for row in rows:
            extent, kind = work.extent[r, row[CLASS]], program.classes[row[CLASS]]
            if period < extent[PERIOD_START] or period >= extent[PERIOD_STOP]:
                continue
            pair, line = program.pairs[kind[CLASS_PAIR]], work.aligned[r, kind[CLASS_PAIR]]
            i = batch.src_at[r * len(program.src_groups) + pair[SRC_GROUP]] + line[SRC_SHIFT]
            j = batch.dst_at[r * len(program.dst_groups) + pair[DST_GROUP]] + line[DST_SHIFT]
            src_block = batch.src_ids[i + period * kind[SRC_STEP] + kind[SRC_PHASE]]
            dst_block = batch.dst_ids[j + period * kind[DST_STEP] + kind[DST_PHASE]]
            src_group, dst_group = program.src_groups[pair[SRC_GROUP]], program.dst_groups[pair[DST_GROUP]]
            if src_group[HAS_NULL] != 0 and src_block == src_group[NULL]:
                continue
            if dst_group[HAS_NULL] != 0 and dst_block == dst_group[NULL]:
                continue
            src_at = address(row[SRC_ORIGIN], src_block, row[SRC_STRIDE])
            dst_at = address(row[DST_ORIGIN], dst_block, row[DST_STRIDE])
            if made > 0 and src_at == src_end + tail and dst_at == dst_end + tail:
                if writes:
                    length[made - 1] += tail + row[LENGTH]
            else:
                if writes:
                    src[made], dst[made], length[made] = src_at, dst_at, row[LENGTH]
                made += 1
            tail, src_end, dst_end = row[TAIL], src_at + row[LENGTH], dst_at + row[LENGTH]
    return made


@jit
def cut_count(length, spans, most, cut_spans):
    """Write the spans that remain after cutting every descriptor at ``most`` bytes; return the number of descriptors."""
    total = 0
    for r in range(len(spans) - 1):
        cut_spans[r] = total
        for i in range(spans[r], spans[r + 1]):
            total += (length[i] - 1) // most + 1
    cut_spans[len(spans) - 1] = total
    return total


@jit
def cut(src, dst, length, most, cut_src, cut_dst, cut_length):
    """Write descriptors cut into pieces of ``most`` bytes, the last of each the rest."""
    at = 0
    for i in range(len(src)):
        done = np.int64(0)
        while done < length[i]:
            cut_src[at], cut_dst[at] = src[i] + done, dst[i] + done
            cut_length[at] = min(most, length[i] - done)
            done += cut_length[at]
            at += 1


@jit
def decode(packed, offsets, at, ids):
    """Read integer lists out of msgpack: ``ids[at[k]:at[k+1]]`` from the array that starts at ``packed[offsets[k]]``.

    Lists with a negative offset are passed over; one that holds anything but integers gets the offset -2. Integers
    above int64 become its greatest.
    """
    for k in range(len(offsets)):
        if offsets[k] < 0:
            continue
        size = at[k + 1] - at[k]
        place = offsets[k] + array_header(size)
        for i in range(at[k], at[k + 1]):
            if packed[place] == 0xCD:  # below 65,536, what most ids are
                ids[i] = (np.int64(packed[place + 1]) << 8) | packed[place + 2]
                place += 3
                continue
            value, nbytes = integer(packed, place)
            if nbytes == 0:
                offsets[k] = -2
                break
            ids[i] = value
            place += nbytes


@jit
def copy(src, dst, length):
    """Copy the bytes of every descriptor: int64 views of uint64 arrays; addresses of this process."""
    for i in range(len(src)):
        move(dst[i], src[i], length[i])
