"""vLLM's own `_build_transfer_params` on the caches and requests of the other benchmarks, where vLLM is importable.

Its worker is made without its constructor, which wants a GPU and a scheduler: the builder reads few attributes.
"""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from bench import baseline, shapes

__all__ = ["builder"]

Lists = tuple[list[int], list[int], list[int]]


def builder(case: shapes.Case) -> Callable[[], Lists] | None:
    """Return a call of vLLM's builder on a case, None where vLLM cannot be imported."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import (  # noqa: PLC0415
            mooncake_connector as connector,
        )
    except ImportError:
        return None

    def regions(side: str) -> list[Any]:
        cache = getattr(case, side)
        return [
            connector.TransferRegion(
                layer_name=str(region.layer),
                layer_index=index,
                base_addr=region.base,
                block_len=region.block_stride,
                kv_block_len=baseline.payload(cache, region),
                group_index=region.group,
            )
            for index, region in enumerate(cache.regions)
        ]

    worker = connector.MooncakeConnectorWorker.__new__(connector.MooncakeConnectorWorker)
    worker.shutdown = lambda: None  # there is nothing to shut down
    worker.tp_rank, worker.tp_size = case.src.tp_rank, case.src.tp_size
    worker.use_mla = any(field.replicated for region in case.src.regions for field in region.fields)
    worker.transfer_topo = SimpleNamespace(total_num_kv_heads=case.src.regions[0].fields[0].heads)
    groups = [SimpleNamespace(kv_cache_spec=None) for _ in case.src.groups]
    worker.kv_cache_config = SimpleNamespace(transfer_groups=groups, has_mamba_layers=False)
    worker._physical_blocks_per_logical_kv_block = 1
    worker._producer_cache_is_replicated = lambda: worker.use_mla
    request = case.request
    meta = SimpleNamespace(
        remote_hostname="127.0.0.1",
        remote_port=1,
        remote_tp_rank=case.dst.tp_rank,
        remote_tp_size=case.dst.tp_size,
        req_blocks={request.id: ("transfer", request.dst_blocks)},
    )
    ready = [(request.id, SimpleNamespace(local_block_ids=request.src_blocks))]
    local, remote = regions("src"), regions("dst")

    def build() -> Lists:
        coroutine = worker._build_transfer_params(ready, meta, local, remote)
        try:
            coroutine.send(None)
        except StopIteration as result:
            src, dst, length, failed, why = result.value
            if failed:
                raise SystemExit(f"{case.name}: vLLM refuses it: {why}") from None
            return src, dst, length
        raise SystemExit("vLLM's builder waits for something")

    return build
