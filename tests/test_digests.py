"""The exchange of digests over UDP: answers, noise, lies and silence."""

import socket
import threading

import pytest

import kvcompile
from kvcompile import Cache, HandshakeError
from kvcompile.engines import digests
from kvcompile.engines.digests import Responder
from tests.test_attempts import DIGEST, OTHER


@pytest.fixture
def port() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_exchange(port: str) -> None:
    now = [DIGEST]
    responder = Responder(port, lambda: now)
    try:
        assert digests.ask(port) == (DIGEST,)
        now[:] = [DIGEST, OTHER]
        assert digests.ask(port) == (DIGEST, OTHER)
        now[:] = []
        assert digests.ask(port) == ()
        now[:] = [DIGEST] * 2000  # the newest, as many as a datagram takes
        assert len(digests.ask(port)) == 900
        host, number = port.split(":")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as wire:
            for noise in (b"", b"\xff" * 100, b"x" * 60_000, Cache([], []).to_bytes()):
                wire.sendto(noise, (host, int(number)))
        assert digests.ask(port)  # still there
        with pytest.raises(kvcompile.KVCompileError, match="cannot be taken"):
            Responder(port, list)
    finally:
        responder.close()
    with pytest.raises(HandshakeError, match="no answer"):
        digests.ask(port, 0.5)
    Responder(port, list).close()  # the port was given back


def test_silence_and_lies_are_no_answer(port: str) -> None:
    """A responder that repeats an earlier answer, or sends noise, is not believed: the nonce differs."""
    host, number = port.split(":")
    old = digests._Answer(b"0" * 16, [DIGEST])
    stop = threading.Event()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as wire:
        wire.bind((host, int(number)))
        wire.settimeout(0.1)

        def lie() -> None:
            while not stop.is_set():
                try:
                    _, sender = wire.recvfrom(1000)
                except TimeoutError:
                    continue
                for noise in (kvcompile.handshake.pack(old), b"noise", b""):
                    wire.sendto(noise, sender)

        thread = threading.Thread(target=lie)
        thread.start()
        try:
            with pytest.raises(HandshakeError, match="no answer"):
                digests.ask(port, 0.5)
        finally:
            stop.set()
            thread.join()


@pytest.mark.parametrize("session", ["", "nowhere", "127.0.0.1:many", "127.0.0.1:99999"])
def test_sessions_that_are_none(session: str) -> None:
    with pytest.raises(HandshakeError, match="no answer"):
        digests.ask(session, 0.2)
