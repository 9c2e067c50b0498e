"""The families: from a config's keys to what each layer keeps. It knows no ranks and no bytes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvcompile.errors import LayoutError
from kvcompile.models.config import BY_HAND, Keys, positive, read
from kvcompile.models.keeps import (
    Attention,
    Compressed,
    Delta,
    Indexer,
    Keep,
    Latent,
    Lightning,
    Mamba1,
    Mamba2,
)

__all__ = ["FAMILIES", "Layer", "layers_of"]


class Layer(NamedTuple):
    """A layer by name, and what it keeps; nothing where another layer's cache serves it."""

    name: str
    keeps: tuple[Keep, ...]


Kept = list[tuple[Keep, ...]]


def dense(keys: Keys) -> Kept:
    """Llama, Qwen, Mistral, gpt-oss, Gemma, MiniMax-M2: grouped-query attention, full or in a window."""
    heads, head_dim = keys.kv_heads, keys.head_dim
    # Gemma 4's full layers have heads of their own.
    full_heads = keys.integer("num_global_key_value_heads", default=heads)
    full_dim = keys.integer("global_head_dim", default=head_dim)
    kept: Kept = []
    for window in _windows(keys):
        wide = window is None
        kept.append((Attention(full_heads if wide else heads, full_dim if wide else head_dim, window=window),))
    # Gemma 3n and 4: the last layers read the caches of earlier ones.
    shared = keys.integer("num_kv_shared_layers") if keys.get("num_kv_shared_layers") else 0
    shared = min(shared, len(kept))
    return kept[: len(kept) - shared] + [()] * shared


def latent(keys: Keys) -> Kept:
    """DeepSeek-V2, V3, V3.2, Kimi-K2: a latent, and an indexer's keys where the config has an indexer."""
    part = Latent(keys.integer("kv_lora_rank"), keys.integer("qk_rope_head_dim"))
    if keys.get("index_head_dim") is None:
        return [(part,)] * keys.layers
    own = Indexer(keys.integer("index_head_dim"))
    return [(part, own) if not _shares_topk(keys, number) else (part,) for number in range(keys.layers)]


def kimi_linear(keys: Keys) -> Kept:
    """Kimi-Linear and Kimi-K3: latents, KDA state in the other layers; ``linear_attn_config`` counts from one."""
    linear = keys.table("linear_attn_config")
    needed = ("full_attn_layers", "num_heads", "head_dim", "short_conv_kernel_size")
    missing = [name for name in needed if linear.get(name) is None]
    if missing:
        raise LayoutError(f"config key 'linear_attn_config': keys {missing} are missing. {BY_HAND}")
    heads, dim, kernel = (positive(name, linear[name]) for name in needed[1:])
    state = Delta(heads, heads, dim, dim, kernel, float32=True)
    part = Latent(keys.integer("kv_lora_rank"), keys.integer("qk_rope_head_dim"))
    full = set(linear["full_attn_layers"])
    return [(part,) if number + 1 in full else (state,) for number in range(keys.layers)]


def qwen_gdn(keys: Keys) -> Kept:
    """Qwen3-Next and Qwen3.5: gated delta nets, every fourth layer full attention."""
    names = (
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )
    keys.need(*names)
    k_heads, v_heads, k_dim, v_dim, kernel = (keys.integer(name) for name in names)
    state = Delta(k_heads, v_heads, k_dim, v_dim, kernel)
    full = Attention(keys.kv_heads, keys.head_dim)
    types = keys.get("layer_types")
    if types is None:
        every = keys.integer("full_attention_interval")
        types = ["linear_attention" if (n + 1) % every else "full_attention" for n in range(keys.layers)]
    return _by_type(keys, types, {"linear_attention": (state,), "full_attention": (full,)})


def nemotron_h(keys: Keys) -> Kept:
    """Nemotron-H: Mamba-2 state, attention, or nothing (MLP and experts)."""
    names = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
    keys.need(*names)
    state = Mamba2(*(keys.integer(name) for name in names))
    full = Attention(keys.kv_heads, keys.head_dim)
    types = keys.get("layers_block_type")
    if types is None:
        types = list(keys.need("hybrid_override_pattern")[0])
    nothing: tuple[Keep, ...] = ()
    kinds: dict[Any, tuple[Keep, ...]] = {"M": (state,), "mamba": (state,), "*": (full,), "attention": (full,)}
    return _by_type(keys, types, {**kinds, **dict.fromkeys(("-", "E", "mlp", "moe"), nothing)})


