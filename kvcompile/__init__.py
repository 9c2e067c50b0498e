"""A small compiler from two KV-cache layouts to the descriptors of an RDMA engine (see docs and README)."""

from kvcompile.cache import Cache
from kvcompile.errors import HandshakeError, KVCompileError, LayoutError, RequestError, TransferError
from kvcompile.layout import Buffer, Field, Group, Region

__all__ = [
    "Buffer",
    "Cache",
    "Field",
    "Group",
    "HandshakeError",
    "KVCompileError",
    "LayoutError",
    "Region",
    "RequestError",
    "TransferError",
]
