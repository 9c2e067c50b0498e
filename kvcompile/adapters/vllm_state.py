"""What the adapter keeps: its settings, its counters, and per worker the plans by peer layout. It decides nothing.

A worker may be one that vLLM's tests made without ``__init__``, so nothing is expected of it beforehand.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple

from kvcompile.descriptors import Descriptors
from kvcompile.topology import ELECTIONS

__all__ = ["CORRECTIONS", "MODES", "Settings", "State", "counters", "state_of"]

MODES = ("exact", "optimizing")

CORRECTIONS = (
    "prepare_transfer_regions",
    "validate_region_lengths",
    "validate_head_resharding",
    "sender_plan",
    "handshake_target_ranks",
    "null_blocks",
    "scratch_blocks",
)
"""Overrides of vLLM 0.33.0's behaviour, each by the name of what it replaces; docs/vllm.md has the table."""

PLANS = 1024
"""Layouts whose plans a worker keeps: as many as vLLM keeps peer layouts."""

COUNTERS = (
    "plans",
    "compile_seconds",
    "batches",
    "descriptors",
    "seconds",
    "failed_requests",
    "failed_transfers",
    "pairs",
    "corrected_pairs",
    "left_to_vllm",
)

_lock = threading.Lock()
_counters: Counter[str] = Counter()


class Settings(NamedTuple):
    """How the adapter behaves, from ``kv_connector_extra_config["kvcompile"]`` or `install`'s arguments.

    Attributes
    ----------
    mode : "exact" or "optimizing"
    corrections : frozenset of names in `CORRECTIONS`
    election : one of `kvcompile.topology.ELECTIONS`
        Of optimizing mode, and of pairs of ranks that are corrected.
    engine : bool
        Hand over through `MooncakeEngine`, in batches that the transport can take.
    """

    mode: str = "exact"
    corrections: frozenset[str] = frozenset(CORRECTIONS)
    election: str = "nearest"
    engine: bool = True

    @classmethod
    def of(
        cls,
        mode: str = "exact",
        corrections: str | Iterable[str] = CORRECTIONS,
        election: str = "nearest",
        engine: bool = True,
    ) -> "Settings":
        """Check settings as they come from a configuration; ``corrections`` may be "all" or "none".

        Raises
        ------
        ValueError
            A name that does not exist, or a value of the wrong kind.
        """
        if isinstance(corrections, str):
            named = {"all": CORRECTIONS, "none": ()}.get(corrections)
            if named is None:
                raise ValueError(f"corrections is {corrections!r}, expected 'all', 'none' or a list of {CORRECTIONS}")
            corrections = named
        chosen = frozenset(corrections)
        if chosen - set(CORRECTIONS):
            raise ValueError(f"corrections: {sorted(chosen - set(CORRECTIONS))} are none of {CORRECTIONS}")
        for name, value, known in (("mode", mode, MODES), ("election", election, ELECTIONS)):
            if value not in known:
                raise ValueError(f"{name} is {value!r}, expected one of {known}")
        if not isinstance(engine, bool):
            raise ValueError(f"engine is {engine!r}, expected true or false")
        return cls(mode, chosen, election, engine)


class State:
    """What one worker keeps for the adapter.

    Attributes
    ----------
    settings : Settings
    plans : OrderedDict
        Region lists and peer rank -> compiled plan.
    layouts : OrderedDict
        A peer's layout -> what was prepared for it.
    cache : Cache, LayoutError or None
        What this worker holds, or why it cannot be said; made at the first use after a registration.
    pending : dict
        id of the list of src addresses that was handed out -> (that list, its descriptors), until it is sent.
    engine : MooncakeEngine or None
        Made around the worker's own at the first hand-over.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.plans: OrderedDict[Any, Any] = OrderedDict()
        self.pending: dict[int, tuple[list[int], Descriptors]] = {}
        self.engine: Any = None
        self.layouts: OrderedDict[Any, Any] = OrderedDict()
        self.cache: Any = None

    @staticmethod
    def keep(kept: "OrderedDict[Any, Any]", key: Any, value: Any) -> None:
        """Keep a value, and drop the oldest where there are too many."""
        kept[key] = value
        while len(kept) > PLANS:
            kept.popitem(last=False)


def state_of(worker: Any, settings: Settings) -> State:
    """Return a worker's state, made at the first call with these settings."""
    state: State = worker.__dict__.setdefault("_kvcompile", State(settings))
    return state


def count(**changes: float) -> None:
    """Add to the counters of this process."""
    with _lock:
        _counters.update(changes)


def counters() -> dict[str, float]:
    """Return the counters of this process: plans compiled, batches, descriptors, seconds, what was left to vLLM, ..."""
    with _lock:
        return {name: _counters[name] for name in COUNTERS}
