"""What happens to one work item: plain typed functions, compiled by `cpu` with njit and by `cuda` for the device.

They see no Python object, allocate nothing and raise nothing; everything is int64 and wraps around, so that device
addresses with bit 63 set stay exact. They do not call each other, since each driver compiles them its own way.
Below are also the columns of the arrays that drivers and host share.
"""

import numpy as np

# Columns of a row: COUNT slices of LENGTH bytes, the inner strides apart; TAIL bytes behind each may be copied along.
(
    SRC_ORIGIN,
    SRC_STRIDE,
    DST_ORIGIN,
    DST_STRIDE,
    LENGTH,
    TAIL,
    COUNT,
    SRC_INNER,
    DST_INNER,
    CLASS,
    ROW_COLUMNS,
) = range(11)

# Columns of a lane: rows [START, STOP) of the row array; how they merge; how many lanes behind it write as src, dst or
# length what it writes, each all values by one distance larger.
LANE_START, LANE_STOP, LANE_KIND, SRC_AGAIN, DST_AGAIN, LENGTH_AGAIN, LANE_COLUMNS = range(7)
APART, DENSE, CHAIN = range(3)

# Columns of a class: rows with the same pairs of blocks in the same order. Units: the strides by their greatest common
# divisor; the order of sorted pairs depends on them. Then how many of its lanes are dense, slices lie apart, and rows
# are part of a chain.
(
    CLASS_PAIR,
    SRC_STEP,
    SRC_PHASE,
    DST_STEP,
    DST_PHASE,
    PART,
    PARTS,
    SRC_UNIT,
    DST_UNIT,
    DENSE_LANES,
    APART_SLICES,
    CHAIN_ROWS,
    CLASS_COLUMNS,
) = range(13)

# Columns of a group pair: sizes in tokens, steps in blocks a period.
SRC_GROUP, DST_GROUP, SRC_SIZE, DST_SIZE, STATE, PAIR_SRC_STEP, PAIR_DST_STEP, PAIR_COLUMNS = range(8)

# Columns of a side's group. OVERLAY: the lowest group that shares bytes with this one.
BOUND, HAS_NULL, NULL, OVERLAY, GROUP_COLUMNS = range(5)

# Columns of a buffer whose chunks have edges: bytes, all three; a chunk of 0 is none.
EDGE_BASE, EDGE_NBYTES, EDGE_CHUNK, EDGE_COLUMNS = range(4)

# What one call of `cpu.build` does, as a sum.
READ, MEASURE, WRITE = 1, 2, 4

# Columns of a request's status, and its codes.
CODE, SIDE, GROUP, POSITION, OTHER, STATUS_COLUMNS = range(6)
OK, REFUSED, UNEQUAL, SHORTER, NO_STATE, OUT_OF_BOUND, CONFLICT, TWICE = range(8)

# Positions, in tokens, lie below this, so that no sum of them can leave 64 bits.
MOST_TOKENS = 2**60

# Columns of an alignment, one a (request, group pair): index = position + shift; indices in [start, stop) take part;
# the overlap touches the periods [FROM, TO).
SRC_SHIFT, SRC_START, SRC_STOP, DST_SHIFT, DST_START, DST_STOP, FROM, TO, ALIGN_COLUMNS = range(9)

# Columns of a (request, class): its pairs of ids, its runs, and its periods.
PAIRS_AT, PAIRS, RUNS_AT, RUNS, PERIOD_START, PERIOD_STOP, EXTENT_COLUMNS = range(7)


def refuses(block, bound, has_null, null):
    """Return whether a block id lies outside [0, bound) and is not its side's null id."""
    return (block < 0 or block >= bound) and not (has_null != 0 and block == null)


