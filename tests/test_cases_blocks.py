"""cases.md, continued: blocks and kernel blocks, padding, packing, state, rows."""

import pytest

import kvcompile
from kvcompile import Buffer, Cache, Field, Group, LayoutError, Region, Request
from tests import replay
from tests.helpers import emitted, one_region

A, B = 2**40, 2**50  # base addresses of src and dst


# Blocks and kernel blocks


def test_case_13_kernel_blocks_of_one_block_are_one_descriptor() -> None:
    """Block 768 = 12 kernel blocks of 73,728 bytes; never the block's length on each of them."""
    field = Field.hnd("latent", heads=1, tokens=64, cell_nbytes=1_152, replicated=True)
    src = one_region(field, base=A, stride=73_728, blocks=240, kernel_blocks=12)
    dst = one_region(field, base=B, stride=73_728, blocks=240, kernel_blocks=12)
    plan = kvcompile.compile(src, dst)
    assert emitted(plan, [5], [9]) == [(A + 60 * 73_728, B + 108 * 73_728, 884_736)]
    built = plan.build([Request("one", [[5]], [[9]]), Request("two", [[6]], [[10]])])
    assert replay.triples(built) == [
        (A + 60 * 73_728, B + 108 * 73_728, 884_736),
        (A + 72 * 73_728, B + 120 * 73_728, 884_736),
    ]
    assert built.spans.tolist() == [0, 1, 2]


def test_case_14_kernel_blocks_of_one_token() -> None:
    field = Field.hnd("latent", heads=1, tokens=1, cell_nbytes=1_152, replicated=True)
    src = one_region(field, base=A, stride=1_152, blocks=640, kernel_blocks=64)
    dst = one_region(field, base=B, stride=1_152, blocks=640, kernel_blocks=64)
    assert emitted(kvcompile.compile(src, dst), [2], [0]) == [(A + 147_456, B, 73_728)]


def mla(block_size: int, base: int) -> Cache:
    """Make one MLA layer, 1,152 bytes a token, packed."""
    field = Field.hnd("latent", heads=1, tokens=block_size, cell_nbytes=1_152, replicated=True)
    return one_region(field, base=base, stride=block_size * 1_152, blocks=64)


def test_case_15_small_blocks_into_large() -> None:
    """Dst block at position 1 takes the src blocks at positions 8 to 15."""
    plan = kvcompile.compile(mla(16, A), mla(128, B))
    scattered = [30, 9, 25, 2, 40, 11, 7, 50]
    found = emitted(plan, scattered, [1], src_first=[8], dst_first=[1])
    assert found == [(A + block * 18_432, B + 147_456 + i * 18_432, 18_432) for i, block in enumerate(scattered)]
    found = emitted(plan, [20, 21, 22, 23, 24, 25, 26, 27], [1], src_first=[8], dst_first=[1])
    assert found == [(A + 20 * 18_432, B + 147_456, 147_456)]


def test_case_15_large_blocks_into_small() -> None:
    """The src offset lies inside the block."""
    plan = kvcompile.compile(mla(128, A), mla(16, B))
    scattered = [30, 9, 25]
    found = emitted(plan, [5], scattered, src_first=[1], dst_first=[10])
    assert found == [(A + 5 * 147_456 + (2 + i) * 18_432, B + b * 18_432, 18_432) for i, b in enumerate(scattered)]
    built = plan.build([Request("r", [[5]], [[30, 9, 25]], [1], [10])])
    assert built.uncovered == {}


def test_case_15_with_heads() -> None:
    """HND on both sides: one descriptor for each small block and head."""

    def cache(block_size: int, base: int) -> Cache:
        field = Field.hnd("k", heads=2, tokens=block_size, cell_nbytes=8)
        return one_region(field, base=base, stride=2 * block_size * 8)

    plan = kvcompile.compile(cache(16, A), cache(128, B))
    found = emitted(plan, [3, 7], [2], src_first=[18], dst_first=[2])
    expected = [
        (A + block * 256 + head * 128, B + 2 * 2_048 + head * 1_024 + (2 + i) * 128, 128)
        for i, block in enumerate([3, 7])
        for head in range(2)
    ]
    assert sorted(found) == sorted(expected)


def test_case_15_blocks_of_48_into_32() -> None:
    """Cut where a block of either side ends: 32, 16, 16, 32 tokens of every 96."""
    plan = kvcompile.compile(mla(48, A), mla(32, B))
    t = 1_152
    found = emitted(plan, [7, 3], [5, 20, 1], src_first=[0], dst_first=[0])
    assert sorted(found, key=lambda triple: (triple[1] - B) // (32 * t) not in (5,)) == [
        (A + 7 * 48 * t, B + 5 * 32 * t, 32 * t),
        (A + 7 * 48 * t + 32 * t, B + 20 * 32 * t, 16 * t),
        (A + 3 * 48 * t, B + 20 * 32 * t + 16 * t, 16 * t),
        (A + 3 * 48 * t + 16 * t, B + 1 * 32 * t, 32 * t),
    ]


