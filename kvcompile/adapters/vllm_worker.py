"""The overrides of vLLM's Mooncake worker, as functions of a worker: `Worker`'s methods, or installed in vLLM's class.

Each is named as the method that it replaces. They call vLLM's own where it is right, and keep its protocol.
"""

import contextlib
import logging
import time
from contextvars import ContextVar
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as upstream

from kvcompile.adapters import vllm_ask, vllm_build, vllm_cache, vllm_pair, vllm_send, vllm_table
from kvcompile.adapters.vllm_build import Built, Rules
from kvcompile.adapters.vllm_engine import hand_over
from kvcompile.adapters.vllm_pair import Pair, Regions
from kvcompile.adapters.vllm_state import Settings, State, count, state_of
from kvcompile.cache import Cache
from kvcompile.errors import KVCompileError, LayoutError, TransferError

logger = logging.getLogger("vllm.kvcompile")

Params = tuple[list[int], list[int], list[int], list[str], str | None]
Prepared = tuple[list[Any], list[Any], str | None]

_theirs = {
    name: getattr(upstream.MooncakeConnectorWorker, name)
    for name in (
        "register_kv_caches",
        "_build_pull_metadata",
        "receive_kv",
        "send_kv_to_decode",
        "_prepare_transfer_regions",
        "_build_transfer_params",
        "_send_blocks",
    )
}
_settings = Settings.of(corrections="none")
_pull: ContextVar[Any] = ContextVar("kvcompile_pull", default=None)
_receiving: ContextVar[bool] = ContextVar("kvcompile_receiving", default=False)


class PullMetadata(upstream.MooncakeXferMetadata, omit_defaults=True):  # type: ignore[misc, call-arg]
    """vLLM's pull metadata with what a kvcompile consumer adds; a plain producer ignores it."""

    kvcompile_cache: bytes = b""
    kvcompile_scratch: list[int] = msgspec.field(default_factory=list)
    kvcompile_election: str = ""
    kvcompile_dp: tuple[int, int] = (0, 1)
    """The consumer's data-parallel rank and size: a `balanced` election depends on them, and pulls without a layout
    have no cache to ask."""


def installed(settings: Settings) -> None:
    """Set what workers use that were not made by the connector class."""
    global _settings  # noqa: PLW0603
    _settings = settings


def _state(worker: Any) -> State:
    return state_of(worker, _settings)


def register_kv_caches(self: Any, kv_caches: dict[str, Any]) -> None:
    """Register as vLLM does; be ready for pulls with a cache before the first can come."""
    state = _state(self)
    state.cache = None
    state.plans.clear()
    state.layouts.clear()
    self._xfer_meta_decoder = msgspec.msgpack.Decoder(PullMetadata)
    if not hasattr(self.transfer_topo, "kvcompile"):
        self.transfer_topo.kvcompile = True
        theirs = self.transfer_topo.handshake_target_ranks
        self.transfer_topo.handshake_target_ranks = lambda size, *rest: _target_ranks(self, theirs, size, *rest)
    _theirs["register_kv_caches"](self, kv_caches)
    own = _own(self, state)
    if isinstance(own, Cache):
        opaque = vllm_cache.opaque_reasons(own)
        logger.info(
            "kvcompile: %d regions in %d groups described%s",
            len(own.regions),
            len(own.groups),
            f"; opaque, for equal TP sizes only: {', '.join(opaque[:4])}" if opaque else "",
        )


def _own(worker: Any, state: State) -> Cache | LayoutError:
    """Return what this worker holds, or why the adapter cannot say."""
    if state.cache is None:
        try:
            state.cache = vllm_cache.cache_of(worker)
        except LayoutError as error:
            logger.warning("kvcompile: this worker's layout is left to vLLM: %s", error)
            state.cache = error
    return state.cache  # type: ignore[no-any-return]


