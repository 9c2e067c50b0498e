"""Modules that are run when they are first needed, so that importing this package does not import a compiler."""

import importlib.util
import sys
from types import ModuleType

__all__ = ["later"]


def later(name: str) -> ModuleType:
    """Return a module that is run when something in it is first asked for."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ImportError(f"{name} is not there")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
