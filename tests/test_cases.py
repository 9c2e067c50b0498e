"""cases.md: inputs on which connectors in use have failed, with the right values: heads and memory order."""

import pytest

import kvcompile
from kvcompile import Cache, Field, Group, Region
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
