"""What a vLLM 0.33 worker holds, as a `Cache`; and what a peer without kvcompile must hold, from its lengths alone.

Imports no vLLM: kinds of specs go by class name. What the adapter does not know the inside of (a state whose channels
it cannot tell apart, heads in unknown slots) is one opaque cell a rank: right between equal TP sizes, and refused by
name between others, since then the two sides count different heads.
"""

import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from kvcompile.adapters.vllm_build import NULL_BLOCK
from kvcompile.adapters.vllm_state_fields import state_fields
from kvcompile.cache import Cache, merge
from kvcompile.errors import LayoutError
from kvcompile.layout import Buffer, Field, Group, Region
from kvcompile.topology import shard

__all__ = ["Unknown", "cache_of", "is_kind", "opaque_reasons", "peer_of"]

logger = logging.getLogger("vllm.kvcompile")

OPAQUE = ("page", "state")
"""Fields that are one cell a rank, whatever is inside."""


class Unknown(LayoutError):  # noqa: N818 (a layout, not an accident)
    """A layout that the adapter cannot describe; vLLM's own behaviour stays, and the log says why."""


def is_kind(spec: Any, *names: str) -> bool:
    """Return whether a spec is of one of vLLM's classes, or of a class derived from one."""
    return any(base.__name__ in names for base in type(spec).__mro__)


def cache_of(worker: Any) -> Cache:
    """Describe what a worker has registered.

    Parameters
    ----------
    worker : MooncakeConnectorWorker
        After ``register_kv_caches``.

    Returns
    -------
    Cache
        One group a transfer group. A region that several groups share is declared once for each of them.

    Raises
    ------
    LayoutError
        A layout that the adapter does not know (`Unknown`), or that contradicts itself.
    """
    regions: list[Region] = []
    for name, places in _by_layer(worker.registered_layer_names).items():
        bases = [worker.kv_caches_base_addr[at] for at in places]
        strides = {worker.block_len_per_layer[at] for at in places}
        lengths = {worker.kv_block_len_per_layer[at] for at in places}
        groups = {worker.region_shared_groups[at] for at in places}
        if len(strides) > 1 or len(lengths) > 1 or len(groups) > 1:
            raise Unknown(f"layer {name!r}: its {len(places)} regions differ in block length or group")
        fields = fields_of(worker, name, lengths.pop(), bases, worker.tp_rank, worker.tp_size)
        regions += _regions(worker, name, groups.pop(), bases[0], strides.pop(), fields)
    parallel = getattr(worker.vllm_config, "parallel_config", None)
    dp_size = max(getattr(parallel, "data_parallel_size", 1), 1)
    dp_rank = worker.dp_rank if 0 <= getattr(worker, "dp_rank", -1) < dp_size else 0
    spans = _buffers(worker)
    given: dict[str, Any] = {"buffers": spans} if spans else {}
    return Cache(
        tuple(regions),
        _groups(worker),
        **given,
        tp_rank=worker.tp_rank,
        tp_size=worker.tp_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
    )


