"""Random vLLM deployments, and the oracle of their bytes: every byte of every block has a label that says what it is.

Written from vLLM's layouts alone: nothing of the adapter or of kvcompile is used here. Memory is labels, so a copy can
be judged byte by byte.
"""

import asyncio
import random
from collections import OrderedDict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as upstream
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

BLOCKS = 14  # ids of a group; 0 is vLLM's null block
PADDING, EMPTY = -1, -2


def owned(heads: int, rank: int, size: int, whole: bool = False) -> range:
    """Heads that a rank holds, said once more: neighbours share a head where there are more ranks than heads."""
    if whole:
        return range(heads)
    if size > heads:
        head = rank * heads // size
        return range(head, head + 1)
    return range(rank * heads // size, (rank + 1) * heads // size)


@dataclass
class Layer:
    """One layer of the model: ``gqa``, ``window``, ``nvfp4``, ``mla`` (whole on every rank), ``state`` or ``gdn``."""

    name: str
    kind: str
    group: int
    heads: int = 1
    cell: int = 4

    def block(self, world: "World", side: str, rank: int) -> np.ndarray:
        """Labels, below 2**16, of one kernel block (state: block) of a rank: payload alone."""
        size = world.tp[side]
        tokens = world.block_size // world.ratio[side]
        if self.kind == "mla":
            return np.arange(tokens * self.cell).reshape(1, tokens, self.cell).ravel()
        if self.kind == "state":  # one tensor, heads outermost
            all_heads = np.arange(self.heads * self.cell).reshape(self.heads, self.cell)
            return all_heads[list(owned(self.heads, rank, size))].ravel()
        if self.kind == "gdn":  # conv [row, q | k | v channels], then ssm [v head, values]
            k, v, dim, rows = self.heads, 2 * self.heads, 2, 3
            keys, values = list(owned(k, rank, size)), list(owned(v, rank, size))
            label = np.arange(rows * (2 * k + v) * dim).reshape(rows, 2 * k + v, dim)
            channels = [*keys, *(k + head for head in keys), *(2 * k + head for head in values)]
            conv = label[:, channels]
            ssm = label.size + np.arange(v * self.cell).reshape(v, self.cell)[values]
            return np.concatenate([conv.ravel(), ssm.ravel()])
        heads = list(owned(self.heads, rank, size))
        if self.kind == "nvfp4":  # [K data | K scales | V data | V scales], each of all heads
            parts, at = [], 0
            for width in (8, 1, 8, 1):
                label = at + np.arange(self.heads * tokens * width).reshape(self.heads, tokens, width)
                parts.append(label[heads].ravel())
                at += label.size
            return np.concatenate(parts)
        label = np.arange(self.heads * tokens * self.cell).reshape(self.heads, tokens, self.cell)
        return label[heads].ravel()

    def spec(self, world: "World", side: str, rank: int) -> Any:
        local = len(owned(self.heads, rank, world.tp[side]))
        pad = world.pad[side]
        common: dict[str, Any] = {"block_size": world.block_size, "dtype": torch.uint8}
        if self.kind == "mla":
            return MLAAttentionSpec(**common, num_kv_heads=1, head_size=self.cell, max_tp_shards=1)
        if self.kind in ("state", "gdn"):
            shapes: tuple[tuple[int, ...], ...] = ((local, self.cell),)
            if self.kind == "gdn":
                shapes = ((3, 4 * local * 2), (2 * local, self.cell))
            return MambaSpec(
                block_size=world.block_size,
                shapes=shapes,
                dtypes=(torch.uint8,) * len(shapes),
                mamba_type=MambaAttentionBackendEnum.LINEAR
                if self.kind == "state"
                else MambaAttentionBackendEnum.GDN_ATTN,
                num_speculative_blocks=world.scratch[side],
            )
        padded = None
        if self.kind == "nvfp4":
            return FullAttentionSpec(
                **common,
                num_kv_heads=local,
                head_size=16,
                kv_quant_mode=KVQuantMode.NVFP4,
                num_head_slots=2 * local,
                state_content_bytes=9,
            )
        if pad:
            padded = local * world.block_size * self.cell + pad
        kind = SlidingWindowSpec if self.kind == "window" else FullAttentionSpec
        more = {"sliding_window": 2 * world.block_size} if self.kind == "window" else {}
        return kind(**common, num_kv_heads=local, head_size=self.cell // 2, page_size_padded=padded, **more)


@dataclass
class World:
    """A model on both sides. Sides are ``p`` (prefill, src) and ``d`` (decode, dst)."""

    layers: list[Layer]
    tp: dict[str, int]
    block_size: int = 4
    ratio: dict[str, int] = field(default_factory=lambda: {"p": 1, "d": 1})
    pad: dict[str, int] = field(default_factory=lambda: {"p": 0, "d": 0})
    scratch: dict[str, int] = field(default_factory=lambda: {"p": 0, "d": 0})
    rows: dict[str, list[int]] | None = None  # gaps between the views of one packed row
    use_mla: bool = False
    model_heads: int = 1
    draft_heads: int | None = None
    plain: bool = True  # the consumer runs vLLM without kvcompile

    @property
    def groups(self) -> int:
        return max(layer.group for layer in self.layers) + 1


class Rank:
    """One worker and its memory, as labels."""

    def __init__(self, world: World, side: str, rank: int, cls: type, base: int) -> None:
        self.world, self.side, self.rank = world, side, rank
        self.worker = worker = cls.__new__(cls)
        self.memory: dict[int, np.ndarray] = {}
        self.places: dict[str, tuple[int, int, int]] = {}  # layer -> storage, offset, stride
        self._lay_out(base)
        specs = {layer.name: layer.spec(world, side, rank) for layer in world.layers}
        by_group: list[list[Layer]] = [[one for one in world.layers if one.group == g] for g in range(world.groups)]
        worker.kv_cache_config = KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([one.name for one in g], specs[g[0].name]) for g in by_group],
        )
        worker._layer_specs = specs
        worker.tp_rank, worker.tp_size = rank, world.tp[side]
        worker.pp_rank, worker.pp_size, worker.dp_rank = 0, 1, 0
        worker.use_mla = world.use_mla
        worker._physical_blocks_per_logical_kv_block = world.ratio[side]
        worker.block_size = world.block_size // world.ratio[side]
        worker.engine_id, worker.hostname, worker.rpc_port = f"{side}-engine", f"host-{side}{rank}", 1000 + rank
        worker.is_kv_producer, worker.is_kv_consumer = side == "p", side == "d"
        draft = None
        if world.draft_heads is not None:
            draft = SimpleNamespace(
                draft_model_config=SimpleNamespace(get_total_num_kv_heads=lambda: world.draft_heads)
            )
        worker.vllm_config = SimpleNamespace(speculative_config=draft)
        gdn = next((layer for layer in world.layers if layer.kind == "gdn"), None)
        text = SimpleNamespace()
        if gdn is not None:
            text = SimpleNamespace(
                linear_num_key_heads=gdn.heads,
                linear_num_value_heads=2 * gdn.heads,
                linear_key_head_dim=2,
                linear_value_head_dim=2,
            )
        worker.model_config = SimpleNamespace(hf_text_config=text)
        worker.attn_backends = [SimpleNamespace(get_name=lambda: "FLASHINFER")]
        worker.transfer_topo = TransferTopology(
            tp_rank=rank,
            tp_size=world.tp[side],
            block_size=worker.block_size,
            engine_id=worker.engine_id,
            is_mla=world.use_mla,
            is_mamba=False,
            total_num_kv_heads=world.model_heads,
            attn_backends=[],
        )
        worker._prepared_transfer_regions, worker._layout_by_peer = {}, OrderedDict()
        worker._acked_layout_peers, worker._kv_layout_id = set(), 0
        worker.opaque_packed_storages, worker.reqs_need_send = set(), {}
        worker.device_kv_caches = {}
        worker.shutdown = lambda: None
        self._register()

    def _lay_out(self, base: int) -> None:
        """Give each layer its own storage, or all attention layers one packed row."""
        world = self.world
        at = 0
        for number, layer in enumerate(world.layers):
            payload = len(layer.block(world, self.side, self.rank))
            pad = world.pad[self.side] if layer.kind in ("gqa", "window") else 0
            blocks = BLOCKS * (1 if layer.kind in ("state", "gdn") else world.ratio[self.side])
            if world.rows is None:
                storage = base + (number << 24)
                self.memory[storage] = np.full(blocks * (payload + pad), PADDING, np.int64)
                self.places[layer.name] = (storage, 0, payload + pad)
            else:
                at += world.rows[self.side][number]
                self.places[layer.name] = (base, at, -1)
                at += payload
        if world.rows is not None:
            stride = at + world.rows[self.side][-1]
            self.memory[base] = np.full(BLOCKS * stride, PADDING, np.int64)
            self.places = {name: (base, offset, stride) for name, (_, offset, _) in self.places.items()}

    def _register(self) -> None:
        worker, world = self.worker, self.world
        worker.kv_caches_base_addr, worker.block_len_per_layer, worker.kv_block_len_per_layer = [], [], []
        worker.region_row_offsets = []
        for layer in world.layers:
            storage, offset, stride = self.places[layer.name]
            payload = len(layer.block(world, self.side, self.rank))
            packed = world.rows is not None
            worker.kv_caches_base_addr.append(storage + offset)
            worker.block_len_per_layer.append(stride)
            worker.kv_block_len_per_layer.append(payload if packed else stride)
            worker.region_row_offsets.append(offset if packed else -1)
        worker.registered_layer_names = [layer.name for layer in world.layers]
        worker.registered_layer_indices = list(range(len(world.layers)))
        worker.registered_group_indices = [layer.group for layer in world.layers]
        worker.region_shared_groups = [(layer.group,) for layer in world.layers]
        worker.seen_base_addresses = list(self.memory)
        worker._kv_data_lens = [len(labels) for labels in self.memory.values()]

    def fill(self, layer: Layer, block: int, content: int | None, memory: dict[int, np.ndarray]) -> None:
        """Write one block's labels; ``content`` None: empty."""
        storage, offset, stride = self.places[layer.name]
        state = layer.kind in ("state", "gdn")
        ratio = 1 if state else self.world.ratio[self.side]
        labels = layer.block(self.world, self.side, self.rank)
        tokens = self.world.block_size // ratio
        for kernel_block in range(ratio):
            at = (block * ratio + kernel_block) * stride + offset
            place = memory[storage][at : at + len(labels)]
            if content is None:
                place[:] = EMPTY
            else:  # tokens are counted through the block, whatever kernel blocks it is cut into
                place[:] = content + _through(layer, labels, tokens, kernel_block, self.world)

    def blank(self) -> dict[int, np.ndarray]:
        """Memory with all payload empty."""
        memory = {base: labels.copy() for base, labels in self.memory.items()}
        for layer in self.world.layers:
            for block in range(BLOCKS):
                self.fill(layer, block, None, memory)
        return memory


