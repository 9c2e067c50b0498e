"""Packing, unpacking and their parts in Numba's simulator, against the CPU's, byte for byte (`make sim`)."""

import numpy as np
import pytest

import kvcompile
from kvcompile import Request, device
from kvcompile.kernels import cuda_descriptors, cuda_scan, known
from tests.simulated import OnDevice, SimulatedMemory, cache, on_host

# int64 wraps around, as it should
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 100])
def test_scan(size: int, largest: int) -> None:
    values = np.random.default_rng(size).integers(0, 2**60, size)
    work = np.array([2, 2 + size + 1, *values, 77])
    cuda_scan.scan[1, cuda_scan.WIDE](work.ctypes.data, 0, size, largest)
    whole = [-1 if largest else 0, *(np.maximum.accumulate(values) if largest else np.cumsum(values))]
    assert work[2:].tolist() == whole


def test_pack_and_unpack() -> None:
    """Into a buffer and out of it, byte for byte as on the CPU; what is no piece stays as it was."""
    for cell, start in ((3, 5), (300, 8)):
        generator = np.random.default_rng(cell)
        src, dst = (generator.integers(0, 255, 2 * 16 * 30 * cell + 64, np.uint8) for _ in range(2))
        src_base, dst_base = src.ctypes.data + 1, dst.ctypes.data + 3
        plan = kvcompile.compile(
            cache(src_base, cell=cell, blocks=30, null=0, tp_rank=1, tp_size=2), cache(dst_base, cell=cell, blocks=30)
        )
        requests = [
            Request("a", [[3, 0, 9, 10]], [OnDevice(np.array([1, 2, 3, 4]))]),
            Request("bad", [[1]], [[30]]),
            Request("b", [OnDevice(np.array([7]))], [[29]]),
        ]
        hosted = [on_host(request) for request in requests]
        room = plan.packed_nbytes(hosted)
        staged, expected = (np.full(room + 16, 0x5A, np.uint8) for _ in range(2))
        memory = SimulatedMemory()
        packed = device.pack(plan, requests, OnDevice(staged[start : start + room]), memory, False)
        assert memory.waits == 0
        by_cpu = plan.pack(hosted, expected[start : start + room])
        np.testing.assert_array_equal(staged, expected)
        assert packed.spans.tolist() == by_cpu.spans.tolist()
        assert (list(packed.failed), packed.uncovered, packed.nbytes) == (["bad"], by_cpu.uncovered, by_cpu.nbytes)
        before = dst.copy()
        unpacked = device.pack(plan, requests, OnDevice(staged[start : start + room]), memory, True)
        assert unpacked.nbytes == packed.nbytes
        after, dst[:] = dst.copy(), before
        plan.unpack(hosted, expected[start : start + room])
        np.testing.assert_array_equal(after, dst)
        assert (dst != before).any()
        with pytest.raises(ValueError, match="at least"):
            device.pack(plan, requests, OnDevice(staged[: room - 1]), memory, False)


@pytest.mark.parametrize("longest", [9000, 1000, 33])
@pytest.mark.parametrize("unpacks", [False, True])
def test_copies_of_any_alignment(unpacks: bool, longest: int) -> None:
    """Every pair of alignments, lengths around the widths of copies and of tiles; not one byte beside them."""
    generator = np.random.default_rng(1)
    lengths = [n for n in (*range(1, 36, 2), 512, 513, 1000, 2047, 2048, 4097, 9000) if n <= longest]
    memory = SimulatedMemory()
    source, target = generator.integers(0, 255, 200_000, np.uint8), np.zeros(200_000, np.uint8)
    for shift in (0, 1, 8):
        spread = generator.permutation(len(lengths))
        sizes = np.array(lengths)[spread]
        starts = np.cumsum(sizes + generator.integers(0, 50, len(sizes))) - sizes
        if shift == 0:
            starts += -starts % 16
            starts = np.maximum.accumulate(starts + np.arange(len(starts)) * 64)
        apart, packed = (target, source) if unpacks else (source, target)
        columns = memory.empty(3 * len(sizes))
        columns[:] = np.concatenate([starts + apart.ctypes.data] * 2 + [sizes])
        parts = {known.OFFSETS: len(sizes) + 1, known.SPANS: 2, known.CUT_SPANS: 2, known.SUMS: 20}
        ends = known.WORK_PARTS + 1 + np.cumsum([0, *(parts.get(part, 0) for part in range(known.WORK_PARTS))])
        work = memory.empty(ends[-1])
        work[: len(ends)] = ends
        work[ends[known.SPANS] : ends[known.SPANS] + 2] = 0, len(sizes)
        target[:] = 0
        staging = packed.ctypes.data + shift
        told = memory.empty(4)
        work_at, columns_at, told_at = map(memory.address, (work, columns, told))
        cuda_descriptors.launch_copy(
            memory.run, 0, work_at, columns_at, len(sizes), staging, max(lengths), int(unpacks), told_at
        )
        expected, at = np.zeros_like(target), shift
        for start, size in zip(starts, sizes, strict=True):
            if unpacks:
                expected[start : start + size] = source[at : at + size]
            else:
                expected[at : at + size] = source[start : start + size]
            at += size
        np.testing.assert_array_equal(target, expected)
        assert work[ends[known.CUT_SPANS] : ends[known.CUT_SPANS] + 2].tolist() == [0, sizes.sum()]
        assert told[2:].tolist() == [0, sizes.sum()]
