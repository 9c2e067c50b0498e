"""The trial of a build of Mooncake, in a process of its own: does `native` move the right bytes, and say which?

Run as a module. It prints the digest of the build that it tried; anything else, a crash above all, is a no.
"""

import sys

import numpy as np
import numpy.typing as npt

from kvcompile.descriptors import Descriptors
from kvcompile.engines.attempts import BatchError
from kvcompile.engines.native import Native, digest_of
from kvcompile.errors import KVCompileError

__all__ = ["run"]

NBYTES = 1 << 22
ROWS = 900
UNTOUCHED = 0xFD

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]


def run() -> str:
    """Try it with two engines of this process; return the digest of the build, KVCompileError if something is wrong."""
    from mooncake.engine import TransferEngine  # noqa: PLC0415

    engines = TransferEngine(), TransferEngine()
    random = np.random.default_rng(0)
    ours = random.integers(0, 250, NBYTES, np.uint8)
    theirs = np.full(NBYTES, UNTOUCHED, np.uint8)
    for engine, memory in zip(engines, (ours, theirs), strict=True):
        _expect(engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0, "an engine did not start")
        _expect(engine.register_memory(memory.ctypes.data, NBYTES) == 0, "memory was not registered")
    session = f"127.0.0.1:{engines[1].get_rpc_port()}"
    native = Native(engines[0])

    src, dst, length = _pieces(random), _pieces(random), random.integers(0, NBYTES // ROWS, ROWS)
    length[:3] = 0, 1, NBYTES // ROWS
    there = _moved(ours, theirs, src, dst, length)
    native.move("write", session, _rows(ours, src, theirs, dst, length))
    _expect(np.array_equal(theirs, there), "a write left wrong bytes")
    back = _moved(theirs, ours, dst, src[::-1], length)
    native.move("read", session, _rows(theirs, dst, ours, src[::-1], length))
    _expect(np.array_equal(ours, back), "a read left wrong bytes")

    theirs[:] = UNTOUCHED
    bad = (dst == dst[ROWS // 2]) | (dst == dst[-1])
    there = _moved(ours, theirs, src[~bad], dst[~bad], length[~bad])
    length[bad] = 8
    rows = _rows(ours, src, theirs, np.where(bad, 2 * NBYTES, dst), length)
    _expect(np.array_equal(_arrived(native, session, rows), ~bad), "the wrong rows are said to have failed")
    _expect(np.array_equal(theirs, there), "a write that failed in part left wrong bytes")
    _expect(not native._late, "a batch that is over was not freed")
    _expect(not _arrived(native, "127.0.0.1:1", rows).any(), "a peer that does not exist took something")
    return digest_of(engines[0])


def _pieces(random: np.random.Generator) -> Places:
    """Return where disjoint pieces of a buffer begin, in some order."""
    return random.permutation(ROWS) * (NBYTES // ROWS)


def _moved(src: Bytes, dst: Bytes, src_at: Places, dst_at: Places, length: Places) -> Bytes:
    """Return what memory is to hold once pieces were copied into it."""
    result: Bytes = dst.copy()
    for a, b, nbytes in zip(src_at, dst_at, length, strict=True):
        result[b : b + nbytes] = src[a : a + nbytes]
    return result


def _rows(src: Bytes, src_at: Places, dst: Bytes, dst_at: Places, length: Places) -> Descriptors:
    a, b, nbytes = (column.astype(np.uint64) for column in (src_at + src.ctypes.data, dst_at + dst.ctypes.data, length))
    return Descriptors(a, b, nbytes, np.array([0, len(length)]), ("trial",))


def _arrived(native: Native, session: str, rows: Descriptors) -> npt.NDArray[np.bool_]:
    try:
        native.move("write", session, rows)
    except BatchError as error:
        return error.arrived
    raise KVCompileError("a write that cannot succeed did")


def _expect(right: bool, otherwise: str) -> None:
    if not right:
        raise KVCompileError(otherwise)


if __name__ == "__main__":
    sys.stdout.write(run() + "\n")