def _through(layer: Layer, labels: np.ndarray, tokens: int, kernel_block: int, world: World) -> np.ndarray:
    """Say labels of a kernel block by tokens of the whole block, so that both sides' cuts agree."""
    if layer.kind in ("state", "gdn", "nvfp4"):
        return labels
    head, rest = np.divmod(labels, tokens * layer.cell)
    token, byte = np.divmod(rest, layer.cell)
    return (head * world.block_size + kernel_block * tokens + token) * layer.cell + byte


@dataclass
class Asked:
    """One request: ids by group on both sides, and what each dst block must hold (None: anything)."""

    name: str
    src: list[list[int]]
    dst: list[list[int]]
    content: list[list[int | None]]  # of the src list
    wanted: list[dict[int, int]]  # group -> dst block -> content
    loose: list[set[int]]  # group -> dst blocks of which nothing is asked
    fails: bool = False


def ask(world: World, rng: random.Random, number: int) -> list[Asked]:
    """Make requests with ids in runs, prefix hits, nulls in windows, scratch blocks, and lists that must fail."""
    free = {side: [_ids(rng) for _ in range(world.groups)] for side in "pd"}
    asked = []
    for index in range(rng.choice([1, 1, 2, 3])):
        one = Asked(f"r{number}-{index}", [], [], [], [], [])
        positions = rng.randint(1, 4)
        for group in range(world.groups):
            kind = next(layer.kind for layer in world.layers if layer.group == group)
            _ask_group(world, rng, one, kind, positions, free["p"][group], free["d"][group], index)
        if rng.random() < 0.03 and one.src[0] and len(one.dst[0]) == len(one.src[0]):
            one.src[0] = one.src[0][1:]
            one.content[0] = one.content[0][1:]
            one.fails = True
        asked.append(one)
    return asked


