"""`plan.explain()`: what a person reads about bytes, descriptors, and lanes that cannot merge."""

import kvcompile
from kvcompile import Cache, Field, Group, Region
from tests.helpers import one_region
from tests.test_proof import gqa


def latent(base: int, tokens: int, tp: tuple[int, int], **place: int) -> Cache:
    field = Field.hnd("latent", heads=1, tokens=tokens, cell_nbytes=576, replicated=True, dcp_sharded=True)
    region = Region("mla", 0, base, 576 * tokens, 64, (field,))
    return Cache([region], [Group(tokens * place.get("dcp_size", 1))], tp_rank=tp[0], tp_size=tp[1], **place)


def test_case_33_nothing_merges() -> None:
    """Every eighth token goes to one rank: 576 bytes each, 4,032 bytes apart on src."""
    plan = kvcompile.compile(latent(0, 16, (0, 1)), latent(1 << 20, 2, (3, 8), dcp_size=8))
    assert plan.explain().splitlines() == [
        "1 row, 1 lane, 1 group pair",
        "",
        "src group 0 (blocks of 16 tokens) to dst group 0 (blocks of 16 tokens): "
        "1,152 bytes and at most 2 descriptors a dst block",
        "  nothing merges, whatever the block ids",
        "  1 lane of 2 slices of 576 bytes that never merge: "
        "on src one is 4,032 bytes behind the other, on dst they touch",
    ]


def test_lanes_that_look_alike_are_one_line() -> None:
    plan = kvcompile.compile(gqa(0, 1), gqa(0, 1, base=1 << 30))
    assert plan.explain().splitlines()[2:] == [
        "src group 0 (blocks of 4 tokens) to dst group 0 (blocks of 4 tokens): "
        "192 bytes and at most 2 descriptors a dst block",
        "  2 lanes of 1 row of 96 bytes: one descriptor for each run of blocks consecutive on both sides",
    ]


def test_a_head_of_several_never_merges() -> None:
    plan = kvcompile.compile(gqa(1, 4), gqa(0, 2, base=1 << 30))
    text = plan.explain()
    assert "  nothing merges, whatever the block ids" in text
    assert "1 row of 8 bytes that never merge: on src 16 bytes lie between consecutive blocks', on dst 40 bytes" in text


def test_small_blocks_into_large_ones_are_chains() -> None:
    src = one_region(Field.hnd("kv", heads=1, tokens=4, cell_nbytes=2), stride=8)
    dst = one_region(Field.hnd("kv", heads=1, tokens=16, cell_nbytes=2), stride=32, base=1 << 20)
    assert "at most 4 descriptors a dst block" in kvcompile.compile(src, dst).explain()
    assert "1 lane of 4 rows of 8 bytes: one merges with the next" in kvcompile.compile(src, dst).explain()
    back = kvcompile.compile(dst, src).explain()
    assert "8 bytes and at most 1 descriptors a dst block" in back


def test_padding_copied_along_stripes_and_pairs_without_rows() -> None:
    field = Field.hnd("kv", heads=1, tokens=4, cell_nbytes=2, replicated=True)
    padded = [one_region(field, stride=12, base=base, tp=(1, 2)) for base in (0, 1 << 20)]
    bridged = kvcompile.compile(*padded, bridge_padding=True).explain()
    assert "on both sides, and the 4 bytes of padding behind each" in bridged
    one = one_region(field, stride=12, base=1 << 20)
    striped = kvcompile.compile(padded[0], one, election="striped").explain()
    assert "4 bytes and at most 1/2 descriptors a dst block" in striped
    assert "  striped: part 2 of 2 of each request's blocks, other src ranks send the rest" in striped
    assert "nothing; no head in common, or another src rank sends it" in kvcompile.compile(padded[0], one).explain()


def test_state_and_a_table_that_cannot_run() -> None:
    state = Field.hnd("ssm", heads=2, tokens=1, cell_nbytes=64)
    src, dst = (one_region(state, stride=128, base=base, block_size=16, state=True) for base in (0, 1 << 20))
    plan = kvcompile.compile(src, dst)
    assert "(blocks of state)" in plan.explain()
    table = plan.table.copy()
    table["dst_step"] = 2
    assert plan.with_table(table).explain().startswith("plan table, row 0: steps are (1, 2)")
