"""Regions that several groups share, as vLLM's own ``register_kv_caches`` makes them of real tensors.

Layers of two groups are views of the same bytes: a row is one block of whichever group its id was given to.
"""

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as upstream
from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

from kvcompile.adapters import vllm, vllm_worker
from tests.vllm.judge import Lists, build
from tests.vllm.world import BLOCKS, Asked, Layer, Rank, World, metadata

VIEW = 16  # bytes of a layer in a block


class Window(Layer):
    """A latent of a sliding window."""

    def spec(self, world: World, side: str, rank: int) -> Any:
        return SlidingWindowMLASpec(
            block_size=world.block_size,
            num_kv_heads=1,
            head_size=self.cell,
            dtype=torch.uint8,
            sliding_window=2 * world.block_size,
            max_tp_shards=1,
        )


class Registers:
    """An engine that takes any memory."""

    def batch_register_memory(self, *_given: Any) -> int:
        return 0


class Packed(Rank):
    """A worker whose views lie one behind the other in a row, gaps between them; both groups share each view."""

    def __init__(self, world: World, side: str, rank: int, gaps: list[int]) -> None:
        super().__init__(world, side, rank, upstream.MooncakeConnectorWorker, 0)
        starts = [sum(gaps[: n + 1]) + n * VIEW for n in range(len(gaps) - 1)]
        self.row = starts[-1] + VIEW + gaps[-1]
        self.used = np.zeros(self.row, bool)
        raw = torch.zeros(BLOCKS * self.row, dtype=torch.uint8)
        self.bytes = raw.numpy().reshape(BLOCKS, self.row)
        caches = {}
        for number, start in enumerate(starts):
            self.used[start : start + VIEW] = True
            for layer in world.layers[2 * number : 2 * number + 2]:
                caches[layer.name] = raw.as_strided((BLOCKS, 4, 4), (self.row, 4, 1), start)
        worker = self.worker
        worker.engine = Registers()
        worker.is_kv_producer, worker.is_kv_consumer = False, True  # no listener
        worker.register_kv_caches(caches)
        worker.is_kv_producer, worker.is_kv_consumer = side == "p", side == "d"


@pytest.fixture(autouse=True)
def _uninstalled() -> Iterator[None]:
    yield
    vllm.uninstall()


def copy(src: list[Packed], dst: Packed, said: dict[int, Lists | str]) -> None:
    """Copy real bytes, after a look at where they lie."""
    for rank, lists in said.items():
        assert not isinstance(lists, str), lists
        assert not lists[3], lists
        for a, b, length in zip(*lists[:3], strict=True):
            for side, at in ((src[rank], a), (dst, b)):
                base = side.bytes.ctypes.data
                assert base <= at <= at + length <= base + side.bytes.size
            ctypes.memmove(b, a, length)


EVEN, APART = [0, 0, 0], [0, 8, 8]
SRC, DST = [[3, 4, 5], [0, 7, 9]], [[10, 2], [4, 6, 12]]


@pytest.mark.parametrize("plain", [True, False], ids=["plain consumer", "kvcompile consumer"])
@pytest.mark.parametrize(
    ("tp", "gaps", "right"),
    [
        ((1, 1), (EVEN, EVEN), True),
        ((2, 1), (EVEN, EVEN), True),
        ((1, 1), (APART, APART), True),
        ((1, 1), (APART, EVEN), False),
    ],
)
def test_shared_by_two_groups(tp: tuple[int, int], gaps: tuple[list[int], list[int]], right: bool, plain: bool) -> None:
    """Blocks of both groups arrive whole; without corrections vLLM's own lists, through compiled code."""
    layers = []
    for number in range(len(gaps[0]) - 1):
        layers.append(Layer(f"model.layers.{2 * number}.attn", "mla", 0))
        layers.append(Window(f"model.layers.{2 * number + 1}.attn", "mla", 1))
    world = World(layers, {"p": tp[0], "d": tp[1]}, use_mla=True)
    vllm.install(corrections="all")
    src = [Packed(world, "p", rank, gaps[0]) for rank in range(tp[0])]
    dst = Packed(world, "d", 0, gaps[1])
    assert [one.worker.region_shared_groups for one in (*src, dst)] == [[(0, 1)] * 2] * (len(src) + 1)
    for one in src:
        one.bytes[:] = np.random.default_rng(7).integers(1, 256, one.bytes.shape)
    asked = [Asked("r", SRC, DST, [], [], [])]
    extra: dict[str, Any] = {}
    if not plain:
        pull = {"r": upstream.PullReqMeta("r", "t-r", DST, "", "")}
        made = vllm_worker._build_pull_metadata(dst.worker, pull, include_layout=True)
        assert made.kvcompile_cache
        extra = {"kvcompile_cache": made.kvcompile_cache, "kvcompile_scratch": made.kvcompile_scratch}
    meta = metadata(vllm_worker.PullMetadata, dst, asked, extra)
    copy(src, dst, {rank: build(one.worker, meta, asked, True) for rank, one in enumerate(src)})
    pairs = {10: 4, 2: 5, 6: 7, 12: 9}  # the null source of the window is nobody's
    for block in range(BLOCKS):
        if block in pairs:
            np.testing.assert_array_equal(dst.bytes[block, dst.used], src[0].bytes[pairs[block], src[0].used])
        else:
            assert not dst.bytes[block].any(), block
    vllm.install(corrections="none")
    before = vllm.counters()
    again = [Packed(world, "p", rank, gaps[0]) for rank in range(tp[0])]
    ours = [build(one.worker, meta, asked, True) for one in again]
    after = vllm.counters()
    # Where merged rows are no neighbours on the other side vLLM's loop fails an assertion, which stays its own.
    assert after["left_to_vllm"] == before["left_to_vllm"] + (0 if right else len(again))
    assert after["batches"] == before["batches"] + (len(again) if right else 0)
    vllm.uninstall()
    theirs = [build(one.worker, meta, asked, True) for one in again]
    assert ours == theirs
    if right:  # vLLM copies the null block as well, and is right about the rest
        dst.bytes[:] = 0
        for one in again:
            one.bytes[:] = src[0].bytes
        copy(again, dst, dict(enumerate(theirs)))
        for block, source in (pairs | {4: 0}).items():
            np.testing.assert_array_equal(dst.bytes[block, dst.used], src[0].bytes[source, src[0].used])
