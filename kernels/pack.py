"""The copying of pieces into a staging buffer and out of it: one after the other, without gaps."""

from kvcompile._jit import entry, move

__all__ = ["pack"]


@entry
def pack(address, length, spans, staging, unpacks, byte_spans):
    """Copy the bytes of all descriptors into a buffer, in order, or from there to where they belong.

    Parameters
    ----------
    address, length : int64 arrays [n]
        Their src, or dst if ``unpacks``; addresses of this process.
    spans, byte_spans : int64 arrays [requests + 1]
        Out: request ``i`` owns bytes ``byte_spans[i]:byte_spans[i + 1]`` of the buffer.
    staging : int64
        Address of the buffer, which has room for them all.
    unpacks : int64
        0: into the buffer; 1: out of it.
    """
    at = 0
    for r in range(len(spans) - 1):
        byte_spans[r] = at
        for i in range(spans[r], spans[r + 1]):
            if unpacks != 0:
                move(address[i], staging + at, length[i])
            else:
                move(staging + at, address[i], length[i])
            at += length[i]
    byte_spans[len(spans) - 1] = at
