"""What is wrong with a batch, on a device, the twin of `check`: ids out of bounds, dst blocks given twice.

Lists are the host's to align: that needs no ids. The first error of a request stays, as on the CPU, whatever the order
in which threads find errors: what is noted is the least place.

The work comes in phases, each of which needs all of the one before it. Few ids are one thread block's, which goes
through all phases in one launch; many ids are a launch for each phase.
"""

import numpy as np
from numba import config, cuda, int64

from kvcompile.kernels import item, known
from kvcompile.kernels.cuda_memory import begin, get, line, load, part, size_of, words
from kvcompile.kernels.cuda_scan import ALONE, WIDE, Run, here, scan_block, threads

FEW = 192 if config.ENABLE_CUDASIM else 8192
"""Ids, or words of what the host knows, that one thread block goes through sooner than more launches take."""

TAKE, CHECK, CONFLICT, CONTEST, SETTLE, SPAN, PHASES = range(7)

refuses = cuda.jit(device=True)(item.refuses)
address = cuda.jit(device=True)(item.address)
slot = cuda.jit(device=True)(item.slot)
is_null = cuda.jit(device=True)(item.is_null)
last_start = cuda.jit(device=True)(item.last_start)
widen = cuda.jit(device=True)(item.widen)


def launch_check(run: Run, program: int, work: int, given: int, taken: int, ids: int) -> None:
    """Enqueue the phases.

    Parameters
    ----------
    run : callable
        See `cuda_scan.Run`.
    program, work : int
        Addresses of the plan and of the build on the device.
    given : int
        Address of what the host knows, in pinned memory.
    taken : int
        How many words of it become the first ones of ``work``.
    ids : int
        How many.
    """
    if max(ids, taken) <= FEW:
        run(settle, 1, WIDE, program, work, given, taken, TAKE, PHASES)
        return
    for phase, items in ((TAKE, taken), (CHECK, ids), (CONFLICT, ids), (CONTEST, ids)):
        run(settle, max(-(-items // WIDE), 1), WIDE, program, work, given, taken, phase, phase + 1)
    run(settle, 1, WIDE, program, work, given, taken, SETTLE, PHASES)


@cuda.jit(**ALONE)
def settle(program, work, given, taken, phase, stop):
    """Go through phases; a launch of several of them is one thread block."""
    while phase < stop:
        if phase == TAKE:
            take(work, given, taken)
        elif phase == CHECK:
            check(program, work, given)
        elif phase == CONFLICT:
            conflict(program, work)
        elif phase == CONTEST:
            contest(program, work)
        elif phase == SETTLE:
            state(program, work)
        else:
            span(program, work)
        cuda.syncthreads()
        phase += 1


@cuda.jit(device=True)
def take(work, given, taken):
    """Fetch what the host knows."""
    source, to = words(given, taken), words(work, taken)
    for k in range(here(), taken, threads()):
        to[k] = source[k]


@cuda.jit(device=True)
def owner(work, k):
    """Return the line of the list that the id at ``k`` is in, and where that list begins."""
    at = part(work, known.AT)
    number = last_start(at, 1, k)
    return line(begin(work, known.LISTS), known.LIST_COLUMNS, number), at[number]


@cuda.jit(device=True)
def group_of(program, side, group):
    """Return the line of a side's group."""
    return line(begin(program, known.SRC_GROUPS if side == 0 else known.DST_GROUPS), item.GROUP_COLUMNS, group)


@cuda.jit(device=True)
def check(program, work, given):
    """Read every id from where it was given; note the first one of each request that is out of bounds.

    Also empties the hash tables and the marks.
    """
    ids, slots, marks = part(work, known.IDS), part(work, known.SLOTS), part(work, known.MARKS)
    refused = part(work, known.REFUSED_ID)
    for place in range(here(), len(slots), threads()):
        slots[place] = -1
    for place in range(here(), len(marks), threads()):
        marks[place] = 0
    for k in range(here(), len(ids), threads()):
        of, start = owner(work, k)
        nbytes = get(of, known.LIST_NBYTES)
        read_at = address(get(of, known.LIST_ADDRESS), k - start, get(of, known.LIST_STRIDE))
        block = widen(load(read_at, abs(nbytes)), nbytes)
        ids[k] = block
        group = group_of(program, get(of, known.LIST_SIDE), get(of, known.LIST_GROUP))
        if refuses(block, get(group, item.BOUND), get(group, item.HAS_NULL), get(group, item.NULL)):
            cuda.atomic.min(refused, get(of, known.LIST_REQUEST), k)


@cuda.jit(device=True)
def table_size(program, work):
    """Return the size of each hash table."""
    return size_of(work, known.SLOTS) // max(size_of(program, known.DST_GROUPS) // item.GROUP_COLUMNS, 1)


@cuda.jit(device=True)
def contestant(program, work, k, size):
    """Return the first slot to try for a dst id, where its table begins, and its request; -1: it has no conflict."""
    of, _ = owner(work, k)
    r, block = get(of, known.LIST_REQUEST), get(begin(work, known.IDS), k)
    given = get(line(begin(work, known.GIVEN), known.GIVEN_COLUMNS, r), known.GIVEN_CODE)
    if given != item.OK or get(begin(work, known.REFUSED_ID), r) != known.NONE:
        return np.int64(-1), np.int64(0), r
    group = group_of(program, 1, get(of, known.LIST_GROUP))
    if is_null(block, get(group, item.HAS_NULL), get(group, item.NULL)):
        return np.int64(-1), np.int64(0), r
    return slot(block, size - 1), get(group, item.OVERLAY) * size, r


@cuda.jit(device=True)
def first_dst(work):
    """Return where the dst ids begin."""
    return size_of(work, known.IDS) - size_of(work, known.MARKS)


@cuda.jit(device=True)
def conflict(program, work):
    """Put every dst id of a good request into the hash table of its space, equal ones as the first of them."""
    ids, slots, size = part(work, known.IDS), part(work, known.SLOTS), table_size(program, work)
    for k in range(first_dst(work) + here(), len(ids), threads()):
        place, table, _ = contestant(program, work, k, size)
        while place >= 0:
            found = cuda.atomic.cas(slots, table + place, -1, k)
            if found == -1:
                break
            if ids[found] == ids[k]:
                cuda.atomic.min(slots, table + place, k)
                break
            place = (place + 1) & (size - 1)


@cuda.jit(device=True)
def first_equal(work, k, place, table, size):
    """Return the first id of a space that equals the one at ``k``."""
    ids, slots = begin(work, known.IDS), begin(work, known.SLOTS)
    while get(ids, get(slots, table + place)) != get(ids, k):
        place = (place + 1) & (size - 1)
    return get(slots, table + place)


@cuda.jit(device=True)
def contest(program, work):
    """Note, for every request, the first conflict that it is part of: in the order of spaces, then of the later id."""
    contested, size, ids = part(work, known.CONTESTED), table_size(program, work), size_of(work, known.IDS)
    for k in range(first_dst(work) + here(), ids, threads()):
        place, table, r = contestant(program, work, k, size)
        if place < 0:
            continue
        first = first_equal(work, k, place, table, size)
        if first != k:
            event = table // size * ids + k
            of, _ = owner(work, first)
            cuda.atomic.min(contested, r, event)
            cuda.atomic.min(contested, get(of, known.LIST_REQUEST), event)


@cuda.jit(device=True)
def state(program, work):
    """Write the status of every request: the first error in the order kinds, lists, ids, conflicts, id given twice."""
    statuses, values = part(work, known.STATUS), part(work, known.VALUES)
    for r in range(here(), len(values), threads()):
        given = line(begin(work, known.GIVEN), known.GIVEN_COLUMNS, r)
        refused, event = get(begin(work, known.REFUSED_ID), r), get(begin(work, known.CONTESTED), r)
        code, side, group, other = get(given, known.GIVEN_CODE), np.int64(0), np.int64(0), np.int64(0)
        position, value = np.int64(0), np.int64(0)
        if code != item.OK:
            side, group = get(given, known.GIVEN_SIDE), get(given, known.GIVEN_GROUP)
            position, other = get(given, known.GIVEN_POSITION), get(given, known.GIVEN_OTHER)
        elif refused != known.NONE or event != known.NONE:
            code, at = np.int64(item.OUT_OF_BOUND), refused
            if refused == known.NONE:
                code, size, at = np.int64(item.CONFLICT), table_size(program, work), event % size_of(work, known.IDS)
                place, table, request = contestant(program, work, at, size)
                other_at = first_equal(work, at, place, table, size)
                if request != r:
                    at, other_at = other_at, at
                of, _ = owner(work, other_at)
                other = get(of, known.LIST_REQUEST)
            of, start = owner(work, at)
            side, group, position = get(of, known.LIST_SIDE), get(of, known.LIST_GROUP), at - start
            value = get(begin(work, known.IDS), at)
        elif get(given, known.GIVEN_TWICE) != 0:
            code = np.int64(item.TWICE)
        k = r * item.STATUS_COLUMNS
        statuses[k + item.CODE], statuses[k + item.SIDE], statuses[k + item.GROUP] = code, side, group
        statuses[k + item.POSITION], statuses[k + item.OTHER], values[r] = position, other, value


@cuda.jit(device=True)
def span(program, work):
    """Write the spans if every candidate of a good request is a descriptor; one thread block does it."""
    shared = cuda.shared.array((2, WIDE), int64)
    segments, spans, status = begin(work, known.SEGMENTS), part(work, known.SPANS), begin(work, known.STATUS)
    step = known.SEGMENT_COLUMNS * max(size_of(program, known.LANES) // item.LANE_COLUMNS, 1)
    requests, carry = len(spans) - 1, np.int64(0)
    for start in range(0, requests + 1, WIDE):
        r, made = start + cuda.threadIdx.x, np.int64(0)
        if r < requests and get(status, r * item.STATUS_COLUMNS + item.CODE) == item.OK:
            made = get(segments, (r + 1) * step + known.SEGMENT_AT) - get(segments, r * step + known.SEGMENT_AT)
        before, total = scan_block(shared, made, 0)
        if r <= requests:
            spans[r] = carry + before
        carry += total
