"""The caches of all ranks of a deployment, from a model's config or a list of layers. It allocates nothing."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from kvcompile.cache import Cache
from kvcompile.errors import LayoutError
from kvcompile.fields import stack
from kvcompile.fields.arrangement import Arrangement, ordered
from kvcompile.fields.state import CONV_ORDERS
from kvcompile.layout import Buffer, Group, Region
from kvcompile.models.config import read
from kvcompile.models.families import Layer, layers_of
from kvcompile.models.keeps import KV_DTYPES, Keep, Serving

__all__ = ["MAX_REGIONS", "caches", "group_names"]

BASE = 1 << 40
"""Where a rank's memory begins when nobody says where."""

MAX_REGIONS = 1 << 16
"""What all ranks keep, and their groups: 1,024 ranks of 64 layers; each costs a fraction of a millisecond."""

STATE_ITEMSIZES = {"auto": None, "float32": 4, "bfloat16": 2, "float16": 2}


class Shelf(NamedTuple):
    """Layers that keep the same: one allocation, or one stretch of a packed row."""

    keep: Keep
    layers: list[str]
    arrangements: tuple[Arrangement, ...]
    kernel_blocks: int

    def page(self, tp_rank: int, tp_size: int) -> int:
        """Bytes of one kernel block of one layer."""
        return sum(arrangement.block_nbytes(tp_rank, tp_size) for arrangement in self.arrangements)


@dataclass(frozen=True)
class Deployment:
    """What all ranks share: settings, checked."""

    layers: list[Layer]
    groups: dict[str, Group]
    stages: list[list[Layer]]
    serving: Serving
    tp_size: int
    block_size: int
    kernel_block_size: Mapping[str, int]
    num_blocks: Mapping[str, int]
    overlay: bool


