"""Models from their configs: bytes against published shapes, forms and settings, and what is refused."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

import kvcompile
from kvcompile import LayoutError
from kvcompile.cli import geometries
from kvcompile.models import Attention, Delta, Indexer, Latent, Layer, Mamba1, Mamba2, caches, group_names, layers_of

DATA = Path(__file__).parent / "data"


def config(name: str, **changes: Any) -> dict[str, Any]:
    """A model's config, with changes in the text model where there is one."""
    found = json.loads((DATA / f"{name}.json").read_text())
    found.get("text_config", found).update(changes)
    return found


def payload(name: str, tokens: int = 1, **settings: Any) -> dict[str, int]:
    """Bytes of each field over all layers of a model on one rank: of a token, or of a block of state."""
    settings.setdefault("block_size", tokens)
    (cache,) = caches(config(name), num_blocks=1, **settings)
    found: dict[str, int] = {}
    for region in cache.regions:
        for field in region.fields:
            start, stop = cache.shard(field)
            nbytes = region.kernel_blocks * (stop - start) * field.cells * field.cell_nbytes
            found[field.name] = found.get(field.name, 0) + nbytes
    return found


# What a token takes over all layers. DeepSeek-AI, "Insights into DeepSeek-V3" (ISCA 2025), table 1: DeepSeek-V3
# 70.272 KB, Qwen-2.5 72B 327.680 KB, LLaMA-3.1 405B 516.096 KB. The others follow from their config.json: layers x 2 x
# KV heads x head size x 2 bytes. vLLM 0.33.0: 132 bytes an indexer's key.
TOKENS = {
    "llama-3.1-405b": {"k": 516096 // 2, "v": 516096 // 2},
    "qwen2.5-72b": {"k": 327680 // 2, "v": 327680 // 2},
    "llama-3.3-70b": {"k": 80 * 8 * 256, "v": 80 * 8 * 256},
    "mistral-7b-v0.1": {"k": 32 * 8 * 256, "v": 32 * 8 * 256},
    "qwen3-235b-a22b": {"k": 192512 // 2, "v": 192512 // 2},
    "gpt-oss-120b": {"k": 36 * 8 * 128, "v": 36 * 8 * 128},
    "gemma-3-27b": {"k": 62 * 16 * 256, "v": 62 * 16 * 256},
    "gemma-3n-e4b": {"k": 20 * 2 * 512, "v": 20 * 2 * 512},
    "gemma-4-31b": {"k": 50 * 16 * 512 + 10 * 4 * 1024, "v": 50 * 16 * 512 + 10 * 4 * 1024},
    "deepseek-v2": {"latent": 60 * 1152},
    "deepseek-v3": {"latent": 70272},
    "deepseek-v3.2": {"latent": 70272, "indexer": 61 * 128, "indexer_scale": 61 * 4},
    "kimi-k2": {"latent": 70272},
    "minimax-m2": {"k": 62 * 8 * 256, "v": 62 * 8 * 256},
    "minimax-m3": {"k": 60 * 4 * 256, "v": 60 * 4 * 256, "indexer": 57 * 256},
}


@pytest.mark.parametrize("name", TOKENS)
def test_bytes_of_a_token(name: str) -> None:
    assert payload(name) == TOKENS[name]


# What a sequence's state takes over all layers. vLLM 0.33.0, mamba_utils.py: convolution (kernel - 1) rows of bfloat16,
# temporal heads x matrix.
STATES = {
    "kimi-linear-48b-a3b": {"conv_q": 20 * 3 * 8192, "ssm": 20 * 32 * 128 * 128 * 4, "latent": 7 * 1152},
    "kimi-k3-like": {"conv_v": 69 * 3 * 24576, "ssm": 69 * 96 * 128 * 128 * 4, "latent": 24 * 1152},
    "qwen3-next-80b-a3b": {
        "conv_q": 36 * 3 * 4096,
        "conv_k": 36 * 3 * 4096,
        "conv_v": 36 * 3 * 8192,
        "ssm": 36 * 32 * 128 * 128 * 2,
        "k": 12 * 2 * 512,
    },
    "qwen3.5-27b": {"conv_v": 48 * 3 * 12288, "ssm": 48 * 48 * 128 * 128 * 4, "v": 16 * 4 * 512},
    "nemotron-h-8b": {
        "conv_x": 24 * 3 * 16384,
        "conv_b": 24 * 3 * 2048,
        "conv_c": 24 * 3 * 2048,
        "ssm": 24 * 128 * 64 * 128 * 4,
        "k": 4 * 8 * 256,
    },
    "jamba-v0.1": {"conv_x": 28 * 3 * 16384, "ssm": 28 * 8192 * 16 * 2, "k": 4 * 8 * 256},
    "minimax-m1-80k": {"ssm": 70 * 64 * 128 * 128 * 4, "k": 10 * 8 * 256},
}


@pytest.mark.parametrize("name", STATES)
def test_bytes_of_state(name: str) -> None:
    found = payload(name)
    assert {field: found[field] for field in STATES[name]} == STATES[name]


def test_kimi_k3_s_blocks() -> None:
    """Blocks of 768 tokens in kernel blocks of 64; state of 814,080 bytes, padded to the same 884,736 (vllm#54272)."""
    settings = {"tp_size": 8, "tp_ranks": [3], "block_size": 768, "kernel_block_size": 64}
    (cache,) = caches(config("kimi-k3-like"), align={"state": 884736}, num_blocks=4, overlay=True, **settings)
    assert cache.overlays == (0, 0)
    latents = {(r.block_stride, r.kernel_blocks) for r in cache.regions if not cache.groups[r.group].state}
    assert latents == {(73728, 12)}
    assert {r.block_stride for r in cache.regions if cache.groups[r.group].state} == {884736}
    assert cache.buffers[0].nbytes == 69 * 4 * 884736
    (rank,) = caches(config("kimi-k3-like"), tp_size=8, tp_ranks=[3], num_blocks=1)
    of_layer = [f for r in rank.regions if r.layer == "layers.0" for f in r.fields]
    assert sum(12 * f.cells * f.cell_nbytes for f in of_layer) == 814080


def test_deepseek_v4_s_pages() -> None:
    """vLLM 0.33.0: 584 bytes a cell; pages of 256 tokens at 4 and at 128 a cell, and of the window, padded to 576."""
    (cache,) = caches(config("deepseek-v4-flash"), block_size=256, num_blocks=2)
    assert group_names(config("deepseek-v4-flash")) == ["window 128", "attention", "compressor 8", "compressor 128"]
    assert [(g.block_size, g.null_block) for g in cache.groups] == [(256, 0), (256, None), (4, 0), (8, 0)]
    strides: dict[tuple[str, int], set[int]] = {}
    for region in cache.regions:
        name = region.fields[0].name, region.fields[0].tokens_per_cell
        strides.setdefault(name, set()).add(region.block_stride)
    assert strides == {
        ("window", 1): {149760},
        ("compressed", 4): {37440},
        ("compressed", 128): {1728},
        ("indexer", 4): {8640},
        # float32 KV and score, twice at ratio 4: [4, 2*512*2*4] and [8, 512*2*4] (vllm compressor.py)
        ("compressor", 1): {4 * 2 * 512 * 2 * 4 + 64},
        ("indexer_compressor", 1): {4 * 2 * 128 * 2 * 4 + 448},
    }


def test_a_config_in_every_form(tmp_path: Path) -> None:
    """A path, a folder, a dict, what has to_dict(), and layers by hand give the same caches."""
    found = config("llama-3.3-70b", num_hidden_layers=2)
    (tmp_path / "config.json").write_text(json.dumps(found))
    by_hand = [Layer(f"layers.{number}", (Attention(8, 128),)) for number in range(2)]
    expected = caches(found, tp_size=2)
    for form in (tmp_path, str(tmp_path / "config.json"), SimpleNamespace(to_dict=lambda: found), by_hand):
        assert caches(form, tp_size=2) == expected


def test_ranks_and_stages() -> None:
    """Stage by stage, rank by rank; stages cut as vLLM 0.33.0 does, or as told; prediction layers on the last."""
    found = config("deepseek-v3.2")
    made = caches(found, tp_size=4, tp_ranks=[1, 3], pp_size=4, mtp=True, num_blocks=2)
    assert [cache.tp_rank for cache in made] == [1, 3] * 4
    counts = [len({region.layer for region in cache.regions}) for cache in made[::2]]
    assert counts == [15, 15, 16, 16]
    assert {region.layer for region in made[-1].regions} >= {"layers.61"}
    made = caches(found, pp_size=[33, 28], num_blocks=2)
    assert [len({region.layer for region in cache.regions}) for cache in made] == [33, 28]
    assert {len(cache.groups) for cache in made} == {1}


def test_mtp_layers_have_a_whole_indexer() -> None:
    """GLM-5: some layers share an earlier selection and keep no keys; a prediction layer always keeps them."""
    layers = layers_of(config("deepseek-v3.2", num_hidden_layers=6, index_topk_freq=2), mtp=True)
    kinds = [tuple(keep.kind for keep in layer.keeps) for layer in layers]
    whole, shared = ("latent", "indexer"), ("latent",)
    assert kinds == [whole, whole, shared, whole, shared, whole, whole]
    layers = layers_of(config("deepseek-v3.2", num_hidden_layers=3, index_topk_pattern="FSS"))
    assert [len(layer.keeps) for layer in layers] == [2, 1, 1]


def test_a_draft_model() -> None:
    """A GQA draft beside a latent, on the last stage, in the same group: cases.md 7."""
    draft = config("llama-3.3-70b", num_hidden_layers=1)
    made = caches(config("deepseek-v3", num_hidden_layers=2), tp_size=8, pp_size=2, draft=draft, num_blocks=2)
    assert [region.layer for region in made[0].regions] == ["layers.0"]
    assert [region.layer for region in made[-1].regions] == ["layers.1", "draft.layers.0"]
    assert made[0].groups == (kvcompile.Group(16),)
    assert group_names(config("gpt-oss-120b"), draft=draft) == ["window 128", "attention"]


def test_windows() -> None:
    """Which layers look back how far, where the config lists it and where its architecture implies it."""

    def windows(name: str, **changes: Any) -> list[int | None]:
        return [keep.window for layer in layers_of(config(name, **changes)) for keep in layer.keeps]

    assert windows("gpt-oss-120b") == [128, None] * 18
    assert windows("gpt-oss-120b", layer_types=None) == [128, None] * 18
    assert windows("gemma-3-27b") == ([1024] * 5 + [None]) * 10 + [1024] * 2
    assert windows("mistral-7b-v0.1") == [4096] * 32
    assert windows("mistral-7b-v0.1", sliding_window=None) == [None] * 32
    assert windows("qwen2.5-72b") == [None] * 80
    assert windows("qwen2.5-72b", use_sliding_window=True) == [None] * 70 + [131072] * 10
    assert windows("gemma-3n-e4b") == ([512] * 4 + [None]) * 4
    assert [layer.keeps for layer in layers_of(config("gemma-3n-e4b"))[20:]] == [()] * 15


def test_what_layers_keep() -> None:
    def first(name: str, kind: type) -> object:
        return next(keep for layer in layers_of(config(name)) for keep in layer.keeps if isinstance(keep, kind))

    assert first("deepseek-v3", Latent) == Latent(512, 64)
    assert first("deepseek-v3.2", Indexer) == Indexer(128)
    assert first("minimax-m3", Indexer) == Indexer(128, scaled=False)
    assert first("kimi-k3-like", Delta) == Delta(96, 96, 128, 128, 4, float32=True)
    assert first("qwen3-next-80b-a3b", Delta) == Delta(16, 32, 128, 128, 4)
    assert first("nemotron-h-8b", Mamba2) == Mamba2(128, 64, 8, 128, 4)
    assert first("jamba-v0.1", Mamba1) == Mamba1(8192, 16, 4)
    pattern = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    kinds = {(): "-", (Mamba2(128, 64, 8, 128, 4),): "M", (Attention(8, 128),): "*"}
    assert "".join(kinds[layer.keeps] for layer in layers_of(config("nemotron-h-8b"))) == pattern
    named = {"-": "mlp", "M": "mamba", "*": "attention"}
    listed = config("nemotron-h-8b", layers_block_type=[named[letter] for letter in pattern])
    assert layers_of(listed) == layers_of(config("nemotron-h-8b"))


@pytest.mark.parametrize(
    ("kv_dtype", "field", "nbytes"),
    [
        ("fp8", "k", 128),
        ("fp8_e5m2", "k", 128),
        ("float32", "k", 512),
        ("int4_per_token_head", "k", 64),
        ("fp8_per_token_head", "k_scale", 4),
        ("nvfp4", "v", 64),
        ("nvfp4", "v_scale", 8),
    ],
)
def test_kv_dtypes(kv_dtype: str, field: str, nbytes: int) -> None:
    (cache,) = caches(config("llama-3.3-70b", num_hidden_layers=1), kv_dtype=kv_dtype)
    assert {f.name: f.cell_nbytes for r in cache.regions for f in r.fields}[field] == nbytes


def test_latent_dtypes() -> None:
    for kv_dtype, nbytes in (("auto", 1152), ("fp8", 576), ("fp8_per_token_head", 584), ("fp8_ds_mla", 656)):
        (cache,) = caches(config("deepseek-v3", num_hidden_layers=1), kv_dtype=kv_dtype)
        assert cache.regions[0].fields[0].cell_nbytes == nbytes


def test_state_dtypes() -> None:
    for name, settings, nbytes in (
        ("qwen3-next-80b-a3b", {}, 2),
        ("qwen3-next-80b-a3b", {"state_dtype": "float32"}, 4),
        ("qwen3.5-27b", {}, 4),
        ("qwen3.5-27b", {"state_dtype": "bfloat16"}, 2),
        ("kimi-linear-48b-a3b", {}, 4),
    ):
        (cache,) = caches(config(name), **settings)
        ssm = next(f for r in cache.regions for f in r.fields if f.name == "ssm")
        assert ssm.cell_nbytes == 128 * 128 * nbytes


def test_a_rank_s_memory_is_one_buffer() -> None:
    """What ``place`` is asked for is what the regions take, in every order; ranks are asked in turn."""
    for order in ("hnd", "LBNHC", "LHBNC", "BLHNC", "BHLNC", "LPBNHC", "PLBNHC"):
        asked: list[int] = []

        def place(nbytes: int, asked: list[int] = asked) -> int:
            asked.append(nbytes)
            return 4096 * len(asked)

        made = caches(config("gpt-oss-120b"), tp_size=3, order=order, num_blocks=5, place=place)
        assert [cache.buffers[0].base for cache in made] == [4096, 8192, 12288]
        for cache, nbytes in zip(made, asked, strict=True):
            assert max(cache.span(region)[1] for region in cache.regions) == cache.buffers[0].base + nbytes
            assert min(cache.span(region)[0] for region in cache.regions) == cache.buffers[0].base


def test_overlaid_groups() -> None:
    """All groups in one pool, as in vLLM 0.33.0: block by block in packed rows, or layers of equal blocks."""
    for order in ("BLHNC", "LBHNC"):
        (cache,) = caches(config("gpt-oss-120b"), order=order, overlay=True, num_blocks=5)
        assert cache.overlays == (0, 0)
        assert cache.buffers[0].nbytes == 5 * 18 * 16 * 8 * 256
    with pytest.raises(LayoutError, match=r"overlay: blocks of .* expected equal blocks"):
        caches(config("gemma-4-31b"), overlay=True)
    (cache,) = caches(config("gemma-4-31b"), overlay=True, order="BLHNC", num_blocks=2)
    assert cache.overlays == (0, 0)
    assert {region.block_stride for region in cache.regions} == {50 * 16 * 16 * 1024}  # the windows' longer row


def bad(name: str = "llama-3.3-70b", **changes: Any) -> dict[str, Any]:
    return config(name, **changes)


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        ({"model_type": "rwkv7", "architectures": ["Rwkv7"]}, {}, r"'Rwkv7'.*not known.*'num_hidden_layers', 'num_key"),
        ({}, {}, r"model_type None.*'model_type'.*are missing.*by hand: caches\(\[Layer"),
        (bad(num_hidden_layers=None), {}, "num_hidden_layers.*missing"),
        (bad(num_hidden_layers="80"), {}, "'num_hidden_layers' is '80', expected a positive integer"),
        (bad("deepseek-v3", kv_lora_rank=None), {}, r"\['kv_lora_rank'\] are all missing.*by hand"),
        (bad("nemotron-h-8b", n_groups=None, conv_kernel=None), {}, r"keys \['n_groups', 'conv_kernel'\] are missing"),
        (bad("nemotron-h-8b", hybrid_override_pattern="MX"), {}, "types of layers: 'X', expected 52 of"),
        (bad("kimi-k3-like", linear_attn_config={"num_heads": 3}), {}, r"'full_attn_layers', 'head_dim', 'short_conv"),
        (bad("kimi-k3-like", linear_attn_config=None), {}, "'linear_attn_config'.*missing"),
        (bad("minimax-m3", sparse_attention_config={}), {}, "'sparse_attention_config'.*missing|needs"),
        (bad("gpt-oss-120b", layer_types=["full_attention"]), {}, "layer_types.*expected 36"),
        (bad("gpt-oss-120b", layer_types=["chunked"] * 36), {}, "'chunked'"),
        (bad("gpt-oss-120b", sliding_window=None), {}, "sliding_window.*missing"),
        (bad(torch_dtype="int8"), {}, "dtype of the config is 'int8'"),
        (bad("deepseek-v3"), {"mtp": True, "pp_size": 0}, "pp_size is 0"),
        (bad("kimi-k2", num_nextn_predict_layers=None), {"mtp": True}, "num_nextn_predict_layers"),
        (3, {}, "config is a int, expected a path"),
        ("no/such/config.json", {}, "expected a readable config.json"),
        ([], {}, "at least one"),
        ([3], {}, "expected one of kvcompile.models.Layer"),
        (bad(), {"tp_size": 0}, "tp_size is 0"),
        (bad(), {"tp_size": True}, "tp_size is True"),
        (bad(), {"tp_size": 2, "tp_ranks": [2]}, "tp_ranks holds 2, expected numbers from 0 to 1"),
        (bad(), {"pp_size": 81}, "pp_size makes stages"),
        (bad(), {"pp_size": [40, 39]}, r"pp_size makes stages of \[40, 39\] layers"),
        (bad(), {"order": "ndh"}, "order is 'ndh'"),
        (bad(), {"order": "LBNCH"}, "inside a cell"),
        (bad(), {"kv_dtype": "fp4"}, "kv_dtype is 'fp4', expected one of auto"),
        (bad(), {"kv_dtype": "fp8_ds_mla"}, "which grouped-query attention is not kept in"),
        (bad("deepseek-v3"), {"kv_dtype": "nvfp4"}, "which a latent is not kept in"),
        (bad("deepseek-v4-flash"), {"kv_dtype": "nvfp4", "block_size": 256}, "which a compressed latent is not"),
        (bad(), {"state_dtype": "fp8"}, "state_dtype is 'fp8'"),
        (bad("jamba-v0.1"), {"conv_order": "columns"}, "conv_order is 'columns'"),
        (
            bad(),
            {"block_size": 48, "kernel_block_size": 32},
            "kernel_block_size of attention is 32, expected a divisor",
        ),
        (bad(), {"kernel_block_size": {"latent": 8}}, r"kernel_block_size: \['latent'\] are unknown"),
        (bad("gpt-oss-120b"), {"num_blocks": {"attention": 3}}, r"num_blocks: \['window 128'\] are missing"),
        (bad(), {"num_blocks": {"attention": 0}}, "num_blocks of attention is 0"),
        (bad(), {"order": "BLHNC", "kernel_block_size": 8}, "packed rows"),
        (bad(), {"tp_size": 8, "dcp_size": 2}, "k has 8 heads, expected a tp_size of at least 16"),
        (bad("deepseek-v3"), {"tp_size": 3, "dcp_size": 2}, "dcp_size is 2, expected a divisor of tp_size 3"),
        (bad("deepseek-v3"), {"tp_size": 2, "dcp_size": 2, "dcp_interleave": 32}, "multiple of dcp_interleave 32"),
        (bad("deepseek-v4-flash"), {"tp_size": 2, "dcp_size": 2}, "tokens in a cell"),
    ],
)
def test_what_is_refused(given: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=f"(?s){message}"):
        caches(given, **settings)


def test_a_config_file_that_is_none(tmp_path: Path) -> None:
    for content in ("", "[", "[" * 100000, "[]", "\x00"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(LayoutError, match=r"expected a readable config|expected a path, a mapping"):
            caches(tmp_path)
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(17 << 20)
    with pytest.raises(LayoutError, match=r"expected a config\.json"):
        caches(tmp_path)


JUNK = (None, 0, -1, 2**40, 1.5, True, "", "x", [], [0], [None] * 3, {}, {"a": 1}, float("nan"), [[]], "9" * 50)


@pytest.mark.parametrize("path", sorted(DATA.glob("*.json")), ids=lambda path: path.stem)
def test_any_value_of_any_key(path: Path) -> None:
    """A LayoutError or layers, whatever a key holds, in no time and no memory."""
    found = json.loads(path.read_text())
    text = found.get("text_config", found)
    nested = [value for value in text.values() if isinstance(value, dict)]
    for table in (text, *nested):
        for key, value in list(table.items()):
            for junk in JUNK:
                table[key] = junk
                with contextlib.suppress(LayoutError):
                    layers_of(found, mtp=True)
            table[key] = value


@pytest.mark.parametrize("order", ["hnd", "nhd"])
@pytest.mark.parametrize(
    ("built_in", "name", "settings"),
    [
        ("qwen3-235b-a22b", "qwen3-235b-a22b", {"block_size": 16}),
        ("llama-3.3-70b", "llama-3.3-70b", {"block_size": 16}),
        ("deepseek-v3", "deepseek-v3", {"block_size": 64}),
        (
            "kimi-k3-like",
            "kimi-k3-like",
            {"block_size": 768, "kernel_block_size": 64, "align": {"state": 884736}},
        ),
    ],
)
def test_the_demo_s_geometries_are_these(built_in: str, name: str, settings: dict[str, Any], order: str) -> None:
    """The demo's built-in models lie as these: every field of every layer of a rank."""
    model = geometries.MODELS[built_in]
    serving = geometries.Serving(8, order, settings["block_size"])
    demo = geometries.regions(model, serving, 3, len(model.layers), [4] * len(model.groups()))
    (cache,) = caches(config(name), tp_size=8, tp_ranks=[3], order=order, num_blocks=4, **settings)
    starts: dict[object, int] = {}
    ours: dict[tuple[object, str], object] = {}
    for region in cache.regions:
        start = starts.setdefault(region.layer, region.base)
        for field in region.fields:
            moved = replace(field, offset=region.base - start + field.offset)
            ours[region.layer, field.name] = moved, region.block_stride, region.num_blocks, region.kernel_blocks
    theirs = {
        (region.layer, field.name): (field, region.block_stride, region.num_blocks, region.kernel_blocks)
        for region in demo
        for field in region.fields
    }
    assert ours == theirs