def fields_of(worker: Any, layer: str, nbytes: int, bases: Sequence[int], rank: int, size: int) -> tuple[Field, ...]:
    """Return the fields of one kernel block of a layer: its payload, cut into heads where the adapter knows how.

    Parameters
    ----------
    worker : MooncakeConnectorWorker
    layer : str
    nbytes : int
        What vLLM transfers of a block here; more than the payload where blocks are padded.
    bases : sequence of int
        One, or one a head where vLLM registered each head's blocks apart.
    rank, size : int
        The place whose fields are asked for: this worker's, or that of a peer that orders its blocks as this side does.
    """
    spec = worker._layer_specs[layer]
    if is_kind(spec, "MambaSpec"):
        return state_fields(worker, spec, size)
    if not is_kind(spec, "AttentionSpec") or is_kind(spec, "CircularBufferSpec"):
        raise Unknown(f"layer {layer!r}: a {type(spec).__name__} is not known to the adapter")
    ratio = worker._physical_blocks_per_logical_kv_block
    tokens = spec.block_size // ratio
    payload = min(nbytes, spec.unpadded_page_size_bytes // ratio)
    if is_kind(spec, "MLAAttentionSpec", "SlidingWindowMLASpec") or spec.max_tp_shards == 1:
        packed = nbytes > payload and layer in _opaque_rows(worker)
        return (_whole("latent", 1, tokens, nbytes if packed else payload, replicated=True),)
    heads = total_heads(worker, layer, spec)
    if heads is None or spec.tokens_per_state != 1:
        return (_whole("page", size, tokens, payload),)
    start, stop = shard(heads, rank, size)
    here = shard(heads, worker.tp_rank, worker.tp_size)
    cell = spec.state_content_size_bytes
    if len(bases) > 1:
        steps = {after - before for before, after in pairwise(bases)}
        if len(bases) != stop - start or len(steps) > 1 or nbytes != tokens * cell or min(steps) < 0:
            raise Unknown(f"layer {layer!r}: {len(bases)} regions are not its {stop - start} heads at even distances")
        return (Field("kv", heads, tokens, cell, 0, steps.pop(), cell),)
    if spec.num_head_slots in (None, spec.num_kv_heads) and payload == (here[1] - here[0]) * tokens * cell:
        return (_in_order(worker, layer, Field.hnd("kv", heads=heads, tokens=tokens, cell_nbytes=cell), stop - start),)
    if spec.num_head_slots == 2 * spec.num_kv_heads and spec.kv_quant_mode.is_nvfp4 and _is_flashinfer(worker):
        return _nvfp4(heads, stop - start, tokens, cell)
    return (_whole("page", size, tokens, payload),)


def total_heads(worker: Any, layer: str, spec: Any) -> int | None:
    """Return the KV heads of the whole model that a layer belongs to, None where they cannot be told.

    vLLM's spec holds this rank's heads; which of several totals makes so many on this rank is decided by the model's
    own configuration, the draft's for its layers. Never heads times TP: replicas would be counted as heads.
    """
    draft = getattr(getattr(worker.vllm_config, "speculative_config", None), "draft_model_config", None)
    totals = []
    if not worker.use_mla:
        totals.append(worker.transfer_topo.total_num_kv_heads)
    if draft is not None:
        totals.insert(0 if spec.is_draft else len(totals), draft.get_total_num_kv_heads())
    for total in totals:
        start, stop = shard(total, worker.tp_rank, worker.tp_size)
        if stop - start == spec.num_kv_heads:
            return int(total)
    # More than one head on a rank: no replicas, so all ranks' heads are different ones.
    if spec.num_kv_heads > 1 or worker.tp_size == 1:
        return int(spec.num_kv_heads * worker.tp_size)
    logger.debug("kvcompile: layer %s: one KV head on this rank, and no configuration says of how many", layer)
    return None


def peer_of(worker: Any, own: Cache, meta: Any) -> Cache:
    """Describe a peer that sends no cache: this deployment's own layers at the peer's TP size, if its lengths agree.

    Parameters
    ----------
    worker : MooncakeConnectorWorker
    own : Cache
        The worker's.
    meta : MooncakeXferMetadata
        With the peer's layout.

    Returns
    -------
    Cache
        With one block a region: a plain peer does not say how many it has.

    Raises
    ------
    Unknown
        A length that is not the owned heads times the bytes of a head, or a layer that this side does not hold.
    """
    declared = {(region.layer, region.group): region for region in own.regions}
    lengths = dict(zip(worker.registered_layer_names, worker.kv_block_len_per_layer, strict=True))
    regions = []
    named = meta.registered_layer_names
    if not named or len(named) != len(meta.registered_group_indices):
        raise Unknown("the peer names no layers or groups")
    shared = meta.registered_shared_group_ids or [(group,) for group in meta.registered_group_indices]
    for name, places in _by_layer(named).items():
        at = places[0]
        for group in shared[at]:
            ours = declared.get((_name(name, group, shared[at]), group))
            if ours is None and meta.remote_pp_size != worker.pp_size:
                continue
            if ours is None or len(places) > 1:
                raise Unknown(f"layer {name!r} of the peer: not one region of this side's group {group}")
            length, stride = meta.kv_block_lens[at], meta.block_lens[at]
            place = meta.remote_tp_rank, meta.remote_tp_size
            fields = ours.fields
            if place[1] != own.tp_size:
                fields = fields_of(worker, name, lengths[name], (ours.base,), *place)
            owned = _payload(fields, *place)
            here = lengths[name]
            padded = here > _payload(ours.fields, own.tp_rank, own.tp_size)
            expected = here if own.tp_size == meta.remote_tp_size else owned
            if (
                length < owned
                or stride < length
                or (length != expected and not (padded and own.tp_size != meta.remote_tp_size))
            ):
                raise Unknown(
                    f"layer {name!r}: the peer's blocks are {length} bytes, expected {expected}: its heads at TP "
                    f"{meta.remote_tp_size} times this side's bytes of a head"
                )
            regions.append(
                Region(
                    ours.layer,
                    group,
                    meta.kv_caches_base_addr[at],
                    stride,
                    ours.kernel_blocks,
                    fields,
                    ours.kernel_blocks,
                )
            )
    spans = [(region.base, region.base + region.block_stride * region.num_blocks) for region in regions]
    buffers = tuple(Buffer(start, end - start) for start, end in merge(spans))
    return Cache(tuple(regions), own.groups, buffers, tp_rank=meta.remote_tp_rank, tp_size=meta.remote_tp_size)


def opaque_reasons(own: Cache) -> list[str]:
    """Say which layers are opaque cells: right between equal TP sizes only."""
    names = [f"{r.layer}: {f.name}" for r in own.regions for f in r.fields if f.name in OPAQUE and not f.replicated]
    return sorted(names)


def _by_layer(names: Sequence[str]) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for at, name in enumerate(names):
        places.setdefault(name, []).append(at)
    return places


def _name(layer: str, group: int, groups: Sequence[int]) -> str:
    """Return the name of a layer's region in one of the groups that share it."""
    return layer if len(groups) == 1 else f"{layer}#{group}"


def _regions(
    worker: Any, name: str, groups: Sequence[int], base: int, stride: int, fields: tuple[Field, ...]
) -> Iterator[Region]:
    state = is_kind(worker._layer_specs[name], "MambaSpec")
    ratio = 1 if state else worker._physical_blocks_per_logical_kv_block
    for group in groups:
        yield Region(
            _name(name, group, groups), group, base, stride, worker.kv_cache_config.num_blocks * ratio, fields, ratio
        )


def _groups(worker: Any) -> tuple[Group, ...]:
    specs = [group.kv_cache_spec for group in worker.kv_cache_config.transfer_groups]
    return tuple(Group(spec.block_size, NULL_BLOCK, is_kind(spec, "MambaSpec")) for spec in specs)


def _buffers(worker: Any) -> tuple[Buffer, ...]:
    """Return the storages as vLLM registered them, overlapping ones as one; none: as the regions say."""
    lengths = getattr(worker, "_kv_data_lens", [])
    if len(lengths) != len(worker.seen_base_addresses) or not lengths:
        return ()
    spans = [(base, base + nbytes) for base, nbytes in zip(worker.seen_base_addresses, lengths, strict=True)]
    return tuple(Buffer(start, end - start) for start, end in merge(spans))


def _whole(name: str, heads: int, tokens: int, nbytes: int, replicated: bool = False) -> Field:
    """One cell for all that a rank holds of a block."""
    return Field(name, heads, tokens, nbytes, 0, nbytes, nbytes, replicated, tokens_per_cell=tokens)


def _opaque_rows(worker: Any) -> set[str]:
    """Return the layers whose region is a whole packed row, with other layers' bytes in it."""
    rows = zip(
        worker.registered_layer_names,
        worker.region_row_offsets,
        worker.kv_block_len_per_layer,
        worker.block_len_per_layer,
        strict=True,
    )
    return {name for name, offset, nbytes, stride in rows if offset == 0 and nbytes == stride}


def _in_order(worker: Any, layer: str, field: Field, local: int) -> Field:
    """Return a field with the strides of the layer's [block, head, token, content] tensor, where there is one.

    vLLM's connector asks for heads outermost in a block (``LBHNC``); another order shows in the strides.
    """
    tensor = getattr(worker, "device_kv_caches", {}).get(layer)
    if tensor is None or tensor.ndim != 4 or tensor.shape[1] == 1:
        return field
    size = tensor.element_size()
    strides = tensor.stride(1) * size, tensor.stride(2) * size
    if strides == (field.head_stride, field.token_stride):
        return field
    if tensor.shape[1] != local or min(strides) < field.cell_nbytes:
        raise Unknown(f"layer {layer!r}: strides {tuple(tensor.stride())}, expected heads outermost in a block")
    return msgspec.structs.replace(field, head_stride=strides[0], token_stride=strides[1])


def _is_flashinfer(worker: Any) -> bool:
    backends = getattr(worker, "attn_backends", [])
    return bool(backends) and all(backend.get_name().startswith("FLASHINFER") for backend in backends)


def _nvfp4(heads: int, local: int, tokens: int, cell: int) -> tuple[Field, ...]:
    """FlashInfer's NVFP4 pages, HND: K data, K scales, V data, V scales, each of all heads; 8 bytes of data a scale."""
    data, scale = cell * 8 // 9, cell - cell * 8 // 9
    side = local * tokens * cell
    return tuple(
        Field.hnd(f"{kind}{part}", heads=heads, tokens=tokens, cell_nbytes=size, offset=at + start)
        for kind, at in (("k", 0), ("v", side))
        for part, size, start in (("", data, 0), ("_scale", scale, local * tokens * data))
    )


def _payload(fields: Sequence[Field], rank: int, size: int) -> int:
    """Return the bytes of dense fields that a rank holds in one kernel block."""
    total = 0
    for field in fields:
        start, stop = shard(field.heads, rank, size, field.replicated)
        total += (stop - start) * field.cells * field.cell_nbytes
    return total
