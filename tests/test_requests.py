"""Which blocks pair, and what stays uncovered (section 5)."""

import kvcompile
from kvcompile import Cache, Descriptors, Field, Group, Region, Request
from tests import replay
from tests.lists import PLAIN, ROOM, TOKENS, UNEQUAL, UNIT, A, B, cache, failing, one, pairs, place, plain_error

# Alignment without positions


def test_lists_end_together() -> None:
    assert one(PLAIN, [[1, 3, 5]], [[2, 9, 4]]) == ([(0, 1, 2), (0, 3, 9), (0, 5, 4)], [])
    assert one(PLAIN, [[7, 1, 3, 5]], [[2, 9]]) == ([(0, 3, 2), (0, 5, 9)], [])
    assert one(PLAIN, [[7, 1]], [[]]) == ([], [])
    assert one(PLAIN, [[]], [[]]) == ([], [])


def test_a_src_block_may_be_given_by_many() -> None:
    """A shared prefix: only dst blocks are exclusive."""
    built = PLAIN.build(
        [Request("a", [[1, 2]], [[3, 4]]), Request("b", [[1, 2]], [[5, 6]]), Request("c", [[1, 1]], [[7, 9]])]
    )
    assert built.failed == {}
    assert [pairs(PLAIN, built, index) for index in range(3)] == [
        [(0, 1, 3), (0, 2, 4)],
        [(0, 1, 5), (0, 2, 6)],
        [(0, 1, 7), (0, 1, 9)],
    ]


def test_several_groups_each_by_itself() -> None:
    """Each list is of one group of its own side; one may be empty, one trimmed."""
    plan = kvcompile.compile(
        cache(A, TOKENS, TOKENS, Group(4, state=True)), cache(B, TOKENS, TOKENS, Group(4, state=True))
    )
    found = one(plan, [[1, 2], [5, 7, 9], [3, 4]], [[11], [], [12, 14]])
    assert found == ([(0, 2, 11), (2, 3, 12), (2, 4, 14)], [])


def test_positions_far_out_in_blocks_of_several_sizes() -> None:
    """What is too far in blocks of one group is not in the smaller ones of another."""
    plan = kvcompile.compile(cache(A, Group(4), Group(64)), cache(B, Group(4), Group(64)))
    near, far = (
        plan.build([Request("r", [[1, 2], [3]], [[5, 9], [7]], first, first)]) for first in ([0, 0], [2**57, 2**53])
    )
    assert far.failed == near.failed == {}
    assert replay.triples(far) == replay.triples(near) != []
    beyond = plan.build([Request("r", [[1, 2], [3]], [[5, 9], [7]], [2**57, 2**54], [2**57, 2**54])])
    assert beyond.failed["r"].group == 1


def test_group_numbers_may_differ() -> None:
    """Layers pair by name: src group 1 is dst group 0, and lists are given in each side's own order."""
    field = Field.hnd("x", heads=1, tokens=4, cell_nbytes=8)
    src = Cache([Region("a", 0, A, 32, 20, [field]), Region("b", 1, A + ROOM, 32, 20, [field])], [TOKENS, TOKENS])
    dst = Cache([Region("b", 0, B, 32, 20, [field]), Region("a", 1, B + ROOM, 32, 20, [field])], [TOKENS, TOKENS])
    plan = kvcompile.compile(src, dst)
    built = plan.build([Request("r", [[1], [2, 3]], [[4, 6], [5]])])
    assert replay.triples(built) == [
        (A + ROOM + 64, B + 4 * 32, 32),
        (A + ROOM + 96, B + 6 * 32, 32),
        (A + 32, B + ROOM + 5 * 32, 32),
    ]
    assert built.failed == {}


def test_one_dst_group_of_two_src_groups() -> None:
    """Each src group pairs with it by itself; a block is uncovered if it is so for any of them."""
    field = Field.hnd("x", heads=1, tokens=4, cell_nbytes=8)
    src = Cache(
        [Region("a", 0, A, 32, 20, [field]), Region("b", 1, A + ROOM, 32, 20, [field])], [Group(4, 0), Group(4, 0)]
    )
    dst = Cache([Region("a", 0, B, 32, 20, [field]), Region("b", 0, B + ROOM, 32, 20, [field])], [TOKENS])
    plan = kvcompile.compile(src, dst)
    built = plan.build([Request("r", [[1, 0, 3], [0, 7, 9]], [[4, 6, 8]])])
    assert built.uncovered == {"r": [(0, 0), (0, 1)]}
    assert replay.triples(built) == [
        (A + 32, B + 4 * 32, 32),
        (A + 96, B + 8 * 32, 32),
        (A + ROOM + 7 * 32, B + ROOM + 6 * 32, 32),
        (A + ROOM + 9 * 32, B + ROOM + 8 * 32, 32),
    ]


