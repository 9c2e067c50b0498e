"""Builders: what the fields of every kind of cache are, and how engines lay them out. Each cites its source.

A builder returns an `Arrangement`, or several where they follow one another in a block; `Arrangement.regions` and
`stack` place it in memory, `Cache.from_torch` takes the places from a tensor's strides instead.
"""

from kvcompile.fields.arrangement import Arrangement, Part, stack
from kvcompile.fields.attention import dense, nvfp4, whole
from kvcompile.fields.latent import FP8_DS_MLA_NBYTES, NVFP4_DS_MLA_NBYTES, compressed, indexer, latent
from kvcompile.fields.state import Projection, conv, gdn, kda, linear, mamba1, mamba2, matrices

__all__ = [
    "FP8_DS_MLA_NBYTES",
    "NVFP4_DS_MLA_NBYTES",
    "Arrangement",
    "Part",
    "Projection",
    "compressed",
    "conv",
    "dense",
    "gdn",
    "indexer",
    "kda",
    "latent",
    "linear",
    "mamba1",
    "mamba2",
    "matrices",
    "nvfp4",
    "stack",
    "whole",
]
