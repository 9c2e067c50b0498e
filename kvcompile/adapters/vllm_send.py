"""Serve one pull of a consumer, as vLLM's own method does, but with the exact list of requests that failed.

The order of checks, the answers and the counters are vLLM 0.33.0's protocol; only what happens after a failed transfer
differs: requests whose bytes have certainly arrived are reported as done, and released.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as upstream

from kvcompile.adapters.vllm_build import Built
from kvcompile.adapters.vllm_engine import hand_over
from kvcompile.adapters.vllm_state import State
from kvcompile.errors import TransferError

__all__ = ["Hooks", "serve"]

logger = logging.getLogger("vllm.kvcompile")

Status = upstream.MooncakeXferResponseStatus


class Hooks(NamedTuple):
    """What serving asks of the overrides: to build a batch, and to check the lengths of aligned regions."""

    build: Callable[..., Built | None]
    lengths_error: Callable[..., str | None]


async def serve(worker: Any, state: State, hooks: Hooks, identity: bytes, sock: Any, meta: Any) -> None:
    """Answer a pull: prepare the pair, then send each request when it is ready.

    Parameters
    ----------
    worker : MooncakeConnectorWorker
    state : State
    hooks : Hooks
    identity : bytes
        The consumer's, on the socket.
    sock : zmq.asyncio.Socket
    meta : MooncakeXferMetadata
    """

    async def answer(**fields: Any) -> None:
        await sock.send_multipart((identity, worker._encoder.encode(upstream.MooncakeXferResponse(**fields))))

    ranks = worker.transfer_topo.handshake_target_ranks(meta.remote_tp_size)
    regions, refusal = _regions(worker, hooks, meta, ranks)
    if refusal is not None:
        status, reason = refusal
        if status is Status.ERROR:
            logger.error(reason)
        await answer(status=status, err_msg=reason)
        return
    waiting = {asyncio.create_task(_ready(send)): (request, send) for request, send in _sends(worker, meta).items()}
    while waiting:
        done, _ = await asyncio.wait(
            waiting, timeout=envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            late = [request for request, _ in waiting.values()]
            for task in waiting:
                task.cancel()
            logger.warning("Timeout waiting for P side ready: %s", late)
            await answer(
                status=Status.FINISH,
                err_reqs=late,
                err_msg="Timeout waiting for P side ready.",
                layout_id=meta.layout_id,
            )
            return
        ready = _claim(worker, [waiting.pop(task) for task in done], ranks, meta.remote_pp_size)
        try:
            failed = await _send(worker, state, hooks, ready, meta, *regions)
        finally:
            for _, send in ready:
                send.sending -= 1
        fine = [(request, send) for request, send in ready if request not in failed]
        for _, send in fine:
            _settle(worker, send)
        await answer(
            status=Status.CONTINUE if waiting else Status.FINISH,
            ok_reqs=[request for request, _ in fine] or None,
            err_reqs=list(failed) or None,
            err_msg="; ".join(dict.fromkeys(failed.values())) or None,
            layout_id=meta.layout_id,
        )


def _regions(
    worker: Any, hooks: Hooks, meta: Any, ranks: list[int]
) -> tuple[tuple[list[Any], list[Any]], tuple[Any, str] | None]:
    """Return the aligned regions of a pull, or the status and words of a refusal, in vLLM's order of checks."""
    nothing: tuple[list[Any], list[Any]] = ([], [])
    if meta.remote_tp_rank not in ranks:
        return nothing, (
            Status.ERROR,
            f"This D tp_rank {meta.remote_tp_rank} is not paired with P tp_rank {worker.tp_rank}; "
            f"expected one of {ranks}.",
        )
    if upstream._pp_mismatch_hides_packed_layers(
        worker.pp_size,
        meta.remote_pp_size,
        local_has_opaque_row=bool(worker.opaque_packed_storages),
        remote_row_offsets=meta.registered_row_offsets,
        remote_kv_block_lens=meta.kv_block_lens,
        remote_block_lens=meta.block_lens,
    ):
        return nothing, (
            Status.ERROR,
            "Mooncake non-page-contiguous packed regions keep only the first layer name, so they cannot be aligned "
            f"across PP sizes {worker.pp_size} and {meta.remote_pp_size}.",
        )
    if meta.layout_id and not meta.kv_caches_base_addr:
        stored = worker._lookup_peer_layout(meta)
        if stored is None:
            where = f"{meta.remote_hostname}:{meta.remote_port}"
            return nothing, (Status.LAYOUT_MISS, f"Mooncake KV layout {meta.layout_id:#x} from {where} is not cached.")
        local, remote = stored
    else:
        local, remote, reason = worker._prepare_transfer_regions(meta)
        if reason is not None:
            return nothing, (Status.ERROR, reason)
    if getattr(local, "pair", None) is None:
        heads = worker.transfer_topo.total_num_kv_heads
        reason = hooks.lengths_error(
            local_regions=local,
            remote_regions=remote,
            local_tp_size=worker.tp_size,
            remote_tp_size=meta.remote_tp_size,
            producer_cache_replicated=worker._producer_cache_is_replicated(),
            total_num_kv_heads=None if worker.use_mla or worker.kv_cache_config.has_mamba_layers else heads,
        )
        if reason is not None:
            return nothing, (Status.ERROR, reason)
    return (local, remote), None


