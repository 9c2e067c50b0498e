"""What is wrong with a batch, on a device, the twin of `check`: ids out of bounds, dst blocks given twice.

Lists are the host's to align: that needs no ids. The first error of a request stays, as on the CPU, whatever the order
in which threads find errors: what is noted is the least place.
"""

import numpy as np
from numba import cuda

from kvcompile.kernels import item, known
from kvcompile.kernels.cuda_memory import load
from kvcompile.kernels.cuda_scan import here, part

refuses = cuda.jit(device=True)(item.refuses)
address = cuda.jit(device=True)(item.address)
slot = cuda.jit(device=True)(item.slot)
is_null = cuda.jit(device=True)(item.is_null)
last_start = cuda.jit(device=True)(item.last_start)
widen = cuda.jit(device=True)(item.widen)


@cuda.jit(device=True)
def owner(program, work, number):
    """Return (side, request, group) of a list."""
    src_groups = len(part(program, known.SRC_GROUPS)) // item.GROUP_COLUMNS
    dst_groups = len(part(program, known.DST_GROUPS)) // item.GROUP_COLUMNS
    src_lists = len(part(work, known.NUM_TOKENS)) * src_groups
    if number < src_lists:
        return 0, number // src_groups, number % src_groups
    return 1, (number - src_lists) // dst_groups, (number - src_lists) % dst_groups


@cuda.jit(device=True, inline="always")
def group_of(program, side, group):
    """Return the columns of a side's group."""
    groups = part(program, known.SRC_GROUPS if side == 0 else known.DST_GROUPS)
    return groups[group * item.GROUP_COLUMNS : (group + 1) * item.GROUP_COLUMNS]


@cuda.jit
def check(program, work):
    """Read every id from where it was given; note the first one of each request that is out of bounds.

    Also empties the hash tables and the marks.
    """
    k = here()
    ids, slots, marks = part(work, known.IDS), part(work, known.SLOTS), part(work, known.MARKS)
    for place in range(k, len(slots), np.int64(cuda.gridDim.x) * cuda.blockDim.x):
        slots[place] = -1
    if k < len(marks):
        marks[k] = 0
    if k >= len(ids):
        return
    at, lists = part(work, known.AT), part(work, known.LISTS)
    number = last_start(at, 1, k)
    given = lists[number * known.LIST_COLUMNS : (number + 1) * known.LIST_COLUMNS]
    nbytes = given[known.LIST_NBYTES]
    read_at = address(given[known.LIST_ADDRESS], k - at[number], given[known.LIST_STRIDE])
    block = widen(load(read_at, abs(nbytes)), nbytes)
    ids[k] = block
    side, r, g = owner(program, work, number)
    group = group_of(program, side, g)
    if refuses(block, group[item.BOUND], group[item.HAS_NULL], group[item.NULL]):
        cuda.atomic.min(part(work, known.REFUSED_ID), r, k)


@cuda.jit(device=True)
def contestant(program, work, k):
    """Return the first slot to try for an id, its space, and its request; -1 for what can have no conflict."""
    ids, slots = part(work, known.IDS), part(work, known.SLOTS)
    if k >= len(ids):
        return np.int64(-1), np.int64(0), np.int64(0)
    side, r, g = owner(program, work, last_start(part(work, known.AT), 1, k))
    given = part(work, known.GIVEN)[r * known.GIVEN_COLUMNS + known.GIVEN_CODE]
    if side == 0 or given != item.OK or part(work, known.REFUSED_ID)[r] != known.NONE:
        return np.int64(-1), np.int64(0), r
    group = group_of(program, side, g)
    if is_null(ids[k], group[item.HAS_NULL], group[item.NULL]):
        return np.int64(-1), np.int64(0), r
    size = len(slots) // (len(part(program, known.DST_GROUPS)) // item.GROUP_COLUMNS)
    return slot(ids[k], size - 1), group[item.OVERLAY] * size, r


@cuda.jit
def conflict(program, work):
    """Put every dst id of a good request into the hash table of its space, equal ones as the first of them."""
    k = here()
    place, table, _ = contestant(program, work, k)
    if place < 0:
        return
    ids, slots = part(work, known.IDS), part(work, known.SLOTS)
    size = len(slots) // (len(part(program, known.DST_GROUPS)) // item.GROUP_COLUMNS)
    while True:
        found = cuda.atomic.cas(slots, table + place, -1, k)
        if found == -1:
            return
        if ids[found] == ids[k]:
            cuda.atomic.min(slots, table + place, k)
            return
        place = (place + 1) & (size - 1)


@cuda.jit(device=True)
def first_equal(program, work, k, place, table):
    """Return the first id of a space that equals the one at ``k``."""
    ids, slots = part(work, known.IDS), part(work, known.SLOTS)
    size = len(slots) // (len(part(program, known.DST_GROUPS)) // item.GROUP_COLUMNS)
    while ids[slots[table + place]] != ids[k]:
        place = (place + 1) & (size - 1)
    return slots[table + place]


@cuda.jit
def contest(program, work):
    """Note, for every request, the first conflict that it is part of: in the order of spaces, then of the later id."""
    k = here()
    place, table, r = contestant(program, work, k)
    if place < 0:
        return
    first = first_equal(program, work, k, place, table)
    if first == k:
        return
    ids, contested = part(work, known.IDS), part(work, known.CONTESTED)
    size = len(part(work, known.SLOTS)) // (len(part(program, known.DST_GROUPS)) // item.GROUP_COLUMNS)
    event = table // size * len(ids) + k
    _, other, _ = owner(program, work, last_start(part(work, known.AT), 1, first))
    cuda.atomic.min(contested, r, event)
    cuda.atomic.min(contested, other, event)


@cuda.jit
def settle(program, work):
    """Write the status of every request: the first error in the order kinds, lists, ids, conflicts, id given twice."""
    r = here()
    if r >= len(part(work, known.NUM_TOKENS)):
        return
    given = part(work, known.GIVEN)[r * known.GIVEN_COLUMNS : (r + 1) * known.GIVEN_COLUMNS]
    status = part(work, known.STATUS)[r * item.STATUS_COLUMNS : (r + 1) * item.STATUS_COLUMNS]
    at, ids, values = part(work, known.AT), part(work, known.IDS), part(work, known.VALUES)
    refused, event = part(work, known.REFUSED_ID)[r], part(work, known.CONTESTED)[r]
    for column in range(item.STATUS_COLUMNS):
        status[column] = given[column]
    values[r] = 0
    if given[known.GIVEN_CODE] != item.OK:
        return
    if refused != known.NONE:
        number = last_start(at, 1, refused)
        side, _, group = owner(program, work, number)
        status[item.CODE], status[item.SIDE], status[item.GROUP] = item.OUT_OF_BOUND, side, group
        status[item.POSITION], values[r] = refused - at[number], ids[refused]
    elif event != known.NONE:
        here_id = event % len(ids)
        place, table, request = contestant(program, work, here_id)
        other_id = first_equal(program, work, here_id, place, table)
        if request != r:
            here_id, other_id = other_id, here_id
        number = last_start(at, 1, here_id)
        _, _, group = owner(program, work, number)
        _, other, _ = owner(program, work, last_start(at, 1, other_id))
        status[item.CODE], status[item.SIDE], status[item.GROUP] = item.CONFLICT, 1, group
        status[item.POSITION], status[item.OTHER], values[r] = here_id - at[number], other, ids[here_id]
    elif given[known.GIVEN_TWICE] != 0:
        status[item.CODE] = item.TWICE
