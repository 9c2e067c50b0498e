"""The engine for one process: peers are other engines of the process, and bytes move by a jitted loop. No network."""

import os
import secrets
import weakref
from typing import ClassVar

from kvcompile import backend
from kvcompile.descriptors import Descriptors
from kvcompile.engines.base import Engine
from kvcompile.errors import TransferError
from kvcompile.layout import Buffer

__all__ = ["BATCH_NBYTES", "LocalEngine"]

BATCH_NBYTES = 64 << 20
"""Bytes between two looks at whether the caller has left: some milliseconds of copying."""


class LocalEngine(Engine):
    """Copy between caches of one process, after checking that every descriptor lies in registered memory on both sides.

    Parameters
    ----------
    max_nbytes : int
        Bytes of one batch; a timeout is noticed between batches.
    """

    lingers: ClassVar[bool] = False
    _engines: ClassVar[weakref.WeakValueDictionary[str, "LocalEngine"]] = weakref.WeakValueDictionary()

    def __init__(self, max_nbytes: int = BATCH_NBYTES) -> None:
        super().__init__(None, max_nbytes)
        # Unlike any other, also in a forked child: a session means something in its own process only.
        self.session = f"local:{os.getpid()}:{secrets.token_hex(8)}"
        self._engines[self.session] = self

    def _register(self, buffer: Buffer) -> None:
        """Nothing to do: `_check` knows what is registered."""

    def _unregister(self, buffer: Buffer) -> None:
        """Nothing to do."""

    def _peer(self, session: str) -> "LocalEngine":
        peer = self._engines.get(session)
        if peer is None:
            raise TransferError("no LocalEngine of this process has that session")
        return peer

    def _ask(self, session: str) -> tuple[str, ...]:
        return tuple(self._peer(session)._digests)

    def _held(self, session: str) -> tuple[Engine, ...]:
        return self, self._peer(session)

    def _check(self, kind: str, session: str, descriptors: Descriptors) -> None:
        peer = self._peer(session)
        src, dst = (self, peer) if kind == "write" else (peer, self)
        for side, engine, address in (("src", src, descriptors.src), ("dst", dst, descriptors.dst)):
            row = engine._outside(address, descriptors.length)
            if row >= 0:
                raise TransferError(
                    f"descriptor {row}: {side} is {int(descriptors.length[row])} bytes at {int(address[row]):#x}, "
                    f"expected them inside one registered buffer of {engine.session}"
                )

    def _move(self, kind: str, session: str, batch: Descriptors) -> None:
        backend.copy(batch.src, batch.dst, batch.length)
