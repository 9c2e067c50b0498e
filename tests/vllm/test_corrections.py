"""`install` with corrections, in vLLM's own worker class: each correction by its name, and what is left without it.

Every case is one where vLLM 0.33.0 loses or spoils bytes, or refuses. The oracle (`world`) judges all bytes.
"""

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as upstream
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import CircularBufferSpec

from kvcompile.adapters import vllm, vllm_worker
from kvcompile.engines import MooncakeEngine
from tests.vllm.judge import Lists, build, copy, producers, right, source
from tests.vllm.world import Asked, Layer, Rank, World, metadata, owned

CLASS = upstream.MooncakeConnectorWorker
DOCS = Path(__file__).parents[2] / "docs" / "vllm.md"


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    """The next test finds vLLM as it is."""
    names = [name for name in vars(CLASS) if not name.startswith("__")]
    before = {name: getattr(CLASS, name) for name in names}, upstream._validate_asymmetric_region_lengths
    yield
    vllm.uninstall()
    assert ({name: getattr(CLASS, name) for name in names}, upstream._validate_asymmetric_region_lengths) == before


@pytest.fixture
def log() -> Iterator[list[str]]:
    """Lines of the adapter's logger, at the level that vLLM's own configuration gives it."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.kvcompile")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(handler)


def layer(number: int, kind: str, group: int, heads: int = 1, cell: int = 4) -> Layer:
    return Layer(f"model.layers.{number}.attn", kind, group, heads, cell)


def world(layers: list[Layer], src: int, dst: int, plain: bool = False, **more: Any) -> World:
    more.setdefault("model_heads", layers[0].heads)
    return World(layers, {"p": src, "d": dst}, plain=plain, **more)


def whole(world: World, src: list[list[int]] | None = None, dst: list[list[int]] | None = None) -> list[Asked]:
    """Two blocks of attention and one state for each of two requests, or the lists given."""
    if src is not None and dst is not None:
        content: list[list[int | None]] = [[(at + 1) << 20 for at in range(len(ids))] for ids in src]
        wanted = []
        for group, (have, want) in enumerate(zip(src, dst, strict=True)):
            ends = zip(have[len(have) - len(want) :], want, content[group][-len(want) :], strict=True)
            wanted.append({b: value for a, b, value in ends if a and b})
        return [Asked("r", src, dst, content, wanted, [set() for _ in src])]
    asked = []
    for at in range(2):
        one = Asked(f"r{at}", [], [], [], [], [])
        for group in range(world.groups):
            state = any(layer.group == group and layer.kind in ("state", "gdn") for layer in world.layers)
            src_ids, dst_ids = [3 + 4 * at, 5 + 4 * at][: 1 if state else 2], [9 + at, 2 + at * 3][: 1 if state else 2]
            values = [(at * 16 + position + 1) << 20 for position in range(len(src_ids))]
            one.src.append(src_ids)
            one.dst.append(dst_ids)
            one.content.append(list(values))
            one.wanted.append(dict(zip(dst_ids, values, strict=True)))
            one.loose.append(set())
        asked.append(one)
    return asked


def scratch() -> list[Asked]:
    """One state each, with two speculative blocks behind it on one side and one on the other."""
    src, dst = [[3, 4], [5, 11, 12]], [[6, 7], [8, 13]]
    content: list[list[int | None]] = [[1 << 20, 2 << 20], [2 << 20, 7 << 30, 7 << 30]]
    return [Asked("r", src, dst, content, [{6: 1 << 20, 7: 2 << 20}, {8: 2 << 20}], [set(), {13}])]


class Pulled:
    """What all producers of one consumer said about one pull, through vLLM's own class as it is now."""

    def __init__(self, world: World, requests: list[Asked], dst: int = 0) -> None:
        self.world, self.requests = world, requests
        self.consumer = Rank(world, "d", dst, CLASS, 1 << 44)
        named = producers(world, self.consumer, not world.plain)
        assert named is not None, "vLLM names no producers"
        self.sources = {rank: Rank(world, "p", rank, CLASS, 1 << 40) for rank in named}
        extra: dict[str, Any] = {}
        if not world.plain:
            pull = {one.name: upstream.PullReqMeta(one.name, f"t-{one.name}", one.dst, "", "") for one in requests}
            made = vllm_worker._build_pull_metadata(self.consumer.worker, pull, include_layout=True)
            extra = {name: getattr(made, name) for name in ("kvcompile_cache", "kvcompile_scratch")}
        cls = upstream.MooncakeXferMetadata if world.plain else vllm_worker.PullMetadata
        self.meta = metadata(cls, self.consumer, requests, extra)
        self.said: dict[int, Lists | str] = {
            rank: build(one.worker, self.meta, requests, True) for rank, one in self.sources.items()
        }

    @property
    def corrections(self) -> set[str]:
        found = set()
        for one in self.sources.values():
            local, _, _ = one.worker._prepare_transfer_regions(self.meta)
            pair = getattr(local, "pair", None)
            found |= {pair.correction} if pair is not None else set()
        return found

    @property
    def refusals(self) -> list[str]:
        return [said for said in self.said.values() if isinstance(said, str)]

    def arrived(self) -> bool:
        """Whether nothing was refused or failed, and every byte is the oracle's."""
        got, fits = self.consumer.blank(), True
        for rank, said in self.said.items():
            if isinstance(said, str) or said[3]:
                return False
            fits &= copy(source(self.world, self.sources[rank], self.requests), got, said)
        return fits and right(self.world, self.consumer, got, self.requests, set())


