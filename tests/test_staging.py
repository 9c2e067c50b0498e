"""Packing pieces into a buffer and unpacking them, on the CPU; bytes are compared with what `build` names."""

import numpy as np
import numpy.typing as npt
import pytest

import kvcompile
from kvcompile import Buffer, Cache, Descriptors, Field, Group, LayoutError, Plan, Region, Request

Bytes = npt.NDArray[np.uint8]

BLOCKS, TOKENS, LAYERS, HEADS = 24, 4, 3, 4


def memory(seed: int, nbytes: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 255, nbytes, np.uint8)


def cache(at: Bytes, cell: int, whole: bool = False, **place: int) -> Cache:
    """One rank in the given bytes: ``HEADS`` heads, or fields that every rank keeps whole."""
    local = HEADS if whole else HEADS // place.get("tp_size", 1)
    span = local * TOKENS * cell
    field = Field.hnd("kv", heads=HEADS, tokens=TOKENS, cell_nbytes=cell, replicated=whole)
    regions = [Region(n, 0, at.ctypes.data + 3 + n * BLOCKS * span, span, BLOCKS, [field]) for n in range(LAYERS)]
    return Cache(regions, [Group(TOKENS, null_block=0)], [Buffer(at.ctypes.data, at.nbytes)], **place)


def requests() -> list[Request]:
    return [
        Request("a", [[3, 0, 9, 10, 2]], [[1, 2, 3, 4, 5]]),
        Request("bad", [[1]], [[BLOCKS]]),
        Request("b", [np.array([7, 8], np.int32)], [(11, 12)]),
    ]


def named(built: Descriptors, src: Bytes) -> list[bytes]:
    """The src bytes of each descriptor."""
    starts = (built.src - np.uint64(src.ctypes.data)).astype(int)
    return [src[at : at + n].tobytes() for at, n in zip(starts, built.length.astype(int), strict=True)]


@pytest.mark.parametrize("cell", [1, 3, 16, 200])
@pytest.mark.parametrize("unaligned", [0, 5])
def test_there_and_back(cell: int, unaligned: int) -> None:
    """Rank 1 of two sends its heads: packed in the order of `build`, and unpacked to exactly their places."""
    src, dst = memory(1, 20_000 * cell), memory(2, 20_000 * cell)
    plan = kvcompile.compile(cache(src, cell, tp_rank=1, tp_size=2), cache(dst, cell))
    built = plan.build(requests())
    room = plan.packed_nbytes(requests())
    assert room == LAYERS * 8 * 2 * TOKENS * cell  # nulls and the bad one included
    staging = np.full(room + 16, 0x5A, np.uint8)
    staged = staging[unaligned : unaligned + room]
    packed = plan.pack(requests(), staged)
    pieces = named(built, src)
    assert staged[: packed.nbytes].tobytes() == b"".join(pieces)
    assert (staging[unaligned + packed.nbytes :] == 0x5A).all()
    assert (staging[:unaligned] == 0x5A).all()
    assert packed.nbytes == built.nbytes
    ends = np.concatenate([[0], np.cumsum(built.length.astype(np.int64))])
    assert packed.spans.tolist() == ends[built.spans].tolist()
    assert packed.requests == ("a", "bad", "b")
    assert list(packed.failed) == ["bad"]
    assert packed.uncovered == built.uncovered == {"a": [(0, 1)]}
    assert "1 failed" in str(packed)

    expected = dst.copy()
    for at, piece in zip((built.dst - np.uint64(dst.ctypes.data)).astype(int), pieces, strict=True):
        expected[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
    unpacked = plan.unpack(requests(), staged)
    np.testing.assert_array_equal(dst, expected)
    assert unpacked.spans.tolist() == packed.spans.tolist()


def test_what_can_merge_stays() -> None:
    """Whole blocks make few descriptors: they are not packed, whether or not their ids run on."""
    src, dst = memory(1, 20_000), memory(2, 20_000)
    plan = kvcompile.compile(cache(src, 8, whole=True), cache(dst, 8, whole=True))
    before = dst.copy()
    assert plan.packed_nbytes(requests()) == 0
    assert plan.pack(requests(), bytearray(8)).nbytes == 0
    assert plan.unpack(requests(), bytearray(8)).spans.tolist() == [0, 0, 0, 0]
    np.testing.assert_array_equal(dst, before)


def plan_of(src: Bytes, dst: Bytes) -> Plan:
    return kvcompile.compile(cache(src, 8, tp_rank=1, tp_size=2), cache(dst, 8))


def test_buffers() -> None:
    """Any type and shape that is one span; what is too small, or no span, is refused before a byte moves."""
    src, dst = memory(1, 100_000), memory(2, 100_000)
    plan = plan_of(src, dst)
    room = plan.packed_nbytes(requests())
    expected = np.zeros(room, np.uint8)
    plan.pack(requests(), expected)
    for staging in (bytearray(room), memoryview(bytearray(room)), np.zeros((room // 64, 8))):
        plan.pack(requests(), staging)
        assert bytes(memoryview(staging).cast("B")) == expected.tobytes()
    plan.unpack(requests(), expected.tobytes())  # it is only read
    for staging, words in (
        (bytearray(room - 1), f"{room - 1} bytes, expected at least {room}"),
        (bytes(room), "read-only"),
        (np.zeros((room, 2), np.uint8)[:, 0], "not contiguous"),
        ([0] * room, "staging is a list"),
    ):
        with pytest.raises(ValueError, match=words):
            plan.pack(requests(), staging)


def test_arguments() -> None:
    src, dst = memory(1, 100_000), memory(2, 100_000)
    plan = plan_of(src, dst)
    with pytest.raises(ValueError, match="stream goes with device"):
        plan.pack(requests(), bytearray(10_000), stream=0)
    with pytest.raises(ValueError, match=r"requests\[0\]"):
        plan.unpack([1], bytearray(10_000))  # type: ignore[list-item]
    assert plan.pack([], bytearray(0)).nbytes == 0
    table = plan.table.copy()
    table["length"] = 0
    with pytest.raises(LayoutError, match="plan table"):
        plan.with_table(table).pack(requests(), bytearray(10_000))