def jamba(keys: Keys) -> Kept:
    """Jamba: Mamba-1 state, every few layers attention."""
    names = ("mamba_expand", "hidden_size", "mamba_d_state", "mamba_d_conv", "attn_layer_period", "attn_layer_offset")
    offset = keys.need(*names)[5]
    period = keys.integer("attn_layer_period")
    expand, hidden, state_size, kernel = (keys.integer(name) for name in names[:4])
    state = Mamba1(expand * hidden, state_size, kernel)
    full = Attention(keys.kv_heads, keys.head_dim)
    return [(full,) if number % period == offset else (state,) for number in range(keys.layers)]


def minimax_linear(keys: Keys) -> Kept:
    """MiniMax-Text-01 and M1: lightning attention, every eighth layer attention."""
    state = Lightning(keys.integer("num_attention_heads"), keys.head_dim)
    full = Attention(keys.kv_heads, keys.head_dim)
    types = keys.get("attn_type_list") or keys.need("layer_types")[0]
    kinds: dict[Any, tuple[Keep, ...]] = {
        0: (state,),
        1: (full,),
        "linear_attention": (state,),
        "full_attention": (full,),
    }
    return _by_type(keys, types, kinds)


def minimax_sparse(keys: Keys) -> Kept:
    """MiniMax-M3: attention, in sparse layers with an indexer's keys, bfloat16 and whole on every rank."""
    sparse = keys.table("sparse_attention_config")
    if sparse.get("sparse_index_dim") is None or sparse.get("sparse_attention_freq") is None:
        raise LayoutError(
            f"config key 'sparse_attention_config' needs 'sparse_index_dim' and 'sparse_attention_freq'. {BY_HAND}"
        )
    full = Attention(keys.kv_heads, keys.head_dim)
    own = Indexer(positive("sparse_index_dim", sparse["sparse_index_dim"]), scaled=False)
    return _by_type(keys, sparse["sparse_attention_freq"], {0: (full,), 1: (full, own)})


def deepseek_v4(keys: Keys) -> Kept:
    """DeepSeek-V4: latents in a window; latents of 4 or 128 tokens each, their compressors' state, an indexer."""
    dim, window = keys.integer("head_dim"), keys.integer("sliding_window")
    index_dim = keys.integer("index_head_dim")
    ratios = keys.get("compress_ratios")
    if ratios is None:
        rates = keys.table("compress_rates")
        ratios = [rates.get(name, 0) for name in keys.need("layer_types")[0]]
    kinds: dict[Any, tuple[Keep, ...]] = {}
    for ratio in (0, 1, 4, 128):
        keeps: list[Keep] = [Compressed("window", dim, window=window)]
        if ratio > 1:
            # vllm/models/deepseek_v4/compressor.py, CompressorStateCache, 0.33.0: float32 KV and score, overlapping at
            # 4.
            halves, block_size = (2, 4) if ratio == 4 else (1, 8)
            state = {"window": halves * ratio, "own_block_size": block_size}
            keeps += [
                Compressed("compressed", dim, ratio),
                Compressed("compressor", dim, raw_nbytes=2 * halves * dim * 4, **state),
            ]
        if ratio == 4:
            keeps += [
                Indexer(index_dim, tokens_per_cell=ratio),
                Compressed("indexer_compressor", index_dim, raw_nbytes=2 * halves * index_dim * 4, **state),
            ]
        kinds[ratio] = tuple(keeps)
    return _by_type(keys, ratios[: keys.layers], kinds)


Family = Callable[[Keys], Kept]

_DENSE = (
    *("llama", "mistral", "mistral3", "ministral", "ministral3", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "gpt_oss"),
    *("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "minimax_m2"),
    *("glm4", "glm4_moe", "phi3", "granite", "granitemoe", "olmo2"),
)

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(_DENSE, dense),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa"), latent),
    **dict.fromkeys(("kimi_linear", "kimi_k3"), kimi_linear),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_mtp"), qwen_gdn
    ),
    "nemotron_h": nemotron_h,
    "jamba": jamba,
    **dict.fromkeys(("minimax", "minimax_m1", "minimax_text_01"), minimax_linear),
    **dict.fromkeys(("minimax_m3", "minimax_m3_text", "minimax_m3_vl"), minimax_sparse),
    "deepseek_v4": deepseek_v4,
}


