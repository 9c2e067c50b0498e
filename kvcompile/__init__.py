"""A small compiler from two KV-cache layouts to the descriptors of an RDMA engine (see docs and README)."""

from kvcompile.backend import warmup
from kvcompile.cache import Cache
from kvcompile.descriptors import Descriptors
from kvcompile.errors import HandshakeError, KVCompileError, LayoutError, RequestError, TransferError
from kvcompile.layout import Buffer, Field, Group, Region
from kvcompile.plan import Plan, compile
from kvcompile.proof import Proof, prove
from kvcompile.request import Request
from kvcompile.together import build_all

__all__ = [
    "Buffer",
    "Cache",
    "Descriptors",
    "Field",
    "Group",
    "HandshakeError",
    "KVCompileError",
    "LayoutError",
    "Plan",
    "Proof",
    "Region",
    "Request",
    "RequestError",
    "TransferError",
    "build_all",
    "compile",
    "prove",
    "warmup",
]
