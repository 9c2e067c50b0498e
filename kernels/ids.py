"""What the requests of a batch give, packed as msgpack by the host, into one array. It judges kinds, not values."""

import numpy as np

from kvcompile._jit import jit
from kvcompile.kernels import arrays, item

__all__ = ["read"]

NIL, ONE_PAIR = 0xC0, 0x81  # msgpack's: None, a map of one pair

array_header = jit(item.array_header)
array = jit(item.array)
binary = jit(item.binary)
fill = jit(item.fill)
integer = jit(item.integer)
given_size = jit(arrays.given_size)
batch_of = jit(arrays.batch_of)


@jit
def read(packed, given, requests, src_groups, dst_groups, src_most, dst_most, limit):
    """Read five msgpack lists, one item a request: src and dst id lists, first positions of both, tokens.

    Parameters
    ----------
    packed : uint8 array
        An id list is an array of integers; or a binary, of int64 as they lie in memory; or a map of 0 to the number of
        ids that are elsewhere, and left open here.
    given : int64 array, out
        Words of `arrays.given_size`, then room for all ids. See `arrays.batch_of`; nothing is failed, no request id is
        given twice.
    requests, src_groups, dst_groups : int64
    src_most, dst_most : int64
        What there is room for: ids of each side.
    limit : int64
        Positions lie below it.

    Returns
    -------
    src_ids, dst_ids : int64
        How many; -1 and where in ``packed`` if something there is not as it should be. Ids above int64 become its
        greatest.
    """
    start = given_size(requests, src_groups, dst_groups)
    fill(given[:start], 0)
    _, batch = batch_of(given, requests, src_groups, dst_groups)
    place, filled = 1, start  # a header of one byte: five lists
    for side in range(2):
        groups, at, begin = src_groups if side == 0 else dst_groups, batch.src_at if side == 0 else batch.dst_at, filled
        room = given[: filled + (src_most if side == 0 else dst_most)]
        place += array_header(requests)
        for r in range(requests):
            place = enter(packed, place, groups)
            if place < 0:
                return -1, -place
            for g in range(groups):
                place, filled = read_ids(packed, place, room, filled)
                if place < 0:
                    return -1, -place
                at[r * groups + g + 1] = filled - begin
    for side in range(2):
        groups, firsts = src_groups if side == 0 else dst_groups, batch.src_first if side == 0 else batch.dst_first
        place += array_header(requests)
        for r in range(requests):
            if packed[place] == NIL:
                firsts[r] = -1
                batch.num_tokens[r] -= 1
                place += 1
                continue
            place = enter(packed, place, groups)
            if place < 0:
                return -1, -place
            for g in range(groups):
                value, nbytes = integer(packed, place)
                if nbytes == 0 or not 0 <= value < limit:
                    return -1, place
                firsts[r, g] = value
                place += nbytes
    place += array_header(requests)
    for r in range(requests):
        missing = batch.num_tokens[r]  # sides without positions: neither, or both
        if missing == -1:
            return -1, place
        batch.num_tokens[r] = -1
        if packed[place] == NIL:
            place += 1
            continue
        value, nbytes = integer(packed, place)
        if nbytes == 0 or missing != 0 or not 0 <= value < item.MOST_TOKENS:
            return -1, place
        batch.num_tokens[r] = value
        place += nbytes
    return batch.src_at[-1], batch.dst_at[-1]


@jit
def enter(packed, place, size):
    """Return where the first item of an array of so many items stands, or minus the place if it is none."""
    found, nbytes = array(packed, place)
    if nbytes == 0 or found != size:
        return -place
    return place + nbytes


@jit
def read_ids(packed, place, given, filled):
    """Read an id list behind those that ``given`` holds; return where it ends there and here.

    Minus the place first, if something else stands there, or more ids than there is room for: a list that another
    thread changed while it was packed.
    """
    size, header = array(packed, place)
    nbytes, bin_header = binary(packed, place)
    if bin_header != 0:
        size = nbytes >> 3
    elif packed[place] == ONE_PAIR:
        size, header = integer(packed, place + 2)
    elif header == 0:
        return -place, filled
    if size < 0 or size > len(given) - filled:
        return -place, filled
    ids = given[filled : filled + size]
    if bin_header != 0:
        place += bin_header
        took = packed[place : place + 8 * size].view(np.int64)
        for i in range(size):
            ids[i] = took[i]
        return place + nbytes, filled + size
    if packed[place] == ONE_PAIR:
        return place + 2 + header, filled + size
    return read_list(packed, place + header, ids), filled + size


@jit
def read_list(packed, place, ids):
    """Read integers from a place on; return where they end, or minus where something else stands."""
    for i in range(len(ids)):
        if packed[place] == 0xCD:  # below 65,536, what most ids are
            ids[i] = (np.int64(packed[place + 1]) << 8) | packed[place + 2]
            place += 3
            continue
        value, nbytes = integer(packed, place)
        if nbytes == 0:
            return -place
        ids[i] = value
        place += nbytes
    return place
