"""Engines move the bytes that descriptors name; Mooncake itself is imported when a `MooncakeEngine` is made."""

from kvcompile.engines.base import Engine
from kvcompile.engines.local import LocalEngine
from kvcompile.engines.mooncake import MooncakeEngine

__all__ = ["Engine", "LocalEngine", "MooncakeEngine"]
