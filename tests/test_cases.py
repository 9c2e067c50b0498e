"""cases.md: inputs on which connectors in use have failed, with the right values: heads, memory order, blocks, rows."""

import pytest

import kvcompile
from kvcompile import Buffer, Cache, Field, Group, LayoutError, Region, Request
from tests import replay
from tests.helpers import build, emitted, one_region

A, B = 2**40, 2**50  # base addresses of src and dst
HB = 65_536


def heads_cache(heads: int, rank: int, size: int, nbytes: int, base: int = 0, **options: object) -> Cache:
    """Make a rank of a model whose heads take ``nbytes`` each of a block of 16 tokens, HND, packed."""
    local = 1 if size > heads else (rank + 1) * heads // size - rank * heads // size
    field = Field.hnd("kv", heads=heads, tokens=16, cell_nbytes=nbytes // 16)
    return one_region(field, base=base, stride=local * nbytes, tp=(rank, size), **options)


def sent(heads: int, nbytes: int, src_size: int, dst_size: int, dst_rank: int) -> dict[int, list[tuple[int, int, int]]]:
    """{src rank: descriptors of block 0 to block 0} of what arrives at a dst rank, without ranks that send nothing."""
    dst, found = heads_cache(heads, dst_rank, dst_size, nbytes), {}
    for rank in range(src_size):
        plan = kvcompile.compile(heads_cache(heads, rank, src_size, nbytes), dst)
        if descriptors := emitted(plan, [0], [0]):
            found[rank] = descriptors
    return found


# Heads and tensor parallelism


def test_case_1_gather_of_replicated_heads() -> None:
    """GQA, 4 heads on 8 ranks, to one rank, block 3 to 7."""
    dst = heads_cache(4, 0, 1, HB, B)
    for rank in range(8):
        plan = kvcompile.compile(heads_cache(4, rank, 8, HB, A), dst)
        offset = {0: 0, 2: 65_536, 4: 131_072, 6: 196_608}.get(rank)
        expected = [] if offset is None else [(A + 3 * 65_536, B + 7 * 262_144 + offset, 65_536)]
        assert emitted(plan, [3], [7]) == expected


def test_case_1_gather_to_two_ranks() -> None:
    """The first table of offsets: dst 0, 65,536 for ranks 0, 2; and for ranks 4, 6."""
    assert sent(4, HB, 8, 2, 0) == {0: [(0, 0, HB)], 2: [(0, 65_536, HB)]}
    assert sent(4, HB, 8, 2, 1) == {4: [(0, 0, HB)], 6: [(0, 65_536, HB)]}


@pytest.mark.parametrize(
    ("src_size", "offsets"),
    [
        (1, [0, 0, 65_536, 65_536, 131_072, 131_072, 196_608, 196_608]),
        (2, [0, 0, 65_536, 65_536, 0, 0, 65_536, 65_536]),
        (4, [0] * 8),
    ],
)
def test_case_1_scatter_to_eight_ranks(src_size: int, offsets: list[int]) -> None:
    """The second table: src offsets of dst ranks 0 to 7; dst offset 0 always; from the rank that holds the head."""
    for rank, offset in enumerate(offsets):
        assert sent(4, HB, src_size, 8, rank) == {rank * src_size // 8: [(offset, 0, HB)]}


def test_case_2_heads_are_counted_over_the_model() -> None:
    """Two heads on four ranks are not eight heads."""
    assert sent(2, 4_096, 4, 1, 0) == {0: [(0, 0, 4_096)], 2: [(0, 4_096, 4_096)]}


def test_case_3_lengths_follow_heads_not_ranks() -> None:
    """Half a src block is a whole dst block."""
    for rank in range(8):
        offset = (rank // 2 - 2 * (rank // 4)) * 4_096
        assert sent(4, 4_096, 2, 8, rank) == {rank // 4: [(offset, 0, 4_096)]}
    for rank in range(16):
        assert sent(8, 4_096, 8, 16, rank) == {rank // 2: [(0, 0, 4_096)]}


def two_kinds(rank: int, size: int, base: int) -> Cache:
    """Make case 4: attention divided by heads, an indexer that every rank keeps whole."""
    local = 4 // size
    main = Field.hnd("kv", heads=4, tokens=16, cell_nbytes=4_096)
    indexer = Field.hnd("indexer", heads=1, tokens=16, cell_nbytes=2_048, replicated=True)
    regions = [
        Region("main", 0, base, local * 65_536, 16, [main]),
        Region("indexer", 0, base + 2**30, 32_768, 16, [indexer]),
    ]
    return Cache(regions, [Group(16)], tp_rank=rank, tp_size=size)


def test_case_4_one_model_two_kinds() -> None:
    """The indexer is sent once, whole, at offset 0."""
    dst, indexers = two_kinds(0, 1, B), []
    for rank in range(4):
        found = emitted(kvcompile.compile(two_kinds(rank, 4, A), dst), [3], [5])
        assert found[0] == (A + 3 * 65_536, B + 5 * 262_144 + rank * 65_536, 65_536)
        indexers += found[1:]
    assert indexers == [(A + 2**30 + 3 * 32_768, B + 2**30 + 5 * 32_768, 32_768)]


def test_case_5_state_slices() -> None:
    """State slice s on four ranks, 2s on two."""
    s = 768

    def cache(rank: int, size: int, base: int) -> Cache:
        ssm = Field.hnd("ssm", heads=4, tokens=1, cell_nbytes=s)
        return one_region(ssm, base=base, stride=4 // size * s, block_size=64, state=True, tp=(rank, size))

    for rank in range(4):
        for dst_rank in range(2):
            plan = kvcompile.compile(cache(rank, 4, A), cache(dst_rank, 2, B))
            expected = [(A + s, B + 2 * 2 * s + rank % 2 * s, s)] if rank // 2 == dst_rank else []
            assert emitted(plan, [1], [2]) == expected


def test_case_6_sizes_that_do_not_divide() -> None:
    hb = 512
    assert sent(12, hb, 4, 6, 0) == {0: [(0, 0, 2 * hb)]}
    assert sent(12, hb, 4, 6, 1) == {0: [(2 * hb, 0, hb)], 1: [(0, hb, hb)]}
    assert sent(12, hb, 4, 6, 2) == {1: [(hb, 0, 2 * hb)]}
    assert sent(12, hb, 4, 6, 4) == {2: [(2 * hb, 0, hb)], 3: [(0, hb, hb)]}
    assert [sent(4, hb, 6, 4, rank) for rank in range(4)] == [{holder: [(0, 0, hb)]} for holder in (0, 2, 3, 5)]
    assert [sent(4, hb, 4, 6, rank) for rank in range(6)] == [{holder: [(0, 0, hb)]} for holder in (0, 0, 1, 2, 2, 3)]


def test_case_7_mla_with_a_sharded_draft_layer() -> None:
    """Draft 8,192 a rank of 8 to 16,384 a rank of 4; the latent comes whole from one rank of the pair."""

    def cache(rank: int, size: int, base: int) -> Cache:
        latent = Field.hnd("latent", heads=1, tokens=16, cell_nbytes=1_152, replicated=True)
        draft = Field.hnd("kv", heads=8, tokens=16, cell_nbytes=512)
        regions = [
            Region("mla", 0, base, 18_432, 16, [latent]),
            Region("draft", 0, base + 2**30, 8 // size * 8_192, 16, [draft]),
        ]
        return Cache(regions, [Group(16)], tp_rank=rank, tp_size=size)

    for dst_rank in range(4):
        dst, whole = cache(dst_rank, 4, B), []
        for rank in range(8):
            found = emitted(kvcompile.compile(cache(rank, 8, A), dst), [0], [0])
            drafts = [triple for triple in found if triple[2] == 8_192]
            slot = {2 * dst_rank: 0, 2 * dst_rank + 1: 8_192}.get(rank)
            assert drafts == ([] if slot is None else [(A + 2**30, B + 2**30 + slot, 8_192)])
            whole += [(rank, *triple) for triple in found if triple not in drafts]
        assert whole == [(2 * dst_rank, A, B, 18_432)]


@pytest.mark.parametrize(
    ("heads", "src_size", "dst_size", "senders"),
    [
        (2, 4, 1, [[0, 2]]),
        (2, 8, 1, [[0, 4]]),
        (4, 8, 1, [[0, 2, 4, 6]]),
        (4, 8, 2, [[0, 2], [4, 6]]),
        (4, 16, 2, [[0, 4], [8, 12]]),
        (8, 16, 4, [[0, 2], [4, 6], [8, 10], [12, 14]]),
    ],
)
def test_case_8_hybrid_models_keep_their_heads(
    heads: int, src_size: int, dst_size: int, senders: list[list[int]]
) -> None:
    """Attention beside state: each dst rank gets each head once, from the ranks of case 1; the state as well."""

    def cache(rank: int, size: int, base: int) -> Cache:
        local = max(1, heads // size)
        kv = Field.hnd("kv", heads=heads, tokens=4, cell_nbytes=64)
        ssm = Field.hnd("ssm", heads=16, tokens=1, cell_nbytes=32)
        regions = [
            Region("attention", 0, base, local * 256, 8, [kv]),
            Region("mamba", 1, base + 2**30, 16 // size * 32, 8, [ssm]),
        ]
        return Cache(regions, [Group(4), Group(4, state=True)], tp_rank=rank, tp_size=size)

    for dst_rank in range(dst_size):
        dst, attention, state = cache(dst_rank, dst_size, B), {}, []
        for rank in range(src_size):
            plan = kvcompile.compile(cache(rank, src_size, A), dst)
            for source, target, length in replay.triples(build(plan, ([0], [0]), ([0], [0]))):
                if source < A + 2**30:
                    attention[target - B] = (rank, source - A, length)
                else:
                    state.append((target - B - 2**30, length))
        assert attention == {number * 256: (rank, 0, 256) for number, rank in enumerate(senders[dst_rank])}
        part, whole = 16 // src_size * 32, 16 // dst_size * 32
        assert sorted(state) == [(at, part) for at in range(0, whole, part)]


# Memory order


def test_case_9_nhd_is_not_hnd() -> None:
    """Head 1 of 4, 32 tokens of 256 bytes: NHD strides over the tokens, HND is one slice."""
    dst = one_region(Field.hnd("k", heads=4, tokens=32, cell_nbytes=256), stride=8_192, tp=(1, 4))
    nhd = one_region(Field.nhd("k", heads=4, local_heads=4, tokens=32, cell_nbytes=256), stride=32_768)
    hnd = one_region(Field.hnd("k", heads=4, tokens=32, cell_nbytes=256), stride=32_768)
    assert emitted(kvcompile.compile(nhd, dst), [0], [0]) == [(256 + t * 1_024, t * 256, 256) for t in range(32)]
    assert emitted(kvcompile.compile(hnd, dst), [0], [0]) == [(8_192, 0, 8_192)]


def test_case_10_halves_far_apart() -> None:
    """V lies 2**30 behind K: two slices of a block, whether two regions say so or one with far offsets."""
    k = Field.hnd("k", heads=1, tokens=16, cell_nbytes=1_024)
    v = Field.hnd("v", heads=1, tokens=16, cell_nbytes=1_024)
    apart = Cache([Region("0", 0, A, 16_384, 64, [k]), Region("0", 0, A + 2**30, 16_384, 64, [v])], [Group(16)])
    far = Field.hnd("v", heads=1, tokens=16, cell_nbytes=1_024, offset=2**30)
    one = one_region([k, far], base=A, stride=16_384, layer="0")
    near = Field.hnd("v", heads=1, tokens=16, cell_nbytes=1_024, offset=16_384)
    dst = one_region([k, near], base=B, stride=32_768, layer="0")
    expected = [(A + 5 * 16_384, B + 2 * 32_768, 16_384), (A + 2**30 + 5 * 16_384, B + 2 * 32_768 + 16_384, 16_384)]
    assert emitted(kvcompile.compile(apart, dst), [5], [2]) == expected
    assert emitted(kvcompile.compile(one, dst), [5], [2]) == expected


def test_case_11_a_kernel_block_is_not_a_block() -> None:
    """Block 256 of kernel 64: id 3 is kernel blocks 12 to 15."""
    field = Field.hnd("kv", heads=2, tokens=64, cell_nbytes=4)
    packed = one_region(field, base=A, stride=512, kernel_blocks=4)
    padded = one_region(field, base=A, stride=640, kernel_blocks=4)
    dst = one_region(field, base=B, stride=512, kernel_blocks=4)
    assert emitted(kvcompile.compile(packed, dst), [3], [0]) == [(A + 12 * 512, B, 2_048)]
    found = emitted(kvcompile.compile(padded, dst), [3], [0])
    assert found == [(A + (12 + n) * 640, B + n * 512, 512) for n in range(4)]


def test_case_12_a_head_split_of_nhd_costs_a_descriptor_a_token() -> None:
    def cache(order: str, rank: int, size: int) -> Cache:
        fields = []
        for name in "kv":
            local, options = 2 // size, {"heads": 2, "tokens": 16, "cell_nbytes": 8}
            offset = 0 if name == "k" else local * 128
            if order == "hnd":
                fields.append(Field.hnd(name, offset=offset, **options))
            else:
                fields.append(Field.nhd(name, local_heads=local, offset=offset, **options))
        return one_region(fields, stride=2 // size * 256, tp=(rank, size))

    for rank in range(2):
        hnd, nhd = (
            build(kvcompile.compile(cache(order, 0, 1), cache(order, rank, 2)), ([1, 2], [4, 6]))
            for order in ("hnd", "nhd")
        )
        assert sorted(hnd.length.tolist()) == [128] * 4
        assert sorted(nhd.length.tolist()) == [8] * 64
        assert hnd.nbytes == nhd.nbytes == 512


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
