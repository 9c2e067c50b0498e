"""The one place that says how kernels are compiled, and where the result is kept on disk. It holds no kernel.

Numba stamps a cached kernel by its own file alone, so an edit in `kernels/item.py` would leave a stale loop. The
cache folder is therefore named after a digest of all of `kernels/` and of the Numba version.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
from numba import types
from numba.core import cgutils
from numba.core.runtime import rtsys
from numba.extending import intrinsic

__all__ = ["bare", "cache_folder", "entry", "jit", "locked", "move"]


@functools.cache
def cache_folder() -> Path | None:
    """Return the folder of the compiled kernels, None where none can be written.

    ``$NUMBA_CACHE_DIR`` if set, else ``$XDG_CACHE_HOME`` or ``~/.cache``; below it ``kvcompile/<digest>``.
    """
    total = hashlib.sha256(numba.__version__.encode())
    for file in sorted((Path(__file__).parent / "kernels").glob("*.py")):
        total.update(file.name.encode())
        total.update(file.read_bytes())
    total.update(Path(__file__).read_bytes())
    root = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root) / "kvcompile" / total.hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


def entry(function: Callable[..., Any]) -> Any:
    """Compile a function that Python calls: nopython, without the GIL, cached on disk; lazily, at its first call."""
    folder = cache_folder()
    before = numba.config.CACHE_DIR
    try:
        if folder is not None:
            numba.config.CACHE_DIR = str(folder)  # read by Numba when it decorates, not later
        kernel = numba.njit(cache=folder is not None, **_OPTIONS)(function)
    finally:
        numba.config.CACHE_DIR = before
    kept: Any = getattr(kernel, "_cache", None)
    if hasattr(kept, "_load_overload"):
        kept.load_overload = functools.partial(_load, kept)
    return kernel


def _load(kept: Any, signature: Any, context: Any) -> Any:
    """Load a kernel from its cache without declaring before all that Numba can compile, most of a first build's time.

    To compile, Numba declares it then.
    """
    rtsys.initialize(context)
    return kept._load_overload(signature, context)


def jit(function: Callable[..., Any]) -> Any:
    """Compile a function that only kernels call: it is part of what is cached of them, and needs no wrapper."""
    return numba.njit(no_cpython_wrapper=True, **_OPTIONS)(function)


# No divisor here is ever zero, and nobody calls a kernel from C: both would cost compile time.
_OPTIONS = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Hold the cache folder's lock: of many processes that start at once, one compiles and the others load."""
    folder = cache_folder()
    if folder is None:
        yield
        return
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@intrinsic  # type: ignore[untyped-decorator]
def _bare(typing_context: Any, array: Any) -> Any:
    """Return the same array without its reference count: its parts cost no atomic operation each.

    For the arrays that Python passed, which live until the kernel returns.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        struct = context.make_array(signature.return_type)(context, builder, args[0])
        struct.meminfo = cgutils.get_null_value(struct.meminfo.type)
        struct.parent = cgutils.get_null_value(struct.parent.type)
        return struct._getvalue()

    return array(array), codegen


bare = (lambda array: array) if numba.config.DISABLE_JIT else _bare


@intrinsic  # type: ignore[untyped-decorator]
def move(typing_context: Any, dst: Any, src: Any, nbytes: Any) -> Any:
    """``memmove(dst, src, nbytes)`` on raw addresses (int64, as wrapped around from unsigned)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, source, size = args
        to = builder.inttoptr(to, cgutils.voidptr_t)
        source = builder.inttoptr(source, cgutils.voidptr_t)
        cgutils.raw_memmove(builder, to, source, size, itemsize=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen
