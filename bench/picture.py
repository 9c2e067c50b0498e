"""Draw a run of the benchmarks as one SVG: build time of each case, growth, and how late a second thread wakes."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from bench.figures import Figure

mpl.use("svg")
import matplotlib.pyplot as plt

__all__ = ["draw"]

OURS, THEIRS, FLOOR = "#1f77b4", "#d62728", "#7f7f7f"


def draw(figures: Sequence[Figure], about: str, path: Path) -> None:
    """Draw what was measured; parts that were not run stay empty."""
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvcompile", "font.size": 8}):
        canvas, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained", width_ratios=[1.4, 1, 1])
        _builds(axes[0], figures)
        _growth(axes[1], figures)
        _stalls(axes[2], figures)
        canvas.suptitle(about, fontsize=7, color=FLOOR)
        canvas.savefig(path, metadata={"Date": None})
        plt.close(canvas)
    # What is left of the metadata names hosts, and says nothing of the picture.
    path.write_text(re.sub(r"\s*<metadata>.*?</metadata>", "", path.read_text(), flags=re.DOTALL))


def _values(figures: Sequence[Figure], section: str, metric: str, unit: str = "ms") -> dict[str, float]:
    return {f.case: f.value for f in figures if f.section.startswith(section) and (f.metric, f.unit) == (metric, unit)}


def _builds(axes: Any, figures: Sequence[Figure]) -> None:
    columns = {
        "connectors today": (THEIRS, _values(figures, "Descriptor build", "baseline")),
        "kvcompile": (OURS, _values(figures, "Descriptor build", "lists")),
        "filling three arrays": (FLOOR, _values(figures, "Descriptor build", "fill")),
    }
    cases = list(columns["kvcompile"][1])
    for number, (name, (color, values)) in enumerate(columns.items()):
        places = [row + 0.27 * (1 - number) for row in range(len(cases))]
        axes.barh(places, [values[case] for case in cases], 0.25, color=color, label=name)
    axes.set(xscale="log", xlabel="ms, block id lists to descriptors", yticks=range(len(cases)), yticklabels=cases)
    axes.invert_yaxis()
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)


def _growth(axes: Any, figures: Sequence[Figure]) -> None:
    for name, color in (("scattered", OURS), ("contiguous", "#2ca02c")):
        values = _values(figures, "Growth with blocks", name)
        blocks = [int(case.split()[0].replace(",", "")) for case in values]
        axes.plot(blocks, list(values.values()), "o-", color=color, label=name)
    axes.set(xscale="log", yscale="log", xlabel="blocks of a request, 94 layers", ylabel="ms")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)


def _stalls(axes: Any, figures: Sequence[Figure]) -> None:
    worst, usual = (_values(figures, "A second thread", metric) for metric in ("longest", "p99"))
    cases = list(worst)
    axes.barh([row - 0.2 for row in range(len(cases))], list(usual.values()), 0.35, color=OURS, label="p99")
    axes.barh([row + 0.2 for row in range(len(cases))], list(worst.values()), 0.35, color=FLOOR, label="longest")
    axes.set(xscale="log", xlabel="ms a second thread wakes late", yticks=range(len(cases)), yticklabels=cases)
    axes.invert_yaxis()
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