def _ids(rng: random.Random) -> list[int]:
    ids = list(range(1, BLOCKS))
    cut = rng.randrange(len(ids))
    ids = ids[cut:] + ids[:cut]
    if rng.random() < 0.4:
        rng.shuffle(ids)
    return ids


def _ask_group(
    world: World,
    rng: random.Random,
    one: Asked,
    kind: str,
    positions: int,
    src_free: list[int],
    dst_free: list[int],
    index: int,
) -> None:
    content = [(index * 16 + position + 1) << 20 for position in range(positions)]
    src: list[int]
    dst: list[int]
    wanted: dict[int, int] = {}
    loose: set[int] = set()
    if kind in ("state", "gdn"):
        src, content = [src_free.pop(0)], content[-1:]
        dst = [dst_free.pop(0)]
        wanted[dst[0]] = content[0]
        if rng.random() < 0.3:  # placeholders of earlier positions
            before = rng.randint(1, 3)
            src, content = [0] * before + src, [*[0] * before, *content]
            dst = [0] * rng.randint(0, before) + dst
        scratch = [dst_free.pop(0) for _ in range(world.scratch["d"])]
        src += [src_free.pop(0) for _ in range(world.scratch["p"])]
        content = [*content, *[7 << 30] * world.scratch["p"]]
        dst += scratch
        loose |= set(scratch)
    else:
        src = [src_free.pop(0) for _ in range(positions)]
        hit = rng.choice([0, 0, 0, rng.randint(0, positions)])
        dst = [dst_free.pop(0) for _ in range(positions - hit)]
        if kind == "window" and rng.random() < 0.5:
            gone = rng.randint(0, positions - 1)
            for position in range(gone):
                src[position] = 0
            free_dst = rng.randint(0, len(dst))
            for position in range(min(free_dst, max(0, gone - hit + rng.choice([0, 0, 1])))):
                dst[position] = 0
        for at, block in enumerate(dst):
            position = hit + at
            if block and src[position]:
                wanted[block] = content[position]
    one.src.append(src)
    one.dst.append(dst)
    one.content.append(list(content))
    one.wanted.append(wanted)
    one.loose.append(loose)


def metadata(cls: type, rank: Rank, requests: list[Asked], extra: dict[str, Any]) -> Any:
    """Return what a consumer sends in a pull."""
    worker = rank.worker
    return cls(
        remote_hostname=worker.hostname,
        remote_port=worker.rpc_port,
        remote_tp_size=worker.tp_size,
        remote_tp_rank=worker.tp_rank,
        req_blocks={one.name: (f"t-{one.name}", one.dst) for one in requests},
        kv_caches_base_addr=worker.kv_caches_base_addr,
        block_lens=worker.block_len_per_layer,
        kv_block_lens=worker.kv_block_len_per_layer,
        registered_layer_names=worker.registered_layer_names,
        registered_layer_indices=worker.registered_layer_indices,
        registered_group_indices=worker.registered_group_indices,
        registered_shared_group_ids=[list(groups) for groups in worker.region_shared_groups],
        registered_row_offsets=worker.region_row_offsets,
        **extra,
    )


def ready(requests: list[Asked]) -> list[tuple[str, Any]]:
    """Return the producer's side of requests, as its scheduler hands it on."""
    return [(one.name, upstream.SendBlockMeta(one.name, f"t-{one.name}", one.src, asyncio.Event())) for one in requests]
