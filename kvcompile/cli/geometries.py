"""Built-in model geometries: what one layer keeps for a token, and where a rank puts it. It allocates nothing.

Each model names the published figures that it is made of; `cache` turns one into a rank's `Cache`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from kvcompile import Cache, Field, Group, Region
from kvcompile.topology import shard

__all__ = ["MODELS", "Delta", "Dense", "Latent", "Model", "Serving", "cache", "regions"]


@dataclass(frozen=True)
class Serving:
    """How one side serves a model: TP size, memory order ("hnd" or "nhd"), tokens of a block."""

    tp_size: int
    order: str
    block_size: int


@dataclass(frozen=True)
class Dense:
    """Keys and values of grouped-query attention: a block is [K | V], each [heads, tokens] or [tokens, heads]."""

    heads: int
    cell_nbytes: int
    group: str = "attention"

    def fields(self, serving: Serving, tp_rank: int, tokens: int) -> list[Field]:
        local = _local(self.heads, serving, tp_rank)
        sizes = {"heads": self.heads, "tokens": tokens, "cell_nbytes": self.cell_nbytes}
        half = local * tokens * self.cell_nbytes
        if serving.order == "hnd":
            return [Field.hnd("k", **sizes), Field.hnd("v", offset=half, **sizes)]
        return [Field.nhd("k", local_heads=local, **sizes), Field.nhd("v", local_heads=local, offset=half, **sizes)]


@dataclass(frozen=True)
class Latent:
    """The compressed latent and rope part of MLA, whole on every rank."""

    cell_nbytes: int
    group: str = "attention"

    def fields(self, serving: Serving, tp_rank: int, tokens: int) -> list[Field]:
        return [Field.hnd("latent", heads=1, tokens=tokens, cell_nbytes=self.cell_nbytes, replicated=True)]


@dataclass(frozen=True)
class Delta:
    """Recurrent state of Kimi Delta Attention: rows of the convolutions' [Q | K | V], then the heads' matrices."""

    heads: int
    rows: int
    conv_nbytes: int
    matrix_nbytes: int
    group: str = "state"

    def fields(self, serving: Serving, tp_rank: int, tokens: int) -> list[Field]:
        local = _local(self.heads, serving, tp_rank)
        part = local * self.conv_nbytes
        conv = {"heads": self.heads, "local_heads": 3 * local, "tokens": self.rows, "cell_nbytes": self.conv_nbytes}
        fields = [Field.nhd(f"conv_{name}", offset=place * part, **conv) for place, name in enumerate("qkv")]
        ssm = {"heads": self.heads, "tokens": 1, "cell_nbytes": self.matrix_nbytes}
        return [*fields, Field.hnd("ssm", offset=3 * self.rows * part, **ssm)]


Kind = Dense | Latent | Delta


@dataclass(frozen=True)
class Model:
    """Layers of a model, first to last.

    Attributes
    ----------
    block_size : int
        Tokens of a block unless the user says otherwise.
    kernel_tokens : int or None
        Tokens of a kernel block; a block by default.
    page_nbytes : int
        State blocks are padded to a multiple of it.
    """

    layers: tuple[Kind, ...]
    block_size: int = 16
    kernel_tokens: int | None = None
    page_nbytes: int = 1

    def groups(self) -> list[str]:
        """Names of the groups, in order of first use: layers with block tables of one kind share them."""
        return list(dict.fromkeys(kind.group for kind in self.layers))


MODELS = {
    # config.json: num_hidden_layers 94, num_key_value_heads 4, head_dim 128, bfloat16
    "qwen3-235b-a22b": Model((Dense(4, 256),) * 94),
    # config.json: num_hidden_layers 80, num_key_value_heads 8, head_dim 128, bfloat16
    "llama-3.3-70b": Model((Dense(8, 256),) * 80),
    # config.json: num_hidden_layers 61, kv_lora_rank 512, qk_rope_head_dim 64, bfloat16
    "deepseek-v3": Model((Latent(1152),) * 61, block_size=64),
    # 93 layers, 24 of them MLA and 69 KDA: Kimi-K3's config as inference-sim#1638 quotes it; every fourth and the last
    # are MLA, as in Kimi-Linear. Blocks of 768 tokens in kernel blocks of 64, 884,736 bytes: vllm#54272. 96 KDA heads
    # of 128 are inferred: at TP 8 they need 814,080 bytes of state, for which vLLM rounds the block up to 768 tokens.
    # Convolution over 4 inputs, so 3 rows are kept, bfloat16; matrices float32: as in Kimi-Linear.
    "kimi-k3-like": Model(
        tuple(Latent(1152) if n % 4 == 0 or n == 93 else Delta(96, 3, 256, 65536) for n in range(1, 94)),
        block_size=768,
        kernel_tokens=64,
        page_nbytes=884736,
    ),
}


def regions(model: Model, serving: Serving, tp_rank: int, layers: int, num_blocks: Sequence[int]) -> list[Region]:
    """Lay out the first layers of a model on one rank, every region at base 0.

    Parameters
    ----------
    num_blocks : sequence of int
        Blocks of each group, in the order of `Model.groups`.

    Raises
    ------
    ValueError
        A block size that is no multiple of the kernel block's.
    """
    kernel_tokens = model.kernel_tokens or serving.block_size
    if serving.block_size % kernel_tokens:
        raise ValueError(
            f"block size is {serving.block_size}, expected a multiple of {kernel_tokens}, the kernel block's"
        )
    made = []
    for number, kind in enumerate(model.layers[:layers]):
        state = isinstance(kind, Delta)
        fields = kind.fields(serving, tp_rank, kernel_tokens)
        nbytes = sum(_nbytes(field, serving, tp_rank) for field in fields)
        stride = -(-nbytes // model.page_nbytes) * model.page_nbytes if state else nbytes
        kernel_blocks = 1 if state else serving.block_size // kernel_tokens
        group = model.groups().index(kind.group)
        blocks = num_blocks[group] * kernel_blocks
        made.append(Region(f"layers.{number}", group, 0, stride, blocks, tuple(fields), kernel_blocks))
    return made


def cache(
    model: Model,
    serving: Serving,
    tp_rank: int,
    layers: int,
    num_blocks: Sequence[int],
    place: Callable[[int], int],
) -> Cache:
    """Make the cache of one rank; ``place`` gives the address of so many bytes, once for each layer."""
    made = tuple(
        msgspec.structs.replace(region, base=place(region.block_stride * region.num_blocks))
        for region in regions(model, serving, tp_rank, layers, num_blocks)
    )
    groups = tuple(Group(serving.block_size, state=name == "state") for name in model.groups())
    return Cache(made, groups, tp_rank=tp_rank, tp_size=serving.tp_size)


def _local(heads: int, serving: Serving, tp_rank: int) -> int:
    start, stop = shard(heads, tp_rank, serving.tp_size)
    return stop - start


def _nbytes(field: Field, serving: Serving, tp_rank: int) -> int:
    local = field.heads if field.replicated else _local(field.heads, serving, tp_rank)
    return local * field.tokens * field.cell_nbytes