def caches(
    config: Any,
    *,
    tp_size: int = 1,
    tp_ranks: Iterable[int] | None = None,
    pp_size: int | Sequence[int] = 1,
    dcp_size: int = 1,
    dcp_interleave: int = 1,
    block_size: int = 16,
    kernel_block_size: int | Mapping[str, int] | None = None,
    order: str = "hnd",
    kv_dtype: str = "auto",
    num_blocks: int | Mapping[str, int] = 1024,
    state_dtype: str = "auto",
    conv_order: str = "row_first",
    align: int | Mapping[str, int] = 1,
    overlay: bool = False,
    null_block: int | None = 0,
    mtp: bool = False,
    draft: Any = None,
    place: Callable[[int], int] | None = None,
) -> list[Cache]:
    """Make the caches of a deployment's ranks.

    Layers that keep the same lie in one stretch of each rank's one buffer. Groups are `group_names`'.

    Parameters
    ----------
    config : path, mapping, config object or sequence of Layer
        A Hugging Face config.json, a folder that holds one, its content; or the layers, described by hand.
    tp_size : int
    tp_ranks : iterable of int, optional
        Only these ranks of each stage.
    pp_size : int or sequence of int
        Pipeline stages: how many (cut as vLLM 0.33.0 does, ``distributed/utils.py``, ``get_pp_indices``), or the
        layers of each. Prediction and draft layers are on the last.
    dcp_size, dcp_interleave : int
        Decode context parallelism, as of `Cache`: attention that is neither in a window nor compressed.
    block_size : int
        Tokens of a block on one rank, as given to the engine: with context parallelism a block id stands for
        ``dcp_size`` times as many.
    kernel_block_size : int or mapping, optional
        Tokens of a kernel block; by kind (``attention``, ``latent``, ``indexer``, ``compressed``) if a mapping. A
        block by default.
    order : str
        Of keys and values, as of `fields.Arrangement`: ``hnd``, ``nhd``, ``LBHNC`` and so on. B before L packs a block
        of all layers of a group into one row, for every kind of layer.
    kv_dtype : str
        As of vLLM's ``--kv-cache-dtype``: auto, bfloat16, fp8, fp8_per_token_head, nvfp4, fp8_ds_mla, ...
    num_blocks : int or mapping
        Blocks of each group, by name if a mapping.
    state_dtype : str
        Of recurrent matrices: float32, bfloat16, float16; auto: the config's ``mamba_ssm_dtype`` or
        ``mamba_ssm_cache_dtype``, else float32 (KDA, Nemotron-H, lightning attention) or the model's own (vLLM's).
    conv_order : str
        Of convolution states: ``row_first`` (vLLM's SD) or ``dim_first`` (DS).
    align : int or mapping
        Kernel blocks, and blocks of state, are padded to a multiple of so many bytes; by kind (also ``state``) if a
        mapping.
    overlay : bool
        All groups share one pool, as in vLLM 0.33.0 (``v1/core/kv_cache_planning.py``,
        ``get_kv_cache_config_from_groups``): an id belongs to one of them at a time.
    null_block : int or None
        The id that stands for blocks that have left a window.
    mtp : bool
        The model's multi-token-prediction layers too.
    draft : as config
        A draft model, whose layers are called ``draft.layers.0`` and so on.
    place : callable, optional
        Called once a rank with the bytes it needs, in the order of the result; returns their address. Made up if
        absent.

    Returns
    -------
    list of Cache
        Stage by stage, each rank by rank.

    Raises
    ------
    LayoutError
        An unknown architecture, missing keys, settings that do not go together, or more ranks and layers than there
        can be.
    """
    layers = layers_by_hand(config)
    itemsize, state = 2, None
    if layers is None:
        layers, keys = layers_of(config, mtp=mtp), read(config)
        itemsize, state = keys.itemsize, keys.get("mamba_ssm_dtype", keys.get("mamba_ssm_cache_dtype"))
    hidden = len(layers) if isinstance(config, (list, tuple)) else read(config).layers
    drafts = []
    if draft is not None:
        drafts = layers_by_hand(draft) or layers_of(draft, prefix="draft.")
    _number("tp_size", tp_size)
    _number("dcp_size", dcp_size)
    _number("block_size", block_size)
    if state_dtype == "auto" and state is not None:
        state_dtype = state
    for name, value, known in (
        ("kv_dtype", kv_dtype, KV_DTYPES),
        ("state_dtype", state_dtype, tuple(STATE_ITEMSIZES)),
        ("conv_order", conv_order, CONV_ORDERS),
    ):
        if value not in known:
            raise LayoutError(f"{name} is {value!r:.80}, expected one of {', '.join(known)}")
    stages = _stages(layers, hidden, pp_size)
    stages[-1] = stages[-1] + drafts
    everything = [*layers, *drafts]
    ranks = range(tp_size) if tp_ranks is None else list(islice(tp_ranks, MAX_REGIONS + 1))
    _bound(everything, len(stages), tp_size if tp_ranks is None else len(ranks))
    groups = _groups(everything, block_size, dcp_size, null_block)
    kinds = {keep.kind for layer in everything for keep in layer.keeps}
    padding = _by_name("align", align, kinds)
    serving = Serving(
        kv_dtype, itemsize, STATE_ITEMSIZES[state_dtype], ordered(order), conv_order, dcp_size > 1, padding
    )
    kinds = kinds - {"state"}
    kernel_blocks = _by_name("kernel_block_size", kernel_block_size, kinds)
    blocks = _by_name("num_blocks", num_blocks, set(groups))
    if len(blocks) < len(groups):
        raise LayoutError(f"num_blocks: {sorted(set(groups) - set(blocks))} are missing, expected all groups' numbers")
    plan = Deployment(everything, groups, stages, serving, tp_size, block_size, kernel_blocks, blocks, overlay)
    made = []
    for stage in stages:
        shelves = _shelves(plan, stage)
        _check_context(shelves, tp_size, dcp_size)
        for rank in ranks:
            if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < tp_size:
                raise LayoutError(f"tp_ranks holds {rank!r:.80}, expected numbers from 0 to {tp_size - 1}")
            _, nbytes = _lay_out(plan, shelves, rank, 0)
            base = BASE if place is None else place(nbytes)
            regions, _ = _lay_out(plan, shelves, rank, base)
            buffers = [Buffer(base, nbytes)] if nbytes else []
            made.append(
                Cache(
                    tuple(regions),
                    tuple(groups.values()),
                    tuple(buffers),
                    tp_rank=rank,
                    tp_size=tp_size,
                    dcp_size=dcp_size,
                    dcp_interleave=dcp_interleave,
                )
            )
    return made


