"""Kinds of ids: integers are taken, whatever holds them; what is none is refused before any conversion (section 5)."""

import array
import itertools
from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from kvcompile import Request, backend, request
from tests.lists import PLAIN, one, pairs, plain_error

BAD_IDS: list[object] = [
    [1, 2.0],
    [1.5, 2],
    [np.float64(1), 2],
    np.array([1.0, 2.0]),
    np.array([1, 2], np.float32),
    array.array("d", [1, 2]),
    [True, False],
    [1, True],
    [np.bool_(True), 2],
    np.array([True, False]),
    ["1", "2"],
    [1, "2"],
    "12",
    b"12",
    np.array(["1", "2"]),
    [1, None],
    [None, None],
    None,
    7,
    [[1, 2]],
    [[1], [2]],
    [1, [2]],
    np.array([[1, 2]]),
    np.zeros((2, 0), np.int64),
    np.array(3),
    [1, 2j],
    [1, object()],
    np.array([1, 2.5], object),
    {1: 2},
    float("nan"),
    np.array([1, 2], "datetime64[s]"),
    [np.array([1, 3])],
    [1, np.array([3])],
    [np.array(1), 2],
    {1, 3},
    frozenset([1, 3]),
]


@pytest.mark.parametrize(
    "other", [None, ("b", [[1]], [[2]]), SimpleNamespace(**msgspec.structs.asdict(Request("b", [[3]], [[4]])))]
)
def test_what_is_no_request(other: object) -> None:
    """Also what only looks like one; what is derived from one is one."""
    good = Request("a", [[1]], [[2]])
    with pytest.raises(ValueError, match=rf"requests\[1\] is a {type(other).__name__}, expected a Request"):
        PLAIN.build([good, other])  # type: ignore[list-item]

    class Ours(Request, frozen=True):
        pass

    assert PLAIN.build([good, Ours("b", [[3]], [[4]])]).failed == {}


@pytest.mark.parametrize("bad", BAD_IDS, ids=lambda bad: repr(bad)[:40].split(" at 0x")[0])
@pytest.mark.parametrize("side", ["src", "dst"])
def test_ids_of_the_wrong_kind(bad: object, side: str) -> None:
    lists = {"src": [[1, 3]], "dst": [[2, 4]], side: [bad]}
    error = plain_error(lists["src"], lists["dst"])
    assert (error.side, error.group, error.bound) == (side, 0, None)


@pytest.mark.parametrize("bad", [None, 5, "12", 1.5, [1, 2], object()])
@pytest.mark.parametrize("side", ["src", "dst"])
def test_lists_of_the_wrong_kind(bad: object, side: str) -> None:
    lists = {"src": [[1, 3]], "dst": [[2, 4]], side: bad}
    error = plain_error(lists["src"], lists["dst"])
    assert error.side == side


@pytest.mark.parametrize("bad", [[np.array([0])], {0}, "0", [None], [True], [0.0], np.array([0.0]), [[0]], [2**60]])
def test_positions_of_the_wrong_kind(bad: object) -> None:
    """None of it is taken for a list of integers, and a neighbour in the batch moves."""
    wrong = Request("a", [[1]], [[2]], bad, [0])  # type: ignore[arg-type]
    built = PLAIN.build([wrong, Request("b", [[3, 1]], [[4, 5]], [0], np.array([0]))])
    assert list(built.failed) == ["a"]
    assert built.failed["a"].side == "src"
    assert pairs(PLAIN, built, 1) == [(0, 3, 4), (0, 1, 5)]


GOOD_IDS: list[Callable[[list[int]], object]] = [
    list,
    tuple,
    lambda ids: [np.int64(block) for block in ids],
    lambda ids: [ids[0], *(np.uint8(block) for block in ids[1:])],
    *(
        lambda ids, kind=kind: np.array(ids, kind)
        for kind in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i4", ">u8")
    ),
    *(lambda ids, code=code: array.array(code, ids) for code in "bBhHiIlLqQ"),
    lambda ids: np.repeat(np.array(ids), 3)[::3],
    lambda ids: np.array(ids[::-1])[::-1],
    lambda ids: np.stack([ids, ids], axis=1)[:, 0],
]


