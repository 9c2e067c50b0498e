"""What is wrong with a batch: alignments, ids out of bounds, blocks given twice. A request keeps its first error."""

import numpy as np

from kvcompile._jit import jit
from kvcompile.kernels import item

__all__ = ["check", "check_lists", "conflict", "window"]

refuses = jit(item.refuses)
align = jit(item.align)
first_period = jit(item.first_period)
part_start = jit(item.part_start)
is_null = jit(item.is_null)
overlap_start = jit(item.overlap_start)
overlap_stop = jit(item.overlap_stop)
slot = jit(item.slot)
last_start = jit(item.last_start)
fill = jit(item.fill)


@jit
def check(program, batch, work):
    """Write the alignment of every (request, group pair), or the first error of a request into its status."""
    for r in range(len(batch.num_tokens)):
        status = work.status[r]
        if status[item.CODE] == item.OK:
            check_lists(program, batch, r, status, work.aligned[r])
        if status[item.CODE] == item.OK:
            check_ids(program.src_groups, batch.src_ids, batch.src_at, r, 0, status)
        if status[item.CODE] == item.OK:
            check_ids(program.dst_groups, batch.dst_ids, batch.dst_at, r, 1, status)


@jit
def check_lists(program, batch, r, status, aligned):
    for p in range(len(program.pairs)):
        pair = program.pairs[p]
        s = r * len(program.src_groups) + pair[item.SRC_GROUP]
        d = r * len(program.dst_groups) + pair[item.DST_GROUP]
        code, src_shift, src_start, src_stop, dst_shift, dst_start, dst_stop = align(
            pair[item.STATE],
            pair[item.SRC_SIZE],
            pair[item.DST_SIZE],
            batch.src_at[s + 1] - batch.src_at[s],
            batch.dst_at[d + 1] - batch.dst_at[d],
            batch.src_first[r, pair[item.SRC_GROUP]],
            batch.dst_first[r, pair[item.DST_GROUP]],
            batch.num_tokens[r],
        )
        if code != item.OK:
            status[item.CODE], status[item.SIDE], status[item.GROUP], status[item.OTHER] = (
                code,
                0,
                pair[item.SRC_GROUP],
                pair[item.DST_GROUP],
            )
            return
        line, src_step, dst_step = aligned[p], pair[item.PAIR_SRC_STEP], pair[item.PAIR_DST_STEP]
        line[item.SRC_SHIFT], line[item.SRC_START], line[item.SRC_STOP] = src_shift, src_start, src_stop
        line[item.DST_SHIFT], line[item.DST_START], line[item.DST_STOP] = dst_shift, dst_start, dst_stop
        line[item.FROM] = overlap_start(src_start - src_shift, dst_start - dst_shift, src_step, dst_step)
        line[item.TO] = overlap_stop(src_stop - src_shift, dst_stop - dst_shift, src_step, dst_step)


@jit
def window(kind, line):
    """Return the periods [start, stop) of a class in which both sides have given a block; empty if stop <= start."""
    start = max(
        first_period(line[item.SRC_START], line[item.SRC_SHIFT], kind[item.SRC_PHASE], kind[item.SRC_STEP]),
        first_period(line[item.DST_START], line[item.DST_SHIFT], kind[item.DST_PHASE], kind[item.DST_STEP]),
    )
    stop = min(
        first_period(line[item.SRC_STOP], line[item.SRC_SHIFT], kind[item.SRC_PHASE], kind[item.SRC_STEP]),
        first_period(line[item.DST_STOP], line[item.DST_SHIFT], kind[item.DST_PHASE], kind[item.DST_STEP]),
    )
    if kind[item.PARTS] > 1:
        start = max(start, part_start(line[item.FROM], line[item.TO], kind[item.PART], kind[item.PARTS]))
        stop = min(stop, part_start(line[item.FROM], line[item.TO], kind[item.PART] + 1, kind[item.PARTS]))
    return start, stop


