"""What the host knows of a build before any id is seen: alignments, periods, and where each lane's candidates begin.

A *candidate* is a piece that a request may emit: one for each row, inner slice and period of a lane, in the order in
which a request emits. Which of them exist (no null id, request not failed) and which open a descriptor, only ids tell.
Here is also the shape of the one array in which a build on a device lives.
"""

import numpy as np

from kvcompile._jit import entry, jit
from kvcompile.kernels import item
from kvcompile.kernels.arrays import Batch, Program
from kvcompile.kernels.check import check_lists, window

__all__ = ["count_candidates"]

# Parts of `work`, an array of int64 words: part k is work[work[k]:work[k + 1]]. What the host writes comes first, and
# what it reads back comes last. The device takes what the host writes, but for ids, which it reads where they are.
(
    AT,  # [lists + 1]: list l is ids[at[l]:at[l + 1]]; all src lists first; a side's by request, then by group
    LISTS,  # [lists, LIST_COLUMNS]
    NUM_TOKENS,  # [requests]; -1: not given
    GIVEN,  # [requests, GIVEN_COLUMNS]
    ALIGNED,  # [requests, pairs, ALIGN_COLUMNS]
    WINDOWS,  # [requests, classes, WINDOW_COLUMNS]
    SEGMENTS,  # [requests * lanes + 1, SEGMENT_COLUMNS], the last one where all candidates end
    COVERS,  # [requests * pairs + 1]: where the dst blocks begin that a (request, pair) has to look at
    REFUSED_ID,  # [requests]: the first id out of bounds, as its place among all ids; NONE
    CONTESTED,  # [requests]: the first conflict; NONE
    HOST_IDS,  # ids that were given in host memory; they stay there
    IDS,  # all ids
    SLOTS,  # [dst groups, a power of two above twice the dst ids]: a hash table for each id space
    SUMS,  # [blocks + 1]: per thread block a sum, then what the blocks before it sum up to; the last is the total
    LASTS,  # [blocks + 1]: likewise, the last candidate that exists
    OFFSETS,  # [descriptors + 1]: where each begins among all pieces or bytes
    SPANS,  # [requests + 1]
    CUT_SPANS,  # [requests + 1]: spans of what the offsets count
    STATUS,  # [requests, STATUS_COLUMNS]
    VALUES,  # [requests]: the id that a status is about
    MARKS,  # [dst ids]: 1 where a dst block is not wholly written
    WORK_PARTS,
) = range(22)
NONE = 2**63 - 1

# Parts of `program`, the plan's arrays in one, in the same form.
ROWS, LANES, CLASSES, PAIRS, SRC_GROUPS, DST_GROUPS, SRC_EDGES, DST_EDGES, PROGRAM_PARTS = range(9)

# Columns of a list: its address, bytes from one id to the next, bytes of an id (negative: unsigned); whose it is.
LIST_ADDRESS, LIST_STRIDE, LIST_NBYTES, LIST_SIDE, LIST_REQUEST, LIST_GROUP, LIST_COLUMNS = range(7)

# Columns of a request: the status that the host found, and whether its id is given twice.
GIVEN_CODE, GIVEN_SIDE, GIVEN_GROUP, GIVEN_POSITION, GIVEN_OTHER, GIVEN_TWICE, GIVEN_COLUMNS = range(7)

# Columns of a (request, class): its periods, and where among all ids those of period 0 would be.
WINDOW_START, WINDOW_STOP, WINDOW_SRC_AT, WINDOW_DST_AT, WINDOW_COLUMNS = range(5)

# Columns of a (request, lane): its first candidate among all, and the period that it starts with.
SEGMENT_AT, SEGMENT_PERIOD, SEGMENT_COLUMNS = range(3)

src_blocks_of = jit(item.src_blocks_of)
cuts = jit(item.cuts)
fill = jit(item.fill)


