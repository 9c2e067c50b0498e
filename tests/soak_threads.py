"""Threads for a minute and ten thousand builds, for `make soak`."""

from collections.abc import Callable

from tests.crowd import THREADS, crowd, leak

SECONDS = 60
BUILDS = 10_000


def soak(say: Callable[[str], None]) -> dict[str, int]:
    """Run both; return the figures. AssertionError for a wrong byte, a build that differs, or memory that grows."""
    figures = crowd(SECONDS)
    say(f"{THREADS} threads, {SECONDS} s: {figures.builds:,} builds equal, {figures.transfers:,} transfers right")
    grown = leak(BUILDS)
    say(f"{BUILDS:,} builds: {grown:+,} bytes of memory")
    assert grown < 8 << 20, f"memory grew by {grown:,} bytes"
    return {
        "builds compared": figures.builds,
        "transfers compared": figures.transfers,
        "bytes compared": figures.nbytes,
        "wrong bytes": 0,
    }