def align(state, src_size, dst_size, src_count, dst_count, src_first, dst_first, num_tokens):
    """Align the two id lists of a group pair.

    Parameters
    ----------
    state : int64
        Not 0 for a state pair.
    src_size, dst_size : int64
        Tokens of a block.
    src_count, dst_count : int64
        Ids given.
    src_first, dst_first : int64
        Position of the first block given; negative: no positions.
    num_tokens : int64
        Tokens of the request; negative: not given. Blocks that start at or past it are taken off first.

    Returns
    -------
    code, src_shift, src_start, src_stop, dst_shift, dst_start, dst_stop : int64
        Index in a list = position + shift; the indices from start to stop take part.
    """
    src_stop, dst_stop = src_count, dst_count
    if num_tokens >= 0:
        src_stop = max(0, min(src_count, -(-num_tokens // src_size) - src_first))
        dst_stop = max(0, min(dst_count, -(-num_tokens // dst_size) - dst_first))
    if dst_stop == 0:
        return OK, 0, 0, 0, 0, 0, 0
    if state != 0 and src_size != dst_size:
        if src_stop == 0:
            return NO_STATE, 0, 0, 0, 0, 0, 0
        return OK, src_stop - 1, src_stop - 1, src_stop, dst_stop - 1, dst_stop - 1, dst_stop
    if src_first >= 0:
        return OK, -src_first, 0, src_stop, -dst_first, 0, dst_stop
    if src_size != dst_size:
        return UNEQUAL, 0, 0, 0, 0, 0, 0
    if src_stop < dst_stop:
        return SHORTER, 0, 0, 0, 0, 0, 0
    return OK, src_stop - dst_stop, 0, src_stop, 0, 0, dst_stop


def first_period(index, shift, phase, step):
    """Return the first period whose block of this phase has at least this index in its list."""
    return -(-(index - shift - phase) // step)


def overlap_start(src_position, dst_position, src_step, dst_step):
    """Return the first period of an overlap that starts at the later of two positions, in blocks of each side."""
    return max(src_position // src_step, dst_position // dst_step)


def overlap_stop(src_position, dst_position, src_step, dst_step):
    """Return the end of the periods of an overlap that stops at the earlier of two positions."""
    return min(-(-src_position // src_step), -(-dst_position // dst_step))


def part_start(first, last, part, parts):
    """Return where a part of the periods [first, last) begins; the next one's beginning is its end."""
    return first + part * (last - first) // parts


def src_blocks_of(position, src_size, dst_size, num_tokens):
    """Return the range of src positions that hold the tokens of a dst block, up to ``num_tokens`` if not negative."""
    start = position * dst_size
    stop = start + dst_size
    if num_tokens >= 0:
        stop = min(stop, num_tokens)
    return start // src_size, -(-stop // src_size)


def address(origin, block, stride):
    """Return where a row's slice of a block begins."""
    return origin + block * stride


def to_edge(offset, chunk):
    """Return the bytes from an offset in a buffer to the end of its chunk; a chunk of 0 is none."""
    return chunk - offset % chunk if chunk > 0 else 2**63 - 1


def slot(block, mask):
    """Return the first place to look for a block id in a hash table of ``mask + 1`` places."""
    mixed = block * -7046029254386353131  # 2**64 / golden ratio, odd: neighbours spread
    return (mixed ^ (mixed >> 32)) & mask


def fill(out, value):
    """Set every item of an array; a slice given one value would take Numba a second to compile."""
    for i in range(len(out)):
        out[i] = value


def array_header(size):
    """Return the bytes of a msgpack array's header (msgpack's specification: fixarray, array 16, array 32)."""
    return 1 if size < 16 else 3 if size < 65536 else 5


def array(packed, at):
    """Return the items of a msgpack array and the size of its header in bytes; size 0 if it is none.

    Formats as in msgpack's specification: fixarray, array 16, array 32, big-endian.
    """
    head = packed[at]
    if 0x90 <= head < 0xA0:
        return np.int64(head) - 0x90, 1
    if head == 0xDC:
        return (np.int64(packed[at + 1]) << 8) | packed[at + 2], 3
    if head == 0xDD:
        high, low = (np.int64(packed[at + 1]) << 8) | packed[at + 2], (np.int64(packed[at + 3]) << 8) | packed[at + 4]
        return (high << 16) | low, 5
    return np.int64(0), 0


def binary(packed, at):
    """Return the bytes of a msgpack binary and the size of its header in bytes; size 0 if it is none.

    Formats as in msgpack's specification: bin 8, bin 16, bin 32, big-endian.
    """
    head = packed[at]
    if head < 0xC4 or head > 0xC6:
        return np.int64(0), 0
    width, nbytes = np.int64(1) << np.int64(head - 0xC4), np.int64(0)
    for k in range(1, width + 1):
        nbytes = (nbytes << 8) | packed[at + k]
    return nbytes, 1 + width


def integer(packed, at):
    """Return a msgpack integer and its size in bytes; size 0 if it is none. Beyond int64: its greatest value.

    Formats as in msgpack's specification: fixint, uint 8 to 64, int 8 to 64, big-endian.
    """
    head = packed[at]
    if head < 0x80:
        return np.int64(head), 1
    if head >= 0xE0:
        return np.int64(head) - 256, 1
    if head < 0xCC or head > 0xD3:
        return np.int64(0), 0
    signed = head >= 0xD0
    nbytes = np.int64(1) << np.int64((head - 0xCC) & 3)
    value = np.int64(packed[at + 1])
    if signed and value >= 128:
        value -= 256
    for k in range(2, nbytes + 1):
        value = (value << 8) | packed[at + k]
    if not signed and value < 0:
        value = np.int64(2**63 - 1)
    return value, 1 + nbytes


def is_null(block, has_null, null):
    """Return whether a block id is its side's null id."""
    return has_null != 0 and block == null


def touches(src, dst, src_end, dst_end, tail):
    """Return whether a piece continues, on both sides, the one before it, behind which ``tail`` bytes are bridged."""
    return src == src_end + tail and dst == dst_end + tail


def candidate(n, rows, count):
    """Return (row, inner slice, period) of the ``n``-th candidate of a lane: by period, then row, then inner slice.

    Only a lane of one row has several inner slices.
    """
    period = n // (rows * count)
    n -= period * rows * count
    return n // count, n % count, period


def cuts(length, most):
    """Return into how many descriptors one is cut at ``most`` bytes."""
    return (length - 1) // most + 1


def last_start(starts, columns, i):
    """Return the last line whose first column is at most ``i``, or line 0; that column ascends.

    Parameters
    ----------
    starts : int64 or uint64 array [lines * columns]
    columns : int64
    i : of the type of ``starts``
    """
    low, high = 0, len(starts) // columns
    while high - low > 1:
        middle = (low + high) // 2
        if starts[middle * columns] <= i:
            low = middle
        else:
            high = middle
    return low


def widen(bits, nbytes):
    """Return an integer as int64; beyond it, its greatest value.

    Parameters
    ----------
    bits : int64
        As read, zeros above it.
    nbytes : int64
        Its size; negative: unsigned.
    """
    if nbytes == -8 and bits < 0:
        return np.int64(2**63 - 1)
    if 0 < nbytes < 8 and bits >> (8 * nbytes - 1) != 0:
        return bits - (np.int64(1) << (8 * nbytes))
    return bits


def combine(a, b, largest):
    """Return the larger of two numbers if ``largest``, else their sum: what a scan is made of."""
    return max(a, b) if largest != 0 else a + b


def widest(a, b):
    """Return the widest copy, of 1, 2, 4, 8 or 16 bytes, that can be aligned at both of two addresses at once."""
    apart = (a ^ b) | 16
    return apart & -apart