def test_groups_that_pair_with_nothing() -> None:
    """A layer of one side alone: its lists are checked and copy nothing; a group without regions has no bound."""
    src = cache(A, TOKENS, TOKENS)
    dst = Cache(cache(B, TOKENS).regions, [TOKENS, Group(4)])
    plan = kvcompile.compile(src, dst)
    assert one(plan, [[1], [2, 3]], [[5], [10**12]]) == ([(0, 1, 5)], [])
    error = failing(plan, Request("bad", [[1], [20]], [[5], []]), Request("good", [[1], []], [[6], []]))
    assert place(error) == ("src", 1, 0, 20, 20)


# With positions


def test_only_the_overlap_is_copied() -> None:
    found, missing = one(PLAIN, [[1, 2, 3]], [[5, 7, 9]], src_first=[10], dst_first=[11])
    assert found == [(0, 2, 5), (0, 3, 7)]
    assert missing == [(0, 13)]
    found, missing = one(PLAIN, [[1, 2, 3]], [[5, 7]], src_first=[10], dst_first=[20])
    assert (found, missing) == ([], [(0, 20), (0, 21)])
    assert one(PLAIN, [[]], [[5]], src_first=[0], dst_first=[0]) == ([], [(0, 0)])
    assert one(PLAIN, [[1, 3, 8, 9]], [[5]], src_first=[0], dst_first=[1]) == ([(0, 3, 5)], [])


def test_num_tokens_takes_look_ahead_blocks_off() -> None:
    """Blocks of 4: with 9 tokens, the block that starts at 12 is none of the request's; that at 8 is copied whole."""
    request = {"src_first": [0], "dst_first": [0]}
    assert one(PLAIN, [[1, 3, 5, 7]], [[2, 4, 6, 8]], **request, num_tokens=9) == (
        [(0, 1, 2), (0, 3, 4), (0, 5, 6)],
        [],
    )
    assert one(PLAIN, [[1, 3]], [[2, 4, 6, 8]], **request, num_tokens=8) == ([(0, 1, 2), (0, 3, 4)], [])
    assert one(PLAIN, [[1]], [[2, 4, 6, 8]], **request, num_tokens=9) == ([(0, 1, 2)], [(0, 1), (0, 2)])
    assert one(PLAIN, [[1]], [[2]], **request, num_tokens=0) == ([], [])
    assert one(PLAIN, [[1, 3]], [[2, 4]], src_first=[5], dst_first=[5], num_tokens=24) == ([(0, 1, 2)], [])


def test_look_ahead_blocks_are_checked_all_the_same() -> None:
    """Every id given is checked, also outside the overlap."""
    options = {"src_first": [0], "dst_first": [0], "num_tokens": 4}
    assert place(plain_error([[1, 20]], [[2]], **options)) == ("src", 0, 1, 20, 20)
    assert place(plain_error([[1]], [[2, -1]], **options)) == ("dst", 0, 1, -1, 20)


