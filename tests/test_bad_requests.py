"""Every request that must fail, with the error that says why, and without harming another (section 5)."""

import random
import time
from collections.abc import Callable

import numpy as np
import pytest

import kvcompile
from kvcompile import Cache, Field, Group, Region, Request
from tests import oracle, replay
from tests.helpers import one_region
from tests.lists import PLAIN, ROOM, TOKENS, UNEQUAL, A, B, cache, failing, one, pairs, place, plain_error

# Bounds


@pytest.mark.parametrize("value", [-1, -(2**40), 20, 21, 2**31, 2**32 + 1, 2**63 - 1])
@pytest.mark.parametrize("side", ["src", "dst"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_bounds(value: int, side: str, position: int) -> None:
    """First, middle, last; below, at and above the bound, also where 32 bits would wrap to a valid id."""
    lists = {"src": [[1, 3, 5]], "dst": [[2, 4, 6]]}
    lists[side][0][position] = value
    error = plain_error(lists["src"], lists["dst"])
    assert place(error) == (side, 0, position, value, 20)
    assert str(value) in str(error)
    assert "20" in str(error)


@pytest.mark.parametrize("value", [2**63, 2**64 - 1, 2**64, 2**70, -(2**63) - 1])
def test_ids_beyond_64_bits(value: int) -> None:
    error = plain_error([[1, value]], [[2, 4]])
    assert (error.side, error.group, error.position) == ("src", 0, 1)
    if 0 <= value < 2**64:
        error = plain_error([np.array([1, value], np.uint64)], [[2, 4]])
        assert (error.side, error.group, error.position) == ("src", 0, 1)


WIDE = kvcompile.compile(
    *(
        one_region(Field.hnd("x", heads=1, tokens=1, cell_nbytes=1), base=base, stride=1, blocks=2**34)
        for base in (A, B)
    )
)
EDGES = [
    0,
    31,
    32,
    127,
    128,
    255,
    256,
    2**15 - 1,
    2**15,
    2**16 - 1,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**34 - 1,
]


@pytest.mark.parametrize("make", [list, np.array])
def test_ids_of_every_width(make: Callable[[list[int]], object]) -> None:
    """Where the encoding of an id changes, in lists of one width and of all."""
    for ids in (EDGES[::2], EDGES[1::2], EDGES[::-1][::2], *([block] for block in EDGES)):
        built = WIDE.build([Request("r", [make(ids)], [make(ids[::-1])])])
        assert sorted(replay.moved(replay.triples(built))) == sorted(
            (A + a, B + b) for a, b in zip(ids, ids[::-1], strict=True)
        )


@pytest.mark.parametrize("make", [list, np.array])
@pytest.mark.parametrize("value", [-1 - edge for edge in EDGES] + [-(2**63)])
def test_negative_ids_of_every_width(value: int, make: Callable[[list[int]], object]) -> None:
    """With a bound so large that a lost sign would make a valid id."""
    error = failing(WIDE, Request("bad", [make([1, value])], [[3, 5]]), Request("good", [[7]], [[9]]))
    assert place(error) == ("src", 0, 1, value, 2**34)


@pytest.mark.parametrize("make", [list, lambda ids: np.array(ids, np.uint64)])
@pytest.mark.parametrize("null", [-1, -2, 1 - 2**63])
def test_a_large_id_is_no_negative_null(null: int, make: Callable[[list[int]], object]) -> None:
    """2**64 - 1 is not the null id -1, though their 64 bits are the same."""
    plan = kvcompile.compile(cache(A, Group(4, null)), cache(B, Group(4, null)))
    good = Request("good", [[1, null]], [[3, 5]])
    built = plan.build([Request("bad", [make([1, 2**64 + null])], [[2, 4]]), good])
    assert set(built.failed) == {"bad"}
    assert built.failed["bad"].position == 1
    assert pairs(plan, built, 1) == [(0, 1, 3)]


def test_the_last_id_is_fine() -> None:
    assert one(PLAIN, [[19, 0]], [[0, 19]]) == ([(0, 19, 0), (0, 0, 19)], [])


def test_src_ids_outside_the_overlap_are_checked() -> None:
    assert place(plain_error([[-1, 1]], [[2]])) == ("src", 0, 0, -1, 20)


def test_the_bound_is_the_least_of_the_regions() -> None:
    """In blocks: kernel blocks divided, rounded down."""
    field = Field.hnd("x", heads=1, tokens=4, cell_nbytes=8)
    half = Field.hnd("x", heads=1, tokens=2, cell_nbytes=8)

    def two(base: int) -> Cache:
        return Cache([Region("0", 0, base, 32, 20, [field]), Region("1", 0, base + ROOM, 16, 15, [half], 2)], [TOKENS])

    plan = kvcompile.compile(two(A), two(B))
    good = Request("good", [[6]], [[6]])
    assert place(failing(plan, Request("bad", [[7]], [[1]]), good)) == ("src", 0, 0, 7, 7)
    assert place(failing(plan, Request("bad", [[1]], [[7]]), good)) == ("dst", 0, 0, 7, 7)


# Conflicts


def test_conflicts_fail_together_and_alone() -> None:
    batch = [
        Request("a", [[1, 2]], [[5, 6]]),
        Request("b", [[3, 4]], [[7, 5]]),
        Request("c", [[1]], [[9]]),
        Request("d", [[1, 2]], [[11, 11]]),
        Request("e", [[1, 2, 3]], [[12, 14, 12]]),
    ]
    built = PLAIN.build(batch)
    assert set(built.failed) == {"a", "b", "d", "e"}
    assert replay.triples(built) == [(A + 32, B + 9 * 32, 32)]
    assert built.spans.tolist() == [0, 0, 0, 1, 1, 1]
    for name, value in (("a", 5), ("b", 5), ("d", 11), ("e", 12)):
        error = built.failed[name]
        assert (error.request, error.side, error.group, error.value) == (name, "dst", 0, value)
        assert str(value) in str(error)


@pytest.mark.parametrize("blocks", [300, 1 << 20])
def test_scattered_ids_of_pools_of_any_size(blocks: int) -> None:
    """A bitmap tells the ids of a small pool apart, the hash table alone those of a large one."""
    plan = kvcompile.compile(cache(A, TOKENS, blocks=blocks), cache(B, TOKENS, blocks=blocks))
    middle = blocks // 2
    first = Request("a", [[1, 2, 3, 9, 8]], [[blocks - 2, blocks - 1, 5, middle, middle + 1]])
    second = Request("b", [[4, 5, 6]], [[0, 1, middle - 1]])
    assert plan.build([first, second]).failed == {}
    built = plan.build([first, second, Request("c", [[7, 8]], [[40, middle]])])
    assert {key: (error.position, error.value) for key, error in built.failed.items()} == {
        "a": (3, middle),
        "c": (1, middle),
    }
    assert [length for _, _, length in replay.triples(built)] == [2 * 32, 32]  # of b: a run of two, and one


def test_blocks_outside_the_overlap_conflict_too() -> None:
    """Whoever gives a block, owns it."""
    built = PLAIN.build([Request("a", [[1]], [[5, 6]], [0], [0]), Request("b", [[2]], [[6]])])
    assert set(built.failed) == {"a", "b"}


def test_a_failed_request_gives_nothing() -> None:
    """Conflicts are looked for among requests that pass all other checks."""
    built = PLAIN.build([Request("a", [[1, 20]], [[5, 6]]), Request("b", [[3]], [[6]]), Request("c", [[]], [[6]])])
    assert set(built.failed) == {"a", "c"}
    assert built.failed["a"].value == 20
    assert pairs(PLAIN, built, 1) == [(0, 3, 6)]


def test_equal_ids_of_separate_groups_do_not_conflict() -> None:
    plan = kvcompile.compile(cache(A, TOKENS, TOKENS), cache(B, TOKENS, TOKENS))
    assert one(plan, [[1], [1]], [[5], [5]]) == ([(0, 1, 5), (1, 1, 5)], [])


def overlay(base: int, offset: int = 0) -> Cache:
    """Make two token groups and a state group that overlay each other: an id belongs to one of them at a time."""
    field = Field.hnd("x", heads=1, tokens=4, cell_nbytes=8)
    state = Field.hnd("s", heads=1, tokens=1, cell_nbytes=16)
    regions = [
        Region("0", 0, base, 64, 20, [field]),
        Region("1", 1, base + offset, 64, 20, [field]),
        Region("2", 2, base + 8, 64, 20, [state]),
    ]
    return Cache(regions, [Group(4, 0), Group(4, 1), Group(4, state=True)])


def test_overlaid_groups_share_their_ids() -> None:
    plan = kvcompile.compile(overlay(A), overlay(B))
    assert plan.build([Request("r", [[1], [2], [3]], [[5], [6], [7]])]).failed == {}
    for lists in ([[5], [5], [7]], [[5], [6], [5]], [[5], [6], [6]]):
        built = plan.build([Request("r", [[2], [2], [3]], lists), Request("good", [[2], [], []], [[9], [], []])])
        assert set(built.failed) == {"r"}
        assert len(built) == 1
    built = plan.build([Request("a", [[2], [], []], [[5], [], []]), Request("b", [[], [], [3]], [[], [], [5]])])
    assert set(built.failed) == {"a", "b"}


def test_nulls_of_overlaid_groups_are_each_groups_own() -> None:
    """Dst nulls 0 and 1: id 0 is a block to group 1, id 1 to group 0."""
    plan = kvcompile.compile(overlay(A), overlay(B))
    built = plan.build([Request("r", [[2, 3], [2, 3], []], [[0, 1], [1, 0], []])])
    assert built.failed == {}
    assert len(built) == 2
    built = plan.build([Request("r", [[2], [2], []], [[1], [0], []]), Request("s", [[], [], [4]], [[], [], [1]])])
    assert set(built.failed) == {"r", "s"}


def test_groups_that_only_interleave_do_not_conflict() -> None:
    """The rows of two groups in one span, on bytes of their own: an id of either is another block."""
    field = Field.hnd("x", heads=1, tokens=4, cell_nbytes=8)

    def woven(base: int) -> Cache:
        return Cache(
            [Region("0", 0, base, 64, 20, [field]), Region("1", 1, base + 32, 64, 20, [field])], [TOKENS, TOKENS]
        )

    assert not oracle.overlaid(woven(B), 0, 1)
    built = kvcompile.compile(woven(A), woven(B)).build([Request("r", [[1], [2]], [[5], [5]])])
    assert built.failed == {}
    assert len(built) == 2


def test_a_request_id_that_names_nothing() -> None:
    """It could not stand in ``failed``, so it is the caller's error, before anything is built."""
    with pytest.raises(ValueError, match=r"requests have ids \['a', \[1\]\], expected hashable ones"):
        PLAIN.build([Request("a", [[1]], [[1]]), Request([1], [[2]], [[2]])])  # type: ignore[arg-type]


def test_a_request_id_given_twice() -> None:
    built = PLAIN.build([Request("a", [[1]], [[5]]), Request("b", [[2]], [[6]]), Request("a", [[3]], [[7]])])
    assert set(built.failed) == {"a"}
    assert built.spans.tolist() == [0, 0, 1, 1]
    assert pairs(PLAIN, built, 1) == [(0, 2, 6)]


def test_many_request_ids_given_twice() -> None:
    """In time that grows with the batch, not with its square."""
    begun = time.monotonic()
    built = PLAIN.build([Request(number // 2, [[]], [[]]) for number in range(40_000)])
    assert len(built.failed) == 20_000
    assert time.monotonic() - begun < 10


def test_caches_without_groups() -> None:
    nothing = kvcompile.compile(Cache([], []), Cache([], []))
    built = nothing.build([Request("a", [], []), Request("bad", [[1]], [])])
    assert set(built.failed) == {"bad"}
    assert len(built) == 0


# Lists and options


@pytest.mark.parametrize("side", ["src", "dst"])
@pytest.mark.parametrize("count", [0, 2])
def test_number_of_lists(side: str, count: int) -> None:
    lists = {"src": [[1]], "dst": [[2]], side: [[3]] * count}
    error = plain_error(lists["src"], lists["dst"])
    assert error.side == side


def test_src_shorter_than_dst() -> None:
    error = plain_error([[1]], [[2, 4]])
    assert error.group == 0
    assert "1" in str(error)
    assert "2" in str(error)


def test_unequal_block_sizes_need_positions() -> None:
    built = UNEQUAL.build([Request("bad", [[1, 2]], [[1, 2]]), Request("good", [[1]], [[3]], [0], [0])])
    assert set(built.failed) == {"bad"}
    assert {"3", "2"} <= set("".join(c if c.isdigit() else " " for c in str(built.failed["bad"])).split())
    assert len(built) == 1
    assert UNEQUAL.build([Request("nothing", [[1]], [[]])]).failed == {}


@pytest.mark.parametrize(
    "options",
    [
        {"src_first": [0]},
        {"dst_first": [0]},
        {"num_tokens": 4},
        {"src_first": [0, 0], "dst_first": [0]},
        {"src_first": [0], "dst_first": []},
        {"src_first": [-1], "dst_first": [0]},
        {"src_first": [0], "dst_first": [-1]},
        {"src_first": [0.0], "dst_first": [0]},
        {"src_first": [True], "dst_first": [0]},
        {"src_first": [None], "dst_first": [0]},
        {"src_first": ["0"], "dst_first": [0]},
        {"src_first": 0, "dst_first": 0},
        {"src_first": [0], "dst_first": [0], "num_tokens": -1},
        {"src_first": [0], "dst_first": [0], "num_tokens": 4.0},
        {"src_first": [0], "dst_first": [0], "num_tokens": True},
        {"src_first": [0], "dst_first": [0], "num_tokens": "4"},
        {"src_first": [2**70], "dst_first": [2**70]},
        {"src_first": [0], "dst_first": [0], "num_tokens": 2**70},
    ],
    ids=repr,
)
def test_senseless_positions(options: dict[str, object]) -> None:
    plain_error([[1]], [[2]], **options)


@pytest.mark.parametrize("first", [2**31, 2**40, 2**62, 2**63 - 1])
def test_far_positions(first: int) -> None:
    """Products of position and block size stay right, or are refused: they never wrap."""
    built = PLAIN.build([Request("r", [[1, 3]], [[5, 7]], [first - 1], [first]), Request("good", [[1]], [[9]])])
    if built.failed:
        assert first > 2**40
        assert set(built.failed) == {"r"}
    else:
        assert pairs(PLAIN, built, 0) == [(0, 3, 5)]
        assert built.uncovered == {"r": [(0, first + 1)]}
    assert pairs(PLAIN, built, 1) == [(0, 1, 9)]


def test_positions_as_arrays() -> None:
    options = {"src_first": np.array([1]), "dst_first": (np.int64(2),), "num_tokens": np.int32(12)}
    assert one(PLAIN, [[1, 3]], [[5, 7]], **options) == ([(0, 3, 5)], [])


# Which error is kept


TWO = kvcompile.compile(cache(A, TOKENS, TOKENS), cache(B, TOKENS, TOKENS))


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        # kinds before lists before ids
        ([[99], [1]], [[1], [2.5]], ("dst", 1)),
        ([[99], [1.5]], [["1"], [2]], ("src", 1)),
        ([[1.5]], [[1], [2]], ("src", 0)),
        ([[99]], [[1], [2]], ("src", None)),
        ([[1], [2]], [[99]], ("dst", None)),
        ([[99]], [[1]], ("src", None)),
        # ids: src before dst, group, index
        ([[1], [-1]], [[99], [2]], ("src", 1, 0, -1, 20)),
        ([[1, 2, 98, 97], [99]], [[1], [2]], ("src", 0, 2, 98, 20)),
        ([[1, 2], [3]], [[1], [77]], ("dst", 1, 0, 77, 20)),
        ([[1, 2], [3]], [[-5, 20], [77]], ("dst", 0, 0, -5, 20)),
    ],
)
def test_the_first_error_is_kept(src: object, dst: object, expected: tuple[object, ...]) -> None:
    good = Request("good", [[1], [2]], [[18], [19]])
    error = failing(TWO, Request("bad", src, dst), good)
    assert place(error)[: len(expected)] == expected


def test_lists_before_ids() -> None:
    """A src list that is too short is reported before an id beyond the bound."""
    error = failing(TWO, Request("bad", [[99], []], [[1], [2]]), Request("good", [[1], [2]], [[18], [19]]))
    assert error.group == 1
    assert error.value != 99


def test_bad_requests_never_harm_others() -> None:
    """Every kind of bad request in one batch, in many orders, among good ones: the good ones come out as if alone."""
    good = [Request(f"good{n}", [[n, n + 1, n + 2]], [[2 * n, 2 * n + 1]]) for n in range(4)]
    bad = [
        Request("float", [[1.0]], [[9]]),
        Request("none", None, [[9]]),
        Request("lists", [[1], [2]], [[9]]),
        Request("short", [[]], [[9]]),
        Request("low", [[-1]], [[9]]),
        Request("high", [[1]], [[20]]),
        Request("twice", [[1, 2]], [[9, 9]]),
        Request("conflict1", [[1]], [[15]]),
        Request("conflict2", [[1]], [[15]]),
        Request("positions", [[1]], [[9]], [0], None),
    ]
    alone = {request.id: replay.triples(PLAIN.build([request])) for request in good}
    shuffled = random.Random(0)
    for _ in range(30):
        batch = [*good, *bad]
        shuffled.shuffle(batch)
        built = PLAIN.build(batch)
        assert set(built.failed) == {request.id for request in bad}
        for index, request in enumerate(batch):
            assert replay.triples(built, index) == alone.get(request.id, [])


def test_request_checks_nothing() -> None:
    """Only build does."""
    Request(None, None, "x", 3.5, object(), -1)


def test_ids_of_requests() -> None:
    """Anything hashable; the same key comes back."""
    names = ["a", 1, (2, "b"), None, frozenset([3])]
    built = PLAIN.build([Request(name, [[1]], [[20]]) for name in names])
    assert set(built.failed) == set(names)
