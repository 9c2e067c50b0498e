"""What builders and models say of vLLM's caches is what vLLM 0.33.0 allocates: strides, offsets, bytes, stages."""

import json
from pathlib import Path

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import ssm_conv_transfer_utils
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim, nvfp4_split_data_scale
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvcompile import Cache, Group, fields
from kvcompile.fields import Arrangement
from kvcompile.models import caches, deploy

DATA = Path(__file__).parent.parent / "data"
BLOCKS, LAYERS = 5, ["a", "b", "c"]


def allocated(spec: object, layout: KVCacheLayout) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Allocate three layers as vLLM's worker does."""
    strides = compute_layout_strides(spec, BLOCKS, len(LAYERS), layout)
    size = len(LAYERS) * BLOCKS * spec.page_size_bytes
    tensor = KVCacheTensor(size=size, layers=LAYERS, layer_stride=strides[0], block_stride=strides[1])
    raw = torch.zeros(size, dtype=torch.int8)
    return raw, create_kv_cache_views(raw, spec, BLOCKS, layout, tensor)


def described(arrangement: Arrangement, raw: torch.Tensor, rank: int = 0, size: int = 1) -> Cache:
    """The same from a builder alone."""
    regions = arrangement.regions(layers=LAYERS, base=raw.data_ptr(), num_blocks=BLOCKS, tp_rank=rank, tp_size=size)
    return Cache(regions, [Group(arrangement.parts[0].tokens)], tp_rank=rank, tp_size=size)


def places(cache: Cache) -> list[tuple[object, ...]]:
    return [(region.layer, region.base, region.block_stride, region.fields) for region in cache.regions]


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_six_layouts(layout: KVCacheLayout) -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=8, dtype=torch.bfloat16)
    raw, views = allocated(spec, layout)
    built = fields.dense(heads=8, tokens=16, k_nbytes=16, order=layout.name)
    ranks = {"tp_rank": 1, "tp_size": 2}
    found = Cache.from_torch(
        dict(zip(LAYERS, views, strict=True)), fields=built, groups=[Group(16)], dims="B H N PC", **ranks
    )
    assert places(found) == places(described(built, raw, 1, 2))
    assert [(buffer.base, buffer.nbytes) for buffer in found.buffers] == [(raw.data_ptr(), raw.nbytes)]
    wrong = fields.dense(heads=8, tokens=16, k_nbytes=16, order={"LBNHC": "LBHNC"}.get(layout.name, "LBNHC"))
    if layout.name not in ("BLNHC", "LBNHC"):
        with pytest.raises(fields.arrangement.LayoutError, match="strides say otherwise"):
            Cache.from_torch({"a": views[0]}, fields=wrong, groups=[Group(16)], dims="B H N PC", **ranks)


def test_padded_pages() -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=8, dtype=torch.bfloat16, page_size_padded=4096)
    raw, views = allocated(spec, KVCacheLayout.LBHNC)
    built = fields.dense(heads=4, tokens=16, k_nbytes=16, order="LBHNC", align=4096)
    found = Cache.from_torch(dict(zip(LAYERS, views, strict=True)), fields=built, groups=[Group(16)], dims="B H N PC")
    assert places(found) == places(described(built, raw))
    assert built.block_nbytes() == spec.page_size_bytes


@pytest.mark.parametrize("order", ["hnd", "nhd"])
def test_nvfp4(order: str) -> None:
    """vLLM's own split of a page's halves into data and scales."""
    heads, tokens, full = 4, 16, nvfp4_kv_cache_full_dim(64)
    shape = (BLOCKS, 2, heads, tokens, full) if order == "hnd" else (BLOCKS, 2, tokens, heads, full)
    pages = torch.zeros(shape, dtype=torch.uint8)
    (region,) = fields.nvfp4(heads=heads, tokens=tokens, head_dim=64, order=order).regions(
        layers=["a"], base=pages.data_ptr(), num_blocks=BLOCKS
    )
    assert region.block_stride == pages.stride(0)
    for side in (0, 1):
        for field, view in zip(
            region.fields[2 * side : 2 * side + 2], nvfp4_split_data_scale(pages[:, side]), strict=True
        ):
            head, token = (1, 2) if order == "hnd" else (2, 1)
            assert region.base + field.offset == view.data_ptr()
            assert (field.head_stride, field.token_stride) == (view.stride(head), view.stride(token))
            assert field.cell_nbytes == view.shape[3]


