"""Models: from a Hugging Face config.json to the caches of all ranks; layers described by hand where it is unknown."""

from kvcompile.models.deploy import caches, group_names
from kvcompile.models.families import FAMILIES, Layer, layers_of
from kvcompile.models.keeps import Attention, Compressed, Delta, Indexer, Latent, Lightning, Mamba1, Mamba2

__all__ = [
    "FAMILIES",
    "Attention",
    "Compressed",
    "Delta",
    "Indexer",
    "Latent",
    "Layer",
    "Lightning",
    "Mamba1",
    "Mamba2",
    "caches",
    "group_names",
    "layers_of",
]