def test_case_15_needs_positions() -> None:
    built = kvcompile.compile(mla(16, A), mla(128, B)).build([Request("r", [[1] * 8], [[1]])])
    assert list(built.failed) == ["r"]
    assert "src_first" in str(built.failed["r"])
    assert len(built) == 0


def test_case_16_regions_of_one_group_with_other_kernel_blocks() -> None:
    """Id 3 is kernel blocks 24 to 31 in one region and 3 in the other."""
    fine = Field.hnd("k", heads=1, tokens=2, cell_nbytes=8)
    coarse = Field.hnd("indexer", heads=1, tokens=16, cell_nbytes=4)

    def cache(base: int) -> Cache:
        regions = [Region("0", 0, base, 24, 80, [fine], 8), Region("0", 0, base + 2**20, 64, 10, [coarse], 1)]
        return Cache(regions, [Group(16)])

    found = emitted(kvcompile.compile(cache(A), cache(B)), [3], [3])
    assert found == [
        *((A + n * 24, B + n * 24, 16) for n in range(24, 32)),
        (A + 2**20 + 3 * 64, B + 2**20 + 3 * 64, 64),
    ]


# Padding, packing, state


def test_case_17_payload_stride_and_registered_length_are_three_numbers() -> None:
    field = Field.hnd("k", heads=1, tokens=16, cell_nbytes=256)

    def cache(blocks: int, base: int) -> Cache:
        return Cache([Region("0", 0, base, 4_160, blocks, [field])], [Group(16)], [Buffer(base, 114 * 2**20)])

    with pytest.raises(LayoutError, match="buffer"):
        cache(28_743, A)
    plan = kvcompile.compile(cache(28_735, A), cache(28_735, B))
    built = plan.build([Request("high", [[28_735]], [[1]]), Request("good", [[28_734]], [[28_734]])])
    error = built.failed["high"]
    assert (error.side, error.group, error.position, error.value, error.bound) == ("src", 0, 0, 28_735, 28_735)
    assert replay.triples(built) == [(A + 28_734 * 4_160, B + 28_734 * 4_160, 4_096)]
    found = emitted(plan, [10, 11], [10, 11])
    assert found == [(A + 41_600, B + 41_600, 4_096), (A + 45_760, B + 45_760, 4_096)]


def test_case_18_fields_in_a_padded_row() -> None:
    k = Field.hnd("k", heads=1, tokens=16, cell_nbytes=4_096)
    scale = Field.hnd("k_scale", heads=1, tokens=16, cell_nbytes=1_024, offset=65_536)
    loose = Field.hnd("k_scale", heads=1, tokens=16, cell_nbytes=1_024, offset=65_600)
    packed, apart = (
        one_region([k, other], base=base, stride=1_048_576, blocks=8) for base, other in ((A, scale), (B, loose))
    )
    both = kvcompile.compile(packed, one_region([k, scale], base=B, stride=1_048_576, blocks=8))
    assert emitted(both, [2], [2]) == [(A + 2_097_152, B + 2_097_152, 81_920)]
    assert len(emitted(both, [2, 3], [2, 3])) == 2
    assert emitted(kvcompile.compile(packed, apart), [2], [2]) == [
        (A + 2_097_152, B + 2_097_152, 65_536),
        (A + 2_097_152 + 65_536, B + 2_097_152 + 65_600, 16_384),
    ]


def test_case_19_conv_state_is_cut_by_part() -> None:
    """Q | K | V of a convolution, columns first, three rows of BF16; each part is divided by itself."""

    def cache(rank: int, size: int, base: int) -> Cache:
        widths, offset, fields = {"conv_q": 512, "conv_k": 512, "conv_v": 1_024}, 0, []
        for name, width in widths.items():
            fields.append(Field.hnd(name, heads=width, tokens=3, cell_nbytes=2, offset=offset))
            offset += width // size * 6
        return one_region(fields, base=base, stride=offset, block_size=64, state=True, tp=(rank, size))

    assert [field.offset for field in cache(0, 2, A).regions[0].fields] == [0, 1_536, 3_072]
    plan = kvcompile.compile(cache(0, 2, A), cache(1, 4, B))
    assert emitted(plan, [0], [0]) == [
        (A + 768, B, 768),
        (A + 2_304, B + 768, 768),
        (A + 4_608, B + 1_536, 1_536),
    ]


