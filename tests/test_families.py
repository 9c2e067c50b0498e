"""Every family in every deployment: proved, moved byte for byte, over the real engine too; docs/families.md says so."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcompile
from kvcompile.cli import families, family_moves
from kvcompile.models import Attention, Latent, Layer, caches

DATA = Path(__file__).parent / "data"
DOCUMENT = Path(__file__).parent.parent / "docs" / "families.md"
ROWS = families.rows_of((DATA / "families.txt").read_text().splitlines(), DATA)
ROW_NAMES = [row.name for row in ROWS]


@pytest.mark.parametrize("row", ROWS, ids=ROW_NAMES)
def test_every_family_in_every_deployment(row: families.Row) -> None:
    """Proved, and moved byte for byte with the local engine; the document says what was seen."""
    found = {cell: families.check(row, cell) for cell in families.CELLS}
    assert {cell: result for cell, result in found.items() if not result.right} == {}
    document = DOCUMENT.read_text()
    notes = [line.partition("] ")[2] for line in document.splitlines() if line.startswith("[")]
    assert families.line(row, found, notes) in document.splitlines(), "docs/families.md is stale: make families"


def test_the_document_s_other_half() -> None:
    """Bridged padding on packed rows: 43 layers in 4 groups (vllm#53825), from thousands of descriptors to a few."""
    (row,) = [row for row in ROWS if row.name == "deepseek-v4-flash, order=BLHNC"]
    line = families.bridging(row)
    assert line in DOCUMENT.read_text().splitlines(), "docs/families.md is stale: make families"
    descriptors, bridged, more = (cell.strip() for cell in line.split("|")[5:8])
    assert int(bridged) * 100 < int(descriptors.replace(",", ""))
    assert float(more.rstrip("%")) < 1


@pytest.mark.parametrize("election", ["balanced", "striped"])
@pytest.mark.parametrize("name", ["qwen3-235b-a22b", "deepseek-v3.2", "nemotron-h-8b"])
def test_other_elections(name: str, election: str) -> None:
    (row,) = families.rows_of([f"{name}.json"], DATA)
    for cell in ("more", "fewer", "non-divisible"):
        result = families.check(row, cell, election=election)
        assert result.right


# One model of each family; what they share, the local engine has moved.
OVER_MOONCAKE = (
    *("llama-3.3-70b", "qwen3-235b-a22b", "gpt-oss-120b", "gemma-3-27b", "deepseek-v3", "deepseek-v3.2"),
    *("deepseek-v4-flash", "kimi-linear-48b-a3b", "qwen3-next-80b-a3b", "nemotron-h-8b", "jamba-v0.1"),
    *("minimax-m1-80k", "minimax-m3"),
)


@pytest.mark.parametrize("name", OVER_MOONCAKE)
def test_over_mooncake(name: str) -> None:
    """One deployment of each family over the real engine's TCP."""
    pytest.importorskip("mooncake.engine", reason="needs the extra mooncake", exc_type=ImportError)
    from kvcompile.engines import MooncakeEngine  # noqa: PLC0415 (skipped without it)

    (row,) = families.rows_of([f"{name}.json"], DATA)
    result = families.check(row, "PP", lambda: (MooncakeEngine("127.0.0.1"), MooncakeEngine("127.0.0.1")))
    assert result.right
    assert result.moved is not None


def test_the_checker_sees_faults() -> None:
    """A wrong byte of a destination is seen, and a layer that nobody sends."""
    (row,) = families.rows_of(["qwen3-235b-a22b.json"], DATA)
    plain = families.check(row, "fewer")
    assert plain.moved is not None
    assert plain.moved.wrong == 0
    original = families.move

    def spoiled(srcs: Any, dsts: Any, memory: Any, *rest: Any) -> Any:
        memory[1].arrays[0][-1] ^= 1
        return original(srcs, dsts, memory, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(families, "move", spoiled)
        assert families.check(row, "fewer").moved.wrong == 1
    src, dst = (Layer("layers.0", (Attention(2, 8),)), Layer("layers.1", (Attention(2, 8),)))
    lacking = kvcompile.prove(caches([src], tp_size=2), caches([src, dst], tp_size=1))
    assert not lacking.exact
    assert {finding.layer for finding in lacking.missing} == {"layers.1"}


def test_tokens_dealt_out_are_painted_where_they_belong() -> None:
    """The checker's own arithmetic on context parallelism, spelled out: interleave 2 over 2 ranks."""
    (cache,) = caches(
        [Layer("a", (Latent(1, 1),))], tp_size=2, tp_ranks=[1], dcp_size=2, dcp_interleave=2, block_size=4
    )
    (region,) = cache.regions
    tokens = family_moves._tokens(cache, region, region.fields[0], 1, 2)
    np.testing.assert_array_equal(tokens, [[10, 11, 14, 15], [18, 19, 22, 23]])
