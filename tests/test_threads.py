"""Threads on shared plans and one engine, and memory over many builds; `make soak` does the same for longer."""

from collections.abc import Callable

import pytest

from tests.crowd import crowd, leak


def test_threads_give_what_one_gives(record_property: Callable[[str, object], None]) -> None:
    pytest.importorskip("mooncake.engine", reason="needs the extra mooncake", exc_type=ImportError)
    figures = crowd(5)
    record_property("shares", f"{figures.builds} builds, {figures.transfers} transfers, {figures.nbytes:,} bytes right")
    assert figures.transfers >= 8
    assert figures.builds >= 80


def test_builds_keep_nothing() -> None:
    grown = leak(1000)
    assert grown < 8 << 20, f"{grown:,} bytes more after 1,000 builds"
