"""The vLLM adapter's own logic, without vLLM: tables of regions, lists of blocks, descriptions of caches, verdicts.

What it says beside the real vLLM is tested by ``make test-vllm``.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest

from kvcompile import Buffer, Cache, Field, Group, LayoutError, Region, TransferError
from kvcompile.adapters import vllm_build, vllm_cache, vllm_engine, vllm_pair, vllm_table
from kvcompile.adapters.vllm_build import Rules, check
from kvcompile.adapters.vllm_pair import Answer, compile_pair, partners, verdict
from kvcompile.adapters.vllm_state import CORRECTIONS, Settings, State
from kvcompile.engines import MooncakeEngine


class Place(NamedTuple):
    """vLLM's transfer region, as far as the adapter looks at it."""

    base_addr: int
    block_len: int
    kv_block_len: int
    group_index: int = 0
    shared_group_ids: tuple[int, ...] = ()


class Send(NamedTuple):
    local_block_ids: list[list[int]]


def whole(a: Place, _b: Place) -> tuple[bool, int, int, int]:
    return True, 0, 0, a.kv_block_len


def pulls(src: list[list[int]], dst: list[list[int]]) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    return [("r", Send(src))], {"r": ("t", dst)}


def lists(plan: vllm_table.RegionPlan, src: list[list[int]], dst: list[list[int]]) -> list[tuple[int, int, int]] | None:
    """Build one request without kernel blocks."""
    checked = check(*pulls(src, dst), Rules(["full"] * len(src)))
    built = vllm_build.build_regions(plan, checked, lambda ids: ids)
    return None if built is None else columns(built.descriptors)


def columns(d: Any) -> list[tuple[int, int, int]]:
    return list(zip(d.src.tolist(), d.dst.tolist(), d.length.tolist(), strict=True))


def test_regions_come_in_vllms_order() -> None:
    """Region by region; runs where whole blocks touch on both sides, else block by block."""
    local = [Place(1000, 100, 100), Place(5000, 100, 80)]
    remote = [Place(20000, 100, 100), Place(30000, 100, 80)]
    plan = vllm_table.compile_regions(local, remote, whole)
    assert plan is not None
    assert lists(plan, [[1, 2, 5]], [[7, 8, 9]]) == [
        (1100, 20700, 200),
        (1500, 20900, 100),
        (5100, 30700, 80),
        (5200, 30800, 80),
        (5500, 30900, 80),
    ]


def test_regions_that_touch_are_not_merged() -> None:
    """vLLM's loop never merges two regions, so they get groups of their own."""
    local, remote = [Place(0, 100, 60), Place(60, 100, 40)], [Place(1000, 100, 60), Place(1060, 100, 40)]
    plan = vllm_table.compile_regions(local, remote, whole)
    assert plan is not None
    assert lists(plan, [[3]], [[4]]) == [(300, 1400, 60), (360, 1460, 40)]


def test_shared_region_takes_its_groups_in_order() -> None:
    local, remote = [Place(0, 10, 10, -1, (1, 0))], [Place(1000, 10, 10, -1, (0, 1))]
    plan = vllm_table.compile_regions(local, remote, whole)
    assert plan is not None
    assert lists(plan, [[1], [5]], [[2], [6]]) == [(50, 1060, 10), (10, 1020, 10)]


@pytest.mark.parametrize(
    ("local", "remote"),
    [
        (Place(0, 10, 10), Place(0, 10, 10, 1)),
        (Place(0, 10, 20), Place(0, 10, 20)),
        (Place(0, 10, 10, -1), Place(0, 10, 10, -1)),
        (Place(0, 0, 0), Place(0, 0, 0)),
        (Place(-5, 10, 10), Place(0, 10, 10)),
    ],
)
def test_what_no_table_says_is_left_to_vllm(local: Place, remote: Place) -> None:
    assert vllm_table.compile_regions([local], [remote], whole) is None


def test_ids_that_a_plan_refuses_are_left_to_vllm() -> None:
    plan = vllm_table.compile_regions([Place(0, 10, 10)], [Place(0, 10, 10)], whole)
    assert plan is not None
    assert lists(plan, [[1, 2]], [[4, 4]]) is None


def test_case_1_through_the_sender_plan() -> None:
    """Case 1: TP8 to TP1, odd ranks send nothing, rank 4 its head at its place."""
    for rank, offset in ((0, 0), (2, 65536), (3, None), (4, 131072)):

        def sender(_a: Place, _b: Place, offset: int | None = offset) -> tuple[bool, int, int, int]:
            return offset is not None, 0, offset or 0, 65536

        plan = vllm_table.compile_regions([Place(0, 65536, 65536)], [Place(1 << 40, 262144, 262144)], sender)
        assert plan is not None
        made = lists(plan, [[3]], [[7]])
        assert made == ([] if offset is None else [(3 * 65536, (1 << 40) + 7 * 262144 + offset, 65536)]), rank


