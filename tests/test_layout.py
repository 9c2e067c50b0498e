"""Values that are valid by construction, the heads a rank holds, default buffers, and the bytes of the handshake."""

import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompile import Buffer, Cache, Field, Group, HandshakeError, KVCompileError, LayoutError, Region
from tests import oracle
from tests.helpers import one_region

K = Field.hnd("k", heads=2, tokens=4, cell_nbytes=8)


def region(**changes: object) -> Region:
    """Make a region of two heads, four tokens, eight blocks, packed, but for ``changes``."""
    options = {"layer": "0", "group": 0, "base": 4_096, "block_stride": 64, "num_blocks": 8, "fields": [K]}
    return Region(**{**options, **changes})


def cache(*regions: Region, **changes: object) -> Cache:
    return Cache(**{"regions": regions or [region()], "groups": [Group(4)], **changes})


# What is stored


def test_strides_of_hnd_and_nhd() -> None:
    hnd = Field.hnd("k", heads=8, tokens=16, cell_nbytes=256, offset=32)
    assert (hnd.offset, hnd.head_stride, hnd.token_stride) == (32, 4_096, 256)
    nhd = Field.nhd("k", heads=8, local_heads=2, tokens=16, cell_nbytes=256, offset=32, replicated=True)
    assert (nhd.offset, nhd.head_stride, nhd.token_stride) == (32, 256, 512)
    assert (hnd.replicated, nhd.replicated) == (False, True)
    assert Field("k", 8, 16, 256, 32, 4_096, 256) == hnd


@pytest.mark.parametrize("name", ["\ud800", "x\udfff", 2**64, -(2**63) - 1])
def test_names_that_no_handshake_can_carry(name: str | int) -> None:
    with pytest.raises(LayoutError, match=r"layer is .* expected a"):
        region(layer=name)
    if isinstance(name, str):
        with pytest.raises(LayoutError, match="UTF-8"):
            Field.hnd(name, heads=1, tokens=1, cell_nbytes=1)
        with pytest.raises(LayoutError, match="UTF-8"):
            cache(instance=name)


def test_names_of_derived_types_become_plain() -> None:
    class Name(str):
        __slots__ = ()

    made = cache(region(layer=Name("0"), fields=[msgspec.structs.replace(K, name=Name("k"))]), instance=Name("i"))
    assert {type(text) for text in (made.regions[0].layer, made.regions[0].fields[0].name, made.instance)} == {str}
    assert Cache.from_bytes(made.to_bytes()) == made
    for number in (2**64 - 1, -(2**63)):
        assert Cache.from_bytes(cache(region(layer=number)).to_bytes()).regions[0].layer == number


def test_values_are_frozen() -> None:
    for value, name in (
        (K, "heads"),
        (region(), "base"),
        (Group(4), "block_size"),
        (Buffer(0, 1), "base"),
        (cache(), "tp_rank"),
    ):
        with pytest.raises((AttributeError, dataclasses.FrozenInstanceError)):
            setattr(value, name, 1)


def test_numpy_integers_are_integers() -> None:
    made = Region("0", np.int64(0), np.uint64(2**63 + 64), np.int32(64), np.int64(8), [K])
    assert made == region(base=2**63 + 64)
    assert Cache([made], [Group(np.int16(4))]).buffers == (Buffer(2**63 + 64, 512),)


