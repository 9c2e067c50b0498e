"""Recurrent state: convolution states cut into their projections, and the heads' matrices. It has no tokens.

A convolution state keeps the last rows (kernel size less one) of several projections side by side, and tensor
parallelism cuts each projection by itself: vLLM 0.33.0,
``distributed/kv_transfer/kv_connector/v1/ssm_conv_transfer_utils.py``, ``MambaConvSplitInfo``. Its two orders are
``SD`` (row first) and ``DS`` (dimension first): ``model_executor/layers/mamba/ mamba_utils.py``,
``get_conv_state_layout``; SGLang 0.5.23, ``configs/mamba_utils.py``, has dimension first for Mamba-2 and GDN, row
first for KDA. The state itself follows in the same block (``MambaSpec.shapes``).
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvcompile.errors import LayoutError
from kvcompile.fields.arrangement import Arrangement, Part

__all__ = ["CONV_ORDERS", "Projection", "conv", "gdn", "kda", "linear", "mamba1", "mamba2", "matrices"]

CONV_ORDERS = ("row_first", "dim_first")


class Projection(NamedTuple):
    """One projection of a convolution: heads (whatever tensor parallelism divides) of ``head_dim`` channels."""

    name: str
    heads: int
    head_dim: int


def conv(
    projections: Sequence[Projection],
    *,
    rows: int,
    itemsize: int = 2,
    order: str = "row_first",
    by_channel: bool = False,
) -> Arrangement:
    """Arrange a convolution state.

    Parameters
    ----------
    projections : sequence of Projection
        In the order of the channels. Heads fewer than ranks are replicated, as any field's: Mamba-2's B and C (vLLM
        0.33.0, ``mamba_utils.py``, ``extra_groups_for_head_shards``).
    rows : int
        Kernel size less one; plus the speculative tokens that are kept.
    order : str
        ``row_first``: [rows, channels]; ``dim_first``: [channels, rows].
    by_channel : bool
        Cells of one value instead of a head's: the two orders then move into each other, two bytes at a time. Only
        where the TP sizes divide every projection's heads.
    """
    if order not in CONV_ORDERS:
        raise LayoutError(f"order of a convolution state is {order!r:.80}, expected one of {', '.join(CONV_ORDERS)}")
    parts = []
    for name, heads, head_dim in projections:
        if by_channel:
            parts.append(Part(name, heads * head_dim, rows, itemsize))
        elif order == "row_first":
            parts.append(Part(name, heads, rows, head_dim * itemsize))
        else:
            parts.append(Part(name, heads, 1, head_dim * rows * itemsize))
    return Arrangement(parts, "LBNPHC" if order == "row_first" else "LBPHNC")


def matrices(name: str, *, heads: int, head_nbytes: int) -> Arrangement:
    """Arrange the temporal state: each head's matrix one cell."""
    return Arrangement([Part(name, heads, 1, head_nbytes)], "LBHNC")


def mamba1(
    *, channels: int, state_size: int, kernel: int, itemsize: int = 2, state_itemsize: int = 2, order: str = "row_first"
) -> tuple[Arrangement, Arrangement]:
    """Arrange Mamba-1 state: convolution [x], and ``state_size`` values for each channel.

    vLLM 0.33.0, ``mamba_utils.py``, ``MambaStateShapeCalculator.mamba1_state_shape``; SGLang 0.5.23,
    ``configs/mamba_utils.py``, ``Mamba2StateShape.create_full_rank``.

    Parameters
    ----------
    channels : int
        ``mamba_expand * hidden_size``.
    state_size, kernel : int
        ``mamba_d_state``, ``mamba_d_conv``.
    itemsize, state_itemsize : int
        Bytes of a value of the convolution state and of the temporal state.
    """
    return (
        conv([Projection("conv_x", channels, 1)], rows=kernel - 1, itemsize=itemsize, order=order),
        matrices("ssm", heads=channels, head_nbytes=state_size * state_itemsize),
    )