@pytest.mark.parametrize(
    ("src", "dst", "pairs"),
    [  # case 24, and 26
        ([0, 0, 0, 0, 0, 6, 7], [4, 5], ([6, 7], [4, 5])),
        ([0, 6, 7], [3, 4, 5], ([6, 7], [4, 5])),
        ([6, 7], [0, 5], ([7], [5])),
        ([10, 11, 12, 13], [7, 8], ([12, 13], [7, 8])),
        ([7], [0, 5], ([7], [5])),
    ],
)
def test_nulls_of_windows(src: list[int], dst: list[int], pairs: tuple[list[int], list[int]]) -> None:
    checked = check(*pulls([src], [dst]), Rules(["window"], nulls=True))
    assert (checked.src[0][0], checked.dst[0][0]) == pairs
    assert not checked.failed


def test_a_null_source_in_full_attention_fails_the_request() -> None:
    ready = [("bad", Send([[0, 6]])), ("good", Send([[8, 9]]))]
    wanted = {"bad": ("t", [[3, 4]]), "good": ("u", [[5, 6]])}
    checked = check(ready, wanted, Rules(["full"], nulls=True))
    assert checked.ids == ["good"]
    assert list(checked.failed) == ["bad"]


def test_without_the_correction_vllms_rules_hold() -> None:
    """State lists lose their nulls before alignment; all others keep them."""
    checked = check(*pulls([[0, 6], [0, 3]], [[4, 5], [7]]), Rules(["full", "state"]))
    assert checked.src == [[[0, 6], [3]]]
    assert checked.dst == [[[4, 5], [7]]]


def test_scratch_blocks_are_left_off() -> None:
    rules = Rules(["state"], nulls=True, scratch=[(2, 1)])
    checked = check(*pulls([[0, 5, 91, 92]], [[8, 93]]), rules)
    assert (checked.src, checked.dst) == ([[[5]]], [[[8]]])


def test_errors_of_a_request_are_vllms() -> None:
    ready = [("a", Send([[1]])), ("b", Send([[1], [2]])), ("c", Send([[1]])), ("d", Send([[9]]))]
    wanted = {"a": ("t", [[1, 2]]), "b": ("t", [[1]]), "c": ("t", [[]]), "d": ("t", [[4]])}
    checked = check(ready, wanted, Rules(["full", "full"]))
    assert checked.failed == {"a": "P num blocks less than D", "b": "KV group count mismatch"}
    assert checked.ids == ["d"]


