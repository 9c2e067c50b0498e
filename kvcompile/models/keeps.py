"""What one layer of a model keeps: a value for each kind of cache. It reads no config."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

from kvcompile import fields
from kvcompile.errors import LayoutError
from kvcompile.fields import Arrangement

__all__ = ["Attention", "Compressed", "Delta", "Indexer", "Keep", "Latent", "Lightning", "Mamba1", "Mamba2", "Serving"]

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
SCALED = {"fp8_per_token_head": (1, 1), "int8_per_token_head": (1, 1), "int4_per_token_head": (1, 2)}
"""Element sizes as fractions; with each goes a float32 scale a token and head (`fields.dense`)."""
KV_DTYPES = ("auto", *ITEMSIZES, *SCALED, "nvfp4", "fp8_ds_mla", "nvfp4_ds_mla")


class Serving(NamedTuple):
    """How one side serves a model, apart from ranks and memory.

    Attributes
    ----------
    kv_dtype : str
        One of `KV_DTYPES`, vLLM's names; ``auto``: the model's own.
    itemsize : int
        Bytes of an element of the model's own type.
    state_itemsize : int or None
        Bytes of an element of recurrent matrices; None: what the kind has by default.
    order : str
        Of keys and values, as of `Arrangement`.
    conv_order : str
        Of convolution states, one of `fields.state.CONV_ORDERS`.
    dcp_sharded : bool
        Decode context parallelism divides the tokens of attention.
    align : mapping
        Kernel blocks of a kind are padded to a multiple of so many bytes.
    """

    kv_dtype: str
    itemsize: int
    state_itemsize: int | None
    order: str
    conv_order: str
    dcp_sharded: bool
    align: Mapping[str, int]

    def cell(self, elements: int) -> int:
        """Return the bytes of so many elements of the KV type."""
        if self.kv_dtype in SCALED:
            numerator, denominator = SCALED[self.kv_dtype]
            return elements * numerator // denominator
        return elements * ITEMSIZES.get(self.kv_dtype, self.itemsize)

    def padding(self, kind: str) -> int:
        """Return what kernel blocks of a kind are padded to."""
        return self.align.get(kind, 1)

    def refuse(self, kind: str) -> LayoutError:
        return LayoutError(f"kv_dtype is {self.kv_dtype!r}, which {kind} is not kept in")


@dataclass(frozen=True)
class Attention:
    """Keys and values of grouped-query attention. ``v_dim`` None: as ``k_dim``; ``window``: so many tokens back."""

    heads: int
    k_dim: int
    v_dim: int | None = None
    window: int | None = None

    state: ClassVar = False
    kind: ClassVar = "attention"
    own_block_size: ClassVar = None

    @property
    def group(self) -> str:
        return "attention" if self.window is None else f"window {self.window}"

    def arrangements(self, serving: Serving, tokens: int) -> tuple[Arrangement, ...]:
        """Arrange a kernel block of so many tokens."""
        sharded = serving.dcp_sharded and self.window is None
        v_dim = self.k_dim if self.v_dim is None else self.v_dim
        common: dict[str, Any] = {
            "heads": self.heads,
            "tokens": tokens,
            "order": serving.order,
            "dcp_sharded": sharded,
            "align": serving.padding(self.kind),
        }
        if serving.kv_dtype == "nvfp4":
            if v_dim != self.k_dim:
                raise LayoutError(f"kv_dtype is 'nvfp4', expected heads of K and V alike, got {self.k_dim} and {v_dim}")
            return (fields.nvfp4(head_dim=self.k_dim, **common),)
        if serving.kv_dtype.endswith("ds_mla"):
            raise serving.refuse("grouped-query attention")
        scales = "token_head" if serving.kv_dtype in SCALED else "none"
        k_nbytes, v_nbytes = serving.cell(self.k_dim), serving.cell(v_dim)
        return (fields.dense(k_nbytes=k_nbytes, v_nbytes=v_nbytes, scales=scales, **common),)


@dataclass(frozen=True)
class Latent:
    """Latent and rope part of MLA, one cell a token on every rank."""

    lora_rank: int
    rope_dim: int

    state: ClassVar = False
    kind: ClassVar = "latent"
    group: ClassVar = "attention"
    own_block_size: ClassVar = None

    def arrangements(self, serving: Serving, tokens: int) -> tuple[Arrangement, ...]:
        """Arrange a kernel block of so many tokens."""
        elements = self.lora_rank + self.rope_dim
        if serving.kv_dtype == "nvfp4":
            raise serving.refuse("a latent")
        packed = {"fp8_ds_mla": fields.FP8_DS_MLA_NBYTES, "nvfp4_ds_mla": fields.NVFP4_DS_MLA_NBYTES}
        if serving.kv_dtype in packed:
            if (self.lora_rank, self.rope_dim) != (512, 64):
                raise LayoutError(f"kv_dtype is {serving.kv_dtype!r}, expected a latent of 512 + 64, got {elements}")
            nbytes = packed[serving.kv_dtype]
        else:
            nbytes = serving.cell(elements) + 8 * (serving.kv_dtype in SCALED)  # a pair of scales in the cell
        made = fields.latent(
            tokens=tokens,
            cell_nbytes=nbytes,
            dcp_sharded=serving.dcp_sharded,
            order=outer(serving.order) + "NC",
            align=serving.padding(self.kind),
        )
        return (made,)


@dataclass(frozen=True)
class Indexer:
    """Keys of a sparse-attention indexer, whole on every rank. ``scaled``: FP8 with a float32 scale in any case."""

    head_dim: int
    scaled: bool = True
    tokens_per_cell: int = 1

    state: ClassVar = False
    kind: ClassVar = "indexer"
    group: ClassVar = "attention"
    own_block_size: ClassVar = None

    def arrangements(self, serving: Serving, tokens: int) -> tuple[Arrangement, ...]:
        """Arrange a kernel block of so many tokens."""
        made = fields.indexer(
            tokens=tokens,
            head_dim=self.head_dim if self.scaled else self.head_dim * serving.itemsize,
            scale_nbytes=4 if self.scaled else 0,
            tokens_per_cell=self.tokens_per_cell,
            dcp_sharded=serving.dcp_sharded and self.tokens_per_cell == 1,
            order=outer(serving.order) + "PNC",
            align=max(serving.padding(self.kind), 576 if self.tokens_per_cell > 1 else 1),
        )
        return (made,)


@dataclass(frozen=True)
class Compressed:
    """DeepSeek-V4's latents: one a token in a window, or one for several tokens; and the compressor's float32 state."""

    name: str
    dim: int
    tokens_per_cell: int = 1
    window: int | None = None
    raw_nbytes: int = 0
    own_block_size: int | None = None

    state: ClassVar = False
    kind: ClassVar = "compressed"

    @property
    def group(self) -> str:
        if self.own_block_size is not None:
            return f"compressor {self.window}"
        return "attention" if self.window is None else f"window {self.window}"

    def arrangements(self, serving: Serving, tokens: int) -> tuple[Arrangement, ...]:
        """Arrange a kernel block of so many tokens."""
        packed = serving.kv_dtype in ("auto", "fp8_ds_mla")
        if not packed and serving.kv_dtype not in ITEMSIZES:
            raise serving.refuse("a compressed latent")
        if self.raw_nbytes:
            cell, scale = self.raw_nbytes, 0
        elif packed:
            cell, scale = 448 + 2 * (self.dim - 448), 8
        else:
            cell, scale = serving.cell(self.dim), 0
        made = fields.compressed(
            tokens=tokens,
            tokens_per_cell=self.tokens_per_cell,
            cell_nbytes=cell,
            scale_nbytes=scale,
            name=self.name,
            order=outer(serving.order) + "PNC",
            align=max(serving.padding(self.kind), 576 if packed else 512),
        )
        return (made,)


class Recurrent:
    """What all recurrent states have in common."""

    state: ClassVar = True
    kind: ClassVar = "state"
    group: ClassVar = "state"
    own_block_size: ClassVar = None


@dataclass(frozen=True)
class Mamba1(Recurrent):
    """Mamba-1 state, of as many channels."""

    channels: int
    state_size: int
    kernel: int

    def arrangements(self, serving: Serving, tokens: int) -> tuple[Arrangement, ...]:
        """Arrange a block."""
        return fields.mamba1(**asdict(self), **_state(serving, serving.itemsize))


@dataclass(frozen=True)
class Mamba2(Recurrent):
    """Mamba-2 state."""

    heads: int
    head_dim: int
    groups: int
    state_size: int
    kernel: int

    def arrangements(self, serving: Serving, tokens: int) -> tuple[Arrangement, ...]:
        """Arrange a block."""
        return fields.mamba2(**asdict(self), **_state(serving, serving.itemsize))


@dataclass(frozen=True)
class Delta(Recurrent):
    """State of a gated delta net (GDN, KDA). ``float32``: matrices in float32 unless the user says otherwise."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    kernel: int
    float32: bool = False

    def arrangements(self, serving: Serving, tokens: int) -> tuple[Arrangement, ...]:
        """Arrange a block."""
        return fields.gdn(
            k_heads=self.k_heads,
            v_heads=self.v_heads,
            k_dim=self.k_dim,
            v_dim=self.v_dim,
            kernel=self.kernel,
            **_state(serving, 4 if self.float32 else serving.itemsize),
        )


@dataclass(frozen=True)
class Lightning(Recurrent):
    """State of linear attention: a square matrix for each head."""

    heads: int
    head_dim: int

    def arrangements(self, serving: Serving, tokens: int) -> tuple[Arrangement, ...]:
        """Arrange a block."""
        itemsize = serving.state_itemsize or 4
        return fields.linear(heads=self.heads, head_dim=self.head_dim, state_itemsize=itemsize)


Keep = Attention | Latent | Indexer | Compressed | Mamba1 | Mamba2 | Delta | Lightning


def outer(order: str) -> str:
    """Return L and B in the order that another order has them in."""
    return "LB" if order.index("L") < order.index("B") else "BL"


def _state(serving: Serving, state_itemsize: int) -> dict[str, Any]:
    return {
        "itemsize": serving.itemsize,
        "state_itemsize": serving.state_itemsize or state_itemsize,
        "order": serving.conv_order,
    }
