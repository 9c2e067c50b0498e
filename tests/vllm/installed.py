"""A pytest plugin (``-p``): a whole session with `install` active, and at its end what the builder did."""

import os
from typing import Any

import pytest

from kvcompile.adapters import vllm


def pytest_configure(config: pytest.Config) -> None:
    """Install before any test is collected."""
    vllm.install(corrections=os.environ.get("KVCOMPILE_CORRECTIONS", "none"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the adapter's counters: a session in which it built nothing has tested nothing."""
    terminalreporter.write_line(f"kvcompile counters: {vllm.counters()}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session in which no batch went through the compiled builder."""
    if not vllm.counters().get("batches"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
