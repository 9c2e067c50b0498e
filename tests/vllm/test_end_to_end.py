"""Two deployments over Mooncake TCP on loopback, ``start_load_kv`` to ``get_finished``, bootstrap and ZMQ included.

All ranks of both sides are connectors of this process, made by vLLM's own factory; each has its engine and memory.
"""

import asyncio
import json
import logging
import re
import socket
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as upstream
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvcompile.adapters import vllm
from kvcompile.engines import MooncakeEngine
from kvcompile.errors import TransferError

LAYERS, TOKENS, HEAD, BLOCKS = 3, 32, 16, 40
CELL = 2 * HEAD * 2  # K and V, float16
MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"


@contextmanager
def place(rank: int, size: int) -> Iterator[None]:
    """Be one rank of a tensor-parallel group, as far as the connector asks."""
    with ExitStack() as stack:
        stack.enter_context(patch(f"{MODULE}.get_tensor_model_parallel_rank", return_value=rank))
        stack.enter_context(patch(f"{MODULE}.get_tensor_model_parallel_world_size", return_value=size))
        stack.enter_context(patch(f"{MODULE}.get_pp_group", return_value=SimpleNamespace(rank_in_group=0)))
        stack.enter_context(patch(f"{MODULE}.get_ip", return_value="127.0.0.1"))
        yield


def shard(heads: int, rank: int, size: int) -> slice:
    start = rank * heads // size
    return slice(start, max(start + 1, (rank + 1) * heads // size))


class Side:
    """All ranks of one side, with memory."""

    def __init__(
        self, role: str, size: int, heads: int, model: str, ours: bool, dp: tuple[int, int] = (0, 1), **settings: Any
    ) -> None:
        self.role, self.size, self.heads, self.dp = role, size, heads, dp
        self.ranks: list[Any] = []
        self.tensors: list[list[torch.Tensor]] = []
        for rank in range(size):
            with place(rank, size):
                self._add(rank, model, ours, settings)

    def _add(self, rank: int, model: str, ours: bool, settings: dict[str, Any]) -> None:
        config = VllmConfig(
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=64, max_model_len=2048, is_encoder_decoder=False
            ),
            model_config=ModelConfig(model=model, dtype="float16", skip_tokenizer_init=True),
            cache_config=CacheConfig(block_size=TOKENS, enable_prefix_caching=True),
            kv_transfer_config=KVTransferConfig(
                kv_connector="MooncakeConnector",
                kv_connector_module_path="kvcompile.adapters.vllm" if ours else None,
                kv_role=self.role,
                engine_id=self.role,
                kv_connector_extra_config={"mooncake_protocol": "tcp", "num_workers": 2, "kvcompile": settings},
            ),
            device_config=DeviceConfig("cpu"),
        )
        config.cache_config.kv_cache_layout = "LBNHC"
        parallel = config.parallel_config  # as vLLM's engine process sets it of a model with experts
        parallel.data_parallel_rank = parallel.data_parallel_index = self.dp[0]
        parallel.data_parallel_size = self.dp[1]
        local = shard(self.heads, rank, self.size)
        count = local.stop - local.start
        names = [f"model.layers.{n}.self_attn.attn" for n in range(LAYERS)]
        spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=count, head_size=HEAD, dtype=torch.float16)
        cache = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)])
        with set_current_vllm_config(config):
            connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
            connector.connector_worker.transfer_topo.total_num_kv_heads = self.heads
            tensors = [torch.zeros(BLOCKS, count, TOKENS, CELL, dtype=torch.uint8) for _ in names]
            connector.register_kv_caches(dict(zip(names, tensors, strict=True)))
        self.ranks.append(connector)
        self.tensors.append(tensors)

    def load(self, connector: Any, meta: Any) -> None:
        connector.bind_connector_metadata(meta)
        connector.start_load_kv(SimpleNamespace())
        connector.clear_connector_metadata()

    def close(self) -> None:
        """End the workers' threads. vLLM's own ``shutdown`` waits for sockets that only the end of a process closes."""
        for connector in self.ranks:
            worker = connector.connector_worker
            worker.shutdown = lambda: None
            for name in ("sender_loop", "receiver_loop"):
                loop = getattr(worker, name, None)
                if loop is not None:
                    asyncio.run_coroutine_threadsafe(_cancel(), loop).result(10)
                    loop.call_soon_threadsafe(loop.stop)
            if hasattr(worker, "bootstrap_server"):
                worker.bootstrap_server.shutdown()
        self.ranks.clear()


