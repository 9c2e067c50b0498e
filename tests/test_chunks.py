"""``Buffer.chunk_nbytes``: what is registered in pieces is copied in pieces, on either side, and nowhere else cut."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcompile
from kvcompile import Buffer, Cache, Field, Group, LayoutError, Region, Request
from kvcompile.engines import LocalEngine
from tests import replay
from tests.helpers import Triple

A, B = 2**40, 2**50
MIB = 2**20


def cache(base: int, block: int, blocks: int, chunk: int | None = None, before: int = 0) -> Cache:
    """Make one layer of blocks of ``block`` bytes, in a buffer that starts ``before`` bytes earlier."""
    field = Field.hnd("kv", heads=1, tokens=1, cell_nbytes=block)
    buffers = [Buffer(base - before, block * blocks + before, chunk)]
    return Cache([Region("layer", 0, base, block, blocks, [field])], [Group(1)], buffers)


def test_case_36_a_block_over_a_chunk_edge() -> None:
    """Blocks of 48 MiB in chunks of 2 GiB: block 42 ends 16 MiB behind the edge."""
    block = 48 * MIB
    plan = kvcompile.compile(cache(A, block, 64, 2**31), cache(B, block, 64))
    (first, second) = replay.triples(plan.build([Request("r", [[42]], [[1]])]))
    assert first == (A + 42 * block, B + block, 33_554_432)
    assert second == (A + 2**31, B + block + 33_554_432, 16_777_216)
    turned = kvcompile.compile(cache(B, block, 64), cache(A, block, 64, 2**31))
    assert replay.triples(turned.build([Request("r", [[1]], [[42]])])) == [
        (b, a, length) for a, b, length in (first, second)
    ]


def test_edges_count_from_the_base_of_the_buffer_and_on_both_sides() -> None:
    """Src edges every 100 bytes from 30 before the region, dst edges every 70: a run is cut at all of them."""
    plan = kvcompile.compile(cache(A, 50, 8, 100, before=30), cache(B, 50, 8, 70))
    assert replay.triples(plan.build([Request("r", [[0, 1, 2]], [[0, 1, 2]])])) == [
        (A, B, 70),  # an edge of both
        (A + 70, B + 70, 70),
        (A + 140, B + 140, 10),
    ]
    assert [length for *_, length in replay.triples(plan.build([Request("r", [[1, 2]], [[0, 1]])]))] == [20, 50, 30]


def test_one_side_or_one_buffer_alone() -> None:
    """Chunks of one of several buffers, the ones beside it whole; spans follow, requests keep their own rows."""
    k = Field.hnd("k", heads=1, tokens=1, cell_nbytes=64)

    def two(base: int, chunk: int | None) -> Cache:
        regions = [Region(n, 0, base + n * 2**20, 64, 8, [k]) for n in (0, 1)]
        return Cache(regions, [Group(1)], [Buffer(base, 512), Buffer(base + 2**20, 512, chunk)])

    plan = kvcompile.compile(two(A, 96), two(B, None))
    built = plan.build([Request("r", [[0, 1]], [[3, 4]]), Request("s", [[2]], [[6]]), Request("t", [[9]], [[0]])])
    assert replay.triples(built, 0) == [
        (A, B + 192, 128),
        (A + 2**20, B + 2**20 + 192, 96),
        (A + 2**20 + 96, B + 2**20 + 288, 32),
    ]
    assert replay.triples(built, 1) == [(A + 128, B + 384, 64), (A + 2**20 + 128, B + 2**20 + 384, 64)]
    assert built.spans.tolist() == [0, 3, 5, 5]
    assert built.failed.keys() == {"t"}


@settings(max_examples=80)
@given(st.data())
def test_every_cut_has_a_reason(data: st.DataObject) -> None:
    """No descriptor crosses an edge or is above ``max_length``; where two touch, an edge or the limit is there."""
    block, blocks = data.draw(st.integers(1, 40)), 24
    chunks = [data.draw(st.none() | st.integers(1, 90)) for _ in range(2)]
    before = [data.draw(st.integers(0, 50)) for _ in range(2)]
    src, dst = (cache(base, block, blocks, *how) for base, *how in zip((A, B), chunks, before, strict=True))
    plan = kvcompile.compile(src, dst)
    start = [data.draw(st.integers(0, 10)) for _ in range(2)]
    size = data.draw(st.integers(0, 8))
    ids = [[*range(at, at + size), 20] for at in start]
    max_length, sort = data.draw(st.none() | st.integers(1, 120)), data.draw(st.booleans())
    whole = kvcompile.compile(cache(A, block, blocks), cache(B, block, blocks))
    expected = replay.moved(replay.triples(whole.build([Request("r", ids[:1], ids[1:])], sort=sort)))
    found = replay.triples(plan.build([Request("r", ids[:1], ids[1:])], max_length=max_length, sort=sort))
    assert list(replay.moved(found)) == list(expected)

    def edge(address: int, base: int, before: int, chunk: int | None) -> bool:
        return chunk is not None and (address - base + before) % chunk == 0

    def edges(one: Triple, at: int) -> bool:
        return edge(one[0] + at, A, before[0], chunks[0]) or edge(one[1] + at, B, before[1], chunks[1])

    for one in found:
        assert 0 < one[2] <= (max_length or one[2])
        assert not any(edges(one, at) for at in range(1, one[2]))
    for one, after in pairwise(found):
        if (one[0] + one[2], one[1] + one[2]) == after[:2]:
            assert edges(after, 0) or one[2] == max_length


def test_out_is_reused_and_grown_by_a_cut() -> None:
    plan = kvcompile.compile(cache(A, 50, 64, 100), cache(B, 50, 64))
    out = plan.build([Request("r", [[0]], [[0]])])
    for ids in ([0, 1, 2, 3], [5], list(range(40))):
        again = plan.build([Request("r", [ids], [ids])], out=out)
        assert again is out
        assert replay.triples(again) == replay.triples(plan.build([Request("r", [ids], [ids])]))


def test_engines_register_chunks_and_take_what_is_cut_at_them() -> None:
    """An engine refuses a descriptor over two registrations; so chunks that a cache forgets are an error there."""
    memory = np.random.default_rng(0).integers(1, 255, (2, 16, 1000), np.uint8)
    memory[1] = 0
    chunked = [cache(memory[n].ctypes.data, 1000, 16, 1536) for n in (0, 1)]
    prefill, decode = LocalEngine(), LocalEngine()
    src, dst = prefill.register(chunked[0]), decode.register(chunked[1])
    assert len(dst.buffers[0].chunks) == 11
    ids = list(range(3, 12))
    request = Request("r", [ids], [[block - 2 for block in ids]])
    whole = kvcompile.compile(*(cache(memory[n].ctypes.data, 1000, 16) for n in (0, 1)))
    with pytest.raises(kvcompile.TransferError, match="one registered buffer"):
        prefill.write(decode.session, whole.build([request]))
    assert not memory[1].any()
    prefill.write(decode.session, kvcompile.compile(src, dst).build([request]))
    np.testing.assert_array_equal(memory[1, 1:10], memory[0, 3:12])
    assert not memory[1, 0].any()
    assert not memory[1, 10:].any()


def test_chunks_travel_in_the_handshake_and_belong_to_the_shape() -> None:
    one, other = cache(A, 50, 8, 100), cache(A, 50, 8, 70)
    assert Cache.from_bytes(one.to_bytes()) == one
    assert one.shape_digest == cache(B, 50, 8, 100).shape_digest != other.shape_digest
    for chunk in (0, -1, 1.5, True):
        with pytest.raises(LayoutError, match="chunk_nbytes"):
            Buffer(A, 400, chunk)