@jit
def check_ids(groups, ids, at, r, side, status):
    for g in range(len(groups)):
        bound, has_null, null = groups[g, item.BOUND], groups[g, item.HAS_NULL], groups[g, item.NULL]
        given = ids[at[r * len(groups) + g] : at[r * len(groups) + g + 1]]
        refused = 0
        for i in range(len(given)):
            refused += refuses(given[i], bound, has_null, null)
        if refused == 0:
            continue
        for i in range(len(given)):
            if refuses(given[i], bound, has_null, null):
                status[item.CODE], status[item.SIDE], status[item.GROUP], status[item.POSITION] = (
                    item.OUT_OF_BOUND,
                    side,
                    g,
                    i,
                )
                return


@jit
def conflict(program, batch, work):
    """Fail every request that gives a dst block which it or another good request gives too.

    Groups that overlay each other share one id space, and one pass over the hash table.
    """
    groups, at, ids, slots = program.dst_groups, batch.dst_at, batch.dst_ids, work.slots
    mask = len(slots) - 1
    for space in range(len(groups)):
        if groups[space, item.OVERLAY] != space or ascend(program, batch, space):
            continue
        if differ(program, batch, work, space):
            continue
        fill(slots, -1)
        for r in range(len(batch.num_tokens)):
            if work.status[r, item.CODE] != item.OK and work.status[r, item.CODE] != item.CONFLICT:
                continue
            for g in range(space, len(groups)):
                if groups[g, item.OVERLAY] != space:
                    continue
                has_null, null = groups[g, item.HAS_NULL], groups[g, item.NULL]
                begin = at[r * len(groups) + g]
                for k in range(begin, at[r * len(groups) + g + 1]):
                    block = ids[k]
                    if is_null(block, has_null, null):
                        continue
                    place = slot(block, mask)
                    while slots[place] >= 0 and ids[slots[place]] != block:
                        place = (place + 1) & mask
                    if slots[place] < 0:
                        slots[place] = k
                        continue
                    # The list that came first is known by its place among all ids.
                    first = slots[place]
                    other = last_start(at, 1, first)
                    fail(work.status, r, g, k - begin, other // len(groups))
                    fail(work.status, other // len(groups), other % len(groups), first - at[other], r)


@jit
def ascend(program, batch, space):
    """Return whether all ids of a space ascend from list to list, nulls aside: then none is given twice."""
    groups, before = program.dst_groups, np.int64(-1)
    for k in range(len(batch.dst_at) - 1):
        group = groups[k % len(groups)]
        if group[item.OVERLAY] == space:
            for block in batch.dst_ids[batch.dst_at[k] : batch.dst_at[k + 1]]:
                if is_null(block, group[item.HAS_NULL], group[item.NULL]):
                    continue
                if block <= before:
                    return False
                before = block
    return True


@jit
def differ(program, batch, work, space):
    """Return whether all ids of a space differ, as marks in a bitmap show; also False where it would be too large."""
    groups, at = program.dst_groups, batch.dst_at
    bound = np.int64(0)
    for group in groups:
        if group[item.OVERLAY] == space:
            bound = max(bound, group[item.BOUND])
    shift = 0
    while (bound - 1) >> shift > 63 and 1 << shift < len(work.slots):
        shift += 1
    if (bound - 1) >> shift > 63:
        return False
    # Neighbours mark different words: none waits for the one before.
    bits, mask = work.slots[: 1 << shift], (1 << shift) - 1
    fill(bits, 0)
    for k in range(len(at) - 1):
        group, status = groups[k % len(groups)], work.status[k // len(groups), item.CODE]
        if group[item.OVERLAY] != space or status not in (item.OK, item.CONFLICT):
            continue
        twice = np.int64(0)
        for block in batch.dst_ids[at[k] : at[k + 1]]:
            if is_null(block, group[item.HAS_NULL], group[item.NULL]):
                continue
            bit = np.int64(1) << (block >> shift)
            twice |= bits[block & mask] & bit
            bits[block & mask] |= bit
        if twice != 0:
            return False
    return True


@jit
def fail(status, r, group, position, other):
    if status[r, item.CODE] == item.OK:
        status[r, item.CODE], status[r, item.SIDE], status[r, item.GROUP] = item.CONFLICT, 1, group
        status[r, item.POSITION], status[r, item.OTHER] = position, other
