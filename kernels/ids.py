"""What the requests of a batch give, packed as msgpack by the host, into one array. It judges kinds, not values."""

import numpy as np

from kvcompile._jit import entry, jit
from kvcompile.kernels import arrays, item

__all__ = ["read"]

NIL = 0xC0  # msgpack's

array_header = jit(item.array_header)
array = jit(item.array)
fill = jit(item.fill)
integer = jit(item.integer)
given_size = jit(arrays.given_size)
batch_of = jit(arrays.batch_of)


@entry
def read(packed, given, starts, requests, src_groups, dst_groups, limit):
    """Read five msgpack lists, one item a request: src and dst id lists, first positions of both, tokens.

    Parameters
    ----------
    packed : uint8 array
        A number in the place of an id list is the size of one that the host will put there.
    given : int64 array, out
        Words of `arrays.given_size`, then room for all ids. See `arrays.batch_of`; nothing is failed, no request id is
        given twice.
    starts : int64 array, out
        Where the host's id lists are to be put in ``given``, in order.
    requests, src_groups, dst_groups : int64
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
    place, filled, found = 1, start, 0  # a header of one byte: five lists
    for side in range(2):
        groups, at, begin = src_groups if side == 0 else dst_groups, batch.src_at if side == 0 else batch.dst_at, filled
        place += array_header(requests)
        for r in range(requests):
            place = enter(packed, place, groups)
            if place < 0:
                return -1, -place
            for g in range(groups):
                size, header = array(packed, place)
                nbytes = header
                if header == 0:
                    size, nbytes = integer(packed, place)
                    if nbytes == 0 or found == len(starts):
                        return -1, place
                    starts[found] = filled
                    found += 1
                if size > len(given) - filled:  # a list that changed while it was packed
                    return -1, place
                place += nbytes
                if header != 0:
                    place = read_list(packed, place, given[filled : filled + size])
                    if place < 0:
                        return -1, -place
                filled += size
                at[r * groups + g + 1] = filled - begin
    if found != len(starts):
        return -1, place
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