def _target_ranks(worker: Any, theirs: Any, remote_size: int, *rest: Any) -> list[int]:
    """Return which ranks to talk to: vLLM's answer where it has one, else those that share bytes or a release."""
    state = _state(worker)
    receives = _receiving.get()
    pull = _pull.get()
    election = state.settings.election if state.settings.mode == "optimizing" else "nearest"
    if not receives:
        election = getattr(pull, "kvcompile_election", "") or "nearest"
    divides = worker.tp_size % remote_size == 0 or remote_size % worker.tp_size == 0
    own = _own(worker, state)
    if (divides and election != "balanced") or not isinstance(own, Cache) or _is_plain(state):
        return theirs(remote_size, *rest)  # type: ignore[no-any-return]
    if not divides and "handshake_target_ranks" not in state.settings.corrections:
        return theirs(remote_size, *rest)  # type: ignore[no-any-return]
    sizes = (remote_size, worker.tp_size) if receives else (worker.tp_size, remote_size)
    dp = _dp(own) if receives else getattr(pull, "kvcompile_dp", (0, 1))
    pairs = vllm_pair.partners(vllm_pair.signatures(own), *sizes, election, *dp)
    named = {src for src, dst in pairs if dst == worker.tp_rank}
    if not receives:
        named = {dst for src, dst in pairs if src == worker.tp_rank}
    # A producer without kvcompile knows no election: its own ranks are asked too, or bytes would be lost in silence.
    return sorted(named | set(theirs(remote_size, *rest)) if divides else named)


def _is_plain(state: State) -> bool:
    """Whether pairs are left as vLLM has them."""
    return not state.settings.corrections and state.settings.mode == "exact"


def _dp(cache: Cache) -> tuple[int, int]:
    return cache.dp_rank, cache.dp_size


def receive_kv(self: Any, remote_engine_id: str, pull_metas: dict[str, Any]) -> None:
    """Ask the ranks that the plan names; each settles its own part."""
    token = _receiving.set(True)
    try:
        _theirs["receive_kv"](self, remote_engine_id, pull_metas)
    finally:
        _receiving.reset(token)


def _build_pull_metadata(self: Any, pull_metas: dict[str, Any], *, include_layout: bool) -> Any:
    """Append this consumer's cache and its speculative blocks to what vLLM sends."""
    theirs = _theirs["_build_pull_metadata"](self, pull_metas, include_layout=include_layout)
    state = _state(self)
    own = _own(self, state)
    election = state.settings.election if state.settings.mode == "optimizing" else ""
    return PullMetadata(
        **{name: getattr(theirs, name) for name in theirs.__struct_fields__},
        kvcompile_cache=own.to_bytes() if include_layout and isinstance(own, Cache) else b"",
        kvcompile_scratch=_scratch(self),
        kvcompile_election=election,
        kvcompile_dp=_dp(own) if isinstance(own, Cache) else (0, 1),
    )


def _scratch(worker: Any) -> list[int]:
    """Return the speculative blocks at the end of a state group's lists, one number a group."""
    specs = [group.kv_cache_spec for group in worker.kv_cache_config.transfer_groups]
    return [spec.num_speculative_blocks if vllm_cache.is_kind(spec, "MambaSpec") else 0 for spec in specs]


async def send_kv_to_decode(self: Any, identity: bytes, sock: Any, meta: Any) -> None:
    """Serve a pull with exact failure lists."""
    _pull.set(meta)
    hooks = vllm_send.Hooks(_build, validate_region_lengths)
    await vllm_send.serve(self, _state(self), hooks, identity, sock, meta)


async def serve_upstream(self: Any, identity: bytes, sock: Any, meta: Any) -> None:
    """Serve a pull as vLLM does, all or nothing; ranks are those of this pull."""
    _pull.set(meta)
    await _theirs["send_kv_to_decode"](self, identity, sock, meta)


def validate_region_lengths(
    local_regions: list[Any], remote_regions: list[Any], *args: Any, **kwargs: Any
) -> str | None:
    """Leave lengths to the proof where a pair was compiled from two caches."""
    if getattr(local_regions, "pair", None) is not None:
        return None
    return vllm_ask.lengths_error(local_regions, remote_regions, *args, **kwargs)  # type: ignore[no-any-return]


