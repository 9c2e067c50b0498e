"""Every fault, the one that waits for its port included, for `make soak`: some of them again and again."""

import socket
import time
from collections.abc import Callable

from kvcompile import HandshakeError
from kvcompile.engines import MooncakeEngine
from tests.faults import (
    FAULTS,
    NAMES,
    NBYTES,
    PATIENCE,
    SHAPE,
    failure,
    killed_during,
    theirs,
    unregistered_under_way,
    world,
)
from tests.peer import Peer

ADDRESS = 0x6000_0000_0000
RESTART_S = 180.0
"""Seconds until a port must be free again: TIME_WAIT takes sixty."""
ROUNDS = 8


def restarted() -> str:
    """A new process on the old session, with memory at the old address: only its digest tells them apart."""
    with world() as here:
        ports = _free_ports()
        blind = MooncakeEngine("127.0.0.1")
        blind.register(here.cache)
        with theirs(here, address=ADDRESS, ports=ports) as first:
            session, built = first.session, here.build(first.cache)
            for engine in (here.engine, blind):
                engine.write(session, built, PATIENCE)
            here.check(first, built, NAMES)
        here.clear()
        second, waited = _again(here.file, session, ports)
        try:
            assert second.cache.shape_digest == first.cache.shape_digest
            assert second.cache.buffers == first.cache.buffers
            for retries in (0, 3):
                refused = failure(
                    lambda retries=retries: here.engine.write(
                        session, built, PATIENCE, retries=retries, digest=first.cache.digest
                    ),
                    HandshakeError,
                )
                assert refused.requests == NAMES
            assert here.landed() == 0
            # A caller that asks nobody: the first write fails, and bars what it was sending, so the second is refused.
            # (Mooncake may go on with the first, and find the new process by itself.)
            failure(lambda: blind.write(session, built, PATIENCE))
            assert failure(lambda: blind.write(session, built, PATIENCE)).barred
            time.sleep(1.5)
            first_astray = here.check(second, built, (), NAMES)
            # Mooncake itself takes the second write, and it lands in memory of somebody else.
            columns = next(built.batches(max_descriptors=1000))
            lists = columns.src.tolist(), columns.dst.tolist(), columns.length.tolist()
            assert blind._engine.batch_transfer_sync_write(session, *lists) == 0
            astray = here.landed()
            assert astray == columns.nbytes
            here.clear()
            assert failure(lambda: here.engine.write(session, built, PATIENCE, retries=3), HandshakeError)
            assert here.landed() == 0
            built = here.build(second.cache)
            # The connection to the old process is still known: the first attempt fails, the verified second one lands.
            here.engine.write(session, built, PATIENCE, retries=3)
            here.check(second, built, NAMES)
        finally:
            second.end()
        raw = f"raw writes: {first_astray} and {astray} bytes astray"
        return f"after {waited:.0f} s; {raw}; ours: HandshakeError, none; then right"


def soak(say: Callable[[str], None]) -> dict[str, int]:
    """Run every fault; return the figures. AssertionError where one was not survived."""
    rounds = {**FAULTS, "peer restarted on its session and address": restarted}
    for turn in range(ROUNDS):
        rounds[f"peer killed during, round {turn + 2}"] = killed_during
        rounds[f"memory unregistered under way, round {turn + 2}"] = unregistered_under_way
    outcomes: dict[str, str] = {}
    lost = []
    for name, fault in rounds.items():
        started = time.monotonic()
        try:
            outcomes[name] = fault()
        except Exception as error:
            outcomes[name] = f"NOT SURVIVED: {type(error).__name__}: {error}"
            lost.append(name)
        say(f"{name:<44}{time.monotonic() - started:6.1f} s  {outcomes[name]}")
    assert not lost, f"not survived: {lost}"
    return {"faults tried": len(outcomes), "faults survived": len(outcomes) - len(lost)}


def _free_ports() -> tuple[int, int]:
    """Find two neighbouring ports that nobody listens at."""
    for port in range(23000, 31000, 2):
        try:
            for number in (port, port + 1):
                with socket.socket() as probe:
                    probe.bind(("", number))  # refused in TIME_WAIT as well, as Mooncake's is
        except OSError:
            continue
        return port, port + 1
    raise AssertionError("no two neighbouring ports are free")


def _again(file: str, session: str, ports: tuple[int, int]) -> tuple[Peer, float]:
    """Start a peer until it gets the session."""
    started = time.monotonic()
    while time.monotonic() - started < RESTART_S:
        try:
            second = Peer(NBYTES, SHAPE, file=file, address=ADDRESS, ports=ports)
        except EOFError:  # it ended: no port was free
            time.sleep(2)
            continue
        if second.session == session:
            return second, time.monotonic() - started
        second.end()
        time.sleep(2)
    raise AssertionError(f"{session} was not free again after {RESTART_S} s")
