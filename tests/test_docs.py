"""What docs/caches.md shows runs as written, and names what exists."""

import re
from pathlib import Path

import pytest

from kvcompile import fields

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "caches.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("source", EXAMPLES)
def test_example_runs(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(source, "caches.md", "exec"), {"__name__": "docs"})
    printed = capsys.readouterr().out
    assert printed.startswith("exact: ") or "print" not in source


def test_builders_and_orders_exist() -> None:
    table = PAGE[PAGE.index("| kind |") : PAGE.index("Every builder's docstring")]
    builders = [name for row in table.splitlines()[2:] if row for name in re.findall(r"`(\w+)`", row.split("|")[2])]
    assert len(builders) == 11
    assert all(callable(getattr(fields, name)) for name in builders)
    orders = re.findall(r"`([LBPHNC]{5,6})`", PAGE)
    assert len(set(orders)) >= 9
    assert all(fields.arrangement.ordered(order) for order in orders)


def test_links_exist() -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", PAGE):
        assert (DOCS / link).exists()
