"""What a worker says of a pull, what that copies, and whether the oracle (`world`) agrees byte by byte."""

import asyncio
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as upstream

from kvcompile.adapters import vllm, vllm_worker
from tests.vllm.world import BLOCKS, EMPTY, PADDING, Asked, Rank, World, ready

Lists = tuple[list[int], list[int], list[int], list[str], str | None]


def build(worker: Any, meta: Any, requests: list[Asked], upstreams: bool) -> Lists | str:
    """Run one pull through a worker's own methods: its lists, or why the pull is refused."""
    cls = upstream.MooncakeConnectorWorker
    try:
        prepare = cls._prepare_transfer_regions if upstreams else vllm.Worker._prepare_transfer_regions
        local, remote, error = prepare(worker, meta)
        if error is not None:
            return str(error)
        check = upstream._validate_asymmetric_region_lengths if upstreams else vllm_worker.validate_region_lengths
        error = check(
            local_regions=local,
            remote_regions=remote,
            local_tp_size=worker.tp_size,
            remote_tp_size=meta.remote_tp_size,
            producer_cache_replicated=worker._producer_cache_is_replicated(),
            total_num_kv_heads=None
            if worker.use_mla or worker.kv_cache_config.has_mamba_layers
            else worker.transfer_topo.total_num_kv_heads,
        )
        if error is not None:
            return str(error)
        made = cls._build_transfer_params if upstreams else vllm.Worker._build_transfer_params
        return asyncio.run(made(worker, ready(requests), meta, local, remote))  # type: ignore[no-any-return]
    except AssertionError as error:
        return f"AssertionError: {error}"


def copy(src: dict[int, np.ndarray], dst: dict[int, np.ndarray], lists: Lists) -> bool:
    """Copy labels by descriptors; False where one leaves the memory of either side."""
    for a, b, length in zip(*lists[:3], strict=True):
        spans = []
        for memory, address in ((src, a), (dst, b)):
            base = max((base for base in memory if base <= address), default=None)
            if base is None or address - base + length > len(memory[base]):
                return False
            spans.append((memory[base], address - base))
        (read, at), (written, to) = spans
        written[to : to + length] = read[at : at + length]
    return True


def right(world: World, dst: Rank, got: dict[int, np.ndarray], requests: list[Asked], failed: set[str]) -> bool:
    """Whether every payload byte of a consumer is what the oracle wants, and every other as it was."""
    wanted, loose = dst.blank(), dst.blank()
    for one in requests:
        for layer in world.layers:
            for block, content in one.wanted[layer.group].items():
                if one.name not in failed:
                    dst.fill(layer, block, content, wanted)
            for block in one.loose[layer.group]:
                dst.fill(layer, block, -(1 << 40), loose)
    for base, labels in wanted.items():
        ignored = (labels == PADDING) & ((got[base] == PADDING) | (got[base] == EMPTY)) | (loose[base] < EMPTY)
        if not np.array_equal(np.where(ignored, 0, got[base]), np.where(ignored, 0, labels)):
            return False
    return True


def source(world: World, rank: Rank, requests: list[Asked]) -> dict[int, np.ndarray]:
    memory = rank.blank()
    for layer in world.layers:
        for block in range(BLOCKS):
            rank.fill(layer, block, 5 << 40, memory)  # of other requests: belongs nowhere
        for one in requests:
            for block, content in zip(one.src[layer.group], one.content[layer.group], strict=True):
                if block:
                    rank.fill(layer, block, content, memory)
    return memory


def producers(world: World, consumer: Rank, ours: bool) -> list[int] | None:
    """Which producers a consumer asks; None where vLLM cannot say."""
    size = world.tp["p"]
    try:
        if not ours:
            return consumer.worker.transfer_topo.handshake_target_ranks(size)  # type: ignore[no-any-return]
        token = vllm_worker._receiving.set(True)
        try:
            theirs = consumer.worker.transfer_topo.handshake_target_ranks
            return vllm_worker._target_ranks(consumer.worker, theirs, size)
        finally:
            vllm_worker._receiving.reset(token)
    except AssertionError:
        return None