async def _cancel() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    config = json.loads((Path(__file__).parent / "llama.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture
def bootstrap(monkeypatch: pytest.MonkeyPatch) -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    monkeypatch.setenv("VLLM_MOONCAKE_BOOTSTRAP_PORT", str(port))
    monkeypatch.setenv("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "30")
    return f"http://127.0.0.1:{port}"


def contents(request: str, heads: int, blocks: int) -> np.ndarray:
    """All bytes of a request: [layer, block, head, token, byte]."""
    rng = np.random.default_rng(zlib.crc32(request.encode()))
    return rng.integers(1, 256, (LAYERS, blocks, heads, TOKENS, CELL), dtype=np.uint8)


def run(
    prefill: Side, decode: Side, requests: dict[str, tuple[list[int], list[int]]], bootstrap: str
) -> dict[str, set[str]]:
    """Move requests; return who finished where, after a bounded time."""
    for rank, connector in enumerate(prefill.ranks):
        for request, (src, _) in requests.items():
            data = contents(request, prefill.heads, len(src))[:, :, shard(prefill.heads, rank, prefill.size)]
            for layer, tensor in enumerate(prefill.tensors[rank]):
                for position, block in enumerate(src):
                    tensor[block] = torch.from_numpy(data[layer, position])
        meta = upstream.MooncakeConnectorMetadata()
        meta.reqs_to_send = {f"p-{request}": (f"t-{request}", []) for request in requests}
        prefill.load(connector, meta)
        meta = upstream.MooncakeConnectorMetadata()
        meta.reqs_to_send = {f"p-{request}": (f"t-{request}", [src]) for request, (src, _) in requests.items()}
        prefill.load(connector, meta)
    for connector in decode.ranks:
        meta = upstream.MooncakeConnectorMetadata()
        for request, (_, dst) in requests.items():
            params = {
                "transfer_id": f"t-{request}",
                "remote_engine_id": "kv_producer",
                "remote_bootstrap_addr": bootstrap,
            }
            meta.add_new_req(f"d-{request}", [dst], params)
        decode.load(connector, meta)
    done: dict[str, set[str]] = {"sent": set(), "received": set(), "invalid": set()}
    sent: list[set[str]] = [set() for _ in prefill.ranks]
    received: list[set[str]] = [set() for _ in decode.ranks]
    deadline = time.monotonic() + 40
    names = {f"d-{request}" for request in requests}
    while time.monotonic() < deadline and any(got != names for got in received):
        for got, connector in zip(received, decode.ranks, strict=True):
            got.update(connector.get_finished(set())[1] or set())
            done["invalid"] |= {str(block) for block in connector.get_block_ids_with_load_errors()}
        time.sleep(0.02)
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline and any(len(one) < len(requests) for one in sent):
        for one, connector in zip(sent, prefill.ranks, strict=True):
            one.update(connector.get_finished(set())[0] or set())
        time.sleep(0.02)
    done["received"] = set.intersection(*received)
    done["sent"] = set.intersection(*sent)
    return done


def check(decode: Side, requests: dict[str, tuple[list[int], list[int]]], failed: set[str] = frozenset()) -> None:
    """All bytes of the destination, also those that must stay untouched."""
    for rank, tensors in enumerate(decode.tensors):
        for layer, tensor in enumerate(tensors):
            expected = np.zeros(tuple(tensor.shape), np.uint8)
            for request, (src, dst) in requests.items():
                if request not in failed:
                    data = contents(request, decode.heads, len(src))[layer][:, shard(decode.heads, rank, decode.size)]
                    expected[dst] = data[len(src) - len(dst) :]
            np.testing.assert_array_equal(tensor.numpy(), expected, f"rank {rank}, layer {layer}")


REQUESTS = {"a": ([3, 4, 5, 9], [7, 8, 20]), "b": ([12, 11, 30], [1, 2, 3]), "c": ([22], [33])}


@pytest.mark.parametrize(
    ("src", "dst", "heads", "ours_src", "ours_dst", "settings"),
    [
        (4, 2, 4, True, True, {}),
        (2, 4, 4, True, True, {}),
        (4, 2, 4, True, False, {}),
        (2, 4, 4, False, True, {}),
        (4, 2, 2, True, True, {"mode": "optimizing", "election": "striped"}),
        (4, 2, 2, True, True, {"mode": "optimizing", "election": "balanced"}),
        (4, 6, 12, True, True, {}),
        (6, 4, 12, True, True, {}),
        (3, 2, 1, True, True, {}),
    ],
)
def test_bytes_and_release(
    src: int, dst: int, heads: int, ours_src: bool, ours_dst: bool, settings: dict[str, Any], model: str, bootstrap: str
) -> None:
    before = vllm.counters()
    prefill = Side("kv_producer", src, heads, model, ours_src, **settings)
    decode = Side("kv_consumer", dst, heads, model, ours_dst, **settings)
    try:
        done = run(prefill, decode, REQUESTS, bootstrap)
        assert done["received"] == {f"d-{request}" for request in REQUESTS}
        assert done["invalid"] == set()
        check(decode, REQUESTS)
        # Every producer rank lets go of the blocks, also one that had nothing to send.
        assert done["sent"] == {f"p-{request}" for request in REQUESTS}
        if ours_src:
            assert vllm.counters().get("batches", 0) > before.get("batches", 0)
    finally:
        decode.close()
        prefill.close()


@pytest.mark.parametrize(
    ("producer", "election", "heads", "senders"),
    [
        ("optimizing", "balanced", 2, [[0, 2], [1, 3]]),
        ("optimizing", "balanced", 1, [[0, 1], [2, 3]]),
        ("exact", "balanced", 1, [[0, 1], [2, 3]]),
        ("exact", "striped", 1, [[0, 1, 2, 3]] * 2),
        ("plain", "balanced", 2, [[0, 2], [0, 2]]),
    ],
)
def test_consumers_elect(
    producer: str, election: str, heads: int, senders: list[list[int]], model: str, bootstrap: str
) -> None:
    """Two data-parallel consumers are served by the replicas they elect, in any order, with a layout and without.

    A producer without kvcompile knows no election, and loses nothing either.
    """
    settings = {"mode": "optimizing", "election": election}
    ours = producer != "plain"
    prefill = Side("kv_producer", 4, heads, model, ours, **({"mode": producer} if ours else {}))
    decodes = [Side("kv_consumer", 2, heads, model, True, (rank, 2), **settings) for rank in range(2)]
    before = [0] * 4
    try:
        moved: list[dict[str, tuple[list[int], list[int]]]] = [{}, {}]
        for turn, rank in enumerate((1, 0, 1, 0)):
            # The first pull to each rank carries the layout, the later ones do not.
            requests = {f"{turn}{name}": (src, [b + turn for b in dst]) for name, (src, dst) in SPREAD.items()}
            done = run(prefill, decodes[rank], requests, bootstrap)
            assert done["received"] == {f"d-{request}" for request in requests}, f"turn {turn}"
            assert done["sent"] == {f"p-{request}" for request in requests}, f"turn {turn}"
            assert done["invalid"] == set()
            moved[rank] |= requests
            check(decodes[rank], moved[rank])
            sent = [sum(one.connector_worker.xfer_stats.data["num_descriptors"]) for one in prefill.ranks]
            assert [at for at in range(4) if sent[at] > before[at]] == senders[rank], f"turn {turn}"
            before = sent
    finally:
        for decode in decodes:
            decode.close()
        prefill.close()


LINE = r"kvcompile: P rank \d of 4 to D rank \d of [26] at 127\.0\.0\.1:\d+: proof exact; (.*) \(\d+\.\d{3} s\)"


@pytest.mark.parametrize(
    ("src", "dst", "heads", "settings", "how"),
    [
        (4, 6, 12, {"corrections": "all"}, "corrected by override 'handshake_target_ranks'"),
        (4, 2, 4, {"corrections": "all"}, "vLLM's own descriptors"),
        (4, 2, 2, {"mode": "optimizing", "election": "striped"}, "optimized, election 'striped'"),
    ],
)
def test_installed_in_vllms_own_class(
    src: int, dst: int, heads: int, settings: dict[str, str], how: str, model: str, bootstrap: str
) -> None:
    """`install` with corrections: vLLM's connector from its own registry, through to the release of the blocks."""
    lines: list[str] = []
    logger, handler = logging.getLogger("vllm.kvcompile"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    vllm.install(**settings)  # type: ignore[arg-type]
    before = vllm.counters()
    prefill = Side("kv_producer", src, heads, model, False)
    decode = Side("kv_consumer", dst, heads, model, False)
    try:
        assert type(prefill.ranks[0].connector_worker) is upstream.MooncakeConnectorWorker
        done = run(prefill, decode, REQUESTS, bootstrap)
        assert done["received"] == {f"d-{request}" for request in REQUESTS}
        assert done["sent"] == {f"p-{request}" for request in REQUESTS}
        assert done["invalid"] == set()
        check(decode, REQUESTS)
        after = vllm.counters()
        assert after["batches"] > before["batches"]
        assert after["left_to_vllm"] == before["left_to_vllm"]
        pairs, corrected = (after[name] - before[name] for name in ("pairs", "corrected_pairs"))
        assert (pairs, corrected) == {"c": (8, 8), "v": (0, 0), "o": (4, 0)}[how[0]]
        found = [match[1] for line in lines if (match := re.fullmatch(LINE, line))]
        # One line for each pair that talks.
        assert found == [how] * (8 if dst == 6 else 4), lines
    finally:
        decode.close()
        prefill.close()
        vllm.uninstall()
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(handler)


SPREAD = {"a": ([3, 4, 9], [1, 6, 11]), "b": ([12], [16])}


def test_exact_failure_list(model: str, bootstrap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that fails half-way fails the requests it concerns, and no other."""
    moved = []
    move, wrap = MooncakeEngine._move, MooncakeEngine.wrap.__func__

    def fails_at_the_end(self: Any, kind: str, session: str, batch: Any) -> None:
        if len(moved) >= 2 * LAYERS:
            raise TransferError("planted")
        moved.append(len(batch))
        move(self, kind, session, batch)

    monkeypatch.setattr(MooncakeEngine, "_move", fails_at_the_end)
    monkeypatch.setattr(MooncakeEngine, "wrap", classmethod(lambda cls, *args: wrap(cls, *args, max_descriptors=1)))
    requests = {"a": ([3, 4], [7, 8]), "b": ([12, 11], [1, 2]), "c": ([22], [33])}
    prefill = Side("kv_producer", 1, 2, model, True)
    decode = Side("kv_consumer", 1, 2, model, True)
    try:
        done = run(prefill, decode, requests, bootstrap)
        invalid = {int(block) for block in done["invalid"]}
        failed = {request for request, (_, dst) in requests.items() if set(dst) & invalid}
        assert failed
        assert failed != set(requests), "some requests fail, and not all"
        assert invalid == {block for request in failed for block in requests[request][1]}
        for tensor in decode.tensors[0]:
            for request in set(requests) - failed:
                assert all(tensor[block].any() for block in requests[request][1])
    finally:
        decode.close()
        prefill.close()