def test_case_20_default_buffers() -> None:
    """Overlapping spans are registered as one, touching ones apart, equal ones once."""
    ten = Field.hnd("k", heads=1, tokens=1, cell_nbytes=10)

    def spans(*regions: tuple[int, int, int]) -> list[tuple[int, int]]:
        """Give each region (base, stride, group) two blocks of ten bytes."""
        made = [
            Region(str(number), group, base, stride, 2, [ten]) for number, (base, stride, group) in enumerate(regions)
        ]
        cache = Cache(made, [Group(1), Group(1)])
        return [(buffer.base, buffer.base + buffer.nbytes) for buffer in cache.buffers]

    assert spans((0, 90, 0), (60, 90, 0), (200, 90, 0)) == [(0, 160), (200, 300)]
    assert spans((200, 90, 0), (60, 90, 0), (0, 90, 0)) == [(0, 160), (200, 300)]
    assert spans((0, 90, 0), (100, 90, 0)) == [(0, 100), (100, 200)]
    assert spans((0, 90, 0), (0, 90, 1)) == [(0, 100)]


def test_case_21_ids_times_stride() -> None:
    field = Field.hnd("k", heads=1, tokens=10, cell_nbytes=100)
    plan = kvcompile.compile(one_region(field, base=4_096, stride=1_000), one_region(field, base=B, stride=2_000))
    assert [source for source, _, _ in emitted(plan, [5, 11], [0, 1])] == [9_096, 15_096]


def rows_of(base: int, stride: int, *layers: tuple[str, int, int]) -> Cache:
    """Make layers (name, place in the row, bytes), one token a block."""
    regions = [
        Region(name, 0, base + place, stride, 32, [Field.hnd("k", heads=1, tokens=1, cell_nbytes=nbytes)])
        for name, place, nbytes in layers
    ]
    return Cache(regions, [Group(1)])


def test_case_22_joined_only_where_both_sides_touch() -> None:
    src = rows_of(A, 1_000, ("0", 64, 100), ("1", 228, 100), ("2", 328, 100))
    dst = rows_of(B, 1_000, ("0", 64, 100), ("1", 164, 100), ("2", 328, 100))
    assert emitted(kvcompile.compile(src, dst), [0], [0]) == [
        (A + 64, B + 64, 100),
        (A + 228, B + 164, 100),
        (A + 328, B + 328, 100),
    ]
    src, dst = rows_of(A, 1_000, ("0", 0, 100), ("1", 164, 100)), rows_of(B, 1_000, ("0", 0, 100), ("1", 100, 100))
    assert emitted(kvcompile.compile(src, dst), [0], [0]) == [(A, B, 100), (A + 164, B + 100, 100)]
    src, dst = rows_of(A, 300, ("0", 0, 100), ("1", 100, 200)), rows_of(B, 300, ("0", 0, 200), ("1", 200, 100))
    with pytest.raises(LayoutError, match=r"(?s)'0'.*'k'.*100.*200|'0'.*'k'.*200.*100"):
        kvcompile.compile(src, dst)


def test_case_23_whole_rows() -> None:
    """Four layers that fill a row move as one; without the second, ends and beginnings of rows still merge."""
    layers = [("0", 0, 100), ("1", 100, 200), ("2", 300, 60), ("3", 360, 40)]
    src, dst = rows_of(A, 400, *layers), rows_of(B, 400, *layers)
    ids = [3, 4, 5, 6], [13, 14, 15, 16]
    assert emitted(kvcompile.compile(src, dst), *ids) == [(A + 1_200, B + 5_200, 1_600)]
    expected = [
        (A + 1_200, B + 5_200, 100),
        *((A + 1_500 + n * 400, B + 5_500 + n * 400, 200) for n in range(3)),
        (A + 2_700, B + 6_700, 100),
    ]
    assert emitted(kvcompile.compile(src, dst, layers=["0", "2", "3"]), *ids) == expected
    without = rows_of(B, 400, layers[0], *layers[2:])
    assert emitted(kvcompile.compile(src, without), *ids) == expected


def test_case_23_with_a_row_doubled() -> None:
    """Rows that begin where another ends share its lane, all of them; in it, each piece follows the one before it."""
    layers = [("0", 0, 100), ("2", 300, 100)]
    plan = kvcompile.compile(rows_of(A, 400, *layers), rows_of(B, 400, *layers))
    assert plan.table["length"].tolist() == [100, 100]
    doubled = plan.with_table(plan.table[[0, 0, 1]])
    assert emitted(doubled, [3, 4], [13, 14]) == [
        (A + 1_200, B + 5_200, 100),
        (A + 1_200, B + 5_200, 100),
        (A + 1_500, B + 5_500, 200),
        (A + 1_600, B + 5_600, 100),
        (A + 1_900, B + 5_900, 100),
    ]