def mamba2(
    *,
    heads: int,
    head_dim: int,
    groups: int,
    state_size: int,
    kernel: int,
    itemsize: int = 2,
    state_itemsize: int = 4,
    order: str = "row_first",
) -> tuple[Arrangement, Arrangement]:
    """Arrange Mamba-2 state: convolution [x | B | C], and a matrix for each head; B and C by groups.

    vLLM 0.33.0, ``mamba_utils.py``, ``MambaStateShapeCalculator.mamba2_state_shape``; SGLang 0.5.23,
    ``configs/mamba_utils.py``, ``Mamba2StateShape.create``.

    Parameters
    ----------
    heads, head_dim : int
        ``mamba_num_heads``, ``mamba_head_dim``.
    groups : int
        ``n_groups``: on more ranks than that, each has one of them.
    state_size, kernel : int
        ``ssm_state_size``, ``conv_kernel``.
    """
    projections = [
        Projection("conv_x", heads, head_dim),
        Projection("conv_b", groups, state_size),
        Projection("conv_c", groups, state_size),
    ]
    return (
        conv(projections, rows=kernel - 1, itemsize=itemsize, order=order),
        matrices("ssm", heads=heads, head_nbytes=head_dim * state_size * state_itemsize),
    )


def gdn(
    *,
    k_heads: int,
    v_heads: int,
    k_dim: int,
    v_dim: int,
    kernel: int,
    itemsize: int = 2,
    state_itemsize: int = 4,
    order: str = "row_first",
) -> tuple[Arrangement, Arrangement]:
    """Arrange the state of a gated delta net: convolution [Q | K | V], and a matrix for each value head.

    vLLM 0.33.0, ``mamba_utils.py``, ``MambaStateShapeCalculator.gated_delta_net_state_shape``; SGLang 0.5.23,
    ``configs/mamba_utils.py``, ``Mamba2StateShape.conv_shard_groups``.

    Parameters
    ----------
    k_heads, v_heads, k_dim, v_dim, kernel : int
        ``linear_num_key_heads``, ``linear_num_value_heads``, ``linear_key_head_dim``, ``linear_value_head_dim``,
        ``linear_conv_kernel_dim``. Q has the heads of K.
    """
    projections = [
        Projection("conv_q", k_heads, k_dim),
        Projection("conv_k", k_heads, k_dim),
        Projection("conv_v", v_heads, v_dim),
    ]
    return (
        conv(projections, rows=kernel - 1, itemsize=itemsize, order=order),
        matrices("ssm", heads=v_heads, head_nbytes=v_dim * k_dim * state_itemsize),
    )


def kda(
    *, heads: int, head_dim: int, kernel: int, itemsize: int = 2, state_itemsize: int = 4, order: str = "row_first"
) -> tuple[Arrangement, Arrangement]:
    """Arrange the state of Kimi Delta Attention: a gated delta net with equal heads.

    vLLM 0.33.0, ``mamba_utils.py``, ``MambaStateShapeCalculator.kda_state_shape`` (float32 matrices,
    ``MambaStateDtypeCalculator.kda_state_dtype``); SGLang 0.5.23, ``configs/mamba_utils.py``, ``KimiLinearStateShape``.
    """
    return gdn(
        k_heads=heads,
        v_heads=heads,
        k_dim=head_dim,
        v_dim=head_dim,
        kernel=kernel,
        itemsize=itemsize,
        state_itemsize=state_itemsize,
        order=order,
    )


def linear(*, heads: int, head_dim: int, state_itemsize: int = 4) -> tuple[Arrangement]:
    """Arrange the state of linear (lightning) attention: a matrix for each head, and no convolution.

    vLLM 0.33.0, ``mamba_utils.py``, ``MambaStateShapeCalculator.linear_attention_state_shape``: MiniMax-Text-01 and M1.
    """
    return (matrices("ssm", heads=heads, head_nbytes=head_dim * head_dim * state_itemsize),)