@entry
def count_candidates(program, batch, status, aligned, windows, segments, covers, most, src_chunk, dst_chunk):
    """Check the lists of a batch, and write what all offsets of a build follow from.

    Parameters
    ----------
    program, batch : tuples of arrays
        `Program` and `Batch`; ids are not looked at.
    status : int64 array [requests, STATUS_COLUMNS]
        In: what `gather` found. Out: also what is wrong with the lists.
    aligned, windows, segments, covers : int64 arrays, out
        See the parts of the same names.
    most, src_chunk, dst_chunk : int64
        Bytes at which descriptors are cut, and of the smallest chunk of each side's buffers; 0: none.

    Returns
    -------
    candidates, covered : int64
        Candidates; dst blocks to be looked at for cover.
    descriptors, nbytes : int64
        No more than so many descriptors and bytes come out.
    gaps, merges : int64
        1 if some candidates may not exist for another reason than a failed request; 1 if some may merge.
    """
    program, batch = Program(*program), Batch(*batch)
    lanes = max(len(program.lanes), 1)
    at, covered, descriptors, nbytes, gaps, merges = 0, 0, 0, np.int64(0), 0, 0
    fill(aligned.ravel(), 0)
    fill(windows.ravel(), 0)
    for r in range(len(batch.num_tokens)):
        if status[r, item.CODE] == item.OK:
            check_lists(program, batch, r, status[r], aligned[r])
        good = status[r, item.CODE] == item.OK
        for p in range(len(program.pairs)):
            covers[r * len(program.pairs) + p] = covered
            if good:
                covered += uncertain(program, batch, r, p, aligned[r, p])
        if good:
            for c in range(len(program.classes)):
                kind = program.classes[c]
                pair, line = program.pairs[kind[item.CLASS_PAIR]], aligned[r, kind[item.CLASS_PAIR]]
                start, stop = window(kind, line)
                if stop > start:
                    s = batch.src_at[r * len(program.src_groups) + pair[item.SRC_GROUP]]
                    d = batch.src_at[-1] + batch.dst_at[r * len(program.dst_groups) + pair[item.DST_GROUP]]
                    windows[r, c, WINDOW_START], windows[r, c, WINDOW_STOP] = start, stop
                    windows[r, c, WINDOW_SRC_AT] = s + line[item.SRC_SHIFT] + kind[item.SRC_PHASE]
                    windows[r, c, WINDOW_DST_AT] = d + line[item.DST_SHIFT] + kind[item.DST_PHASE]
        for number in range(lanes):
            segments[r * lanes + number, SEGMENT_AT], segments[r * lanes + number, SEGMENT_PERIOD] = at, 0
            if not good or number >= len(program.lanes):
                continue
            lane = program.lanes[number]
            rows = program.rows[lane[item.LANE_START] : lane[item.LANE_STOP]]
            start, stop = union(rows, windows[r])
            if stop <= start:
                continue
            segments[r * lanes + number, SEGMENT_PERIOD] = start
            at += (stop - start) * len(rows) * rows[0, item.COUNT]
            merges |= lane[item.LANE_KIND] != item.APART
            for row in rows:
                pieces = (stop - start) * row[item.COUNT]
                nbytes += pieces * row[item.LENGTH]
                # A padding that is bridged counts as the piece's before it.
                whole = row[item.LENGTH] + row[item.TAIL]
                made = 1 if most == 0 else cuts(whole, most)
                made += 0 if src_chunk == 0 else whole // src_chunk + 1
                made += 0 if dst_chunk == 0 else whole // dst_chunk + 1
                descriptors += pieces * made
                c = row[item.CLASS]
                pair = program.pairs[program.classes[c, item.CLASS_PAIR]]
                gaps |= windows[r, c, WINDOW_START] != start or windows[r, c, WINDOW_STOP] != stop
                gaps |= program.src_groups[pair[item.SRC_GROUP], item.HAS_NULL] != 0
                gaps |= program.dst_groups[pair[item.DST_GROUP], item.HAS_NULL] != 0
    segments[len(batch.num_tokens) * lanes, SEGMENT_AT], covers[len(covers) - 1] = at, covered
    return at, covered, descriptors, nbytes, gaps, merges


@jit
def uncertain(program, batch, r, p, line):
    """Return how many dst blocks of a pair have to be looked at: none where all are covered, whatever the ids."""
    pair = program.pairs[p]
    if line[item.DST_STOP] == 0 or program.src_groups[pair[item.SRC_GROUP], item.HAS_NULL] != 0:
        return line[item.DST_STOP]
    src_size, dst_size, num_tokens = pair[item.SRC_SIZE], pair[item.DST_SIZE], batch.num_tokens[r]
    if pair[item.STATE] != 0:
        src_size, dst_size, num_tokens = 1, 1, -1
    ends = 0
    for j in (0, line[item.DST_STOP] - 1):
        start, stop = src_blocks_of(j - line[item.DST_SHIFT], src_size, dst_size, num_tokens)
        start, stop = start + line[item.SRC_SHIFT], stop + line[item.SRC_SHIFT]
        ends += start >= line[item.SRC_START] and stop <= line[item.SRC_STOP]
    return 0 if ends == 2 else line[item.DST_STOP]


@jit
def union(rows, windows):
    """Return the periods of a lane: from the first to the last of any of its rows."""
    start, stop = np.int64(2**62), np.int64(-(2**62))
    for row in rows:
        first, last = windows[row[item.CLASS], WINDOW_START], windows[row[item.CLASS], WINDOW_STOP]
        if first < last:
            start, stop = min(start, first), max(stop, last)
    return start, stop
