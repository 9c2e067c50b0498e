"""`prove`: right deployments are exact, each kind of fault is found and named, and no changed number survives."""

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

import kvcompile
from kvcompile import Buffer, Cache, Field, Group, LayoutError, Plan, Region, prove
from kvcompile.table import TABLE
from tests import mutations
from tests.helpers import one_region

ELECTIONS = ("nearest", "balanced", "striped")


def gqa(
    tp_rank: int, tp_size: int, *, layers: tuple[object, ...] = ("l0", "l1"), base: int = 1 << 20, heads: int = 4
) -> Cache:
    """K (cells of 2 bytes) and V (of 4) of some layers in HND order, blocks of 4 tokens, a region each."""
    local = max(1, (tp_rank + 1) * heads // tp_size - tp_rank * heads // tp_size)
    k = Field.hnd("k", heads=heads, tokens=4, cell_nbytes=2)
    fields = (k, Field.hnd("v", heads=heads, tokens=4, cell_nbytes=4, offset=8 * local))
    regions = [Region(layer, 0, base + 4096 * n, 24 * local, 10, fields) for n, layer in enumerate(layers)]
    return Cache(regions, [Group(4)], tp_rank=tp_rank, tp_size=tp_size)


def places(found: tuple) -> set[tuple]:
    return {(one.rank, one.layer, one.field, one.heads, one.tokens) for one in found}


def changed(plan: Plan, row: int, **values: int) -> Plan:
    table = plan.table.copy()
    for name, value in values.items():
        table[name][row] = value
    return plan.with_table(table)


@pytest.fixture
def sides() -> tuple[list[Cache], list[Cache]]:
    """Four src ranks with a head each, two dst ranks with two."""
    return [gqa(rank, 4) for rank in range(4)], [gqa(rank, 2, base=1 << 30) for rank in range(2)]


def test_exact_says_what_was_looked_at(sides: tuple[list[Cache], list[Cache]]) -> None:
    proof = prove(*sides)
    assert proof.exact
    assert (proof.missing, proof.duplicated, proof.misplaced) == ((), (), ())
    assert str(proof).startswith("exact: ")
    assert "4 src ranks to 2 dst ranks, 4 plans" in str(proof)


def test_caches_of_any_iterable(sides: tuple[list[Cache], list[Cache]]) -> None:
    assert prove(iter(sides[0]), (cache for cache in sides[1])).exact


def test_an_absent_src_rank_is_missing(sides: tuple[list[Cache], list[Cache]]) -> None:
    srcs, dsts = sides
    proof = prove([srcs[0], srcs[1], srcs[3]], dsts)
    assert places(proof.missing) == {(1, layer, field, (2, 3), (0, 4)) for layer in ("l0", "l1") for field in "kv"}
    assert not proof.duplicated
    assert not proof.misplaced


def test_two_senders_are_a_duplicate(sides: tuple[list[Cache], list[Cache]]) -> None:
    srcs, dsts = sides
    proof = prove([*srcs, srcs[1]], dsts)
    assert places(proof.duplicated) == {(0, layer, field, (1, 2), (0, 4)) for layer in ("l0", "l1") for field in "kv"}
    assert not proof.missing
    assert not proof.misplaced


def test_k_and_v_exchanged_are_misplaced(sides: tuple[list[Cache], list[Cache]]) -> None:
    srcs, dsts = sides
    plan = kvcompile.compile(srcs[1], dsts[0])
    assert len(plan.table) == 4
    a, b = (int(plan.table["src_origin"][row]) for row in (0, 1))
    swapped = changed(changed(plan, 0, src_origin=b), 1, src_origin=a)
    proof = prove(srcs, dsts, {(1, 0): swapped})
    assert places(proof.misplaced) == {(0, "l0", field, (1, 2), (0, 4)) for field in "kv"}
    assert {one.src for one in proof.misplaced} == {1}
    assert not proof.missing
    assert not proof.duplicated


def test_a_head_that_a_rank_does_not_hold_is_nowhere_in_its_memory() -> None:
    """Also where the row reads from where that head would lie, if it were there."""
    src = replace(gqa(1, 4), buffers=(Buffer(0, 1 << 24),))
    dst = gqa(0, 4, base=1 << 30)
    plan = kvcompile.compile(gqa(0, 4), dst)
    would_be = plan.with_table(plan.table[:1])
    table = would_be.table.copy()
    table["src_origin"] = (1 << 20) - 8  # a head before the one that it holds
    table["length"] = 8
    proof = prove([src], [dst], {(0, 0): would_be.with_table(table)})
    assert {(one.field, one.heads, one.why) for one in proof.misplaced} == {
        ("k", (0, 1), "src rank 0 does not hold it")
    }


def test_a_part_of_a_block_is_named_by_its_tokens(sides: tuple[list[Cache], list[Cache]]) -> None:
    srcs, dsts = sides
    plan = kvcompile.compile(srcs[2], dsts[1])
    row = next(n for n in range(4) if int(plan.table["src_origin"][n]) == srcs[2].regions[1].base)
    proof = prove(srcs, dsts, {(2, 1): changed(plan, row, length=5)})
    assert places(proof.missing) == {(1, "l1", "k", (2, 3), (2, 4))}  # the third cell by half
    assert not proof.misplaced


def test_neighbouring_heads_are_one_finding() -> None:
    srcs, dsts = [gqa(0, 1)], [gqa(0, 1, base=1 << 30)]
    plan = kvcompile.compile(srcs[0], dsts[0])
    proof = prove(srcs, dsts, {(0, 0): plan.with_table(plan.table[:0])})
    assert places(proof.missing) == {(0, layer, field, (0, 4), (0, 4)) for layer in ("l0", "l1") for field in "kv"}
    assert all(one.why == "nobody writes it" and one.src is None for one in proof.missing)


def test_the_table_a_person_reads(sides: tuple[list[Cache], list[Cache]]) -> None:
    text = str(prove(sides[0][:3], sides[1])).splitlines()
    assert text[0].startswith("NOT exact: 4 missing, 0 duplicated, 0 misplaced (3 src ranks to 2 dst ranks")
    assert text[1].split() == ["dst", "rank", "layer", "field", "heads", "tokens"]
    assert text[2].split() == ["missing", "1", "l0", "k", "[3,", "4)", "[0,", "4)", "nobody", "writes", "it"]
    assert len(text) == 6


def test_long_tables_are_cut() -> None:
    cache = gqa(0, 1, layers=tuple(range(100)))
    assert str(prove([], [cache])).endswith("... and 160 more")


def test_case_30_a_layer_that_nobody_holds_is_named() -> None:
    """Layers 33 and 28 on two stages, and a draft layer 61 on dst that no src holds."""
    stages = [gqa(0, 1, layers=tuple(range(33))), gqa(0, 1, layers=tuple(range(33, 61)))]
    proof = prove(stages, [gqa(0, 1, layers=tuple(range(62)), base=1 << 30)])
    assert places(proof.missing) == {(0, 61, field, (0, 4), (0, 4)) for field in "kv"}
    assert not proof.duplicated
    assert not proof.misplaced
    assert " 61 " in str(proof)


def test_writing_behind_the_block_names_what_is_hit() -> None:
    """A row one cell too long writes into the next block, and on the last one across the edge of the buffer."""
    src = one_region(Field.hnd("kv", heads=1, tokens=4, cell_nbytes=2), stride=8)
    dst = one_region(Field.hnd("kv", heads=1, tokens=4, cell_nbytes=2), base=1 << 20, stride=8)
    plan = kvcompile.compile(src, dst)
    proof = prove([src], [dst], {(0, 0): changed(plan, 0, length=10)})
    assert {one.why for one in proof.misplaced} >= {"src rank 0 writes over it for another block"}
    assert any("edge of a buffer" in one.why for one in proof.misplaced)


def test_padding_may_go_to_padding_and_nothing_else() -> None:
    cell = {"heads": 1, "tokens": 4, "cell_nbytes": 2}
    fields = [Field.hnd("k", **cell), Field.hnd("v", **{**cell, "cell_nbytes": 3}, offset=12)]
    padded = [one_region(fields, base=base, stride=24) for base in (0, 1 << 20)]
    plan = kvcompile.compile(*padded)
    assert plan.table["length"].tolist() == [8, 12]
    over_the_gap = plan.with_table(changed(plan, 0, length=24).table[:1])
    assert prove(padded[:1], padded[1:], {(0, 0): over_the_gap}).exact
    # The gap of src holds a field where that of dst holds none.
    held = one_region([*fields, Field.hnd("s", heads=1, tokens=4, cell_nbytes=1, offset=8)], base=0, stride=24)
    proof = prove([held], padded[1:], {(0, 0): over_the_gap})
    assert {(one.field, one.why) for one in proof.misplaced} == {
        ("s", "src rank 0 writes it where this block has no field")
    }
    # And the other way round: what reads padding is wrong where dst holds a field.
    held = replace(held, regions=tuple(replace(region, base=1 << 20) for region in held.regions), buffers=None)
    proof = prove(padded[:1], [held], {(0, 0): over_the_gap})
    assert {(one.field, one.why) for one in proof.misplaced} == {("s", "src rank 0 does not hold it")}


def test_a_tail_over_a_field_is_found() -> None:
    """The bytes between one block's payload and the next are another group's on dst."""
    field = Field.hnd("kv", heads=1, tokens=4, cell_nbytes=2)
    src = one_region(field, stride=12)
    regions = [
        Region("layer", 0, 1 << 20, 12, 64, (field,)),
        Region("other", 1, (1 << 20) + 8, 12, 64, (replace(field, tokens=2),)),
    ]
    dst = Cache(regions, [Group(4), Group(2)])
    plan = kvcompile.compile(src, dst, bridge_padding=True)
    assert plan.table["tail"].tolist() == [0]
    proof = prove([src], [dst], {(0, 0): changed(plan, 0, tail=4)})
    assert {(one.layer, one.why) for one in proof.misplaced} == {
        ("other", "src rank 0 writes over it for another block")
    }


def test_overlaid_groups_are_looked_at_one_by_one() -> None:
    field = Field.hnd("kv", heads=2, tokens=4, cell_nbytes=2)
    state = Field.hnd("ssm", heads=2, tokens=1, cell_nbytes=6)
    caches = [
        Cache(
            [Region("a", 0, base, 16, 8, (field,)), Region("s", 1, base, 16, 8, (state,))],
            [Group(4), Group(4, state=True)],
        )
        for base in (4096, 1 << 20)
    ]
    assert caches[0].overlays == (0, 0)
    assert prove(caches[:1], caches[1:]).exact


def test_what_layouts_disagree_about_is_compile_s_error() -> None:
    with pytest.raises(LayoutError, match="cell_nbytes is 2 on src and 4 on dst"):
        prove(
            [one_region(Field.hnd("kv", heads=1, tokens=4, cell_nbytes=2), stride=8)],
            [one_region(Field.hnd("kv", heads=1, tokens=4, cell_nbytes=4), stride=16)],
        )


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((["x"], []), "src_caches holds a str"),
        (([], [None]), "dst_caches holds a NoneType"),
        ((Cache([], []), []), "src_caches or dst_caches is a Cache"),
        (([], [], {(0, 0): 1}), r"plans\[\(0, 0\)\] is a int"),
    ],
)
def test_arguments_that_make_no_sense(args: tuple, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        prove(*args)


@pytest.mark.parametrize("pair", [(0, 1), (-1, 0), "00", 0])
def test_a_plan_for_a_pair_that_there_is_not(pair: object) -> None:
    cache = gqa(0, 1)
    with pytest.raises(ValueError, match="expected \\(index in src_caches"):
        prove([cache], [cache], {pair: kvcompile.compile(cache, cache)})


def dcp(
    base: int, heads: int, tp: int, size: int, interleave: int, tokens: int, kernel_blocks: int, order: str = "hnd"
) -> list[Cache]:
    """All ranks of a side: a latent divided by tokens, a field divided by heads and tokens, one by heads alone."""
    caches = []
    for rank in range(tp):
        latent = Field.hnd("latent", heads=1, tokens=tokens, cell_nbytes=3, replicated=True, dcp_sharded=True)
        local = max(1, (rank + 1) * heads // tp - rank * heads // tp)
        sizes = {"heads": heads, "tokens": tokens, "cell_nbytes": 2, "dcp_sharded": True}
        kv = Field.hnd("kv", **sizes) if order == "hnd" else Field.nhd("kv", local_heads=local, **sizes)
        whole = Field.hnd("kv", heads=heads, tokens=tokens * size, cell_nbytes=1)
        regions = [
            Region("mla", 0, base, tokens * 3 + 5, 12 * kernel_blocks, (latent,), kernel_blocks),
            Region("gqa", 0, base + (1 << 16), tokens * 2 * local, 12 * kernel_blocks, (kv,), kernel_blocks),
            Region("own", 0, base + (2 << 16), tokens * size * local, 12 * kernel_blocks, (whole,), kernel_blocks),
        ]
        group = Group(kernel_blocks * tokens * size)
        caches.append(Cache(regions, [group], tp_rank=rank, tp_size=tp, dcp_size=size, dcp_interleave=interleave))
    return caches


# Heads, then a side each: tp, dcp size, interleave, tokens and kernel blocks of a rank.
DCP = {
    "case 32": (1, (2, 2, 16, 16, 1), (1, 1, 1, 16, 1)),
    "case 33": (1, (1, 1, 1, 16, 1), (8, 8, 1, 2, 1)),
    "equal": (2, (4, 2, 2, 4, 2, "nhd"), (4, 2, 2, 4, 2)),
    "other interleave": (1, (4, 4, 2, 4, 1), (4, 2, 4, 4, 2, "nhd")),
    "over kernel blocks": (1, (2, 2, 6, 4, 3), (6, 3, 2, 4, 1)),
    "several heads": (3, (6, 2, 1, 4, 1, "nhd"), (2, 1, 1, 8, 1, "nhd")),
}


@pytest.mark.parametrize("election", ELECTIONS)
@pytest.mark.parametrize("name", DCP)
def test_context_parallel_deployments(name: str, election: str) -> None:
    heads, *sides = DCP[name]
    srcs, dsts = (dcp(base, heads, *side) for base, side in zip((1 << 20, 1 << 30), sides, strict=True))
    plans = {(i, j): kvcompile.compile(s, d, election=election) for i, s in enumerate(srcs) for j, d in enumerate(dsts)}
    proof = prove(srcs, dsts, plans)
    assert proof.exact, str(proof)
    fate, faults = mutations.try_mutants(
        srcs, dsts[-1], {(i, 0): plans[i, len(dsts) - 1] for i in range(len(srcs))}, Random(0), 12
    )
    assert not faults
    assert fate["caught"]


def test_tokens_of_another_context_parallel_place_are_not_the_same() -> None:
    """Two places keep their own tokens at the same offsets: exchanged plans cover every byte, from wrong tokens."""
    srcs, dsts = dcp(1 << 20, 1, 2, 2, 2, 4, 1), dcp(1 << 30, 1, 1, 1, 1, 8, 1)
    plans = [kvcompile.compile(src, dsts[0]) for src in srcs]
    assert prove(srcs, dsts, {(0, 0): plans[0], (1, 0): plans[1]}).exact
    proof = prove(srcs, dsts, {(0, 0): plans[1], (1, 0): plans[0]})
    assert not proof.missing
    assert not proof.duplicated
    assert {one.why for one in proof.misplaced if one.layer == "mla"} == {
        "src rank 0 does not hold it",
        "src rank 1 does not hold it",
    }


def test_halves_of_a_cell() -> None:
    """Rows may cut cells anywhere, as long as each byte goes to its own place."""
    src, dst = (
        one_region(Field.hnd("kv", heads=1, tokens=4, cell_nbytes=6), stride=24, base=base) for base in (0, 1 << 20)
    )
    plan = kvcompile.compile(src, dst)
    table = np.repeat(plan.table, 2)
    table["length"] = 9, 15
    for name in ("src_origin", "dst_origin"):
        table[name][1] += np.uint64(9)
    halves = plan.with_table(table)
    assert prove([src], [dst], {(0, 0): halves}).exact
    proof = prove([src], [dst], {(0, 0): changed(halves, 1, src_origin=6)})  # the start of the cell that it continues
    assert places(proof.misplaced) == {(0, "layer", "kv", (0, 1), (1, 4))}
    assert not proof.missing


def test_compressed_cells() -> None:
    """A cell of four tokens; findings count tokens."""
    fields = Field.hnd("latent", heads=1, tokens=16, cell_nbytes=6, tokens_per_cell=4)
    src = one_region(fields, stride=24)
    dst = one_region(replace(fields, tokens=8), stride=12, base=1 << 20, kernel_blocks=1)
    assert prove([src], [dst]).exact
    plan = kvcompile.compile(src, dst)
    proof = prove([src], [dst], {(0, 0): changed(plan, 0, length=6)})
    assert {one.tokens for one in proof.missing} == {(4, 8)}


def test_stripes_cover_every_block_once() -> None:
    """Eight ranks send an eighth of the blocks each; another part, or one more, is a fault."""
    latent = Field.hnd("latent", heads=1, tokens=4, cell_nbytes=2, replicated=True)
    srcs = [one_region(latent, stride=8, tp=(rank, 8)) for rank in range(8)]
    dst = one_region(latent, stride=8, base=1 << 20)
    plans = {(rank, 0): kvcompile.compile(src, dst, election="striped") for rank, src in enumerate(srcs)}
    assert [int(plans[rank, 0].table["parts"][0]) for rank in range(8)] == [8] * 8
    assert prove(srcs, [dst], plans).exact
    proof = prove(srcs, [dst], {**plans, (3, 0): changed(plans[3, 0], 0, part=4)})
    assert proof.missing
    assert proof.duplicated
    assert prove(srcs, [dst], {**plans, (3, 0): changed(plans[3, 0], 0, parts=9)}).missing


def test_random_deployments_and_thousands_of_mutants(record_property: Callable[[str, object], None]) -> None:
    """What compile makes is exact but for layers that no src holds; a changed plan is not, or the judge says why."""
    fate = mutations.random_deployments(100, 20)
    record_property("shares", mutations.figures(fate))
    assert fate["caught"] >= 1000
    assert fate["equivalent"] < fate["caught"] / 5
    kinds = {name.removeprefix("caught ") for name in fate if name.startswith("caught ")}
    assert kinds == {"drop", "double", *TABLE.names}


def test_lost_layers_are_drawn() -> None:
    """A deployment of the strategy, without one of its src layers: that one is missing, and nothing else is."""
    srcs = [gqa(rank, 4) for rank in range(4)]
    fewer = [Cache(src.regions[:1], src.groups, tp_rank=src.tp_rank, tp_size=4) for src in srcs]
    proof = prove(fewer, [gqa(0, 1, base=1 << 30)])
    mutations.check_exact(proof, fewer, gqa(0, 1, base=1 << 30))
    assert places(proof.missing) == {(0, "l1", field, (0, 4), (0, 4)) for field in "kv"}


def test_buffers_that_touch_are_not_one() -> None:
    """Bytes are right, but no engine takes a copy across two registrations."""
    field = Field.hnd("kv", heads=1, tokens=4, cell_nbytes=2)
    regions = [Region("a", 0, 4096, 8, 4, (field,)), Region("b", 0, 4128, 8, 4, (field,))]
    src = Cache(regions, [Group(4)], [Buffer(4096, 64)])
    apart, one = (Cache(regions, [Group(4)], buffers) for buffers in ([Buffer(4096, 32), Buffer(4128, 32)], None))
    assert one.buffers == apart.buffers
    plan = kvcompile.compile(src, apart)
    assert prove([src], [apart], {(0, 0): plan}).exact
    long = changed(plan, 0, dst_origin=4096 + 24, src_origin=4096 + 24, length=16, src_stride=0, dst_stride=0)
    assert any("edge of a buffer" in one.why for one in prove([src], [apart], {(0, 0): long}).misplaced)