def test_latents() -> None:
    """The specs of MLA, of DeepSeek-V3.2's indexer and of DeepSeek-V4 (their numbers stand in the models' sources)."""
    common = {"num_kv_heads": 1, "max_tp_shards": 1}
    mla = MLAAttentionSpec(block_size=64, head_size=576, dtype=torch.bfloat16, **common)
    assert mla.page_size_bytes == fields.latent(tokens=64, cell_nbytes=1152).block_nbytes()
    packed = MLAAttentionSpec(
        block_size=64, head_size=576, dtype=torch.uint8, state_content_bytes=fields.FP8_DS_MLA_NBYTES, **common
    )
    built = fields.latent(tokens=64, cell_nbytes=fields.FP8_DS_MLA_NBYTES)
    assert packed.page_size_bytes == built.block_nbytes()
    indexer = MLAAttentionSpec(block_size=64, head_size=132, dtype=torch.uint8, **common)
    assert indexer.page_size_bytes == fields.indexer(tokens=64, head_dim=128).block_nbytes()
    for per_cell in (4, 128):
        spec = MLAAttentionSpec(
            block_size=256,
            head_size=512,
            dtype=torch.uint8,
            tokens_per_state=per_cell,
            alignment=576,
            model_version="deepseek_v4",
            state_content_bytes=584,
            **common,
        )
        assert spec.page_size_bytes == fields.compressed(tokens=256, tokens_per_cell=per_cell).block_nbytes()
    for tokens, width in ((4, 2 * 2 * 512), (8, 2 * 512), (4, 2 * 2 * 128)):
        spec = SlidingWindowMLASpec(
            block_size=tokens, head_size=width, dtype=torch.float32, sliding_window=8, alignment=576, **common
        )
        built = fields.compressed(tokens=tokens, tokens_per_cell=1, cell_nbytes=4 * width, scale_nbytes=0)
        assert spec.page_size_bytes == built.block_nbytes()


STATES = [
    (
        MambaAttentionBackendEnum.MAMBA1,
        lambda tp: MambaStateShapeCalculator.mamba1_state_shape(tp, 64, 16, 4),
        lambda order: fields.mamba1(channels=64, state_size=16, kernel=4, order=order),
    ),
    (
        MambaAttentionBackendEnum.MAMBA2,
        lambda tp: MambaStateShapeCalculator.mamba2_state_shape(tp, 16 * 8, 4, 16, 8, 32, 4),
        lambda order: fields.mamba2(
            heads=16, head_dim=8, groups=4, state_size=32, kernel=4, state_itemsize=2, order=order
        ),
    ),
    (
        MambaAttentionBackendEnum.GDN_ATTN,
        lambda tp: MambaStateShapeCalculator.gated_delta_net_state_shape(tp, 16, 32, 8, 4, 4),
        lambda order: fields.gdn(k_heads=16, v_heads=32, k_dim=8, v_dim=4, kernel=4, state_itemsize=2, order=order),
    ),
]


@pytest.mark.parametrize("layout", ["SD", "DS"])
@pytest.mark.parametrize("kind", STATES, ids=lambda kind: kind[0].name)
def test_state(kind: tuple, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of both states on every rank, also with fewer groups than ranks; offsets of projections."""
    name, shapes, build = kind
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: layout)
    monkeypatch.setattr(ssm_conv_transfer_utils, "is_conv_state_dim_first", lambda: layout == "DS")
    for tp_size in (1, 2, 4, 8, 16):
        spec = MambaSpec(
            block_size=16, shapes=shapes(tp_size), dtypes=(torch.bfloat16, torch.bfloat16), mamba_type=name
        )
        conv, ssm = build("row_first" if layout == "SD" else "dim_first")
        for rank in range(tp_size):
            regions = fields.stack((conv, ssm), layers=["a"], base=0, num_blocks=2, tp_rank=rank, tp_size=tp_size)
            assert {region.block_stride for region in regions} == {spec.page_size_bytes}
            assert regions[1].base == conv.block_nbytes(rank, tp_size)
            if layout == "DS" and (name is not MambaAttentionBackendEnum.MAMBA2 or tp_size <= 4):
                split = ssm_conv_transfer_utils.derive_mamba_conv_split(spec, tp_size)
                assert [field.offset for field in regions[0].fields] == [at for at, _ in split.local_conv_offsets]
            if layout == "SD":
                rows, channels = spec.shapes[0]
                strides = {(field.tokens, field.token_stride) for field in regions[0].fields}
                assert strides == {(rows, 2 * channels)}


def test_stages() -> None:
    for layers in (4, 27, 61, 94):
        for size in (1, 2, 3, 4):
            ours = [len(stage) for stage in deploy._stages(list(range(layers)), layers, size)]
            starts = [get_pp_indices(layers, rank, size) for rank in range(size)]
            assert ours == [stop - start for start, stop in starts]


def test_models_state_is_vllm_s() -> None:
    """Qwen3-Next's real shapes, rank by rank."""
    config = json.loads((DATA / "qwen3-next-80b-a3b.json").read_text())
    for tp_size in (1, 2, 4, 8, 16):
        conv, ssm = MambaStateShapeCalculator.gated_delta_net_state_shape(tp_size, 16, 32, 128, 128, 4)
        nbytes = 2 * (torch.Size(conv).numel() + torch.Size(ssm).numel())
        (cache,) = caches(config, tp_size=tp_size, tp_ranks=[tp_size - 1], num_blocks=1)
        assert {r.block_stride for r in cache.regions if cache.groups[r.group].state} == {nbytes}
