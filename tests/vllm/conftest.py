"""Tests against the real vLLM: collected only where it is installed (``make test-vllm``)."""

import importlib.util
from collections import Counter
from typing import Any

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

if importlib.util.find_spec("vllm"):
    import tests.vllm.stand_in  # noqa: F401  before vLLM itself


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many random pulls vLLM got right and wrong, by kind, over all processes."""
    total: Counter[str] = Counter()
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name == "tally":
                total.update(value)
    for name in sorted(total, key=lambda name: (":" in name, name)):
        terminalreporter.write_line(f"{total[name]:6}  {name}")
