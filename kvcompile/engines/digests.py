"""The digests that a peer's memory has now: a question and an answer in one UDP datagram each.

Mooncake's ports are TCP, so the same number is free for UDP: who knows a peer's session knows where to ask. An answer
repeats the question's nonce, so that it is no answer to an earlier one; nothing here is secret, and nothing is signed.
"""

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import msgspec

from kvcompile import handshake
from kvcompile.errors import HandshakeError, KVCompileError

__all__ = ["ANSWER_S", "Responder", "ask", "normal"]

ANSWER_S = 5.0
"""Seconds after which there is no answer. A peer that answers does so in less than a millisecond."""

_RESEND_S = 0.2
"""Seconds before the question is sent again: a datagram may be lost."""

_DATAGRAM = 60_000
_MOST = 900
"""Digests of one answer, so that it fits a datagram; an engine has one for each cache."""

_Nonce = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
_Digest = Annotated[str, msgspec.Meta(min_length=64, max_length=64)]


class _Question(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    nonce: _Nonce


class _Answer(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    nonce: _Nonce
    digests: Annotated[list[_Digest], msgspec.Meta(max_length=_MOST)]


class Responder:
    """Answer questions at the UDP port of a session until `close`.

    Raises
    ------
    KVCompileError
        The port cannot be taken.
    """

    def __init__(self, session: str, digests: Callable[[], Iterable[str]]) -> None:
        self._digests = digests
        self._closed = False
        try:
            family, address = _address(session)
            self._socket = socket.socket(family, socket.SOCK_DGRAM)
            try:
                self._socket.bind(address)
            except OSError:
                self._socket.close()
                raise
        except OSError as error:
            raise KVCompileError(
                f"serve_digests: UDP {session} cannot be taken ({error}): let peers `ask` another way"
            ) from error
        self._thread = threading.Thread(target=self._serve, name="kvcompile-digests", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering, and give the port back."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, although it also complains
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while not self._closed:
            try:
                data, sender = self._socket.recvfrom(_DATAGRAM)
                question = handshake.unpack(data, _Question)
                newest = list(self._digests())[-_MOST:]
                self._socket.sendto(handshake.pack(_Answer(question.nonce, newest)), sender)
            except (HandshakeError, OSError):
                continue  # not a question, or nobody there to hear the answer


def ask(session: str, timeout: float = ANSWER_S) -> tuple[str, ...]:
    """Ask a peer that serves its digests for those it has now.

    Parameters
    ----------
    session : str
        ``host:port``.
    timeout : float
        Seconds.

    Raises
    ------
    HandshakeError
        No answer.
    """
    nonce = secrets.token_bytes(16)
    question = handshake.pack(_Question(nonce))
    deadline = time.monotonic() + timeout
    try:
        family, address = _address(session)
        with socket.socket(family, socket.SOCK_DGRAM) as wire:
            wire.connect(address)  # only this peer's datagrams come in
            while (left := deadline - time.monotonic()) > 0:
                wire.send(question)
                wire.settimeout(min(left, _RESEND_S))
                with contextlib.suppress(TimeoutError, HandshakeError):
                    answer = handshake.unpack(wire.recv(_DATAGRAM), _Answer)
                    if answer.nonce == nonce:
                        return tuple(answer.digests)
    except (OSError, ValueError) as error:
        raise HandshakeError(f"no answer from UDP {session}: {error}; does the peer serve_digests()?") from error
    raise HandshakeError(f"no answer from UDP {session} in {timeout} s")


def normal(answer: Any) -> tuple[str, ...]:
    """Return what an ``ask`` of the caller's gave, a digest or several, each as hex or 32 bytes, as digests in hex.

    Raises
    ------
    HandshakeError
        It is none of that.
    """
    several = [answer] if isinstance(answer, (str, bytes, bytearray, memoryview)) else answer
    if not isinstance(several, Iterable):
        raise HandshakeError(f"no answer: ask gave {answer!r:.60}, expected a digest")
    found = []
    for one in several:
        if isinstance(one, str):
            found.append(one.strip().lower())
        elif isinstance(one, (bytes, bytearray, memoryview)):
            raw = bytes(one)
            found.append(raw.hex() if len(raw) == 32 else raw.decode("ascii", "replace").strip().lower())
        else:
            raise HandshakeError(f"no answer: ask gave {one!r:.60}, expected a digest as str or bytes")
    return tuple(found)


def _address(session: str) -> tuple[socket.AddressFamily, Any]:
    host, _, port = session.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    return found[0][0], found[0][4]
