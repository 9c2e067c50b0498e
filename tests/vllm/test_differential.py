"""Thousands of random pulls against vLLM 0.33.0 itself: exact mode says what vLLM says, corrections are right.

An independent oracle (`world`) labels every byte. *Upstream right*: exact mode must give identical lists, corrections
on or off. *Upstream wrong*: the corrected connector must give the oracle's bytes, or a named refusal.
"""

import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as upstream

from kvcompile.adapters import vllm_worker
from kvcompile.adapters.vllm_state import Settings, state_of
from tests.vllm.judge import Lists, build, copy, producers, right, source
from tests.vllm.world import Asked, Layer, Rank, World, ask, metadata

WORLDS = int(os.environ.get("KVCOMPILE_WORLDS", "600"))
PULLS = 5
"""Pulls in each world, with requests of their own: plans are compiled at the first and used by the others."""

PAIRS = [(1, 1), (2, 2), (1, 2), (2, 1), (4, 2), (2, 4), (4, 1), (1, 4), (8, 2), (2, 8), (4, 8), (8, 4), (8, 1), (1, 8)]
ODD = [(2, 3), (3, 2), (4, 6), (6, 4), (6, 3), (3, 6)]


def make(rng: random.Random) -> tuple[str, World]:
    """Draw a deployment; each kind is one that connectors meet."""
    kind = rng.choice(
        [
            "gqa",
            "gqa",
            "window",
            "mla",
            "draft",
            "indexer",
            "hybrid",
            "hybrid",
            "padded",
            "nvfp4",
            "rows",
            "ratio",
            "odd",
            "scratch",
        ]
    )
    tp = rng.choice(PAIRS)
    heads = rng.choice([1, 2, 4, 8])
    layers = [Layer(f"model.layers.{n}.attn", "gqa", 0, heads) for n in range(rng.randint(1, 3))]
    world = World(layers, {"p": tp[0], "d": tp[1]}, model_heads=heads, plain=rng.random() < 0.4)
    if rng.random() < 0.3:
        world.ratio = dict.fromkeys("pd", 2)
    if kind == "window":
        layers.append(Layer("model.layers.8.attn", "window", 1, heads))
    elif kind in ("mla", "rows", "draft"):
        for layer in layers:
            layer.kind, layer.heads = "mla", 1
        world.use_mla, world.model_heads = True, 1
        if kind == "draft":
            layers.append(Layer("model.layers.9.attn", "gqa", 0, heads))
            world.draft_heads = heads
        if kind == "rows":
            world.ratio = dict.fromkeys("pd", 1)
            layers[:] = [Layer(f"model.layers.{n}.attn", "mla", 0) for n in range(3)]
            gaps = {side: [rng.choice([0, 0, 4, 8]) for _ in range(4)] for side in "pd"}
            if rng.random() < 0.5:
                gaps["d"] = gaps["p"]
            world.rows = gaps
    elif kind == "indexer":
        layers.append(Layer("model.layers.0.indexer", "mla", 0, 1, 6))
    elif kind in ("hybrid", "scratch"):
        many = 8 * rng.choice([1, 2])
        layers.append(Layer("model.layers.7.linear", rng.choice(["state", "gdn"]), 1, many))
        if kind == "scratch":
            world.tp = dict.fromkeys("pd", rng.choice([1, 2]))
            world.scratch = {"p": rng.randint(0, 2), "d": rng.randint(0, 2)}
            if world.plain:  # a plain peer does not say how many it has: this side's own number is taken
                world.scratch["d"] = world.scratch["p"]
    elif kind == "padded":
        world.ratio = dict.fromkeys("pd", 1)
        world.pad = {"p": rng.choice([4, 8]), "d": rng.choice([4, 8])}
    elif kind == "nvfp4":
        world.ratio = dict.fromkeys("pd", 1)
        for layer in layers:
            layer.kind = "nvfp4"
    elif kind == "ratio":
        world.ratio = {"p": rng.choice([1, 2, 4]), "d": rng.choice([1, 2, 4])}
    elif kind == "odd":
        a, b = rng.choice(ODD)
        # Every rank of a side holds as many heads as its neighbour, so that one rank's layout tells the others'.
        world.tp, world.model_heads = {"p": a, "d": b}, rng.choice([12, 1, 2])
        for layer in layers:
            layer.heads = world.model_heads
    return kind, world