def layers_of(config: Any, *, mtp: bool = False, prefix: str = "") -> list[Layer]:
    """Say what each layer of a model keeps.

    Parameters
    ----------
    config : path, mapping or config object
        As of `read`.
    mtp : bool
        The multi-token-prediction layers too: each keeps what the model's last whole attention layer keeps.
    prefix : str
        Before each layer's name.

    Returns
    -------
    list of Layer
        ``layers.0`` and so on; prediction layers count on.

    Raises
    ------
    LayoutError
        An unknown architecture, or keys that are missing or make no sense; the message says how to go on by hand.
    """
    keys = read(config)
    family = next((FAMILIES[name] for name in keys.model_types if name in FAMILIES), None)
    if family is None:
        usual = ("num_hidden_layers", "num_key_value_heads", "head_dim")
        missing = [name for name in ("model_type", *usual) if keys.get(name) is None]
        raise LayoutError(
            f"model_type {' / '.join(keys.model_types) or None} (architectures {keys.get('architectures')!r:.200}) is "
            f"not known, known are {', '.join(sorted(FAMILIES))}. Of the keys of a plain decoder, {missing or 'none'} "
            f"are missing. {BY_HAND}"
        )
    try:
        kept = family(keys)
    except (TypeError, ValueError, AttributeError) as error:  # a value of another kind than its key's
        raise LayoutError(f"config of model_type {' / '.join(keys.model_types)}: {error}. {BY_HAND}") from error
    if mtp:
        # DeepSeek, Kimi, GLM: num_nextn_predict_layers; Qwen: mtp_num_hidden_layers; MiniMax: num_mtp_modules.
        count = min(keys.integer("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"), keys.layers)
        attends = [keeps for keeps in kept if any(not keep.state for keep in keeps)]
        kept = kept + [max(reversed(attends), key=len)] * count
    return [Layer(f"{prefix}layers.{number}", keeps) for number, keeps in enumerate(kept)]


def _windows(keys: Keys) -> list[int | None]:
    """Return the window of each layer, None for full attention."""
    count, window = keys.layers, keys.get("sliding_window")
    types = keys.get("layer_types")
    if types is None:
        types = _implied_types(keys, count)
    full = {"full_attention", "attention"}
    unknown = sorted({str(name) for name in types} - full - {"sliding_attention"})[:8]
    if unknown or len(types) < count:
        raise LayoutError(
            f"config key 'layer_types': {unknown or len(types)}, expected {count} of 'full_attention' and "
            f"'sliding_attention'. {BY_HAND}"
        )
    if "sliding_attention" in types[:count]:
        window = positive("sliding_window", keys.need("sliding_window")[0])
    return [None if name in full else window for name in types[:count]]


def _implied_types(keys: Keys, count: int) -> list[str]:
    """Return the layers' types where a config does not list them: as its architecture is written.

    Gemma 2 and gpt-oss: every second layer is full; Gemma 3: every sixth (transformers, ``configuration_gemma3.py``).
    Qwen: windows only if ``use_sliding_window``, from layer ``max_window_layers`` on. Others: in all layers, if there
    is a window.
    """
    name = keys.model_types[0]
    every = {"gemma2": 2, "gpt_oss": 2, "gemma3": 6, "gemma3_text": 6}.get(name) or keys.get("sliding_window_pattern")
    if every:
        every = keys.integer("sliding_window_pattern", default=every)
        return ["full_attention" if (number + 1) % every == 0 else "sliding_attention" for number in range(count)]
    first = count
    if keys.get("sliding_window") is not None and keys.get("use_sliding_window", not name.startswith("qwen")):
        first = 0
        if name.startswith("qwen") and keys.get("max_window_layers") != 0:
            first = min(keys.integer("max_window_layers", default=count), count)
    return ["full_attention"] * first + ["sliding_attention"] * (count - first)


def _by_type(keys: Keys, types: Sequence[Any], kinds: dict[Any, tuple[Keep, ...]]) -> Kept:
    """Look up each layer's type."""
    count = keys.layers if keys.get("num_hidden_layers") is not None else len(types)
    unknown = sorted({repr(name) for name in types if name not in kinds})[:8]
    if unknown or len(types) < count:
        raise LayoutError(
            f"types of layers: {', '.join(unknown) or len(types)}, expected {count} of {sorted(map(repr, kinds))}. "
            f"{BY_HAND}"
        )
    return [kinds[name] for name in types[:count]]


def _shares_topk(keys: Keys, number: int) -> bool:
    """Whether a layer takes the selection of an earlier one, and keeps no keys (vLLM 0.33.0, ``deepseek_v2.py``)."""
    pattern = keys.get("index_topk_pattern")
    if pattern is not None:
        return bool(number < len(pattern) and pattern[number] == "S")
    every, offset = keys.integer("index_topk_freq", default=1), keys.get("index_skip_topk_offset", 2)
    return bool(max(number - offset + 1, 0) % every)
