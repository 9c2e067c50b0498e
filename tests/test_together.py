"""build_all: a request over several plans is sent by all of them or by none."""

import numpy as np
import pytest

import kvcompile
from kvcompile import Plan, Request, RequestError, build_all
from tests.peer import rank

DST = [rank((1 + number) << 30, tp=(number, 2)) for number in range(2)]
SRC = rank(1 << 20)


def plans() -> list[Plan]:
    return [kvcompile.compile(SRC, dst) for dst in DST]


def parts(wrong: int | None = None) -> list[list[Request]]:
    """Four requests for two plans, with ids of their own in each; one of them wrong in plan 1."""
    lists = [[Request(n, [[4 * i, 4 * i + 1]], [[i * 3, i * 3 + 1]]) for i, n in enumerate("abcd")] for _ in range(2)]
    if wrong is not None:
        lists[1][wrong] = Request("abcd"[wrong], [[0]], [[99]])
    return lists


def rows(descriptors: kvcompile.Descriptors, request: str) -> list[tuple[int, int, int]]:
    at = descriptors.requests.index(request)
    own = slice(*descriptors.spans[at : at + 2].tolist())
    columns = (descriptors.src, descriptors.dst, descriptors.length)
    return list(zip(*(column[own].tolist() for column in columns), strict=True))


@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_sent_by_all_or_none(wrong: int) -> None:
    fine = build_all(plans(), parts())
    assert [built.failed for built in fine] == [{}, {}]
    name = "abcd"[wrong]
    for given in (parts(wrong), dict(enumerate(parts(wrong)))):
        built = build_all(plans(), given)
        for number, one in enumerate(built):
            assert list(one.failed) == [name]
            assert one.requests == tuple("abcd")
            assert rows(one, name) == []
            assert len(one) == one.spans[-1] == len(one.src) == len(one.dst)
            for other in set("abcd") - {name}:
                assert rows(one, other) == rows(fine[number], other) != []
        assert str(built[1].failed[name]) in str(built[0].failed[name])
        assert "refused by plan 1, so plan 0 sends nothing of it" in str(built[0].failed[name])
        error = built[0].failed[name]
        assert isinstance(error, RequestError)
        assert (error.request, error.side, error.group, error.position, error.value) == (name, "dst", 0, 0, 99)


def test_several_plans_each_refuse_another() -> None:
    lists = parts(2)
    lists[0][1] = Request("b", [[-1, 1]], [[3, 4]])
    lists[0].append(Request("only here", [[30]], [[30]]))
    built = build_all({"x": plans()[0], "y": plans()[1]}, {"x": lists[0], "y": lists[1]})
    assert list(built) == ["x", "y"]
    assert set(built["x"].failed) == set(built["y"].failed) == {"b", "c"}
    assert "refused by plan" not in str(built["x"].failed["b"])
    assert rows(built["x"], "only here")
    assert built["y"].requests == tuple("abcd")


def test_uncovered_of_what_is_not_sent_is_gone() -> None:
    cut = Request("a", [[0]], [[0, 1]], src_first=[1], dst_first=[0])
    built = build_all(plans(), [[cut], [cut]])
    assert built[0].uncovered == {"a": [(0, 0)]}
    built = build_all(plans(), [[cut], [Request("a", [[0]], [[99]])]])
    assert built[0].uncovered == {}
    assert list(built[0].failed) == ["a"]


def test_result_serves_as_out() -> None:
    both = plans()
    first = build_all(both, parts(0))[0]
    again = both[0].build(parts()[0], out=first)
    assert again is first
    np.testing.assert_array_equal(again.src, both[0].build(parts()[0]).src)


def test_options_reach_every_plan() -> None:
    built = build_all(plans(), parts(), sort=True, max_length=100)
    assert all(one.length.max() <= 100 for one in built)


def test_nothing_for_a_plan() -> None:
    built = build_all(dict(enumerate(plans())), {1: parts()[1]})
    assert len(built[0]) == 0
    assert len(built[1]) > 0


def test_arguments() -> None:
    with pytest.raises(ValueError, match="no plan has key 'z'"):
        build_all({"x": plans()[0]}, {"z": []})
    with pytest.raises(ValueError, match="expected a mapping"):
        build_all({"x": plans()[0]}, [[]])
    with pytest.raises(ValueError, match="has 1 items, expected 2"):
        build_all(plans(), [[]])