@pytest.mark.parametrize("make", GOOD_IDS)
def test_every_kind_of_integers(make: Callable[[list[int]], object]) -> None:
    """Also strided, reversed, read-only, big-endian."""
    src, dst = make([7, 1, 3, 5]), make([2, 9])
    assert one(PLAIN, [src], [dst]) == ([(0, 3, 2), (0, 5, 9)], [])
    if isinstance(src, np.ndarray):
        src.flags.writeable = False
        assert one(PLAIN, [src], [dst]) == ([(0, 3, 2), (0, 5, 9)], [])


@pytest.mark.parametrize("kinds", [*itertools.product((list, np.array), repeat=2)])
def test_lists_that_changed_while_they_were_counted(kinds: tuple[Callable[..., object], ...]) -> None:
    """What another thread does to a list meanwhile never leaves the memory that was made for its ids."""
    src, dst = (kind(ids) for kind, ids in zip(kinds, ([7, 1, 3, 5], [2, 9]), strict=True))
    packed = msgspec.msgpack.encode([[[src]], [[dst]], [None], [None], [None]], enc_hook=request._ids)
    for room in itertools.product(range(6), repeat=2):
        given = backend.read(packed, 1, room, backend.reading((1,), (1,)))
        if room[0] < 4 or room[1] < 2:
            assert given is None
            continue
        assert given is not None
        assert (given.batch.src_ids.tolist(), given.batch.dst_ids.tolist()) == ([7, 1, 3, 5], [2, 9])


@pytest.mark.parametrize("odd", [b"", b"12345678", {0: 2}, None])
@pytest.mark.parametrize("where", ["list", "id", "lists"])
def test_what_ids_of_arrays_are_packed_as_is_no_list(odd: object, where: str) -> None:
    src = {"list": [odd], "id": [[1, odd, 3]], "lists": odd}[where]
    assert plain_error(src, [[2]]).side == "src"
    assert plain_error([np.array([1, 2])], src).side == "dst"


@pytest.mark.parametrize(
    "others", [*itertools.combinations_with_replacement(range(0, len(GOOD_IDS), 3), 2)], ids=lambda pair: f"{pair}"
)
def test_a_batch_of_several_kinds_is_that_of_lists(others: tuple[int, ...]) -> None:
    """One that fails among them, and whatever the kinds, alone and beside each other."""
    lists = [([7, 1, 3, 5], [2, 9]), ([4, 99, 6], [3, 4]), ([8], [1])]
    kinds = [list, *(GOOD_IDS[number] for number in others)]
    given = [[[kind(ids)] for ids in pair] for kind, pair in zip(kinds, lists, strict=True)]
    built = PLAIN.build([Request(str(n), *pair) for n, pair in enumerate(given)])
    expected = PLAIN.build([Request(str(n), [src], [dst]) for n, (src, dst) in enumerate(lists)])
    assert pairs(PLAIN, built) == pairs(PLAIN, expected)
    assert (built.spans.tolist(), {name: str(error) for name, error in built.failed.items()}) == (
        expected.spans.tolist(),
        {name: str(error) for name, error in expected.failed.items()},
    )
    assert list(built.failed) == ["1"]


def test_ids_are_not_changed() -> None:
    src, dst = np.array([7, 1, 3, 5]), np.array([2, 9])
    one(PLAIN, [src], [dst])
    assert (src.tolist(), dst.tolist()) == ([7, 1, 3, 5], [2, 9])


def test_torch() -> None:
    torch = pytest.importorskip("torch")
    src, dst = [7, 1, 3, 5], [2, 9]
    expected = ([(0, 3, 2), (0, 5, 9)], [])
    for kind in (torch.int64, torch.int32, torch.int16, torch.uint8):
        assert one(PLAIN, [torch.tensor(src, dtype=kind)], [torch.tensor(dst, dtype=kind)]) == expected
    strided = torch.stack([torch.tensor(src), torch.tensor(src)], dim=1)[:, 1]
    assert one(PLAIN, [strided], [dst]) == expected
    for bad in (torch.tensor([1.0, 2.0]), torch.tensor([True, False]), torch.tensor([[1, 2]]), torch.tensor(1)):
        assert plain_error([bad], [[2, 4]]).side == "src"
