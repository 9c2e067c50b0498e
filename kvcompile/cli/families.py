"""`kvcompile families`: each model in each deployment, proved and moved byte for byte; writes docs/families.md."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvcompile import Cache, LayoutError, Request, compile, models
from kvcompile.cli.family_moves import DST_FILL, SRC_FILL, Memory, Moved, ids_for, move
from kvcompile.engines import LocalEngine
from kvcompile.engines.base import Engine
from kvcompile.proof import prove

__all__ = ["CELLS", "Result", "Row", "bridging", "check", "document", "line", "rows_of"]

CELLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "same TP": ({"tp_size": 4}, {"tp_size": 4}),
    "more": ({"tp_size": 2, "order": "hnd"}, {"tp_size": 8, "order": "nhd"}),
    "fewer": ({"tp_size": 8, "order": "LBNHC"}, {"tp_size": 2, "order": "LBHNC"}),
    "non-divisible": ({"tp_size": 4}, {"tp_size": 6}),
    "PP": ({"tp_size": 2, "pp_size": 2, "order": "LBHNC"}, {"tp_size": 4, "order": "LHBNC"}),
    "DCP": ({"dcp_size": 2, "dcp_interleave": 16}, {"tp_size": 2}),
    "other blocks": ({"tp_size": 4}, {"tp_size": 2, "blocks": 4}),
}
"""Settings of src and dst, as of `models.caches`; ``blocks``: so many times the row's block size, in kernel blocks
of that size unless rows are packed."""

SAYS = {
    "same TP": "TP4 to TP4",
    "more": "TP2 to TP8, HND to NHD",
    "fewer": "TP8 to TP2, K and V fused: NHD to HND",
    "non-divisible": "TP4 to TP6",
    "PP": "TP2 PP2 to TP4, fused: HND to head-major",
    "DCP": "context parallel 2 in chunks of 16, on as many ranks as it takes, to TP2",
    "other blocks": "TP4 to TP2, blocks four times as long",
}


class Row(NamedTuple):
    """A model: its layers, two of each kind of them, and settings of `models.caches` for both sides."""

    name: str
    whole: list[models.Layer]
    layers: list[models.Layer]
    settings: dict[str, Any]


class Result(NamedTuple):
    """One cell of the table. ``refused``: why the model cannot be served so."""

    proved: bool
    moved: Moved | None
    refused: str = ""

    @property
    def right(self) -> bool:
        """Whether all is as it should be."""
        return bool(self.refused) or (self.proved and self.moved is not None and not self.moved.wrong)


def rows_of(lines: Iterable[str], folder: Path = Path()) -> list[Row]:
    """Read rows: on each line a config.json, below ``folder`` or absolute, and settings like ``kv_dtype=nvfp4``.

    Raises
    ------
    LayoutError
        An unknown model, or a setting without a value.
    """
    rows = []
    for line in lines:
        path, *settings = line.split()
        if wrong := [setting for setting in settings if "=" not in setting]:
            raise LayoutError(f"settings of {path}: {wrong}, expected name=value")
        given = {name: int(value) if value.isdigit() else value for name, value in (s.split("=") for s in settings)}
        config = folder / path
        kept = models.layers_of(config)
        seen: dict[Any, int] = {}
        layers = []
        for layer in kept:
            seen[layer.keeps] = seen.get(layer.keeps, 0) + 1
            if layer.keeps and seen[layer.keeps] <= 2:
                layers.append(layer)
        kinds = {keep.kind for layer in layers for keep in layer.keeps}
        given.setdefault("block_size", 256 if "compressed" in kinds else 64 if "latent" in kinds else 16)
        names = [config.stem if config.suffix == ".json" else config.name, *settings]
        rows.append(Row(", ".join(names), kept, layers, given))
    return rows


def check(
    row: Row,
    cell: str,
    engines: Callable[[], tuple[Engine, Engine]] = lambda: (LocalEngine(), LocalEngine()),
    election: str = "nearest",
) -> Result:
    """Prove one cell, and move a request between all its ranks.

    Parameters
    ----------
    engines : callable
        Makes the engines of src and dst; they are emptied at the end.
    election : str
        As of `compile`.
    """
    src, dst = ({**settings, **row.settings} for settings in CELLS[cell])
    if "blocks" in dst:
        if not str(row.settings.get("order")).startswith("B"):
            dst.setdefault("kernel_block_size", dst["block_size"])
        dst["block_size"] *= dst.pop("blocks")
    if "dcp_size" in src:
        src["tp_size"] = _ranks_for_context(row, src["dcp_size"])
    names = models.group_names(row.layers)
    windows = [int(name.split()[1]) if " " in name else None for name in names]
    longest = max(settings["block_size"] * settings.get("dcp_size", 1) for settings in (src, dst))
    # Long enough for windows to have left blocks behind, where they are not very long.
    tokens = 2 * longest + longest // 2 + max((window for window in windows if window and window <= 512), default=0)
    memory = Memory(SRC_FILL), Memory(DST_FILL)
    try:
        made = [_caches(row, s, names, tokens, m) for s, m in zip((src, dst), memory, strict=True)]
    except LayoutError as error:
        return Result(False, None, str(error))
    pair = engines()
    try:
        srcs, dsts = ([engine.register(c) for c in caches] for engine, caches in zip(pair, made, strict=True))
        random = np.random.default_rng(2026)
        ids = ids_for(srcs, windows, tokens, random), ids_for(dsts, windows, tokens, random)
        plans = {(i, j): compile(a, b, election=election) for i, a in enumerate(srcs) for j, b in enumerate(dsts)}
        return Result(prove(srcs, dsts, plans).exact, move(srcs, dsts, memory, ids, tokens, pair, plans))
    finally:
        for engine in pair:
            engine.unregister()


def line(row: Row, results: dict[str, Result], notes: list[str]) -> str:
    """Write a row of the table; why a cell is refused goes to the notes."""
    cells = []
    for result in results.values():
        if result.refused:
            if result.refused not in notes:
                notes.append(result.refused)
            cells.append(f"refused [{notes.index(result.refused) + 1}]")
        elif result.moved is None or not result.right:
            cells.append("**WRONG**")
        else:
            cells.append(f"{result.moved.nbytes / 2**20:.2f} MiB, {result.moved.descriptors:,}")
    return f"| {row.name} | {' | '.join(cells)} |"


def document(results: dict[str, tuple[Row, dict[str, Result]]], command: str) -> str:
    """Write docs/families.md."""
    notes: list[str] = []
    rows = [line(row, found, notes) for row, found in results.values()]
    packed = [row for row, _ in results.values() if str(row.settings.get("order", "")).startswith("B")]
    return "\n".join(
        [
            "# Families of models, in every deployment",
            "",
            f"Made by `{command}`; a test compares it line by line. Each cell: all ranks of both sides from the",
            "model's config.json (real shapes, two layers of each kind), **proved** (`kvcompile.prove`: every byte of",
            "every dst field is written exactly once, from its own place) and **moved** (one request, over the local",
            "engine, every byte of the destinations compared, also those that must not change): MiB that arrive, and",
            "descriptors.",
            "",
            *(f"- **{cell}**: {says}" for cell, says in SAYS.items()),
            "",
            f"| | {' | '.join(CELLS)} |",
            f"|---|{'---|' * len(CELLS)}",
            *rows,
            "",
            *(f"[{number}] {note}" for number, note in enumerate(notes, 1)),
            "",
            "A row that names an `order` has that one on both sides. Padded blocks (`align`), NVFP4 in both its forms",
            "and packed rows (`B` before `L`) reshard their heads like any other.",
            "",
            "## Bridged padding",
            "",
            "All layers of the model, equal sides, runs of eight blocks, with and without `bridge_padding=True`.",
            "",
            "| | layers | groups | blocks | descriptors | bridged | more bytes |",
            "|---|---|---|---|---|---|---|",
            *(bridging(row) for row in packed if "overlay" not in row.settings),
            "",
        ]
    )


def bridging(row: Row) -> str:
    """Write a row of the second table: what `bridge_padding` saves where a block of all layers is one row of memory."""
    src, dst = (models.caches(row.whole, num_blocks=64, place=place, **row.settings)[0] for place in _PLACES)
    ids = [[1] if group.state else [block for block in range(1, 64) if block % 9] for group in src.groups]
    request = Request("request", ids, ids)
    plain, bridged = (compile(src, dst, bridge_padding=bridge).build([request]) for bridge in (False, True))
    more = bridged.nbytes / plain.nbytes - 1
    counts = f"{len(row.whole)} | {len(src.groups)} | {sum(map(len, ids))}"
    return f"| {row.name} | {counts} | {len(plain):,} | {len(bridged):,} | {more:.2%} |"


_PLACES: tuple[Callable[[int], int], ...] = (lambda _: 1 << 40, lambda _: 1 << 41)


def _caches(row: Row, settings: dict[str, Any], names: list[str], tokens: int, memory: Memory) -> list[Cache]:
    """Make a side's caches, with as many blocks as the request takes and some more."""
    probe = models.caches(row.layers, **settings)[0]
    sizes = {name: group for name, group in zip(names, probe.groups, strict=True)}
    blocks = {name: 3 if group.state else -(-tokens // group.block_size) + 3 for name, group in sizes.items()}
    if settings.get("overlay"):
        blocks = dict.fromkeys(blocks, sum(blocks.values()))
    return models.caches(row.layers, num_blocks=blocks, place=memory.place, **settings)


def _ranks_for_context(row: Row, dcp_size: int) -> int:
    """Return as many ranks as it takes for each head to be on ``dcp_size`` of them."""
    heads = [keep.heads for layer in row.layers for keep in layer.keeps if isinstance(keep, models.Attention)]
    return dcp_size * max(heads, default=2)