def moved_tokens(built: Descriptors) -> set[tuple[int, int]]:
    """{(src token slot, dst token slot)} that are copied, slots of UNIT bytes from the bases."""
    found = {(src - A, dst - B) for src, dst in replay.moved(replay.triples(built))}
    return {(src // UNIT, dst // UNIT) for src, dst in found if src % UNIT == 0}


def test_unequal_blocks_pair_by_token() -> None:
    """Src blocks 1, 2 of 3 tokens at positions 1, 2 (tokens 3 to 8); dst blocks of 2 at positions 1 to 4 (2 to 9)."""
    built = UNEQUAL.build([Request("r", [[5, 8]], [[10, 3, 7, 12]], [1], [1])])
    assert moved_tokens(built) == {
        (15, 21),  # token 3: src block 5, dst block 10 (tokens 2, 3)
        (16, 6),
        (17, 7),
        (24, 14),
        (25, 15),
        (26, 24),  # token 8: src block 8, dst block 12 (tokens 8, 9)
    }
    assert built.uncovered == {"r": [(0, 1), (0, 4)]}


def test_unequal_blocks_and_num_tokens() -> None:
    """Tokens past ``num_tokens`` need not be covered; what the blocks hold is copied whole."""
    built = UNEQUAL.build([Request("r", [[5, 8, 2]], [[10, 3, 7]], [0], [0], 4)])
    assert moved_tokens(built) == {(15, 20), (16, 21), (17, 6), (24, 7)}
    assert built.uncovered == {}
    built = UNEQUAL.build([Request("r", [[5]], [[10, 3]], [0], [0], 3)])
    assert (moved_tokens(built), built.uncovered) == ({(15, 20), (16, 21), (17, 6)}, {})
    built = UNEQUAL.build([Request("r", [[5]], [[10, 3]], [0], [0], 4)])
    assert built.uncovered == {"r": [(0, 1)]}


def test_any_null_src_block_uncovers() -> None:
    plan = kvcompile.compile(cache(A, Group(3, null_block=0)), cache(B, Group(2, null_block=0)))
    built = plan.build([Request("r", [[5, 0]], [[10, 3, 7]], [0], [0])])
    assert moved_tokens(built) == {(15, 20), (16, 21), (17, 6)}
    assert built.uncovered == {"r": [(0, 1), (0, 2)]}
    built = plan.build([Request("r", [[5, 0]], [[10, 0, 0]], [0], [0])])
    assert (moved_tokens(built), built.uncovered) == ({(15, 20), (16, 21)}, {})


# State


def test_state_of_equal_block_size_pairs_as_blocks_do() -> None:
    group = Group(4, null_block=0, state=True)
    plan = kvcompile.compile(cache(A, group), cache(B, group))
    assert one(plan, [[0, 1, 3]], [[2, 4]]) == ([(0, 1, 2), (0, 3, 4)], [])
    assert one(plan, [[1, 0, 3]], [[2, 4]]) == ([(0, 3, 4)], [(0, 0)])
    assert one(plan, [[1, 3]], [[2, 4]], src_first=[4], dst_first=[5]) == ([(0, 3, 2)], [(0, 6)])
    assert one(plan, [[1, 3]], [[2, 4]], src_first=[0], dst_first=[0], num_tokens=4) == ([(0, 1, 2)], [])
    error = failing(plan, Request("bad", [[1]], [[2, 4]]), Request("good", [[1]], [[3]]))
    assert error.group == 0


def test_state_of_unequal_block_size_pairs_the_last() -> None:
    """Whatever comes before is uncovered; positions are not needed; an empty src list is an error."""
    plan = kvcompile.compile(cache(A, Group(8, 0, state=True)), cache(B, Group(4, 0, state=True)))
    assert one(plan, [[1, 3]], [[2, 4, 6]]) == ([(0, 3, 6)], [(0, 0), (0, 1)])
    assert one(plan, [[1, 3, 5, 7]], [[2]]) == ([(0, 7, 2)], [])
    assert one(plan, [[1, 3]], [[2, 0, 6]], src_first=[0], dst_first=[7]) == ([(0, 3, 6)], [(0, 7)])
    assert one(plan, [[1, 0]], [[2, 4]]) == ([], [(0, 0), (0, 1)])
    assert one(plan, [[1, 3]], [[2, 0]]) == ([], [(0, 0)])
    assert one(plan, [[1, 3]], [[2, 4, 6]], src_first=[0], dst_first=[0], num_tokens=8) == ([(0, 1, 4)], [(0, 0)])
    assert one(plan, [[]], [[]]) == ([], [])
    error = failing(plan, Request("bad", [[]], [[2]]), Request("good", [[1]], [[3]]))
    assert error.group == 0


# Nulls


def test_nulls_are_each_sides_own() -> None:
    """Src null 3 and dst null 5: the other side's number is a block like any other; nulls need not lie in bounds."""
    plan = kvcompile.compile(cache(A, Group(4, 3)), cache(B, Group(4, 5)))
    assert one(plan, [[3, 5, 1]], [[3, 6, 5]]) == ([(0, 5, 6)], [(0, 0)])
    plan = kvcompile.compile(cache(A, Group(4, -1)), cache(B, Group(4, 10**9)))
    assert one(plan, [[-1, 5, 1]], [[3, 10**9, 6]]) == ([(0, 1, 6)], [(0, 0)])
    good = Request("good", [[1]], [[3]])
    assert place(failing(plan, Request("bad", [[10**9]], [[4]]), good)) == ("src", 0, 0, 10**9, 20)
    assert place(failing(plan, Request("bad", [[1]], [[-1]]), good)) == ("dst", 0, 0, -1, 20)


def test_null_dst_blocks_may_be_given_by_many() -> None:
    plan = kvcompile.compile(cache(A, TOKENS), cache(B, Group(4, 0)))
    built = plan.build([Request("a", [[1, 2, 3]], [[0, 0, 5]]), Request("b", [[7, 9]], [[0, 6]])])
    assert built.failed == {}
    assert [pairs(plan, built, index) for index in range(2)] == [[(0, 3, 5)], [(0, 9, 6)]]


def test_pieces_on_both_sides_of_a_null_may_merge() -> None:
    """Nulls are dropped as pairs; what comes after is the next piece of its lane."""
    plan = kvcompile.compile(cache(A, Group(4, 0)), cache(B, TOKENS))
    built = plan.build([Request("r", [[3, 0, 4]], [[7, 12, 8]])])
    assert replay.triples(built) == [(A + 3 * 32, B + 7 * 32, 64)]
    assert built.uncovered == {"r": [(0, 1)]}
