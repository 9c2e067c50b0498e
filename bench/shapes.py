"""The seven cases of the facts page: caches, one request each, and what was printed there for vLLM.

Addresses are made up: nothing here owns memory, a build only computes with it.
"""

import random
from typing import NamedTuple

from kvcompile import Buffer, Cache, Field, Group, Region, Request

BLOCK_TOKENS = 16
LAYER_SPAN = 1 << 34
SRC_BASE, DST_BASE = 1 << 44, 1 << 45


class Case(NamedTuple):
    """One measured case; `vllm_ms`: what vLLM 0.33.0's own builder took on the machine of the facts page."""

    name: str
    src: Cache
    dst: Cache
    request: Request
    descriptors: int
    vllm_ms: float | None


def gqa(layers: int, heads: int, num_blocks: int, base: int, tp_rank: int, tp_size: int) -> Cache:
    """Make one rank of a grouped-query model: K and V fused, HND, head dimension 128 in BF16, a region a layer."""
    field = Field.hnd("kv", heads=heads, tokens=BLOCK_TOKENS, cell_nbytes=2 * 128 * 2)
    block_nbytes = max(1, heads // tp_size) * BLOCK_TOKENS * field.cell_nbytes
    return cache(layers, field, block_nbytes, num_blocks, base, tp_rank, tp_size)


def mla(layers: int, num_blocks: int, base: int) -> Cache:
    """Make one rank of a DeepSeek-like model: one latent of 576 BF16 values a token, whole on every rank."""
    field = Field.hnd("latent", heads=1, tokens=BLOCK_TOKENS, cell_nbytes=576 * 2, replicated=True)
    return cache(layers, field, BLOCK_TOKENS * field.cell_nbytes, num_blocks, base, 0, 1)


def cache(
    layers: int, field: Field, block_nbytes: int, num_blocks: int, base: int, tp_rank: int, tp_size: int
) -> Cache:
    """Make a cache of equal layers, each a region in a buffer of its own."""
    bases = [base + layer * LAYER_SPAN for layer in range(layers)]
    return Cache(
        regions=[Region(f"layers.{i}", 0, at, block_nbytes, num_blocks, [field]) for i, at in enumerate(bases)],
        groups=[Group(field.tokens)],
        buffers=[Buffer(at, num_blocks * block_nbytes) for at in bases],
        tp_rank=tp_rank,
        tp_size=tp_size,
    )


def ids(blocks: int, run: int, seed: int) -> list[int]:
    """Draw distinct block ids in consecutive runs of exactly `run`, the runs in random order."""
    starts = [(run + 1) * slot for slot in range(blocks // run)]
    random.Random(seed).shuffle(starts)
    return [start + i for start in starts for i in range(run)]


def case(name: str, src: Cache, dst: Cache, blocks: int, run: int, descriptors: int, vllm_ms: float | None) -> Case:
    """Make a case of one request of `blocks` blocks in runs of `run`."""
    request = Request("request", [ids(blocks, run, 1)], [ids(blocks, run, 2)])
    return Case(name, src, dst, request, descriptors, vllm_ms)


def cases() -> list[Case]:
    """Make the seven cases: Qwen3-235B-A22B (94 layers, 4 KV heads), Llama-3.3-70B (80, 8), DeepSeek-V3 (61)."""
    blocks, room = 2048, 4096
    qwen_src, qwen_dst = (gqa(94, 4, room, base, 1, 4) for base in (SRC_BASE, DST_BASE))
    qwen_tp1 = gqa(94, 4, room, DST_BASE, 0, 1)
    llama_src = gqa(80, 8, 2 * 8192, SRC_BASE, 1, 4)
    llama_dst = gqa(80, 8, 2 * 8192, DST_BASE, 3, 8)
    mla_src, mla_dst = (mla(61, room, base) for base in (SRC_BASE, DST_BASE))
    return [
        case("equal TP, contiguous", qwen_src, qwen_dst, blocks, blocks, 94, 20.1),
        case("equal TP, runs of 8", qwen_src, qwen_dst, blocks, 8, 24_064, 54.7),
        case("equal TP, scattered", qwen_src, qwen_dst, blocks, 1, 192_512, 506.6),
        case("TP4 to TP1, scattered", qwen_src, qwen_tp1, blocks, 1, 192_512, 472.2),
        case("TP4 to TP1, contiguous", qwen_src, qwen_tp1, blocks, blocks, 192_512, 46.9),
        case("TP4 to TP8, 80 x 8,192, runs of 8", llama_src, llama_dst, 8192, 8, 655_360, 329.8),
        case("MLA, 61 layers, contiguous", mla_src, mla_dst, blocks, blocks, 61, 12.3),
    ]
