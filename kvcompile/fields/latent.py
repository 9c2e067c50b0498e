"""What every rank keeps whole: MLA latents, indexer keys, compressed latents. Keys and values are `attention`'s."""

from kvcompile.fields.arrangement import Arrangement, Part

__all__ = ["FP8_DS_MLA_NBYTES", "NVFP4_DS_MLA_NBYTES", "compressed", "indexer", "latent"]

FP8_DS_MLA_NBYTES = 656
"""512 FP8 values, four float32 scales, 64 bfloat16 of rope (vLLM 0.33.0, ``model_executor/layers/attention/
mla_attention.py``, ``MLAAttention.get_kv_cache_spec``; ``v1/attention/backends/mla/flashmla_sparse.py``)."""

NVFP4_DS_MLA_NBYTES = 352
"""As `FP8_DS_MLA_NBYTES`, with 512 FP4 values and their scales."""


def latent(
    *,
    tokens: int,
    cell_nbytes: int,
    name: str = "latent",
    dcp_sharded: bool = False,
    order: str = "LBNC",
    align: int = 1,
) -> Arrangement:
    """Arrange the latent and rope part of multi-head latent attention.

    vLLM 0.33.0, ``mla_attention.py``, ``MLAAttention.get_kv_cache_spec``: one head of ``kv_lora_rank +
    qk_rope_head_dim`` elements, K alone, ``max_tp_shards=1``. SGLang 0.5.23, ``memory_pool.py``, ``MLATokenToKVPool``:
    the same bytes.

    Parameters
    ----------
    tokens : int
        Tokens of a kernel block.
    cell_nbytes : int
        (kv_lora_rank + qk_rope_head_dim) times bytes of an element: 1,152 for DeepSeek's 512 + 64 in bfloat16; or
        `FP8_DS_MLA_NBYTES`, `NVFP4_DS_MLA_NBYTES`, which are one opaque cell.
    dcp_sharded : bool
        Decode context parallelism divides the tokens.
    """
    return Arrangement([Part(name, 1, tokens, cell_nbytes, True, dcp_sharded)], order, align=align)


def indexer(
    *,
    tokens: int,
    head_dim: int,
    scale_nbytes: int = 4,
    tokens_per_cell: int = 1,
    dcp_sharded: bool = False,
    order: str = "LBPNC",
    align: int = 1,
) -> Arrangement:
    """Arrange the keys of a sparse-attention indexer: in each kernel block all FP8 keys, then all scales.

    vLLM 0.33.0, ``model_executor/models/deepseek_v2.py``, ``DeepseekV32IndexerCache`` (132 bytes a token, one head,
    whole on every rank) and ``v1/attention/ops/rocm_aiter_mla_sparse.py``, ``_indexer_k_quant_and_cache_kernel`` (keys
    first, scales behind). SGLang 0.5.23, ``memory_pool.py``, ``DSATokenToKVPool``: pages of 64 tokens, the same.

    Parameters
    ----------
    tokens : int
        Tokens of a kernel block: often another than the latent's.
    head_dim : int
        Bytes of a key; 128, or 64 in MXFP4.
    scale_nbytes : int
        Bytes of a key's scales; 0: none (MiniMax-M3's bfloat16 keys).
    tokens_per_cell : int
        DeepSeek-V4: a key covers several tokens.
    """
    parts = [Part("indexer", 1, tokens, head_dim, True, dcp_sharded, tokens_per_cell)]
    if scale_nbytes:
        parts.append(Part("indexer_scale", 1, tokens, scale_nbytes, True, dcp_sharded, tokens_per_cell))
    return Arrangement(parts, order, align=align)


def compressed(
    *,
    tokens: int,
    tokens_per_cell: int,
    cell_nbytes: int = 576,
    scale_nbytes: int = 8,
    name: str = "compressed",
    order: str = "LBPNC",
    align: int = 576,
) -> Arrangement:
    """Arrange a cache whose cells cover several tokens each: DeepSeek-V4.

    vLLM 0.33.0, ``models/deepseek_v4/attention.py``, ``DeepseekV4Attention.get_kv_cache_spec`` (584 bytes a state,
    ``tokens_per_state`` 4 or 128, pages aligned to 576) and ``models/deepseek_v4/common/ops/cache_utils.py`` (all
    cells of 448 FP8 and 64 bfloat16, then the 8 scales of each, then padding). SGLang 0.5.23,
    ``mem_cache/deepseek_v4_memory_pool.py``: the same bytes a token and page.

    Parameters
    ----------
    tokens : int
        Tokens of a kernel block, counted before compression.
    tokens_per_cell : int
        Tokens that a cell covers; 1: the sliding-window cache of the same model.
    cell_nbytes, scale_nbytes : int
        Bytes of a cell and of its scales; no scales in bfloat16 (1,024 and 0).
    """
    parts = [Part(name, 1, tokens, cell_nbytes, True, False, tokens_per_cell)]
    if scale_nbytes:
        parts.append(Part(f"{name}_scale", 1, tokens, scale_nbytes, True, False, tokens_per_cell))
    return Arrangement(parts, order, align=align)