def group_names(config: Any, *, mtp: bool = False, draft: Any = None) -> list[str]:
    """Name the groups of a model's caches, in their order: ``attention``, ``window 128``, ``state``, ...

    Parameters as of `caches`.
    """
    layers = layers_by_hand(config) or layers_of(config, mtp=mtp)
    if draft is not None:
        layers = layers + (layers_by_hand(draft) or layers_of(draft, prefix="draft."))
    return list(_groups(layers, 1, 1, None))


def layers_by_hand(config: Any) -> list[Layer] | None:
    """Return a sequence of layers as a list, None for anything else."""
    if isinstance(config, (list, tuple)):
        if not config or not all(isinstance(layer, Layer) for layer in config):
            raise LayoutError("config is a sequence, expected one of kvcompile.models.Layer, at least one")
        return list(config)
    return None


def _number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LayoutError(f"{name} is {value!r:.80}, expected a positive integer")


def _bound(layers: list[Layer], stages: int, ranks: int) -> None:
    """Refuse what would take minutes and gigabytes, before anything is made of it."""
    kept = sum(max(1, len(layer.keeps)) for layer in layers)
    few = layers if kept <= MAX_REGIONS else []
    groups = len({keep.group for layer in few for keep in layer.keeps})
    if ranks * (kept + stages * groups) > MAX_REGIONS:
        raise LayoutError(
            f"{ranks} ranks (tp_size or tp_ranks) of {stages} stages (pp_size), layers that keep {kept} caches: these "
            f"are more regions and groups, over all ranks, than the {MAX_REGIONS} expected at most"
        )


def _by_name(what: str, given: int | Mapping[str, int] | None, names: set[str]) -> dict[str, int]:
    """Return a number for each name: the same for all, or as a mapping says."""
    numbers = dict(given) if isinstance(given, Mapping) else {} if given is None else dict.fromkeys(names, given)
    if not set(numbers) <= names:
        raise LayoutError(f"{what}: {sorted(set(numbers) - names)} are unknown, expected names among {sorted(names)}")
    for name, number in numbers.items():
        _number(f"{what} of {name}", number)
    return numbers


def _groups(layers: list[Layer], block_size: int, dcp_size: int, null_block: int | None) -> dict[str, Group]:
    groups: dict[str, Group] = {}
    for layer in layers:
        for keep in layer.keeps:
            windowed = keep.group.startswith(("window", "compressor"))
            span = dcp_size if keep.group == "attention" else 1
            size = keep.own_block_size or block_size * span
            groups.setdefault(keep.group, Group(size, null_block if windowed else None, keep.state))
    return groups