def hybrid(src: int, dst: int, heads: int, plain: bool = False) -> World:
    return world([layer(0, "gqa", 0, heads), layer(1, "state", 1, 16)], src, dst, plain)


def draft(src: int, dst: int, plain: bool = False) -> World:
    layers = [layer(0, "mla", 0), layer(9, "gqa", 0, 8)]
    return world(layers, src, dst, plain, use_mla=True, model_heads=1, draft_heads=8)


ROWS = {"p": [0, 64, 0, 0], "d": [0, 0, 64, 0]}
NULLS = ([[3, 4, 5], [0, 6, 7]], [[8, 9, 10], [3, 4, 5]])
PAIRED = ([[3, 4, 5], [6, 0, 7]], [[8, 9, 10], [4, 5, 2]])

# name -> (deployment, requests, whether the proof at the handshake names it)
CASES: dict[str, tuple[World, list[Asked] | None, bool]] = {
    "sender_plan": (hybrid(4, 1, 2), None, True),
    "prepare_transfer_regions": (
        world([layer(n, "mla", 0, cell=16) for n in range(3)], 1, 1, rows=ROWS, use_mla=True),
        None,
        True,
    ),
    "validate_region_lengths": (world([layer(0, "gqa", 0, 4), layer(1, "mla", 0, cell=6)], 4, 1), None, True),
    "validate_head_resharding": (world([layer(0, "gqa", 0, 4)], 2, 1, pad={"p": 8, "d": 4}), None, True),
    "handshake_target_ranks": (world([layer(0, "gqa", 0, 12)], 4, 6), None, True),
    "null_blocks": (
        world([layer(0, "gqa", 0, 2), layer(1, "window", 1, 2)], 1, 1),
        whole(hybrid(1, 1, 2), *NULLS),
        False,
    ),
    "scratch_blocks": (
        world([layer(0, "gqa", 0, 2), layer(1, "state", 1, 8)], 1, 1, scratch={"p": 2, "d": 1}),
        scratch(),
        False,
    ),
}


@pytest.mark.parametrize("name", vllm.CORRECTIONS)
def test_each_by_its_name(name: str, log: list[str]) -> None:
    """Alone it mends its case; without it vLLM's own lists, or its own words, are back."""
    world, requests, proved = CASES[name]
    requests = requests or whole(world)
    vllm.install(corrections=[name])
    mended = Pulled(world, requests)
    assert mended.arrived(), mended.refusals
    if proved:
        assert mended.corrections == {name}
        assert any(f"proof exact; corrected by override {name!r}" in line for line in log), log
    vllm.install(corrections=set(vllm.CORRECTIONS) - {name})
    if name == "handshake_target_ranks":  # the consumer finds nobody to ask
        with pytest.raises(AssertionError, match="vLLM names no producers"):
            Pulled(world, requests)
        return
    left = Pulled(world, requests)
    assert not left.arrived()
    refused = any(isinstance(said, str) for said in left.said.values())
    if proved and not refused:
        assert sum(f"NOT exact; as vLLM does it, override {name!r} is off" in line for line in log) == len(left.said)
    vllm.uninstall()
    theirs = {rank: build(one.worker, left.meta, requests, True) for rank, one in left.sources.items()}
    assert left.said == theirs


def test_docs_name_them_all() -> None:
    table = re.findall(r"^\| `(\w+)` \|", DOCS.read_text().split("## Corrections")[1], re.MULTILINE)
    assert sorted(table) == sorted(vllm.CORRECTIONS)


class Opaque(Layer):
    """A state whose inside the adapter does not know."""

    def spec(self, world: World, side: str, rank: int) -> Any:
        return replace(super().spec(world, side, rank), mamba_type=MambaAttentionBackendEnum.MAMBA1)


HEADS = [(2, 4, 1), (2, 8, 1), (4, 8, 1), (4, 8, 2), (4, 16, 2), (8, 16, 4)]
INDEXER = [layer(0, "gqa", 0, 4), layer(1, "mla", 0, cell=6)]
WINDOW = [layer(0, "gqa", 0, 2), layer(1, "window", 1, 2)]
LATENT = [layer(0, "mla", 0)]

