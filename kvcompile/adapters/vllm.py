"""vLLM's MooncakeConnector on kvcompile: name this module as ``kv_connector_module_path``, or call `install`.

Written against vLLM 0.33.0. This file connects; what it connects stands in the ``vllm_*`` files beside it.
"""

import logging
import time
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as upstream
from vllm.v1.kv_cache_interface import MambaSpec

from kvcompile.adapters import vllm_build, vllm_table
from kvcompile.adapters.vllm_state import CORRECTIONS, Settings, State, count, counters, state_of
from kvcompile.backend import warmup

__all__ = ["CORRECTIONS", "MooncakeConnector", "counters", "install", "uninstall"]

logger = logging.getLogger("vllm.kvcompile")

Params = tuple[list[int], list[int], list[int], list[str], str | None]

_OURS: dict[str, Any] = {}
_upstream_build = upstream.MooncakeConnectorWorker._build_transfer_params


async def _build_transfer_params(
    self: Any, ready_reqs: list[tuple[str, Any]], agent_meta: Any, local_regions: list[Any], remote_regions: list[Any]
) -> Params:
    """Build the descriptors of ready requests, as vLLM's own method of this name does."""
    started = time.perf_counter()
    state = state_of(self, _settings)
    built = _build(self, state, ready_reqs, agent_meta, local_regions, remote_regions)
    if built is None:
        count(left_to_vllm=1)
        return await _upstream_build(self, ready_reqs, agent_meta, local_regions, remote_regions)
    descriptors, failed = built
    src, dst, length = (column.tolist() for column in (descriptors.src, descriptors.dst, descriptors.length))
    count(batches=1, descriptors=len(src), failed_requests=len(failed), seconds=time.perf_counter() - started)
    return src, dst, length, list(failed), next(iter(failed.values()), None)


def _build(
    worker: Any, state: State, ready: list[tuple[str, Any]], meta: Any, local: list[Any], remote: list[Any]
) -> vllm_build.Built | None:
    """Build what vLLM's loop would, or return None where it must do so itself."""
    plan = _region_plan(worker, state, meta, local, remote)
    if plan is None:
        return None
    groups = worker.kv_cache_config.transfer_groups
    checked = vllm_build.check(ready, meta.req_blocks, lambda group: isinstance(groups[group].kv_cache_spec, MambaSpec))
    built = vllm_build.build_regions(plan, checked, worker._logical_to_kernel_block_ids)
    if built is not None:
        for request, reason in built.failed.items():
            logger.error("req %s: %s", request, reason)
    return built


def _region_plan(
    worker: Any, state: State, meta: Any, local: list[Any], remote: list[Any]
) -> vllm_table.RegionPlan | None:
    """Return the compiled plan of aligned regions, from the worker's plans where it has it."""
    key = (id(local), id(remote), meta.remote_tp_rank, meta.remote_tp_size, worker.tp_rank, worker.tp_size)
    entry = state.plans.get(key)
    if entry is not None and entry[0] == local and entry[1] == remote:
        return entry[2]  # type: ignore[no-any-return]
    started = time.perf_counter()
    try:
        plan = vllm_table.compile_regions(
            local,
            remote,
            lambda a, b: worker._get_sender_transfer_plan(
                local_kv_block_len=a.kv_block_len,
                remote_kv_block_len=b.kv_block_len,
                remote_tp_rank=meta.remote_tp_rank,
                remote_tp_size=meta.remote_tp_size,
            ),
        )
    except (AssertionError, TypeError, ValueError, ArithmeticError):
        plan = None  # vLLM's own loop raises it again, at its own place, if there is anything to send
    # The lists themselves are kept beside their copies: an id is unique only while its list lives.
    state.remember(key, (list(local), list(remote), plan, local, remote))
    count(plans=1, compile_seconds=time.perf_counter() - started)
    return plan


_settings = Settings()
_replaced: dict[tuple[Any, str], Any] = {}


def install(
    *, mode: str = "exact", corrections: str | Iterable[str] = (), election: str = "nearest", engine: bool = True
) -> None:
    """Put the builder into vLLM's own worker class, in place, for this process.

    Parameters
    ----------
    mode : "exact" or "optimizing"
    corrections : "all", "none" or names in `CORRECTIONS`
        None by default: the same descriptors, refusals and errors as vLLM 0.33.0.
    election : str
    engine : bool

    Raises
    ------
    ValueError
        Settings that do not exist.
    """
    global _settings  # noqa: PLW0603
    _settings = Settings.of(mode, corrections, election, engine)
    uninstall()
    warmup()
    worker = upstream.MooncakeConnectorWorker
    for name, ours in _OURS.items():
        _replaced[worker, name] = getattr(worker, name)
        setattr(worker, name, ours)
    logger.info("kvcompile is installed in MooncakeConnectorWorker: %s", _settings)


def uninstall() -> None:
    """Undo `install`: vLLM's own functions are back. Without effect where nothing is installed."""
    while _replaced:
        (owner, name), theirs = _replaced.popitem()
        setattr(owner, name, theirs)


_OURS["_build_transfer_params"] = _build_transfer_params


class Worker(upstream.MooncakeConnectorWorker):
    """vLLM's worker with the adapter's overrides."""

    _build_transfer_params = _build_transfer_params


class MooncakeConnector(upstream.MooncakeConnector):
    """vLLM's MooncakeConnector, whose worker builds its descriptors with a compiled plan.

    Settings come from ``kv_connector_extra_config["kvcompile"]``: the arguments of `install`, with all corrections on by
    default.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        settings = Settings.of(**extra.get("kvcompile", {}))
        if self.connector_worker is not None:
            warmup()
            state_of(self.connector_worker, settings)
            self.connector_worker.__class__ = Worker
            logger.info("MooncakeConnector runs on kvcompile: %s", settings)
