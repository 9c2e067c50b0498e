"""Caches of plain groups, requests over them, and what comes out as pairs of block ids."""

from collections.abc import Sequence

import kvcompile
from kvcompile import Cache, Descriptors, Field, Group, KVCompileError, Plan, Region, Request, RequestError
from tests import replay

A, B = 2**40, 2**50
UNIT = 8  # bytes of a token
ROOM = 2**24  # between groups


def cache(base: int, *groups: Group, blocks: int | Sequence[int] = 20) -> Cache:
    """Make one layer a group, called by its number, packed; blocks of state take as many bytes as token blocks of 4."""
    counts = [blocks] * len(groups) if isinstance(blocks, int) else blocks
    regions = []
    for number, (group, count) in enumerate(zip(groups, counts, strict=True)):
        tokens = 1 if group.state else group.block_size
        field = Field.hnd("x", heads=1, tokens=tokens, cell_nbytes=4 * UNIT if group.state else UNIT)
        regions.append(Region(str(number), number, base + number * ROOM, tokens * field.cell_nbytes, count, [field]))
    return Cache(regions, groups)


TOKENS = Group(4)
PLAIN = kvcompile.compile(cache(A, TOKENS), cache(B, TOKENS))
UNEQUAL = kvcompile.compile(cache(A, Group(3)), cache(B, Group(2)))


def pairs(plan: Plan, built: Descriptors, index: int = 0) -> list[tuple[int, int, int]]:
    """[(group, src id, dst id)] of plans whose groups have equal numbers and whose blocks take 32 bytes."""
    found = []
    for src, dst, length in replay.triples(built, index):
        group = (src - A) // ROOM
        for at in range(0, length, 32):
            found.append((group, (src + at - A - group * ROOM) // 32, (dst + at - B - group * ROOM) // 32))
    return found


def one(plan: Plan, *args: object, **options: object) -> tuple[list[tuple[int, int, int]], object]:
    """Build one request that must not fail; return its pairs, and what is uncovered."""
    built = plan.build([Request("r", *args, **options)])
    assert built.failed == {}
    return pairs(plan, built), built.uncovered.get("r", [])


def failing(plan: Plan, request: Request, good: Request) -> RequestError:
    """Build a bad request before and after a good one, which must stay whole; return the error."""
    alone = replay.triples(plan.build([good]))
    for batch in ([request, good], [good, request]):
        built = plan.build(batch)
        assert set(built.failed) == {request.id}
        at = batch.index(request)
        assert built.spans[at] == built.spans[at + 1]
        assert replay.triples(built) == alone
        assert built.uncovered == {}
    error = built.failed[request.id]
    assert isinstance(error, RequestError)
    assert isinstance(error, KVCompileError)
    assert error.request == request.id
    assert repr(request.id) in str(error)
    return error


def plain_error(src: object, dst: object, **options: object) -> RequestError:
    """The error of a bad request of one token group of either side, beside a good one."""
    return failing(PLAIN, Request("bad", src, dst, **options), Request("good", [[17]], [[18]]))


def place(error: RequestError) -> tuple[object, ...]:
    return error.side, error.group, error.position, error.value, error.bound