def _stages(layers: list[Layer], hidden: int, pp_size: int | Sequence[int]) -> list[list[Layer]]:
    """Cut the hidden layers into stages; what comes after them is on the last."""
    if isinstance(pp_size, int):
        _number("pp_size", pp_size)
        if pp_size > hidden:
            raise LayoutError(f"pp_size makes stages without layers: it is {pp_size}, expected at most {hidden}")
        counts = [hidden // pp_size] * pp_size
        for number in range(hidden % pp_size):
            counts[-2 - number] += 1
    else:
        counts = list(pp_size)
        for count in counts:
            _number("pp_size", count)
    if sum(counts) != hidden or min(counts) < 1:
        given = f"{counts!r:.200} layers"
        raise LayoutError(f"pp_size makes stages of {given}, expected at least one each and {hidden} in all")
    counts[-1] += len(layers) - hidden
    starts = [sum(counts[:number]) for number in range(len(counts))]
    return [layers[start : start + count] for start, count in zip(starts, counts, strict=True)]


def _shelves(plan: Deployment, stage: list[Layer]) -> dict[str, list[Shelf]]:
    """Group a stage's layers by what they keep, in each group."""
    found: dict[Keep, list[str]] = {}
    for layer in stage:
        for keep in layer.keeps:
            found.setdefault(keep, []).append(layer.name)
    shelves: dict[str, list[Shelf]] = {name: [] for name in plan.groups}
    for keep, names in found.items():
        tokens = keep.own_block_size or plan.block_size
        # Windows of their own block size are one kernel block each.
        kernel = tokens if keep.state or keep.own_block_size else plan.kernel_block_size.get(keep.kind, tokens)
        if tokens % kernel:
            raise LayoutError(f"kernel_block_size of {keep.kind} is {kernel}, expected a divisor of {tokens}")
        shelves[keep.group].append(Shelf(keep, names, keep.arrangements(plan.serving, kernel), tokens // kernel))
    return shelves


def _check_context(shelves: dict[str, list[Shelf]], tp_size: int, dcp_size: int) -> None:
    """Every token of every head has to be somewhere: the ranks that hold a head have to be at least ``dcp_size``."""
    if tp_size % dcp_size:
        raise LayoutError(f"dcp_size is {dcp_size}, expected a divisor of tp_size {tp_size}")
    for shelf in (shelf for group in shelves.values() for shelf in group):
        for part in (part for arrangement in shelf.arrangements for part in arrangement.parts):
            if dcp_size > 1 and part.tokens_per_cell > 1 and shelf.keep.group == "attention":
                raise LayoutError(
                    f"dcp_size is {dcp_size}, expected 1: {part.name} has {part.tokens_per_cell} tokens in a cell"
                )
            if part.dcp_sharded and not part.replicated and tp_size < part.heads * dcp_size:
                raise LayoutError(
                    f"dcp_size is {dcp_size}: {part.name} has {part.heads} heads, expected a tp_size of at least "
                    f"{part.heads * dcp_size}, got {tp_size}: tokens would be on no rank"
                )


def _lay_out(plan: Deployment, shelves: dict[str, list[Shelf]], rank: int, base: int) -> tuple[list[Region], int]:
    """Place a rank's regions from ``base`` on; return them and the bytes they take."""
    packed = plan.serving.order.index("B") < plan.serving.order.index("L")
    regions: list[Region] = []
    rows = {name: sum(len(s.layers) * _padded(plan, s, rank) for s in group) for name, group in shelves.items()}
    shared = max(rows.values())
    start = reach = 0
    for number, (name, group) in enumerate(shelves.items()):
        row = shared if plan.overlay and packed else rows[name]
        at = start
        for shelf in group:
            page = _padded(plan, shelf, rank)
            count = plan.num_blocks[name] * shelf.kernel_blocks
            common: dict[str, Any] = {
                "layers": shelf.layers,
                "base": base + at,
                "num_blocks": count,
                "group": number,
                "kernel_blocks": shelf.kernel_blocks,
                "tp_rank": rank,
                "tp_size": plan.tp_size,
            }
            if packed and shelf.kernel_blocks > 1 and row != page:
                raise LayoutError(
                    f"kernel blocks of {shelf.keep.kind} in packed rows: not equally spaced where other layers "
                    "lie between blocks; expected kernel_block_size as block_size, or L before B in order"
                )
            if shelf.keep.state:  # its own order of axes, and padding
                strides: dict[str, Any] = (
                    {"block_stride": row, "layer_stride": page} if packed else {"block_stride": page}
                )
                regions += stack(shelf.arrangements, **common, **strides)
            else:
                (arrangement,) = shelf.arrangements
                regions += arrangement.regions(**common, block_stride=row if packed else None)
            at += page * len(shelf.layers) * (1 if packed else count)
        if packed:
            at = start + row * plan.num_blocks[name] * max((shelf.kernel_blocks for shelf in group), default=1)
        reach = max(reach, at if group else 0)
        start = 0 if plan.overlay else at
    if plan.overlay:
        _check_overlay(plan, regions)
    return regions, reach


def _padded(plan: Deployment, shelf: Shelf, rank: int) -> int:
    """Bytes of one kernel block of one layer, padded: state here, everything else by its own arrangement."""
    page = shelf.page(rank, plan.tp_size)
    align = plan.serving.padding("state") if shelf.keep.state else 1
    return -(-page // align) * align


def _check_overlay(plan: Deployment, regions: list[Region]) -> None:
    """Groups that share memory share it at equal ids only: the distance from id to id is the same in all."""
    sizes = {region.block_stride * region.kernel_blocks for region in regions}
    counts = {plan.num_blocks[name] for name in plan.groups}
    if len({region.group for region in regions}) > 1 and (len(counts) > 1 or len(sizes) > 1):
        raise LayoutError(
            f"overlay: blocks of {sorted(sizes)} bytes, {sorted(counts)} of them, expected equal blocks and numbers in "
            "all groups (align= pads them), or B before L in order"
        )
