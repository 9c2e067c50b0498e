"""Fields of a dst rank that lie on the same bytes: `prove` finds them, in whatever blocks they meet."""

from random import Random

import pytest

from kvcompile import Cache, Field, Group, Region, prove
from kvcompile.proof.shared import meet


@pytest.mark.parametrize("shift", [0, 16, 8])
def test_two_layers_on_the_same_bytes_are_duplicated(shift: int) -> None:
    """Also where only different blocks of one group share them."""
    field = Field.hnd("kv", heads=2, tokens=4, cell_nbytes=2)
    src = Cache([Region(layer, 0, 4096 * n, 16, 8, (field,)) for n, layer in enumerate("ab")], [Group(4)])
    dst = Cache([Region(layer, 0, 4096 + shift * n, 16, 8, (field,)) for n, layer in enumerate("ab")], [Group(4)])
    proof = prove([src], [dst])
    assert {one.layer for one in proof.duplicated} == {"a", "b"}


def strided(base: int, groups: list[Group], *places: tuple[int, int, int, int]) -> Cache:
    """A layer of one cell of 8 bytes for each (offset, stride, blocks, group)."""
    cell = Field.hnd("x", heads=1, tokens=1, cell_nbytes=8)
    regions = [
        Region(n, group, base + at, stride, count, (cell,)) for n, (at, stride, count, group) in enumerate(places)
    ]
    return Cache(regions, groups)


@pytest.mark.parametrize(("stride", "meets"), [(24, True), (40, True), (32, False)])
def test_layers_that_share_bytes_at_other_strides(stride: int, meets: bool) -> None:
    """No block 0 shares a byte, but with odd multiples of 8 as a stride later ones do."""
    groups = [Group(1)]
    src = strided(1 << 20, groups, (0, 8, 9, 0), (4096, 8, 9, 0))
    dst = strided(1 << 30, groups, (0, 16, 9, 0), (8, stride, 9, 0))
    proof = prove([src], [dst])
    assert {one.layer for one in proof.duplicated} == ({0, 1} if meets else set())
    assert {one.why for one in proof.duplicated} <= {
        "another field of this rank has the same bytes: memory that layers share is declared once"
    }


@pytest.mark.parametrize(("shift", "stride", "meets"), [(0, 16, False), (16, 16, True), (12, 16, True), (0, 32, True)])
def test_groups_that_share_bytes_at_other_ids(shift: int, stride: int, meets: bool) -> None:
    """Overlaid groups use an id one at a time: that keeps bytes apart only where equal ids mean equal bytes."""
    groups = [Group(1), Group(1)]
    src = strided(1 << 20, groups, (0, 8, 9, 0), (4096, 8, 9, 1))
    dst = strided(1 << 30, groups, (0, 16, 9, 0), (shift, stride, 9, 1))
    assert dst.overlays == (0, 0)
    proof = prove([src], [dst])
    assert {one.layer for one in proof.duplicated} == ({0, 1} if meets else set())
    assert {one.why for one in proof.duplicated} <= {
        "another group of this rank has the same bytes in blocks of other ids"
    }


def test_whether_blocks_meet_is_exact() -> None:
    """Against a comparison of all blocks with all."""
    random, seen = Random(0), {True: 0, False: 0}

    def segment() -> tuple[int, int, int, int]:
        count, nbytes = random.randint(1, 6), random.randint(1, 6)
        return random.randint(0, 40), nbytes, random.randint(nbytes if count > 1 else 0, 14), count

    for _ in range(20_000):
        a, b, own_ids = segment(), segment(), random.random() < 0.5
        blocks = [[(n, start + n * stride, size) for n in range(count)] for start, size, stride, count in (a, b)]
        expected = any(
            x < y + m and y < x + n for i, x, n in blocks[0] for j, y, m in blocks[1] if not (own_ids and i == j)
        )
        seen[expected] += 1
        assert meet(a, b, own_ids) == meet(b, a, own_ids) == expected, (a, b, own_ids)
    assert min(seen.values()) > 5000
    assert not meet((1, 1, 2, 2**40), (2, 1, 2, 2**40), own_ids=False)
    # Among 2**40 pairs: blocks 2**19 of both, and their neighbours at equal ids.
    far, near = (0, 8, 2**41 + 6, 2**20), (6 * 2**19 + 3, 8, 2**41, 2**20)
    assert meet(far, near, own_ids=False)
    assert not meet(far, near, own_ids=True)
    assert not meet(far, (6 * 2**20 + 20, *near[1:]), own_ids=False)
