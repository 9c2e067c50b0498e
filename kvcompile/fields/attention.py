"""Keys and values, plain and quantized: what attention keeps for a token. Latent caches are `latent`'s."""

from kvcompile.errors import LayoutError
from kvcompile.fields.arrangement import Arrangement, Part

__all__ = ["SCALES", "dense", "nvfp4", "whole"]

SCALES = ("none", "token_head", "token", "head", "tensor")


def dense(
    *,
    heads: int,
    tokens: int,
    k_nbytes: int,
    v_nbytes: int | None = None,
    order: str = "hnd",
    scales: str = "none",
    scale_nbytes: int = 4,
    dcp_sharded: bool = False,
    tokens_per_cell: int = 1,
    align: int = 1,
) -> Arrangement:
    """Arrange keys and values of grouped-query attention, of a full or a sliding window.

    Parameters
    ----------
    heads : int
        KV heads of the model.
    tokens : int
        Tokens of a kernel block.
    k_nbytes, v_nbytes : int
        Bytes of one head of one token: head size times bytes of an element. V as K by default; 0: no V at all
        (MiniMax-M3's index keys).
    order : str
        As of `Arrangement`. ``hnd``, ``nhd``: [K | V] in each block (FlashInfer 0.6, ``docs/tutorials/kv_layout``);
        ``LBHNC`` and its kin: both in a cell (vLLM 0.33.0, ``vllm/v1/kv_cache_interface.py``,
        ``AttentionSpec.state_content_size_bytes``); ``LPBNHC``: two halves of a tensor or two tensors, which a slot of
        tokens indexes (SGLang 0.5.23, ``mem_cache/memory_pool.py``, ``MHATokenToKVPool._create_buffers_normal``;
        ``LPBHNC`` with SGLANG_USE_HND_KVCACHE).
    scales : str
        ``token_head``: one a token and head for K and for V, after each one's data (vLLM 0.33.0,
        ``v1/attention/backends/triton_attn.py``, ``TritonAttentionBackend.customize_spec``: FP8, INT8 and INT4).
        ``token``: one a token for all heads, whole on every rank. ``head``: one a head in each kernel block.
        ``tensor``: one a layer, which comes with the weights (vLLM's ``fp8``, ``layer._k_scale``), so nothing here.
    scale_nbytes : int
        Bytes of one scale. Per block of elements (SGLang 0.5.23, ``MHATokenToKVPoolMXFP8``): of all scales of a head.
    dcp_sharded : bool
        Decode context parallelism divides the tokens.
    tokens_per_cell : int
        As many as ``tokens``: one head's block is one cell, whatever lies inside (SGLang's ``vectorized_5d``, vLLM's
        ``v1/attention/backends/rocm_attn.py``: ``LPBHNC``).
    align : int
        Blocks are padded to a multiple of it.

    Returns
    -------
    Arrangement
        Of ``k``, ``v`` and, where they are kept, ``k_scale`` and ``v_scale``.

    Raises
    ------
    LayoutError
        As of `Arrangement`; unknown scales.
    """
    if scales not in SCALES:
        raise LayoutError(f"scales is {scales!r:.80}, expected one of {', '.join(SCALES)}")
    parts = []
    for name, nbytes in (("k", k_nbytes), ("v", k_nbytes if v_nbytes is None else v_nbytes)):
        if nbytes:
            parts.append(Part(name, heads, tokens, nbytes, False, dcp_sharded, tokens_per_cell))
        if nbytes and scales == "token_head":
            parts.append(Part(f"{name}_scale", heads, tokens, scale_nbytes, False, dcp_sharded))
        elif nbytes and scales == "token":
            parts.append(Part(f"{name}_scale", 1, tokens, scale_nbytes, True, dcp_sharded))
        elif nbytes and scales == "head":
            parts.append(Part(f"{name}_scale", heads, tokens, scale_nbytes, False, dcp_sharded, tokens))
    return Arrangement(parts, order, align=align)


def nvfp4(
    *,
    heads: int,
    tokens: int,
    head_dim: int,
    order: str = "hnd",
    dcp_sharded: bool = False,
    align: int = 1,
    part_align: int = 1,
) -> Arrangement:
    """Arrange keys and values in NVFP4: per token and head D/2 bytes of data and D/16 of scales, for K and for V.

    Parameters
    ----------
    order : str
        ``hnd``, ``nhd``: [K data | K scale | V data | V scale], each part all heads (vLLM 0.33.0,
        ``v1/attention/backends/flashinfer.py``, ``_nvfp4_kv_views``; ``utils/torch_utils.py``,
        ``nvfp4_kv_cache_full_dim``, ``nvfp4_split_data_scale``). ``LBHPNC``: slots 2*head+side, each data then scale
        (vLLM 0.33.0, ``models/minimax_m3/nvidia/msa_cutlass_sparse_decode.py``, ``nvfp4_kv_cache_views``). ``PLBNHC``:
        four buffers (SGLang 0.5.23, ``memory_pool.py``, ``MHATokenToKVPoolFP4``).
    part_align : int
        128 in SGLang 0.5.23's page rows (``mem_cache/minimax_m3_nvfp4_pool.py``, ``_page_row_layout``).
    heads, tokens, dcp_sharded, align
        As of `dense`.

    Returns
    -------
    Arrangement
        Of ``k``, ``k_scale``, ``v`` and ``v_scale``.
    """
    if head_dim % 16:
        raise LayoutError(f"head_dim is {head_dim}, expected a multiple of 16: NVFP4 scales 16 elements at a time")
    parts = [
        Part(name, heads, tokens, nbytes, False, dcp_sharded)
        for side in "kv"
        for name, nbytes in ((side, head_dim // 2), (f"{side}_scale", head_dim // 16))
    ]
    return Arrangement(parts, order, align=align, part_align=part_align)


def whole(name: str, *, tp_size: int, tokens: int, cell_nbytes: int, tokens_per_cell: int = 1) -> Arrangement:
    """Arrange what no one can cut by heads: a rank's heads interleaved inside one cell.

    It moves between equal TP sizes only: with others ``compile`` refuses it, for the two sides' "heads" differ.

    Parameters
    ----------
    tp_size : int
        Ranks; each holds one uncuttable "head".
    cell_nbytes : int
        Bytes of a rank's cell.
    tokens, tokens_per_cell : int
        As of `dense`.
    """
    return Arrangement([Part(name, tp_size, tokens, cell_nbytes, False, False, tokens_per_cell)], "hnd")