def _prepare_transfer_regions(self: Any, meta: Any) -> Prepared:
    """Return vLLM's regions where they are right, else regions with a compiled pair, or why neither can be."""
    state = _state(self)
    if _is_plain(state):
        return _theirs["_prepare_transfer_regions"](self, meta)  # type: ignore[no-any-return]
    key = (
        *(meta.remote_hostname, meta.remote_port, meta.remote_tp_size, meta.remote_tp_rank, meta.remote_pp_size),
        *map(tuple, (meta.kv_caches_base_addr, meta.block_lens, meta.kv_block_lens, meta.registered_layer_names)),
        tuple(meta.registered_group_indices),
        tuple(map(tuple, meta.registered_shared_group_ids)),
        tuple(meta.registered_row_offsets),
        getattr(meta, "kvcompile_cache", b""),
        getattr(meta, "kvcompile_election", ""),
    )
    prepared = state.layouts.get(key)
    if prepared is None:
        prepared = _prepare(self, state, meta)
        state.keep(state.layouts, key, prepared)
    self._remember_peer_layout(meta, prepared)
    return prepared


def _prepare(worker: Any, state: State, meta: Any) -> Prepared:
    started = time.perf_counter()
    answer = vllm_ask.ask(worker, meta)
    theirs: Prepared = (list(answer.local), list(answer.remote), answer.error if not answer.by_lengths else None)
    who = (
        f"P rank {worker.tp_rank} of {worker.tp_size} to D rank {meta.remote_tp_rank} of {meta.remote_tp_size} at "
        f"{meta.remote_hostname}:{meta.remote_port}"
    )
    own = _own(worker, state)
    data = getattr(meta, "kvcompile_cache", b"")
    try:
        if not isinstance(own, Cache):
            raise own
        peer = Cache.from_bytes(data) if data else vllm_cache.peer_of(worker, own, meta)
        ratios = [1 if group.state else worker._physical_blocks_per_logical_kv_block for group in own.groups]
        needed = vllm_pair.verdict(own, peer, answer, ratios)
    except KVCompileError as error:
        if not isinstance(own, Cache) or "validate_region_lengths" not in state.settings.corrections:
            logger.info("kvcompile: %s: as vLLM does it; no corrections: %s", who, error)
            return theirs
        logger.error("kvcompile: %s: refused: %s", who, error)
        return [], [], f"kvcompile: {error}"
    election = getattr(meta, "kvcompile_election", "") or "nearest"
    asked = state.settings.mode == "optimizing" or election != "nearest"
    optimizes = asked and needed in (None, *state.settings.corrections)
    if needed is None and not optimizes:
        logger.info("kvcompile: %s: proof exact; vLLM's own descriptors (%.3f s)", who, time.perf_counter() - started)
        return theirs
    if not optimizes and needed not in state.settings.corrections:
        logger.warning("kvcompile: %s: NOT exact; as vLLM does it, override %r is off", who, needed)
        return theirs
    try:
        pair = vllm_pair.compile_pair(own, peer, election, needed or "", bool(data))
    except LayoutError as error:
        logger.error("kvcompile: %s: override %r refuses: %s", who, needed, error)
        return [], [], f"kvcompile: {error}"
    count(pairs=1, corrected_pairs=bool(needed))
    how = f"corrected by override {needed!r}" if needed else f"optimized, election {election!r}"
    logger.info("kvcompile: %s: proof exact; %s (%.3f s)", who, how, time.perf_counter() - started)
    local, remote = Regions(answer.local), Regions(answer.remote)
    local.pair = pair
    return local, remote, None


async def _build_transfer_params(
    self: Any, ready_reqs: list[tuple[str, Any]], agent_meta: Any, local_regions: list[Any], remote_regions: list[Any]
) -> Params:
    """Build the descriptors of ready requests, as lists of Python integers."""
    state = _state(self)
    built = _build(self, state, ready_reqs, agent_meta, local_regions, remote_regions)
    if built is None:
        return await _theirs["_build_transfer_params"](  # type: ignore[no-any-return]
            self, ready_reqs, agent_meta, local_regions, remote_regions
        )
    descriptors, failed = built
    src, dst, length = (column.tolist() for column in (descriptors.src, descriptors.dst, descriptors.length))
    if src and state.settings.engine:
        state.pending[id(src)] = (src, descriptors)
        while len(state.pending) > 64:  # built, and never sent
            state.pending.pop(next(iter(state.pending)), None)
    return src, dst, length, list(failed), next(iter(failed.values()), None)