def run_world(seed: int, tally: Counter[str]) -> None:
    """Judge some pulls of one deployment."""
    rng = random.Random(seed)
    kind, world = make(rng)
    tally["worlds"] += 1
    consumer = Rank(world, "d", rng.randrange(world.tp["d"]), upstream.MooncakeConnectorWorker, 1 << 44)
    state_of(consumer.worker, Settings())
    ranks = (producers(world, consumer, False), producers(world, consumer, not world.plain))
    ours_of = {
        src: tuple(Rank(world, "p", src, upstream.MooncakeConnectorWorker, 1 << 40) for _ in range(3))
        for src in sorted({*(ranks[0] or []), *(ranks[1] or [])})
    }
    for exact, corrected, _ in ours_of.values():
        state_of(exact.worker, Settings.of(corrections="none"))
        state_of(corrected.worker, Settings())
    for number in range(PULLS):
        run_pull(
            f"seed {seed}.{number} ({kind})", kind, world, consumer, ranks, ours_of, ask(world, rng, number), tally
        )


def run_pull(
    where: str,
    kind: str,
    world: World,
    consumer: Rank,
    ranks: tuple[list[int] | None, list[int] | None],
    workers: dict[int, tuple[Rank, ...]],
    requests: list[Asked],
    tally: Counter[str],
) -> None:
    extra: dict[str, Any] = {}
    if not world.plain:
        pull = {one.name: upstream.PullReqMeta(one.name, f"t-{one.name}", one.dst, "", "") for one in requests}
        made = vllm_worker._build_pull_metadata(consumer.worker, pull, include_layout=True)
        extra = {"kvcompile_cache": made.kvcompile_cache, "kvcompile_scratch": made.kvcompile_scratch}
        assert made.kvcompile_cache, f"{where}: no cache was described"
    meta = metadata(vllm_worker.PullMetadata, consumer, requests, extra)
    plain = metadata(upstream.MooncakeXferMetadata, consumer, requests, {})
    theirs: dict[int, Lists | str] = {}
    ours: dict[int, Lists | str] = {}
    memories = {"theirs": consumer.blank(), "ours": consumer.blank()}
    failed: dict[str, set[str]] = {"theirs": set(), "ours": set()}
    fits = {"theirs": True, "ours": True}
    for src, (exact, corrected, plainly) in workers.items():
        memory = source(world, exact, requests)
        if src in (ranks[0] or []):
            theirs[src] = build(plainly.worker, plain, requests, True)
            # Exact mode without corrections is vLLM, right or wrong.
            said = build(exact.worker, plain, requests, False)
            assert said == theirs[src], f"{where}: exact mode differs\n{said}\n{theirs[src]}"
            assert isinstance(said, str) or all(type(value) is int for column in said[:3] for value in column)
        if src in (ranks[1] or []):
            ours[src] = build(corrected.worker, meta, requests, False)
        for who, lists in (("theirs", theirs.get(src)), ("ours", ours.get(src))):
            if isinstance(lists, tuple):
                failed[who] |= set(lists[3])
                fits[who] &= copy(memory, memories[who], lists)
    fails = {one.name for one in requests if one.fails}
    is_right = (
        ranks[0] is not None
        and fits["theirs"]
        and all(isinstance(lists, tuple) for lists in theirs.values())
        and failed["theirs"] == fails
        and right(world, consumer, memories["theirs"], requests, fails)
    )
    tally["pulls"] += 1
    refusals = [lists for lists in ours.values() if isinstance(lists, str)]
    if is_right:
        tally["upstream right"] += 1
        tally[f"right: {kind}"] += 1
        assert ours == theirs, f"{where}: upstream is right, but\n{ours}\n{theirs}"
        return
    tally["upstream wrong"] += 1
    if refusals or ranks[1] is None:
        tally["wrong, refused by name"] += 1
        tally[f"refused: {kind}"] += 1
        named = all(
            reason.startswith(("kvcompile: ", "Mooncake ", "Local tensor", "Remote tensor")) for reason in refusals
        )
        assert named, f"{where}: {refusals}"
        return
    tally["wrong, corrected"] += 1
    tally[f"corrected: {kind}"] += 1
    assert fits["ours"], f"{where}: a descriptor leaves memory"
    assert failed["ours"] == fails, f"{where}: {failed['ours']} failed, expected {fails}"
    assert right(world, consumer, memories["ours"], requests, fails), f"{where}: wrong bytes"


@pytest.mark.parametrize("part", range(4))
def test_random_pulls(part: int, record_property: Callable[[str, object], None]) -> None:
    tally: Counter[str] = Counter()
    for seed in range(part * WORLDS // 4, (part + 1) * WORLDS // 4):
        run_world(seed, tally)
    record_property("tally", dict(tally))
    assert tally["upstream right"] > tally["pulls"] // 4
    assert tally["wrong, corrected"] > tally["pulls"] // 8
