"""Fail a CI run in which a test was skipped that nobody expected: a skipped check checks nothing.

Not for fixtures: those stand in tests/conftest.py.
"""

import os

import pytest

# Parts of skip reasons that are expected on CI, each with why.  Nothing so far.
EXPECTED_SKIPS: tuple[str, ...] = ()


def unexpected_skips(reporter: pytest.TerminalReporter) -> list[str]:
    """List "test: reason" of each skip whose reason holds no expected part."""
    skips = [(report.nodeid, str(report.longrepr)) for report in reporter.stats.get("skipped", [])]
    return [f"{node}: {reason}" for node, reason in skips if not any(part in reason for part in EXPECTED_SKIPS)]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Turn a green session with unexpected skips red, on CI."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and session.exitstatus == 0 and reporter and unexpected_skips(reporter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which skips those were (-ra lists all of them)."""
    if os.environ.get("CI"):
        for line in unexpected_skips(terminalreporter):
            terminalreporter.write_line(f"UNEXPECTED SKIP {line}", red=True)