def _build(
    worker: Any, state: State, ready: list[tuple[str, Any]], meta: Any, local: list[Any], remote: list[Any]
) -> Built | None:
    """Build descriptors, or return None where vLLM's own loop must do so."""
    started = time.perf_counter()
    pair: Pair | None = getattr(local, "pair", None)
    rules = _rules(worker, state, meta, pair)
    built: Built | None = None
    if pair is not None:
        checked = vllm_build.check(ready, meta.req_blocks, rules)
        built = vllm_build.build_pair(pair.plan, checked, state.settings.mode == "optimizing")
    else:
        plan = _region_plan(worker, state, meta, local, remote)
        if plan is not None:
            checked = vllm_build.check(ready, meta.req_blocks, rules)
            built = vllm_build.build_regions(plan, checked, worker._logical_to_kernel_block_ids)
    if built is None:
        count(left_to_vllm=1)
        return None
    for request, reason in built.failed.items():
        logger.error("req %s: %s", request, reason)
    size = len(built.descriptors)
    count(batches=1, descriptors=size, failed_requests=len(built.failed), seconds=time.perf_counter() - started)
    return built


def _rules(worker: Any, state: State, meta: Any, pair: Pair | None) -> Rules:
    specs = [group.kv_cache_spec for group in worker.kv_cache_config.transfer_groups]
    kinds = [
        "state"
        if vllm_cache.is_kind(spec, "MambaSpec")
        else "window"
        if vllm_cache.is_kind(spec, "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
        else "full"
        for spec in specs
    ]
    scratch: list[tuple[int, int]] = []
    theirs = getattr(meta, "kvcompile_scratch", [])
    if "scratch_blocks" in state.settings.corrections and len(theirs) == len(specs):
        scratch = [(a, b) if a != b else (0, 0) for a, b in zip(_scratch(worker), theirs, strict=True)]
    last = frozenset[int]()
    if pair is not None:
        sizes = enumerate(zip(pair.own.groups, pair.peer.groups, strict=False))
        last = frozenset(at for at, (a, b) in sizes if a.state and a.block_size != b.block_size)
    return Rules(kinds, "null_blocks" in state.settings.corrections, scratch, last)


def _region_plan(
    worker: Any, state: State, meta: Any, local: list[Any], remote: list[Any]
) -> vllm_table.RegionPlan | None:
    """Return the compiled plan of aligned regions, from the worker's plans where it has it."""
    key = (id(local), id(remote), meta.remote_tp_rank, meta.remote_tp_size, worker.tp_rank, worker.tp_size)
    entry = state.plans.get(key)
    if entry is not None and entry[0] == local and entry[1] == remote:
        return entry[2]  # type: ignore[no-any-return]
    started = time.perf_counter()
    plan = None
    # What vLLM's own loop raises it raises again, at its own place, if there is anything to send.
    with contextlib.suppress(AssertionError, TypeError, ValueError, ArithmeticError):
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
    # The lists themselves are kept beside their copies: an id is unique only while its list lives.
    state.keep(state.plans, key, (list(local), list(remote), plan, local, remote))
    count(plans=1, compile_seconds=time.perf_counter() - started)
    return plan


def _send_blocks(self: Any, remote_session: str, src_ptrs: list[int], dst_ptrs: list[int], lengths: list[int]) -> int:
    """Hand over what `_build_transfer_params` built; vLLM's own way for anything else. Not 0 if any request failed."""
    state = _state(self)
    listed, descriptors = state.pending.pop(id(src_ptrs), (None, None))
    if listed is not src_ptrs or descriptors is None or not state.settings.engine:
        return _theirs["_send_blocks"](self, remote_session, src_ptrs, dst_ptrs, lengths)  # type: ignore[no-any-return]
    try:
        hand_over(self, state, remote_session, descriptors)
    except TransferError:
        return -1
    return 0