@pytest.mark.parametrize(
    ("heads", "size", "expected"),
    [
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (12, 8, [(0, 1), (1, 3), (3, 4), (4, 6), (6, 7), (7, 9), (9, 10), (10, 12)]),
        (5, 3, [(0, 1), (1, 3), (3, 5)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (4, 6, [(0, 1), (0, 1), (1, 2), (2, 3), (2, 3), (3, 4)]),
        (1, 3, [(0, 1)] * 3),
    ],
)
def test_heads_a_rank_holds(heads: int, size: int, expected: list[tuple[int, int]]) -> None:
    """Shown by the payload: HND, so the buffer ends after the local heads."""
    for rank, (first, stop) in enumerate(expected):
        field = Field.hnd("k", heads=heads, tokens=4, cell_nbytes=8)
        made = one_region(field, base=64, stride=32 * heads, blocks=1, tp=(rank, size))
        assert made.buffers == (Buffer(64, 32 * (stop - first)),)
        assert oracle.shard(field, made) == range(first, stop)
        whole = one_region(
            Field.hnd("k", heads=heads, tokens=4, cell_nbytes=8, replicated=True), stride=32 * heads, blocks=1
        )
        assert whole.buffers == (Buffer(0, 32 * heads),)


# Buffers


def test_default_buffers_run_from_first_to_last_payload_byte() -> None:
    """Padding before the first field and after the last one is not registered."""
    field = Field.hnd("k", heads=1, tokens=4, cell_nbytes=8, offset=16)
    assert one_region(field, base=1_000, stride=100, blocks=3).buffers == (Buffer(1_016, 232),)


def test_head_major_storage() -> None:
    """A head's plane lies behind all blocks of the head before it: head_stride above block_stride."""
    field = Field("k", 2, 4, 8, 0, 32 * 8, 8)
    made = one_region(field, stride=32, blocks=8)
    assert made.buffers == (Buffer(0, 512),)
    with pytest.raises(LayoutError):
        one_region(Field("k", 2, 4, 8, 0, 32 * 7, 8), stride=32, blocks=8)  # head 1 of block 0 on head 0 of block 7
    one_region(Field("k", 2, 4, 8, 0, 32 * 7, 8), stride=32, blocks=7)


def test_interleaved_blocks_of_two_regions_share_a_buffer() -> None:
    made = cache(region(block_stride=128), region(layer="1", base=4_096 + 64, block_stride=128))
    assert made.buffers == (Buffer(4_096, 16 * 64),)


def test_given_buffers_are_kept() -> None:
    given = [Buffer(9_000, 50), Buffer(4_000, 4_000)]
    assert sorted(cache(buffers=given).buffers, key=lambda buffer: buffer.base) == given[::-1]


def test_padded_local_heads_of_nhd() -> None:
    """``local_heads`` may lie above the shard: only the shard is payload."""
    field = Field.nhd("k", heads=4, local_heads=3, tokens=2, cell_nbytes=8)
    made = one_region(field, stride=48, blocks=1, tp=(0, 2))
    assert made.buffers == (Buffer(0, 24 + 16),)


# Refused at construction


@pytest.mark.parametrize(
    ("make", "words"),
    [
        # two cells on one byte: heads, tokens, fields, blocks, planes
        (lambda: cache(region(fields=[Field("k", 2, 4, 8, 0, 31, 8)])), "byte"),
        (lambda: cache(region(fields=[Field("k", 2, 4, 8, 0, 32, 7)])), "byte"),
        (lambda: cache(region(fields=[Field("k", 2, 4, 8, 0, 0, 8)])), "byte"),
        (lambda: cache(region(fields=[K, Field.hnd("v", heads=2, tokens=4, cell_nbytes=8, offset=63)])), "byte"),
        (lambda: cache(region(block_stride=63)), "byte"),
        (lambda: cache(region(block_stride=0)), "byte"),
        (
            lambda: cache(region(fields=[K, Field.hnd("v", heads=2, tokens=4, cell_nbytes=8, offset=64 * 8 - 64)])),
            "byte",
        ),
        (
            lambda: one_region(Field.nhd("k", heads=4, local_heads=1, tokens=2, cell_nbytes=8), stride=64, tp=(0, 2)),
            "byte",
        ),
        # outside the buffers
        (lambda: cache(buffers=[Buffer(4_096, 511)]), "buffer"),
        (lambda: cache(buffers=[Buffer(4_097, 4_096)]), "buffer"),
        (lambda: cache(buffers=[Buffer(4_096, 256), Buffer(4_352, 256)]), "buffer"),
        (lambda: cache(buffers=[]), "buffer"),
        (lambda: cache(buffers=[Buffer(4_096, 512), Buffer(4_600, 8)]), "disjoint"),
        (lambda: cache(region(base=2**64 - 511)), "2\\*\\*64|18446744073709551616"),
        (lambda: cache(region(base=2**64 - 512)), "2\\*\\*64|18446744073709551616"),
        (lambda: Buffer(2**64 - 8, 8), "2\\*\\*64|18446744073709551616"),
        (lambda: cache(region(block_stride=2**62, num_blocks=8)), ""),
        # negative or senseless sizes
        (lambda: Field("k", 0, 4, 8, 0, 32, 8), "heads"),
        (lambda: Field("k", 2, 0, 8, 0, 32, 8), "tokens"),
        (lambda: Field("k", 2, 4, 0, 0, 32, 8), "cell_nbytes"),
        (lambda: Field("k", 2, 4, 8, -1, 32, 8), "offset"),
        (lambda: Field("k", 2, 4, 8, 0, -32, 8), "head_stride"),
        (lambda: Field("k", 2, 4, 8, 0, 32, -8), "token_stride"),
        (lambda: region(base=-1), "base"),
        (lambda: region(base=2**64), "base"),
        (lambda: region(block_stride=-64), "block_stride"),
        (lambda: region(num_blocks=-1), "num_blocks"),
        (lambda: region(kernel_blocks=0), "kernel_blocks"),
        (lambda: Group(0), "block_size"),
        (lambda: Group(-4), "block_size"),
        (lambda: Buffer(0, -1), "nbytes"),
        (lambda: cache(tp_rank=2, tp_size=2), "tp_rank"),
        (lambda: cache(tp_rank=-1), "tp_rank"),
        (lambda: cache(tp_size=0), "tp_size"),
        (lambda: cache(dp_rank=1), "dp_rank"),
        # what does not fit together
        (lambda: cache(region(group=1)), "group"),
        (lambda: cache(region(group=-1)), "group"),
        (lambda: cache(groups=[Group(5)]), "5"),
        (lambda: cache(region(kernel_blocks=2)), "block"),
        (lambda: cache(region(), region(base=8_192)), "'0'.*'k'"),
        (lambda: cache(region(fields=[K, K])), "k"),
        (lambda: one_region(K, stride=64, kernel_blocks=2, block_size=8, state=True), "kernel_blocks"),
        # other kinds
        (lambda: Field("k", 2.0, 4, 8, 0, 32, 8), "heads"),
        (lambda: Field("k", True, 4, 8, 0, 32, 8), "heads"),
        (lambda: Field("k", "2", 4, 8, 0, 32, 8), "heads"),
        (lambda: Field(None, 2, 4, 8, 0, 32, 8), "name"),
        (lambda: region(base=4_096.0), "base"),
        (lambda: region(fields=None), "fields"),
        (lambda: Cache(None, [Group(4)]), "regions"),
        (lambda: cache(groups=[4]), "groups"),
    ],
)
def test_refused(make: object, words: str) -> None:
    """A LayoutError that names what is wrong."""
    with pytest.raises(LayoutError, match=f"(?s){words}"):
        make()


def test_errors_say_what_where_expected_and_got() -> None:
    with pytest.raises(LayoutError, match=r"(?=.*'layers\.3')(?=.*'k')(?=.*4)(?=.*16)"):
        Cache([region(layer="layers.3")], [Group(16)])
    assert issubclass(LayoutError, KVCompileError)


@settings(max_examples=300)
@given(st.data())
def test_overlap_is_exact(data: st.DataObject) -> None:
    """Refused exactly if two cells of the region share a byte: counted byte by byte, over blocks, heads and tokens."""
    tokens, blocks = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    small = st.integers(0, 24)
    size = data.draw(st.integers(1, 3))
    rank = data.draw(st.integers(0, size - 1))
    fields = [
        Field(
            name,
            data.draw(st.integers(1, 3)),
            tokens,
            data.draw(st.integers(1, 4)),
            *(data.draw(small) for _ in range(3)),
        )
        for name in "ab"[: data.draw(st.integers(1, 2))]
    ]
    stride = data.draw(st.integers(0, 40))
    made = Region("0", 0, 0, stride, blocks, fields)

    class Place:
        tp_rank, tp_size = rank, size

    counted = [
        oracle.address(Place, made, field, block, head, token, byte)
        for field in fields
        for block in range(blocks)
        for head in oracle.shard(field, Place)
        for token in range(tokens)
        for byte in range(field.cell_nbytes)
    ]
    if len(set(counted)) == len(counted):
        assert Cache([made], [Group(tokens)], tp_rank=rank, tp_size=size).regions == (made,)
    else:
        with pytest.raises(LayoutError):
            Cache([made], [Group(tokens)], tp_rank=rank, tp_size=size)


# Handshake


def two_groups(base: int = 4_096, **options: object) -> Cache:
    """Make a cache with something of everything."""
    ssm = Field.hnd("ssm", heads=4, tokens=1, cell_nbytes=16)
    regions = [region(base=base), region(layer="1", group=1, base=base + 2**32, fields=[ssm])]
    return Cache(regions, [Group(4, null_block=0), Group(64, state=True)], **options)


def test_round_trip() -> None:
    made = two_groups(2**63, tp_rank=1, tp_size=2, dp_rank=2, dp_size=3)
    data = made.to_bytes()
    assert isinstance(data, bytes)
    back = Cache.from_bytes(data)
    assert back == made
    assert (back.buffers, back.groups, back.tp_rank, back.dp_size) == (made.buffers, made.groups, 1, 3)
    assert back.to_bytes() == data


def test_digests() -> None:
    """``digest`` is of everything; ``shape_digest`` leaves out the buffers' bases, and nothing else."""
    made = two_groups()
    assert len(made.digest) == len(made.shape_digest) == 64
    assert set(made.digest + made.shape_digest) <= set("0123456789abcdef")
    assert made.digest == two_groups().digest  # an unregistered cache has a fixed, empty instance
    moved = two_groups(2**40)
    assert moved.digest != made.digest
    assert moved.shape_digest == made.shape_digest
    others = [
        two_groups(tp_size=2),
        two_groups(tp_size=2, tp_rank=1),
        two_groups(dp_size=2),
        cache(),
        cache(region(block_stride=65)),
        cache(region(num_blocks=9)),
        cache(region(layer="x")),
        cache(region(fields=[Field.nhd("k", heads=2, local_heads=2, tokens=4, cell_nbytes=8)])),
        cache(groups=[Group(4, null_block=0)]),
        cache(buffers=[Buffer(4_096, 513)]),
        cache(buffers=[Buffer(4_095, 512 + 1)]),
    ]
    assert len({other.digest for other in [made, *others]}) == len(others) + 1
    assert len({other.shape_digest for other in [made, *others]}) == len(others) + 1


def test_relative_places_in_a_buffer_are_shape() -> None:
    """Two regions that change places inside one buffer are another shape; the whole moved is the same."""

    def packed(base: int, first: int) -> Cache:
        places = [base, base + 512]
        regions = [region(base=places[first]), region(layer="1", base=places[1 - first])]
        return cache(*regions, buffers=[Buffer(base, 1_024)])

    assert packed(4_096, 0).shape_digest == packed(2**50, 0).shape_digest != packed(4_096, 1).shape_digest


@pytest.mark.parametrize("value", [None, 3, [], {}, "kvcompile", [1, 2, 3], {"version": 1}, b"", 2**63, 1.5])
def test_msgpack_of_something_else(value: object) -> None:
    with pytest.raises(HandshakeError):
        Cache.from_bytes(msgspec.msgpack.encode(value))


def test_truncated_extended_or_not_msgpack() -> None:
    data = two_groups().to_bytes()
    for stop in range(len(data)):
        with pytest.raises(HandshakeError):
            Cache.from_bytes(data[:stop])
    for bad in (
        data + b"\0",
        data + data,
        b"\0" + data,
        b"\xc1" * 64,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xdd\xff\xff\xff\xff",
    ):
        with pytest.raises(HandshakeError):
            Cache.from_bytes(bad)


def integers(value: object, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Paths of the integers in decoded msgpack, outermost first."""
    if isinstance(value, list):
        return [found for index, item in enumerate(value) for found in integers(item, (*path, index))]
    return [path] if isinstance(value, int) and not isinstance(value, bool) else []


def test_another_version() -> None:
    """The version is the first integer of the frame."""
    frame = msgspec.msgpack.decode(two_groups().to_bytes())
    path = integers(frame)[0]
    assert len(path) == 1
    frame[path[0]] += 1
    with pytest.raises(HandshakeError, match=r"version.*1|1.*version"):
        Cache.from_bytes(msgspec.msgpack.encode(frame))


def test_an_invalid_cache_inside() -> None:
    """Each integer of the body out of range, in turn: never another error, never a cache with such a number."""
    original = msgspec.msgpack.decode(two_groups().to_bytes())
    for path in integers(original):
        for value in (-1, 2**64 - 1, "1", None, 1.5, [], True):
            frame = msgspec.msgpack.decode(msgspec.msgpack.encode(original))
            inner = frame
            for step in path[:-1]:
                inner = inner[step]
            inner[path[-1]] = value
            data = msgspec.msgpack.encode(frame)
            try:
                made = Cache.from_bytes(data)
            except HandshakeError:
                continue
            assert made == Cache.from_bytes(made.to_bytes())


@pytest.mark.parametrize("value", [None, "text", 3, [1, 2]])
def test_not_bytes(value: object) -> None:
    with pytest.raises(HandshakeError):
        Cache.from_bytes(value)


def test_a_long_handshake_is_not_parsed() -> None:
    with pytest.raises(HandshakeError, match="at most 4194304 bytes, got 4194305"):
        Cache.from_bytes(bytes((4 << 20) + 1))