# case -> (deployment, requests, the override that the docs name for it; "" where no proof of a pair can)
MENDED: dict[str, tuple[World, list[Asked] | None, str]] = {
    **{f"case 8: {h} heads, {src} to {dst}": (hybrid(src, dst, h), None, "sender_plan") for h, src, dst in HEADS},
    "case 8 back": (hybrid(1, 8, 4), None, "validate_region_lengths"),
    "case 8, plain": (hybrid(8, 2, 4, plain=True), None, "sender_plan"),
    "case 7": (draft(8, 4), None, "sender_plan"),
    "case 7 back": (draft(4, 8), None, "sender_plan"),
    "case 7, plain": (draft(8, 4, plain=True), None, "sender_plan"),
    "case 4": (world(INDEXER, 4, 1), None, "validate_region_lengths"),
    "case 4 back, plain": (world(INDEXER, 1, 2, plain=True), None, "validate_region_lengths"),
    "ratios 4 and 2": (
        world([layer(0, "gqa", 0, 4)], 1, 1, ratio={"p": 4, "d": 2}),
        None,
        "validate_region_lengths",
    ),
    "ratios 1 and 4, TP 4 and 2": (
        world([layer(0, "gqa", 0, 4)], 4, 2, ratio={"p": 1, "d": 4}),
        None,
        "validate_region_lengths",
    ),
    "ratios 4 and 2, replicas": (replace(hybrid(2, 1, 1), ratio={"p": 4, "d": 2}), None, "sender_plan"),
    "padded, plain": (
        world([layer(0, "gqa", 0, 4)], 1, 2, plain=True, pad={"p": 8, "d": 4}),
        None,
        "validate_head_resharding",
    ),
    "NVFP4": (world([layer(0, "nvfp4", 0, 4)], 2, 1), None, "validate_head_resharding"),
    "case 24": (world(WINDOW, 1, 1), whole(hybrid(1, 1, 2), *NULLS), ""),
    "case 24, plain": (world(WINDOW, 2, 1, plain=True), whole(hybrid(1, 1, 2), *PAIRED), ""),
}


@pytest.mark.parametrize("case", MENDED)
def test_installed_with_all(case: str) -> None:
    """Every dst rank gets every byte; vLLM alone does not serve them all."""
    world, requests, override = MENDED[case]
    requests = requests or whole(world)
    vllm.install(corrections="all")
    found = set()
    for rank in range(world.tp["d"]):
        pulled = Pulled(world, requests, rank)
        assert pulled.arrived(), (rank, pulled.said)
        found |= pulled.corrections
    assert found == ({override} if override else set())
    vllm.uninstall()
    alone = [Pulled(replace(world, plain=True), requests, rank).arrived() for rank in range(world.tp["d"])]
    assert not all(alone), "vLLM alone gets this right: it is no case"


def test_elected_ranks_include_vllms() -> None:
    """A consumer asks whom vLLM asks too: a producer without kvcompile elects nothing, and would send nothing."""
    vllm.install(mode="optimizing", election="balanced")
    for rank, named in ((0, [0, 1, 2]), (1, [2, 3])):
        consumer = Rank(world(LATENT, 4, 2, use_mla=True), "d", rank, CLASS, 1 << 44)
        consumer.worker.vllm_config.parallel_config = SimpleNamespace(data_parallel_size=2)
        consumer.worker.dp_rank = 1
        assert producers(consumer.world, consumer, True) == named