def cache(rank: int, size: int, heads: int = 4, base: int = 0, replicated: bool = False) -> Cache:
    held = heads if replicated else max(1, heads // size)
    field = Field("kv", heads, 2, 8, 0, 16, 8, replicated)
    region = Region("l0", 0, base, held * 16, 10, (field,))
    return Cache((region,), (Group(2, 0),), (Buffer(base, held * 160),), tp_rank=rank, tp_size=size)


def answer(local: list[Place], remote: list[Place], plan: Any, error: str | None = None, override: str = "") -> Answer:
    return Answer(local, remote, lambda: (local, remote), error, override, False, plan)


def test_verdict_by_proof() -> None:
    """An answer that loses heads is caught; the same with the right offsets is not."""
    own, peer = cache(1, 4), cache(0, 1, base=1 << 20)
    regions = [Place(0, 16, 16)], [Place(1 << 20, 64, 64)]
    right = answer(*regions, lambda rank, _a, _b: (True, 0, rank * 16, 16))
    wrong = answer(*regions, lambda rank, _a, _b: (rank == 0, 0, 0, 16))
    assert verdict(own, peer, right, [1]) is None
    assert verdict(own, peer, wrong, [1]) == "sender_plan"
    refused = answer([], [], None, "no", "validate_head_resharding")
    assert verdict(own, peer, refused, [1]) == "validate_head_resharding"
    pair = compile_pair(own, peer, "nearest", "sender_plan", bounded=False)
    made = vllm_build.build_pair(pair.plan, check(*pulls([[3]], [[700]]), Rules(["full"])), sort=False)
    assert columns(made.descriptors) == [(48, (1 << 20) + 700 * 64 + 16, 16)]


def test_row_merge_that_looks_at_one_side() -> None:
    """Case 22: merged regions that are no neighbours on the other side are found out, the unmerged ones are right."""
    fields = (Field("kv", 1, 2, 50, 0, 50, 50, True),)

    def row(*offsets: int, base: int = 0) -> Cache:
        regions = tuple(Region(f"l{n}", 0, base + at, 1000, 5, fields) for n, at in enumerate(offsets))
        return Cache(regions, (Group(2, 0),), (Buffer(base, 5000),))

    own, peer = row(0, 164), row(0, 100, base=1 << 20)
    merged = [Place(0, 1000, 264)], [Place(1 << 20, 1000, 200)]
    apart = [Place(0, 1000, 100), Place(164, 1000, 100)], [Place(1 << 20, 1000, 100), Place((1 << 20) + 100, 1000, 100)]
    said = Answer(*merged, lambda: apart, None, "", False, lambda _rank, a, _b: (True, 0, 0, a.kv_block_len))
    assert verdict(own, peer, said, [1]) == "prepare_transfer_regions"


@pytest.mark.parametrize(("src", "dst", "heads"), [(4, 6, 12), (6, 4, 12), (3, 2, 1), (2, 3, 2), (8, 4, 8)])
def test_partners_cover_both_sides(src: int, dst: int, heads: int) -> None:
    """Every dst rank gets all its heads from somebody, and every src rank is released by somebody."""
    pairs = partners(frozenset({(heads, False)}), src, dst, "nearest")
    assert {a for a, _ in pairs} == set(range(src))
    assert {b for _, b in pairs} == set(range(dst))
    if (src, dst, heads) == (4, 6, 12):
        assert pairs == {(0, 0), (0, 1), (1, 1), (1, 2), (2, 3), (2, 4), (3, 4), (3, 5)}


def test_at_rank() -> None:
    assert cache(1, 4).at_rank(3).tp_rank == 3
    assert cache(1, 4).at_rank(1) == cache(1, 4)
    field = Field("kv", 3, 2, 8, 0, 16, 8)
    uneven = Cache((Region("l0", 0, 0, 32, 2, (field,)),), (Group(2),), tp_rank=0, tp_size=2)
    with pytest.raises(LayoutError, match=r"rank 1 holds 2 heads, expected 1"):
        uneven.at_rank(1)
    with pytest.raises(LayoutError):
        cache(0, 2).at_rank(2)


def test_blocks_of_other_sizes_are_refused() -> None:
    field = Field("kv", 1, 4, 8, 0, 32, 8)
    peer = Cache((Region("l0", 0, 0, 32, 2, (field,)),), (Group(4),))
    with pytest.raises(LayoutError, match="no positions"):
        compile_pair(cache(0, 1, heads=1), peer, "nearest", "", bounded=True)


def test_settings() -> None:
    assert Settings.of().corrections == set(CORRECTIONS)
    assert Settings.of(corrections="none").corrections == set()
    assert Settings.of(corrections=["sender_plan"]).corrections == {"sender_plan"}
    for wrong in ({"mode": "fast"}, {"corrections": ["x"]}, {"corrections": "some"}, {"election": "x"}, {"engine": 1}):
        with pytest.raises(ValueError, match=r"expected|none of"):
            Settings.of(**wrong)


class Worker:
    """A vLLM worker, as far as a hand-over looks at it: an engine that fails from one call on."""

    hostname, rpc_port = "127.0.0.1", 1

    def __init__(self, good: int) -> None:
        self.engine = self.xfer_stats = self
        self.good, self.calls = good, 0
        self.recorded: list[str] = []

    def batch_transfer_sync_write(self, _session: str, _src: Any, _dst: Any, _length: Any) -> int:
        self.calls += 1
        return 0 if self.calls <= self.good else -1

    def record_transfer(self, **_given: Any) -> None:
        self.recorded.append("sent")

    def record_failed_transfer(self) -> None:
        self.recorded.append("failed")


@pytest.mark.parametrize(("good", "failed"), [(9, []), (1, ["b", "c"]), (2, ["c"])])
def test_hand_over_names_what_failed(good: int, failed: list[str]) -> None:
    worker, state = Worker(good), State(Settings())
    state.engine = MooncakeEngine.wrap(worker.engine, "127.0.0.1:1", max_descriptors=1)
    plan = vllm_table.compile_regions([Place(0, 10, 8)], [Place(1000, 10, 8)], whole)
    assert plan is not None
    ready = [(name, Send([[at]])) for at, name in enumerate("abc")]
    checked = check(ready, {name: ("t", [[at]]) for at, name in enumerate("abc")}, Rules(["full"]))
    built = vllm_build.build_regions(plan, checked, lambda ids: ids)
    assert built is not None
    if not failed:
        vllm_engine.hand_over(worker, state, "127.0.0.1:2", built.descriptors)
        assert worker.recorded == ["sent"]
        return
    with pytest.raises(TransferError) as caught:
        vllm_engine.hand_over(worker, state, "127.0.0.1:2", built.descriptors)
    assert list(caught.value.requests) == failed
    assert worker.recorded == ["failed"]


def test_adapter_needs_no_vllm() -> None:
    """All but the files that connect can be imported without it."""
    assert np.all([module.__name__.startswith("kvcompile.adapters") for module in (vllm_cache, vllm_pair, vllm_engine)])
