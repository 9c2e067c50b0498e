"""What the benchmarks rest on: cases are what they claim, builders agree, comparisons see a regression."""

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import kvcompile
from bench import baseline, figures, loads, shapes
from bench.figures import Figure
from bench.timing import interval
from tests import replay

FEW = [case for case in [*shapes.cases(), *loads.loads()] if case.descriptors < 20_000]


@pytest.mark.parametrize("case", FEW, ids=[case.name for case in FEW])
def test_the_baseline_copies_what_we_copy(case: shapes.Case) -> None:
    lists = baseline.build(baseline.spans(case.src, case.dst), case.request.src_blocks, case.request.dst_blocks)
    built = kvcompile.compile(case.src, case.dst).build([case.request])
    assert built.failed == {}
    assert len(lists[0]) == case.descriptors
    assert sorted(replay.triples(built)) == sorted(zip(*lists, strict=True))


def test_the_published_loads_have_their_published_counts() -> None:
    counts = {case.name: case.descriptors for case in loads.loads()}
    assert list(counts.values()) == [128, 2_176, 12_416, 119_296, 8_600, 112_009]
    rows = next(case for case in loads.loads() if "53825" in case.name)
    assert (len(rows.src.regions), len(rows.src.groups)) == (43, 5)
    assert {region.block_stride for region in rows.src.regions} == {1_040_000}
    payloads = [field.cell_nbytes for region in rows.src.regions for field in region.fields]
    assert (min(payloads), max(payloads)) == (819, 102_400)


def test_targets_in_words() -> None:
    assert Figure("s", "c", "time", 2.0, "ms", most=3.0).target == "time <= 3: met"
    assert Figure("s", "c", "ratio", 0.5, least=0.7, most=1.5).target == "ratio >= 0.7 and <= 1.5: MISSED"
    assert Figure("s", "c", "time", 2.0).target == ""


def test_a_comparison_sees_what_became_worse(tmp_path: Path) -> None:
    old = [Figure("s", "c", "slower", 1.0), Figure("s", "c", "same", 1.0), Figure("s", "c", "faster", 1.0)]
    old += [Figure("s", "c", "times", 100.0, more_is_better=True)]
    new = [Figure("s", "c", "slower", 2.0), Figure("s", "c", "same", 1.1), Figure("s", "c", "faster", 0.5)]
    new += [Figure("s", "c", "times", 40.0, more_is_better=True), Figure("s", "c", "new", 1.0)]
    path = tmp_path / "old.json"
    figures.save(path, old, "a machine")
    assert figures.load(path) == ("a machine", old)
    console = Console(width=120, record=True, file=io.StringIO())
    assert figures.compare(console, new, path) == 2
    text = console.export_text()
    assert text.count("worse") == 3  # two rows, and the sum
    assert text.count("better") == 1


def test_tables_are_written_between_the_marks(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("before\n" + "\nold\n".join(figures.MARKS) + "\nafter\n")
    figures.write_markdown(path, [Figure("section", "case", "time", 0.25, "ms", most=1.0)], "a machine")
    text = path.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "| case | 0.25 | time <= 1: met |" in text
    path.write_text("no marks")
    with pytest.raises(SystemExit, match="no lines"):
        figures.write_markdown(path, [], "a machine")


def test_an_interval_holds_the_median() -> None:
    sample = np.random.default_rng(0).normal(1.0, 0.1, 41).tolist()
    low, high = interval(sample)
    assert low < np.median(sample) < high
    assert high - low < 0.15