REFUSED: dict[str, tuple[World, str]] = {
    "ratios, plain": (
        world([layer(0, "gqa", 0, 4)], 1, 1, plain=True, ratio={"p": 4, "d": 2}),
        r"layer '.*': the peer's blocks are 32 bytes, expected 16",
    ),
    "unknown state": (
        world([layer(0, "gqa", 0, 4), Opaque("model.layers.1.mixer", "state", 1, 8)], 4, 2),
        r"layer '.*mixer', field 'state': heads is 4 on src and 2 on dst",
    ),
    "ratios, MLA": (world(LATENT, 1, 1, ratio={"p": 4, "d": 2}, use_mla=True), "cell_nbytes is 4 on src and 8 on dst"),
    "12 heads on 8 ranks": (world([layer(0, "gqa", 0, 12)], 8, 4), r"rank \d holds \d heads, expected \d, as rank \d"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_installed_refuses_by_name(case: str, log: list[str]) -> None:
    world, why = REFUSED[case]
    vllm.install(corrections="all")
    pulled = Pulled(world, whole(world))
    assert pulled.refusals
    for reason in pulled.refusals:
        assert reason.startswith("kvcompile: ")
        assert re.search(why, reason), reason
    assert all(any(reason.removeprefix("kvcompile: ") in line for line in log) for reason in pulled.refusals), log


class Ring(Layer):
    def spec(self, world: World, side: str, rank: int) -> Any:
        heads = len(owned(self.heads, rank, world.tp[side]))
        return CircularBufferSpec(block_size=4, num_kv_heads=heads, head_size=self.cell // 2, dtype=torch.uint8)


def test_what_is_not_known_is_left_to_vllm(log: list[str]) -> None:
    vllm.install(corrections="all")
    deployment = world([layer(0, "gqa", 0, 2), Ring("model.layers.1.ring", "gqa", 1, 2)], 1, 1, plain=True)
    pulled = Pulled(deployment, whole(deployment))
    assert pulled.arrived()
    assert pulled.corrections == set()
    (line,) = [line for line in log if "as vLLM does it; no corrections: layer 'model.layers.1.ring'" in line]
    assert line.endswith("a CircularBufferSpec is not known to the adapter")


def test_a_null_source_in_full_attention(log: list[str]) -> None:
    """That request fails, the other arrives, and the log says why."""
    vllm.install(corrections="all")
    deployment = world([layer(0, "gqa", 0, 2)], 1, 1)
    requests = whole(deployment)
    requests[0].src[0][0], requests[0].content[0][0] = 0, None
    pulled = Pulled(deployment, requests)
    said = pulled.said[0]
    assert not isinstance(said, str)
    assert said[3] == ["r0"]
    got = pulled.consumer.blank()
    assert copy(source(deployment, pulled.sources[0], requests), got, said)
    assert right(deployment, pulled.consumer, got, requests, {"r0"})
    assert any(line == f"req r0: {said[4]}" for line in log)


class Fails:
    """An engine, and its statistics, that fails from the second call on."""

    calls = 0

    def batch_transfer_sync_write(self, *_given: Any) -> int:
        self.calls += 1
        return -1 if self.calls > 1 else 0

    def record_failed_transfer(self) -> None:
        pass


def test_installed_all_or_nothing(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own method hears that the batch failed; the exact list is in the log."""
    wrap = MooncakeEngine.wrap.__func__
    monkeypatch.setattr(MooncakeEngine, "wrap", classmethod(lambda cls, *args: wrap(cls, *args, max_descriptors=2)))
    vllm.install(corrections="all")
    deployment = world([layer(0, "gqa", 0, 2)], 1, 1)
    pulled = Pulled(deployment, whole(deployment))
    worker = pulled.sources[0].worker
    worker.engine = worker.xfer_stats = Fails()
    said = pulled.said[0]
    assert len(said[0]) == 4
    before = vllm.counters()["failed_transfers"]
    assert worker._send_blocks("127.0.0.1:1", *said[:3]) == -1
    assert vllm.counters()["failed_transfers"] == before + 1
    (line,) = [line for line in log if line.startswith("Sending to 127.0.0.1:1 failed")]
    assert "failed for ('r1',), complete: ('r0',)" in line.replace("[", "(").replace("]", ",)"), line


LINE = r"kvcompile: P rank {} of 4 to D rank 0 of 1 at host-d0:1000: proof exact; {} \(\d\.\d{{3}} s\)"


def test_log_and_counters(log: list[str]) -> None:
    """One line a peer layout, as the docs show it, and counters of what was done; nothing for the second pull."""
    vllm.install(corrections="all")
    before = vllm.counters()
    deployment = hybrid(4, 1, 2)
    pulled = Pulled(deployment, whole(deployment))
    said = [line for line in log if "proof" in line]
    assert len(said) == 4
    for rank, line in enumerate(said):
        assert re.fullmatch(LINE.format(rank, "corrected by override 'sender_plan'"), line), line
    for rank, one in pulled.sources.items():
        assert build(one.worker, pulled.meta, pulled.requests, True) == pulled.said[rank]
    assert len([line for line in log if "proof" in line]) == 4
    after = vllm.counters()
    done = {name: after[name] - before[name] for name in after}
    assert (done["pairs"], done["corrected_pairs"], done["batches"]) == (4, 4, 8)
    assert done["descriptors"] == 2 * sum(len(lists[0]) for lists in pulled.said.values())
    assert done["failed_requests"] == done["failed_transfers"] == done["left_to_vllm"] == done["plans"] == 0
    log.clear()
    fine = world([layer(0, "gqa", 0, 4)], 4, 1)
    Pulled(fine, whole(fine))
    assert len(log) == 4
    assert all(re.fullmatch(LINE.format(rank, "vLLM's own descriptors"), line) for rank, line in enumerate(log)), log
    assert vllm.counters()["plans"] == after["plans"] + 4
    section = DOCS.read_text().split("Counters of a process")[1].split("##")[0]
    assert set(re.findall(r"`([a-z_]+)`", section)) == set(after)
