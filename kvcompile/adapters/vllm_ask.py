"""What vLLM's own worker says about a peer: its aligned regions, its refusals, its sender plan. It changes nothing.

vLLM's functions are kept here as they were before anything is installed.
"""

from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as upstream

from kvcompile.adapters.vllm_pair import Answer

__all__ = ["ask", "lengths_error"]

_prepare_transfer_regions = upstream.MooncakeConnectorWorker._prepare_transfer_regions
lengths_error = upstream._validate_asymmetric_region_lengths


def ask(worker: Any, meta: Any) -> Answer:
    """Ask vLLM for its own answer about a peer, the lengths it checks when sending included."""

    def sender_plan(rank: int, a: Any, b: Any) -> tuple[bool, int, int, int]:
        return upstream._compute_sender_transfer_plan(  # type: ignore[no-any-return]
            local_tp_rank=rank,
            local_tp_size=worker.tp_size,
            remote_tp_rank=meta.remote_tp_rank,
            remote_tp_size=meta.remote_tp_size,
            local_kv_block_len=a.kv_block_len,
            remote_kv_block_len=b.kv_block_len,
            producer_cache_replicated=worker._producer_cache_is_replicated(),
            total_num_kv_heads=_total(worker),
        )

    def aligned() -> tuple[Sequence[Any], Sequence[Any]]:
        ours = _theirs_regions(worker, meta)
        local, remote, _ = upstream._align_transfer_regions(
            *ours, allow_partial_layers=meta.remote_pp_size != worker.pp_size
        )
        return local, remote

    try:
        local, remote, error = _prepare_transfer_regions(worker, meta)
        override = "validate_head_resharding" if error and error.startswith("Mooncake KV-head re-sharding") else ""
        by_lengths = False
        if error is None:
            error = lengths_error(**_length_arguments(worker, meta, local, remote))
            by_lengths, override = error is not None, "validate_region_lengths"
    except AssertionError as divides:  # TP sizes, of which neither divides the other
        return Answer((), (), aligned, str(divides), "handshake_target_ranks", False, sender_plan)
    return Answer(local, remote, aligned, error, override, by_lengths, sender_plan)


def _theirs_regions(worker: Any, meta: Any) -> tuple[list[Any], list[Any]]:
    local = worker._get_transfer_regions(
        worker.kv_caches_base_addr,
        worker.block_len_per_layer,
        worker.kv_block_len_per_layer,
        worker.registered_layer_names,
        worker.registered_layer_indices,
        worker.registered_group_indices,
        worker.region_shared_groups,
        worker.region_row_offsets,
    )
    named = len(meta.registered_layer_names)
    shared = [tuple(groups) for groups in meta.registered_shared_group_ids]
    remote = worker._get_transfer_regions(
        meta.kv_caches_base_addr,
        meta.block_lens,
        meta.kv_block_lens,
        meta.registered_layer_names,
        meta.registered_layer_indices,
        meta.registered_group_indices,
        shared if len(shared) == named else None,
        meta.registered_row_offsets if len(meta.registered_row_offsets) == named else None,
    )
    return local, remote


def _total(worker: Any) -> int | None:
    hybrid = worker.use_mla or worker.kv_cache_config.has_mamba_layers
    return None if hybrid else worker.transfer_topo.total_num_kv_heads


def _length_arguments(worker: Any, meta: Any, local: list[Any], remote: list[Any]) -> dict[str, Any]:
    return {
        "local_regions": local,
        "remote_regions": remote,
        "local_tp_size": worker.tp_size,
        "remote_tp_size": meta.remote_tp_size,
        "producer_cache_replicated": worker._producer_cache_is_replicated(),
        "total_num_kv_heads": _total(worker),
    }
