"""The bytes that two peers exchange: one msgpack frame with a version. It knows nothing of what is inside."""

import hashlib
from typing import TypeVar

import msgspec

from kvcompile.errors import HandshakeError, KVCompileError

__all__ = ["MAX_NBYTES", "VERSION", "digest", "pack", "unpack"]

VERSION = 1
"""Covers the format and the election rules: peers of two versions would elect different senders."""

MAX_NBYTES = 4 << 20
"""A cache of 1,000 layers takes about 200 KB; what is larger is not parsed."""

_TAG = "kvcompile"
_T = TypeVar("_T")


class _Frame(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    tag: str
    version: int
    body: msgspec.Raw


def pack(value: object) -> bytes:
    """Encode a value as a frame; equal values give equal bytes."""
    encode = msgspec.msgpack.encode
    return encode(_Frame(_TAG, VERSION, msgspec.Raw(encode(value))))


def unpack(data: bytes, kind: type[_T]) -> _T:
    """Decode a frame into a value of ``kind``.

    Raises
    ------
    HandshakeError
        Not bytes, too long, truncated, extended, not msgpack, another version, or not a valid value of ``kind``.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise HandshakeError(f"handshake: expected bytes, got {type(data).__name__}")
    if len(data) > MAX_NBYTES:
        raise HandshakeError(f"handshake: expected at most {MAX_NBYTES} bytes, got {len(data)}")
    try:
        frame = msgspec.msgpack.decode(data, type=_Frame)
        if frame.tag != _TAG:
            raise HandshakeError(f"handshake: expected tag {_TAG!r}, got {frame.tag[:40]!r}")
        if frame.version != VERSION:
            raise HandshakeError(
                f"handshake: this side speaks version {VERSION}, the peer's bytes are version {frame.version}"
            )
        return msgspec.msgpack.decode(frame.body, type=kind)
    except HandshakeError:
        raise
    except (msgspec.MsgspecError, KVCompileError, ValueError, RecursionError) as error:
        raise HandshakeError(f"handshake: {len(data)} bytes are no valid {kind.__name__}: {error}") from error


def digest(*parts: bytes) -> str:
    """Return the sha256 of the parts, in hex."""
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
    return total.hexdigest()
