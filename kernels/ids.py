"""Python id lists, packed as msgpack by the host, into int64 arrays. It judges kinds, not values."""

import numpy as np

from kvcompile._jit import entry, jit
from kvcompile.kernels import item

__all__ = ["decode"]

array_header = jit(item.array_header)
integer = jit(item.integer)


@entry
def decode(packed, offsets, at, ids):
    """Read integer lists out of msgpack: ``ids[at[k]:at[k+1]]`` from the array that starts at ``packed[offsets[k]]``.

    Lists with a negative offset are passed over; one that holds anything but integers gets the offset -2, and is
    counted in the result. Integers above int64 become its greatest.
    """
    wrong = 0
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
                wrong += 1
                break
            ids[i] = value
            place += nbytes
    return wrong
