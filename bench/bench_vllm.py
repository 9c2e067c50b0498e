"""vLLM's own builder beside kvcompile's, on the same worker objects, in one run: time and GIL stalls.

Asserts nothing about speed; that the lists are equal is asserted.
"""

import argparse
import asyncio
import gc
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as upstream
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvcompile import warmup
from kvcompile.adapters import vllm, vllm_worker
from kvcompile.adapters.vllm_state import Settings, state_of

LAYERS, BLOCKS, HEADS, TOKENS, HEAD = 80, 2048, 8, 16, 128
POOL = 4 * BLOCKS


def worker(rank: int, size: int, base: int) -> Any:
    """Make one of vLLM's workers with ``LAYERS`` registered layers, and no memory behind them."""
    made = upstream.MooncakeConnectorWorker.__new__(upstream.MooncakeConnectorWorker)
    names = [f"model.layers.{n}.attn" for n in range(LAYERS)]
    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS // size, head_size=HEAD, dtype=torch.bfloat16)
    nbytes = spec.page_size_bytes
    made.kv_cache_config = KVCacheConfig(POOL, [], [KVCacheGroupSpec(names, spec)])
    made._layer_specs = dict.fromkeys(names, spec)
    made.tp_rank, made.tp_size, made.pp_size, made.use_mla = rank, size, 1, False
    made._physical_blocks_per_logical_kv_block = 1
    made.hostname, made.rpc_port, made._kv_layout_id = "127.0.0.1", 1, 0
    made.vllm_config, made.model_config = SimpleNamespace(speculative_config=None), SimpleNamespace()
    made.transfer_topo = TransferTopology(rank, size, TOKENS, "engine", False, False, HEADS, [])
    made.kv_caches_base_addr = [base + n * POOL * nbytes for n in range(LAYERS)]
    made.block_len_per_layer = made.kv_block_len_per_layer = [nbytes] * LAYERS
    made.registered_layer_names, made.registered_layer_indices = names, list(range(LAYERS))
    made.registered_group_indices, made.region_shared_groups = [0] * LAYERS, [(0,)] * LAYERS
    made.region_row_offsets, made.opaque_packed_storages = [-1] * LAYERS, set()
    made.seen_base_addresses, made._kv_data_lens = made.kv_caches_base_addr, [POOL * nbytes] * LAYERS
    made._prepared_transfer_regions, made._layout_by_peer = {}, OrderedDict()
    made.shutdown = lambda: None
    return made


def best(run: Callable[[], Any], rounds: int) -> float:
    """Return the least time of some rounds, in seconds."""
    times = []
    for _ in range(rounds):
        gc.collect()
        started = time.perf_counter()
        kept = run()
        times.append(time.perf_counter() - started)
        del kept
    return min(times)


def stall(run: Callable[[], Any]) -> float:
    """Return the longest time that another thread waited for the GIL meanwhile, in seconds."""
    longest, over = 0.0, threading.Event()

    def tick() -> None:
        nonlocal longest
        last = time.perf_counter()
        while not over.is_set():
            time.sleep(0)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    thread = threading.Thread(target=tick)
    thread.start()
    time.sleep(0.05)
    longest = 0.0
    run()
    over.set()
    thread.join()
    return longest


def metadata(peer: Any, dst: list[int]) -> Any:
    """Return a pull of one request."""
    return vllm_worker.PullMetadata(
        remote_hostname="127.0.0.1",
        remote_port=1,
        remote_tp_size=peer.tp_size,
        remote_tp_rank=peer.tp_rank,
        req_blocks={"r": ("t", [dst])},
        kv_caches_base_addr=peer.kv_caches_base_addr,
        block_lens=peer.block_len_per_layer,
        kv_block_lens=peer.kv_block_len_per_layer,
        registered_layer_names=peer.registered_layer_names,
        registered_layer_indices=peer.registered_layer_indices,
        registered_group_indices=peer.registered_group_indices,
        registered_shared_group_ids=[[0]] * LAYERS,
        registered_row_offsets=peer.region_row_offsets,
        kvcompile_cache=vllm_worker._build_pull_metadata(peer, {}, include_layout=True).kvcompile_cache,
    )


def built(method: Any, *args: Any) -> Any:
    """Run a builder, which is a coroutine that never waits."""
    return asyncio.run(method(*args))


def main() -> None:
    """Measure and print."""
    rounds = argparse.ArgumentParser(description=__doc__)
    rounds.add_argument("--rounds", type=int, default=5)
    repeat = rounds.parse_args().rounds
    warmup()
    print(
        f"{LAYERS} layers x {BLOCKS} blocks, scattered, best of {repeat}; milliseconds, times faster, longest GIL stall"
    )
    print(
        f"{'case':16}{'descriptors':>12}{'vLLM 0.33.0':>14}{'exact, lists':>22}{'optimizing, arrays':>22}{'stalls':>26}"
    )
    rng = np.random.default_rng(0)
    src, dst = (rng.permutation(np.arange(1, POOL))[:BLOCKS].tolist() for _ in range(2))
    for name, sizes in (("equal TP", (1, 1)), ("TP4 to TP1", (4, 1)), ("TP1 to TP4", (1, 4))):
        peer = worker(0, sizes[1], 1 << 45)
        meta = metadata(peer, dst)
        ready = [("r", upstream.SendBlockMeta("r", "t", [src], asyncio.Event()))]
        plain, exact, optimizing = (worker(0, sizes[0], 1 << 42) for _ in range(3))
        state_of(exact, Settings())
        state_of(optimizing, Settings.of(mode="optimizing"))
        local, remote, error = upstream.MooncakeConnectorWorker._prepare_transfer_regions(plain, meta)
        ours = vllm.Worker._prepare_transfer_regions(exact, meta)
        pair = vllm.Worker._prepare_transfer_regions(optimizing, meta)
        if error or ours[2] or pair[2]:
            raise SystemExit(f"{name}: {error} {ours[2]} {pair[2]}")
        theirs = upstream.MooncakeConnectorWorker._build_transfer_params
        builders: list[Callable[[], Any]] = [
            partial(built, theirs, plain, ready, meta, local, remote),
            partial(built, vllm.Worker._build_transfer_params, exact, ready, meta, *ours[:2]),
            partial(vllm_worker._build, optimizing, state_of(optimizing, Settings()), ready, meta, *pair[:2]),
        ]
        said, same = builders[0](), builders[1]()
        if said != same:
            raise SystemExit(f"{name}: the lists differ")
        del same
        builders[2]()
        times = [1e3 * best(run, repeat) for run in builders]
        stalls = [1e3 * stall(run) for run in builders]
        cells = [f"{t:.2f} ({times[0] / t:.0f}x)" for t in times[1:]]
        print(
            f"{name:16}{len(said[0]):>12,}{times[0]:>14.1f}{cells[0]:>22}{cells[1]:>22}"
            f"{' / '.join(f'{one:.1f}' for one in stalls):>26}"
        )


if __name__ == "__main__":
    main()
