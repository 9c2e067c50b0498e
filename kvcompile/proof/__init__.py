"""Prove that the plans of a deployment write every byte of every dst block exactly once, from its own place on src.

The question is answered for all requests at once: tables are followed with abstract block ids. Whether a request names
the right blocks, and whether an engine moves what it is told, is not looked at.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvcompile.cache import Cache
from kvcompile.plan import Plan
from kvcompile.plan import compile as compile_plan
from kvcompile.proof.faults import DUPLICATED, MISPLACED, MISSING, WHY, merge
from kvcompile.proof.labels import Tensor
from kvcompile.proof.pieces import Side
from kvcompile.proof.walk import walk
from kvcompile.table import TABLE

__all__ = ["Finding", "Proof", "prove"]

SHOWN = 40
"""Findings that ``str(proof)`` lists."""


class Finding(NamedTuple):
    """A part of a dst block that is not written exactly once from its own place.

    ``rank`` is an index in ``dst_caches``, ``src`` one in ``src_caches`` or None. ``heads`` (of the model) and
    ``tokens`` (of one block, as the rank holds them; rows in a state group) are half-open. Where bytes go to no field,
    it names what is sent, or the nearest field; layer and field are None where there is none.
    """

    rank: int
    layer: str | int | None
    field: str | None
    heads: tuple[int, int]
    tokens: tuple[int, int]
    src: int | None
    why: str


@dataclass(frozen=True)
class Proof:
    """The result of `prove`.

    Attributes
    ----------
    missing, duplicated, misplaced : tuple of Finding
        Dst bytes that nobody writes; that are written more than once; and what is written from or to a wrong place.
    src_ranks, dst_ranks, plans, rows : int
        What was looked at: ranks, plans that are not empty, rows of their tables.
    """

    missing: tuple[Finding, ...]
    duplicated: tuple[Finding, ...]
    misplaced: tuple[Finding, ...]
    src_ranks: int
    dst_ranks: int
    plans: int
    rows: int

    @property
    def exact(self) -> bool:
        """Whether every byte of every dst field is written exactly once, from its own place."""
        return not (self.missing or self.duplicated or self.misplaced)

    def __str__(self) -> str:
        looked = (
            f"{self.src_ranks} src ranks to {self.dst_ranks} dst ranks, "
            f"{self.plans} plans that send something, {self.rows} rows"
        )
        if self.exact:
            return f"exact: every byte of every dst field is written once, from its own place ({looked})"
        kinds = {name: getattr(self, name) for name in ("missing", "duplicated", "misplaced")}
        counts = ", ".join(f"{len(found)} {name}" for name, found in kinds.items())
        lines = [("", "dst rank", "layer", "field", "heads", "tokens", "")]
        for name, found in kinds.items():
            for one in found:
                ranges = (f"[{start}, {stop})" for start, stop in (one.heads, one.tokens))
                lines.append((name, str(one.rank), str(one.layer), str(one.field), *ranges, one.why))
        left = len(lines) - 1 - SHOWN
        lines = lines[: SHOWN + 1]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        return "\n".join([f"NOT exact: {counts} ({looked})", *text, *([f"... and {left} more"] if left > 0 else [])])


def prove(
    src_caches: Sequence[Cache],
    dst_caches: Sequence[Cache],
    plans: Mapping[tuple[int, int], Plan] | None = None,
    *,
    election: str = "nearest",
) -> Proof:
    """Prove a deployment: all ranks of src, sending to all ranks of dst.

    Parameters
    ----------
    src_caches, dst_caches : sequence of Cache
        Every rank of either side.
    plans : mapping of (src index, dst index) to Plan, optional
        Compiled here where absent.
    election : "nearest" or "balanced"
        Of the plans that are compiled here.

    Returns
    -------
    Proof

    Raises
    ------
    ValueError
        Arguments of the wrong kind, or a plan for a pair that there is not.
    LayoutError
        What `compile` refuses.

    Notes
    -----
    It reads ``plan.table`` and the caches, nothing else: labels come from the data model (`proof.labels`), not from the
    lowering. Padding that goes to padding is no fault. Groups that overlay each other are looked at one by one.
    """
    plans = dict(plans or {})
    if isinstance(src_caches, Cache) or isinstance(dst_caches, Cache):
        raise ValueError("src_caches or dst_caches is a Cache, expected a sequence of them, one a rank")
    src_caches, dst_caches = tuple(src_caches), tuple(dst_caches)
    for name, caches in (("src_caches", src_caches), ("dst_caches", dst_caches)):
        wrong = [type(cache).__name__ for cache in caches if not isinstance(cache, Cache)]
        if wrong:
            raise ValueError(f"{name} holds a {wrong[0]}, expected every item to be a Cache")
    for pair, plan in plans.items():
        if not isinstance(plan, Plan):
            raise ValueError(f"plans[{pair}] is a {type(plan).__name__}, expected a Plan")
    strange = [pair for pair in plans if not _is_pair(pair, len(src_caches), len(dst_caches))]
    if strange:
        raise ValueError(f"plans has {strange[0]!r}, expected (index in src_caches, index in dst_caches)")
    tensors: dict[Tensor, int] = {}
    src, dst = Side.of(src_caches, tensors), Side.of(dst_caches, tensors)
    holder = np.full((len(src_caches), len(tensors)), -1, np.int64)
    holder[src.fields.rank, src.fields.tensor] = np.arange(len(src.fields.rank))
    names = list(tensors)
    found: tuple[list[Finding], ...] = ([], [], [])
    sending = rows = 0
    for rank, cache in enumerate(dst_caches):
        tables = {-1: np.empty(0, TABLE)}
        for index, peer in enumerate(src_caches):
            plan = plans.get((index, rank)) or compile_plan(peer, cache, election=election)
            if len(plan.table):
                tables[index] = plan.table
        sending += len(tables) - 1
        rows += sum(map(len, tables.values()))
        for kind, why, sender, number, first, last, start, stop in merge(walk(src, dst, rank, tables, holder)):
            layer, field, tokens, *_ = names[number] if number >= 0 else (None, None, 1)
            where = (first, last), (start * tokens, stop * tokens)
            by = None if sender < 0 else sender
            found[kind].append(Finding(rank, layer, field, *where, by, WHY[why].format(by)))
    missing, duplicated, misplaced = (tuple(found[kind]) for kind in (MISSING, DUPLICATED, MISPLACED))
    return Proof(missing, duplicated, misplaced, len(src_caches), len(dst_caches), sending, rows)


def _is_pair(pair: object, src: int, dst: int) -> bool:
    return (
        isinstance(pair, tuple)
        and len(pair) == 2
        and all(isinstance(index, int) and 0 <= index < size for index, size in zip(pair, (src, dst), strict=True))
    )
