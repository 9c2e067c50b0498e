"""vLLM's MooncakeConnector on kvcompile: name this module as ``kv_connector_module_path``, or call `install`.

Written against vLLM 0.33.0. This file connects; what it connects stands in the ``vllm_*`` files beside it.
"""

import logging
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as upstream

from kvcompile.adapters import vllm_worker
from kvcompile.adapters.vllm_state import CORRECTIONS, Settings, counters, state_of
from kvcompile.backend import warmup

__all__ = ["CORRECTIONS", "MooncakeConnector", "Worker", "counters", "install", "uninstall"]

logger = logging.getLogger("vllm.kvcompile")


class Worker(upstream.MooncakeConnectorWorker):  # type: ignore[misc]
    """vLLM's worker with the adapter's overrides."""

    register_kv_caches = vllm_worker.register_kv_caches
    _build_pull_metadata = vllm_worker._build_pull_metadata
    receive_kv = vllm_worker.receive_kv
    send_kv_to_decode = vllm_worker.send_kv_to_decode
    _prepare_transfer_regions = vllm_worker._prepare_transfer_regions
    _build_transfer_params = vllm_worker._build_transfer_params
    _send_blocks = vllm_worker._send_blocks


class MooncakeConnector(upstream.MooncakeConnector):  # type: ignore[misc]
    """vLLM's MooncakeConnector, whose worker builds its descriptors with a compiled plan.

    Settings come from ``kv_connector_extra_config["kvcompile"]``: the arguments of `install`, with all corrections on
    by default.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        settings = Settings.of(**vllm_config.kv_transfer_config.kv_connector_extra_config.get("kvcompile", {}))
        super().__init__(vllm_config, role, kv_cache_config)
        worker = self.connector_worker
        if worker is not None:
            warmup()
            state_of(worker, settings)
            worker.__class__ = Worker  # its threads wait for register_kv_caches, so nothing has run yet
            logger.info("MooncakeConnector runs on kvcompile: %s", settings)


_replaced: dict[tuple[Any, str], Any] = {}


def install(
    *, mode: str = "exact", corrections: str | Iterable[str] = (), election: str = "nearest", engine: bool = True
) -> None:
    """Put the builder into vLLM's own worker class, in place, for this process.

    Transfers stay all-or-nothing for a batch, as in vLLM; the exact list of what failed goes to the log.

    Parameters
    ----------
    mode : "exact" or "optimizing"
    corrections : "all", "none" or names in `CORRECTIONS`
        None by default: the same descriptors, refusals and errors as vLLM 0.33.0.
    election : "nearest", "balanced" or "striped"
        Of optimizing mode.
    engine : bool
        Hand over in batches that the transport can take.

    Raises
    ------
    ValueError
        Settings that do not exist.
    """
    settings = Settings.of(mode, corrections, election, engine)
    uninstall()
    warmup()
    vllm_worker.installed(settings)
    worker = upstream.MooncakeConnectorWorker
    names = ["_build_transfer_params", "_send_blocks"]
    if settings.corrections or settings.mode != "exact":
        names += ["register_kv_caches", "_build_pull_metadata", "receive_kv", "_prepare_transfer_regions"]
        _replace(upstream, "_validate_asymmetric_region_lengths", vllm_worker.validate_region_lengths)
        _replace(worker, "send_kv_to_decode", vllm_worker.serve_upstream)
    for name in names:
        _replace(worker, name, getattr(vllm_worker, name))
    logger.info("kvcompile is installed in MooncakeConnectorWorker: %s", settings)


def uninstall() -> None:
    """Undo `install`: vLLM's own functions are back. Without effect where nothing is installed."""
    while _replaced:
        (owner, name), theirs = _replaced.popitem()
        setattr(owner, name, theirs)


def _replace(owner: Any, name: str, ours: Any) -> None:
    _replaced[owner, name] = getattr(owner, name)
    setattr(owner, name, ours)
