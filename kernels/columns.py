"""The columns of lanes whose size is known: pieces that never merge, and runs of whole blocks."""

from kvcompile._jit import jit
from kvcompile.kernels import item

__all__ = ["size_of", "write_column", "write_lengths"]

address = jit(item.address)
fill = jit(item.fill)


@jit
def write_column(program, extent, begin, end, out, blocks, runs, again, columns):
    """Write the addresses of one side of the lanes from ``begin`` to ``end``.

    ``again`` is a column of a lane; ``columns`` are those of a row: origin, stride, inner stride.
    """
    rows, lanes, at = program.rows, program.lanes, 0
    origin, stride, inner = columns
    for number in range(begin, end):
        n, size = lanes[number, item.LANE_START], size_of(program, extent, number)
        if lanes[number, again] != 0:
            # An addition each, where AVX2 has no product of 64-bit integers.
            shift(out, at, size, rows[n, origin] - rows[lanes[number - 1, item.LANE_START], origin])
        elif lanes[number, item.LANE_KIND] == item.DENSE:
            first = extent[rows[n, item.CLASS], item.RUNS_AT]
            spread(out[at:], runs[first : first + size], rows[n, origin], rows[n, stride])
        else:
            first, pairs = extent[rows[n, item.CLASS], item.PAIRS_AT], extent[rows[n, item.CLASS], item.PAIRS]
            if rows[n, item.COUNT] == 1:
                spread(out[at:], blocks[first : first + pairs], rows[n, origin], rows[n, stride])
            else:
                spread_inner(out[at:], blocks[first : first + pairs], rows[n], origin, stride, inner)
        at += size


@jit
def write_lengths(program, extent, begin, end, out, run_blocks):
    """Write the lengths of the lanes from ``begin`` to ``end``; return how many."""
    rows, lanes, at = program.rows, program.lanes, 0
    for number in range(begin, end):
        n, size = lanes[number, item.LANE_START], size_of(program, extent, number)
        if lanes[number, item.LANE_KIND] == item.APART:
            fill(out[at : at + size], rows[n, item.LENGTH])
        elif lanes[number, item.LENGTH_AGAIN] != 0:
            shift(out, at, size, 0)
        else:
            first, tail = extent[rows[n, item.CLASS], item.RUNS_AT], rows[n, item.TAIL]
            spread(out[at:], run_blocks[first : first + size], -tail, rows[n, item.LENGTH] + tail)
        at += size
    return at


@jit
def size_of(program, extent, number):
    """Return how many descriptors a lane makes."""
    n = program.lanes[number, item.LANE_START]
    c = program.rows[n, item.CLASS]
    if program.lanes[number, item.LANE_KIND] == item.DENSE:
        return extent[c, item.RUNS]
    return program.rows[n, item.COUNT] * extent[c, item.PAIRS]


@jit
def shift(out, at, size, distance):
    """Write the ``size`` values before ``at`` once more behind them, each by a distance larger."""
    before, after = out[at - size : at], out[at : at + size]
    for i in range(size):
        after[i] = before[i] + distance


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
