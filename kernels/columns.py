"""The columns of lanes whose size is known: pieces that never merge, and runs of whole blocks."""

from kvcompile._jit import jit
from kvcompile.kernels import item

__all__ = ["write_column", "write_lengths"]

address = jit(item.address)
fill = jit(item.fill)


@jit
def write_column(program, extent, begin, end, out, blocks, runs, again, columns):
    """Write the addresses of one side of the lanes from ``begin`` to ``end``.

    ``again`` is a column of a lane; ``columns`` are those of a row: origin, stride, inner stride.
    """
    rows, lanes, at, number = program.rows, program.lanes, 0, begin
    origin, stride, inner = columns
    while number < end:
        n, size, more = lanes[number, item.LANE_START], size_of(program, extent, number), lanes[number, again]
        if lanes[number, item.LANE_KIND] == item.DENSE:
            first = extent[rows[n, item.CLASS], item.RUNS_AT]
            spread(out[at:], runs[first : first + size], rows[n, origin], rows[n, stride])
        else:
            first, pairs = extent[rows[n, item.CLASS], item.PAIRS_AT], extent[rows[n, item.CLASS], item.PAIRS]
            if rows[n, item.COUNT] == 1:
                spread(out[at:], blocks[first : first + pairs], rows[n, origin], rows[n, stride])
            else:
                spread_inner(out[at:], blocks[first : first + pairs], rows[n], origin, stride, inner)
        if size > 0 and more > 0:
            # An addition each, where AVX2 has no product of 64-bit integers.
            shift(out[at : at + (1 + more) * size].reshape((1 + more, size)), rows[n : n + 1 + more], origin)
        at += (1 + more) * size
        number += 1 + more


@jit
def write_lengths(program, extent, begin, end, out, run_blocks):
    """Write the lengths of the lanes from ``begin`` to ``end``; return how many."""
    rows, lanes, at, number = program.rows, program.lanes, 0, begin
    while number < end:
        n, size = lanes[number, item.LANE_START], size_of(program, extent, number)
        lines = 1 + lanes[number, item.LENGTH_AGAIN]
        if lanes[number, item.LANE_KIND] == item.APART:
            fill(out[at : at + lines * size], rows[n, item.LENGTH])
        else:
            first, tail = extent[rows[n, item.CLASS], item.RUNS_AT], rows[n, item.TAIL]
            blocks, nbytes = run_blocks[first : first + size], rows[n, item.LENGTH] + tail
            if alike(blocks):
                fill(out[at : at + lines * size], address(-tail, blocks[0], nbytes))
            elif size > 0:
                spread(out[at:], blocks, -tail, nbytes)
                repeat(out[at : at + lines * size].reshape((lines, size)))
        at += lines * size
        number += lines
    return at


@jit
def alike(blocks):
    """Return whether all runs, of which there are some, have one size: then one length is all that is written."""
    different = len(blocks) == 0
    for i in range(len(blocks)):
        different |= blocks[i] != blocks[0]
    return not different


@jit
def size_of(program, extent, number):
    """Return how many descriptors a lane makes."""
    n = program.lanes[number, item.LANE_START]
    c = program.rows[n, item.CLASS]
    if program.lanes[number, item.LANE_KIND] == item.DENSE:
        return extent[c, item.RUNS]
    return program.rows[n, item.COUNT] * extent[c, item.PAIRS]


@jit
def shift(lines, rows, origin):
    """Write each line but the first: the line before it, by the distance of their rows' origins larger."""
    for k in range(1, len(rows)):
        before, after, distance = lines[k - 1], lines[k], rows[k, origin] - rows[k - 1, origin]
        for i in range(len(after)):
            after[i] = before[i] + distance


@jit
def repeat(lines):
    """Write each line but the first: the same as it."""
    for k in range(1, len(lines)):
        first, line = lines[0], lines[k]
        for i in range(len(line)):
            line[i] = first[i]


@jit
def spread(out, blocks, origin, stride):
    for i in range(len(blocks)):
        out[i] = address(origin, blocks[i], stride)


@jit
def spread_inner(out, blocks, row, origin, stride, inner):
    count = row[item.COUNT]
    for i in range(len(blocks)):
        begin, block_out = address(row[origin], blocks[i], row[stride]), out[i * count : (i + 1) * count]
        for k in range(count):
            block_out[k] = begin + k * row[inner]