def _sends(worker: Any, meta: Any) -> dict[str, Any]:
    """Return what is to be sent for each request of a pull; what the scheduler has not named yet is made here."""
    sends = {}
    for request, (transfer, _) in meta.req_blocks.items():
        if transfer not in worker.reqs_need_send:
            worker.reqs_need_send[transfer] = upstream.SendBlockMeta(
                p_req_id="", transfer_id=transfer, local_block_ids=[], ready=asyncio.Event()
            )
        sends[request] = worker.reqs_need_send[transfer]
    return sends


async def _ready(send: Any) -> None:
    await send.ready.wait()


def _claim(worker: Any, found: list[tuple[str, Any]], ranks: list[int], pp_size: int) -> list[tuple[str, Any]]:
    """Keep the requests that have not expired, and mark them so that they do not while they are sent."""
    ready = []
    for request, send in found:
        if send.transfer_id not in worker.reqs_need_send:
            logger.warning("Request %s expired before sending on P side.", request)
            continue
        send.sending += 1
        if not send.need_send:
            worker.resolve_need_send(send, ranks, pp_size)
        ready.append((request, send))
    return ready


async def _send(
    worker: Any,
    state: State,
    hooks: Hooks,
    ready: list[tuple[str, Any]],
    meta: Any,
    local: list[Any],
    remote: list[Any],
) -> dict[str, str]:
    """Build and hand over; return the requests that failed, each with its reason."""
    session = f"{meta.remote_hostname}:{meta.remote_port}"
    built = hooks.build(worker, state, ready, meta, local, remote)
    if built is None or not state.settings.engine:
        src, dst, length, errors, message = await worker._build_transfer_params(ready, meta, local, remote)
        failed = {request: message or "" for request in errors}
        if src:
            code = await worker.sender_loop.run_in_executor(
                worker._sender_executor, worker._send_blocks, session, src, dst, length
            )
            if code:
                failed |= {r: f"Mooncake transfer engine returned {code}" for r, _ in ready if r not in failed}
        return failed
    descriptors, failed = built
    if len(descriptors):
        try:
            await worker.sender_loop.run_in_executor(
                worker._sender_executor, hand_over, worker, state, session, descriptors
            )
        except TransferError as error:
            failed = failed | {str(request): f"kvcompile: {error}" for request in error.requests}
    return failed


def _settle(worker: Any, send: Any) -> None:
    """Count a request as sent; release it with the last consumer that wanted it."""
    send.sent += 1
    if send.sent == send.need_send and worker.reqs_need_send.pop(send.transfer_id, None) is not None:
        worker.finished_sending_reqs.add(send.p_req_id)
