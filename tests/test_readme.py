"""What the README shows is true: its example runs, its picture is what the script draws, its targets exist."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_is_an_example() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("source", EXAMPLES)
def test_example_runs(source: str) -> None:
    exec(compile(source, "README.md", "exec"), {"__name__": "readme"})


def test_picture_is_what_the_script_draws() -> None:
    draw = runpy.run_path(str(ROOT / "docs" / "slice_table.py"))["draw"]
    assert draw() == (ROOT / "docs" / "slice_table.svg").read_text()


def test_make_targets_and_links_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"make ([a-z0-9-]+)", README))
    assert named <= targets
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert not [link for link in links if not (ROOT / link).exists()]
