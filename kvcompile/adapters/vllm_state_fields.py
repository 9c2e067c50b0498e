"""The fields of a recurrent state in vLLM's page: what tensor parallelism divides, where the adapter knows it.

vLLM puts the tensors of ``MambaSpec.shapes`` one behind the other. A gated delta net's convolution holds the channels
Q | K | V, each divided by itself, so a rank's page is no slice of another TP size's page.
"""

import math
from typing import Any

from kvcompile.layout import Field

__all__ = ["state_fields"]


def state_fields(worker: Any, spec: Any, size: int) -> tuple[Field, ...]:
    """Return the fields of one block of state.

    Parameters
    ----------
    worker : MooncakeConnectorWorker
    spec : MambaSpec
        This worker's.
    size : int
        The TP size whose fields are asked for.

    Returns
    -------
    tuple of Field
        A gated delta net's ``conv_q``, ``conv_k``, ``conv_v`` and ``ssm`` where the model's configuration names its
        heads; ``ssm`` of linear attention, heads outermost; else one opaque ``state`` a rank.
    """
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
    if spec.tp_replicated:
        return (Field("state", 1, 1, sum(sizes), 0, sum(sizes), sum(sizes), replicated=True),)
    if getattr(spec.mamba_type, "name", "") == "LINEAR" and len(sizes) == 1:
        cell = sizes[0] // spec.shapes[0][0]
        return (Field("ssm", spec.shapes[0][0] * worker.tp_size, 1, cell, 0, cell, cell),)
    return _gated_delta(worker, spec, sizes, size) or (Field("state", size, 1, sum(sizes), 0, sum(sizes), sum(sizes)),)


def _gated_delta(worker: Any, spec: Any, sizes: list[int], size: int) -> tuple[Field, ...]:
    """Return a gated delta net's fields, empty where spec and configuration are not one's."""
    config = getattr(worker.model_config, "hf_text_config", None)
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    values = [int(getattr(config, name, 0)) for name in names]
    if len(spec.shapes) != 2 or min(values) < 1:
        return ()
    k_heads, v_heads, k_dim, v_dim = values
    conv, ssm = spec.shapes
    channels = (2 * k_heads * k_dim + v_heads * v_dim) // worker.tp_size
    divides = not (k_heads % worker.tp_size or v_heads % worker.tp_size or k_heads % size or v_heads % size)
    if not divides or ssm[0] * worker.tp_size != v_heads or channels not in conv or len(conv) != 2:
        return ()
    item = spec.dtypes[0].itemsize
    rows_first = conv[1] == channels
    rows = conv[0] if rows_first else conv[1]
    channels = channels * worker.tp_size // size
    fields, at = [], 0
    for name, heads, dim in (("conv_q", k_heads, k_dim), ("conv_k", k_heads, k_dim), ("conv_v", v_heads, v_dim)):
        if rows_first:  # [row, channel]: a head's channels of one row are a cell
            fields.append(Field(name, heads, rows, dim * item, at * item, dim * item, channels * item))
        else:  # [channel, row]: all rows of a head's channels are a cell
            cell = dim * rows * item
            fields.append(Field(name, heads, 1, cell, at * rows * item, cell, cell))
        at += heads // size * dim
    cell = sizes[1] // ssm[0]
    return (*fields, Field("ssm", v_heads, 1, cell, channels * rows * item, cell, cell))
