"""Who sends which head: tables typed from the rules. Bytes alone cannot tell elections apart.

A table lists, for each dst rank, the src rank of each head that the dst rank holds.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcompile
from kvcompile import Cache, Field, LayoutError
from tests.helpers import emitted, one_region

CELL = 16


def cache(heads: int, rank: int, size: int, *, replicated: bool = False, dp: tuple[int, int] = (0, 1)) -> Cache:
    """Make a rank whose local head h is bytes [16*h, 16*h + 16) of a block."""
    field = Field.hnd("kv", heads=heads, tokens=1, cell_nbytes=CELL, replicated=replicated)
    return one_region(field, stride=CELL * heads, tp=(rank, size), dp=dp)


def senders(
    election: str,
    heads: int,
    src_size: int,
    dst_size: int,
    dst_rank: int,
    *,
    flag: bool = False,
    dp: tuple[int, int] = (0, 1),
) -> list[int]:
    """Return, for each head that a dst rank holds, the one src rank that sends it."""
    dst = cache(heads, dst_rank, dst_size, replicated=flag, dp=dp)
    found: dict[int, int] = {}
    for rank in range(src_size):
        plan = kvcompile.compile(cache(heads, rank, src_size, replicated=flag), dst, election=election)
        for _, start, length in emitted(plan, [0], [0]):
            for head in range(start // CELL, (start + length) // CELL):
                assert head not in found, "sent twice"
                found[head] = rank
    assert sorted(found) == list(range(len(found)))
    return [found[head] for head in sorted(found)]


NEAREST = [
    # heads, src size, dst size, senders of the heads of each dst rank
    (4, 8, 1, [[0, 2, 4, 6]]),  # case 1: even ranks
    (4, 8, 2, [[0, 2], [4, 6]]),
    (4, 8, 4, [[0], [2], [4], [6]]),
    (4, 8, 8, [[0], [1], [2], [3], [4], [5], [6], [7]]),  # the paired replica, not the lowest holder
    (4, 1, 8, [[0]] * 8),
    (4, 2, 8, [[0], [0], [0], [0], [1], [1], [1], [1]]),
    (4, 4, 8, [[0], [0], [1], [1], [2], [2], [3], [3]]),
    (4, 8, 16, [[0], [0], [1], [1], [2], [2], [3], [3], [4], [4], [5], [5], [6], [6], [7], [7]]),
    (4, 16, 8, [[0], [2], [4], [6], [8], [10], [12], [14]]),
    (2, 4, 1, [[0, 2]]),  # case 2
    (2, 8, 1, [[0, 4]]),  # case 8
    (4, 16, 2, [[0, 4], [8, 12]]),
    (8, 16, 4, [[0, 2], [4, 6], [8, 10], [12, 14]]),
    (1, 8, 2, [[0], [4]]),
    (12, 4, 6, [[0, 0], [0, 1], [1, 1], [2, 2], [2, 3], [3, 3]]),  # case 6: head 3 is not with the paired rank
    (12, 6, 4, [[0, 0, 1], [1, 2, 2], [3, 3, 4], [4, 5, 5]]),
    (4, 6, 4, [[0], [2], [3], [5]]),  # holders 0,1 | 2 | 3,4 | 5
    (4, 4, 6, [[0], [0], [1], [2], [2], [3]]),
    (2, 6, 4, [[0], [2], [3], [5]]),  # holders 0,1,2 | 3,4,5; paired 0,1 | 2 | 3,4 | 5
    (3, 2, 2, [[0], [1, 1]]),
    (4, 8, 3, [[0], [3], [4, 6]]),  # head 2 is with no paired rank, head 3 is
]


@pytest.mark.parametrize(("heads", "src_size", "dst_size", "expected"), NEAREST)
def test_nearest(heads: int, src_size: int, dst_size: int, expected: list[list[int]]) -> None:
    found = [senders("nearest", heads, src_size, dst_size, rank) for rank in range(dst_size)]
    assert found == expected


BALANCED = [
    # heads, src size, dst size, dp size, senders for each (dp rank, dst rank)
    (4, 8, 1, 1, [[0, 2, 4, 6]]),
    (4, 8, 1, 2, [[0, 2, 4, 6], [1, 3, 5, 7]]),
    (4, 8, 2, 1, [[0, 2], [4, 6]]),
    (4, 8, 2, 2, [[0, 2], [4, 6], [1, 3], [5, 7]]),
    (2, 8, 1, 4, [[0, 4], [1, 5], [2, 6], [3, 7]]),
    (2, 8, 1, 3, [[0, 4], [1, 5], [2, 6]]),  # c*4//3
    (4, 8, 8, 1, [[0], [1], [2], [3], [4], [5], [6], [7]]),
    (2, 4, 8, 1, [[0], [0], [1], [1], [2], [2], [3], [3]]),
    (2, 6, 4, 1, [[0], [1], [3], [4]]),  # c*3//2 of 0,1,2 and of 3,4,5
    (4, 6, 1, 2, [[0, 2, 3, 5], [1, 2, 4, 5]]),
    (1, 2, 3, 1, [[0], [0], [1]]),
    (12, 4, 6, 1, [[0, 0], [0, 1], [1, 1], [2, 2], [2, 3], [3, 3]]),  # a single holder
]


@pytest.mark.parametrize(("heads", "src_size", "dst_size", "dp_size", "expected"), BALANCED)
def test_balanced(heads: int, src_size: int, dst_size: int, dp_size: int, expected: list[list[int]]) -> None:
    found = [
        senders("balanced", heads, src_size, dst_size, rank, dp=(dp_rank, dp_size))
        for dp_rank in range(dp_size)
        for rank in range(dst_size)
    ]
    assert found == expected


REPLICATED = [
    # election, src size, dst size, dp size, the src rank that sends all to each (dp rank, dst rank)
    ("nearest", 8, 4, 1, [0, 2, 4, 6]),
    ("nearest", 4, 8, 1, [0, 0, 1, 1, 2, 2, 3, 3]),
    ("nearest", 8, 1, 4, [0, 0, 0, 0]),
    ("nearest", 4, 4, 2, [0, 1, 2, 3, 0, 1, 2, 3]),
    ("nearest", 3, 2, 1, [0, 2]),
    ("nearest", 2, 3, 1, [0, 0, 1]),
    ("balanced", 8, 4, 1, [0, 2, 4, 6]),
    ("balanced", 4, 8, 1, [0, 0, 1, 1, 2, 2, 3, 3]),
    ("balanced", 8, 1, 4, [0, 2, 4, 6]),
    ("balanced", 8, 2, 2, [0, 2, 4, 6]),
    ("balanced", 3, 2, 1, [0, 1]),
    ("balanced", 2, 3, 1, [0, 0, 1]),
]


@pytest.mark.parametrize(("election", "src_size", "dst_size", "dp_size", "expected"), REPLICATED)
def test_a_replicated_field_has_every_rank_as_holder(
    election: str, src_size: int, dst_size: int, dp_size: int, expected: list[int]
) -> None:
    """MLA: two heads stand for what each rank keeps whole; both come from the same rank."""
    found = [
        senders(election, 2, src_size, dst_size, rank, flag=True, dp=(dp_rank, dp_size))
        for dp_rank in range(dp_size)
        for rank in range(dst_size)
    ]
    assert found == [[rank, rank] for rank in expected]


def elect(election: str, heads: int, src_size: int, dst: Cache, head: int) -> int:
    """Section 4's rule, word for word, for a sharded field."""
    src_size_, dst_size = src_size, dst.tp_size

    def holds(rank: int, size: int) -> bool:
        if size > heads:
            return rank * heads // size == head
        return rank * heads // size <= head < (rank + 1) * heads // size

    holders = [rank for rank in range(src_size_) if holds(rank, src_size)]
    if election == "balanced":
        consumers = [rank for rank in range(dst_size) if holds(rank, dst_size)]
        total = dst.dp_size * len(consumers)
        number = dst.dp_rank * len(consumers) + consumers.index(dst.tp_rank)
        return holders[number * len(holders) // total]
    if src_size >= dst_size:
        paired = [rank for rank in holders if rank * dst_size // src_size == dst.tp_rank]
    else:
        paired = [rank for rank in holders if dst.tp_rank * src_size // dst_size == rank]
    return min(paired or holders)


@settings(max_examples=150)
@given(st.data())
def test_the_rule_at_every_size(data: st.DataObject) -> None:
    election = data.draw(st.sampled_from(["nearest", "balanced"]))
    heads, src_size, dst_size = (data.draw(st.integers(1, 12)) for _ in range(3))
    dst_rank, dp_size = data.draw(st.integers(0, dst_size - 1)), data.draw(st.integers(1, 3))
    dp = (data.draw(st.integers(0, dp_size - 1)), dp_size)
    dst = cache(heads, dst_rank, dst_size, dp=dp)
    first = dst_rank * heads // dst_size
    stop = first + 1 if dst_size > heads else (dst_rank + 1) * heads // dst_size
    expected = [elect(election, heads, src_size, dst, head) for head in range(first, stop)]
    assert senders(election, heads, src_size, dst_size, dst_rank, dp=dp) == expected


@pytest.mark.parametrize("election", ["nearest", "balanced"])
def test_src_dp_and_layout_do_not_matter(election: str) -> None:
    """Sizes and ranks alone decide: not the src rank's place in data parallelism, not addresses, not the order."""
    dst = cache(4, 1, 2, dp=(1, 2))
    for rank in range(8):
        plain = cache(4, rank, 8)
        moved = one_region(
            Field.nhd("kv", heads=4, local_heads=3, tokens=1, cell_nbytes=CELL, offset=8),
            base=2**50,
            stride=100,
            tp=(rank, 8),
            dp=(3, 5),
        )
        a, b = (kvcompile.compile(src, dst, election=election) for src in (plain, moved))
        assert a.table["dst_origin"].tolist() == b.table["dst_origin"].tolist()
        assert a.table["length"].tolist() == b.table["length"].tolist()


def test_mixed_flags_of_one_model() -> None:
    """A field that src keeps whole and dst divides: any src rank may send, the paired one does."""
    for dst_rank in range(2):
        dst = cache(4, dst_rank, 2)
        for rank in range(4):
            plan = kvcompile.compile(cache(4, rank, 4, replicated=True), dst)
            # src ranks 0,1 pair with dst rank 0 and 2,3 with 1; the lower sends
            expected = [(dst_rank * 2 * CELL, 0, 2 * CELL)] if rank == 2 * dst_rank else []
            assert emitted(plan, [0], [0]) == expected


def test_unknown_election() -> None:
    with pytest.raises((ValueError, LayoutError), match="farthest"):
        kvcompile.compile(cache(4, 0, 1), cache(4, 0, 1), election="farthest")
