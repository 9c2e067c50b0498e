"""Small caches and requests by hand, for tests whose numbers are typed in."""

from collections.abc import Sequence

from kvcompile import Cache, Descriptors, Field, Group, Plan, Region, Request
from tests import replay

Triple = tuple[int, int, int]


def one_region(
    field: Field | Sequence[Field],
    *,
    base: int = 0,
    stride: int,
    blocks: int = 64,
    block_size: int | None = None,
    kernel_blocks: int = 1,
    null: int | None = None,
    state: bool = False,
    tp: tuple[int, int] = (0, 1),
    dp: tuple[int, int] = (0, 1),
    layer: str = "layer",
) -> Cache:
    """Make a cache of one layer in one region; ``blocks`` counts kernel blocks."""
    fields = [field] if isinstance(field, Field) else list(field)
    groups = [Group(block_size or fields[0].tokens * kernel_blocks, null, state)]
    region = Region(layer, 0, base, stride, blocks, fields, kernel_blocks)
    return Cache([region], groups, tp_rank=tp[0], tp_size=tp[1], dp_rank=dp[0], dp_size=dp[1])


def build(plan: Plan, *lists: tuple[Sequence[int], Sequence[int]], **positions: object) -> Descriptors:
    """Build one request that must not fail; one (src ids, dst ids) for each group."""
    src_blocks, dst_blocks = [src for src, _ in lists], [dst for _, dst in lists]
    built = plan.build([Request("r", src_blocks, dst_blocks, **positions)])
    assert built.failed == {}
    return built


def emitted(plan: Plan, src_blocks: Sequence[int], dst_blocks: Sequence[int], **positions: object) -> list[Triple]:
    """Return the descriptors of one request over one group."""
    return replay.triples(build(plan, (src_blocks, dst_blocks), **positions))
