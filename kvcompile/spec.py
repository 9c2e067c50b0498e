"""A deployment in a small TOML file: which model, how each side serves it. It compiles and proves nothing.

[model]
name = "qwen3-235b-a22b"        # or config = "config.json" (beside this file), or [[model.layers]] by hand

[src]                           # keys: the parameters of kvcompile.models.caches
tp_size = 8

[dst]
tp_size = 2
order = "nhd"

[plan]                          # keys: the parameters of kvcompile.compile
election = "balanced"
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvcompile import models, topology
from kvcompile.cache import Cache
from kvcompile.errors import KVCompileError, LayoutError

__all__ = ["BUILT_IN", "Deployment", "loads", "parse", "read"]

MAX_NBYTES = 1 << 20
"""Of a file."""

MAX_REGIONS = 1 << 16
"""Layers of all ranks of a side, replicas included: 1,024 ranks of 64 layers; each costs a fraction of a millisecond.

What the layers of one replica keep is bounded by `models.caches` likewise."""

MAX_PAIRS = 1 << 16
"""Pairs of a src and a dst rank."""

BUILT_IN: dict[str, dict[str, Any]] = {
    "qwen3-235b-a22b": {
        "model_type": "qwen3_moe", "num_hidden_layers": 94, "num_key_value_heads": 4, "head_dim": 128,
    },
    "llama-3.3-70b": {"model_type": "llama", "num_hidden_layers": 80, "num_key_value_heads": 8, "head_dim": 128},
    "deepseek-v3": {"model_type": "deepseek_v3", "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "gpt-oss-120b": {
        "model_type": "gpt_oss", "num_hidden_layers": 36, "num_key_value_heads": 8, "head_dim": 64,
        "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
}  # fmt: skip
"""Of each model's published config.json, the keys that decide its cache; all are bfloat16."""

KEEPS = {
    kind.__name__.lower(): kind
    for kind in (
        models.Attention, models.Latent, models.Indexer, models.Compressed,
        models.Mamba1, models.Mamba2, models.Delta, models.Lightning,
    )
}  # fmt: skip
"""What a layer by hand may keep, by ``kind``; the other keys are the parameters of the class."""


class Deployment(NamedTuple):
    """All ranks of both sides; ``options`` are `compile`'s. Names say where a rank is."""

    src: list[Cache]
    dst: list[Cache]
    src_names: list[str]
    dst_names: list[str]
    options: dict[str, Any]


def read(path: str | Path, settings: Mapping[str, str] | None = None) -> Deployment:
    """Read a TOML file, or a config.json as the model of one.

    Parameters
    ----------
    path : path
        A config.json is taken by its name, a folder as one that holds a config.json.
    settings : mapping of table to text, optional
        ``{"src": "tp_size=8 order=nhd"}``: keys that are added, and win.

    Raises
    ------
    LayoutError
        The file cannot be read; and as of `parse`.
    """
    path = Path(path)
    if path.suffix == ".json" or path.is_dir():
        content: dict[str, Any] = {"model": {"config": path.name}}
    else:
        try:
            with path.open("rb") as file:
                data = file.read(MAX_NBYTES + 1)
        except OSError as error:
            raise LayoutError(f"{path}: cannot be read: {error.strerror or error}") from None
        content = _content(data, path.name)
    for table, text in (settings or {}).items():
        given = content.get(table, {})
        content[table] = {**given, **_words(table, text)} if isinstance(given, dict) else given
    return _deployment(content, path.name, path.parent)


def parse(data: bytes, name: str = "spec", folder: Path | None = None) -> Deployment:
    """Turn the content of a file into caches.

    Parameters
    ----------
    data : bytes
    name : str
        How errors call the file.
    folder : Path, optional
        Where a relative ``model.config`` lies; None: no file may be named.

    Raises
    ------
    LayoutError
        Not TOML, an unknown, missing or wrong key (it is named), or caches that do not fit together.
    """
    return _deployment(_content(data, name), name, folder)


def _content(data: bytes, name: str) -> dict[str, Any]:
    if len(data) > MAX_NBYTES:
        raise LayoutError(f"{name}: over {MAX_NBYTES} bytes, expected a small TOML file")
    try:
        return loads(data.decode())
    except (ValueError, RecursionError) as error:  # what TOML and UTF-8 errors derive from
        raise LayoutError(f"{name}: no TOML: {str(error)[:200]}") from None


def _words(table: str, text: str) -> dict[str, Any]:
    """Read ``key=value`` words: values as in TOML, or text."""
    found: dict[str, Any] = {}
    for word in text.split():
        key, equals, value = word.partition("=")
        if not equals:
            raise LayoutError(f"{table} settings: {word!r:.80}, expected key=value")
        try:
            found[key] = loads(f"value = {value}")["value"]
        except (ValueError, RecursionError):
            found[key] = value
    return found


def _deployment(content: dict[str, Any], name: str, folder: Path | None) -> Deployment:
    top = _Keys(name, "", content)
    model, src, dst, plan = (top.table(key) for key in ("model", "src", "dst", "plan"))
    top.end()
    config = _config(model, folder)
    sides = [_settings(side) for side in (src, dst)]
    if sides[0].ranks * sides[1].ranks > MAX_PAIRS:
        counts = f"{sides[0].ranks} src ranks and {sides[1].ranks} dst ranks"
        raise LayoutError(f"{name}: src.tp_size and dst.tp_size make {counts}, expected at most {MAX_PAIRS} pairs")
    options = plan.known(election=_one_of(*topology.ELECTIONS), bridge_padding=_boolean, layers=_many(_text))
    plan.end()
    (srcs, src_names), (dsts, dst_names) = (_build(side, config) for side in sides)
    unknown = set(options.get("layers", ())) - {region.layer for cache in (*srcs, *dsts) for region in cache.regions}
    if unknown:
        raise plan.error("layers", repr(options["layers"]), f"names of layers: none is called {min(unknown)!r:.80}")
    return Deployment(srcs, dsts, src_names, dst_names, options)


def _config(model: "_Keys", folder: Path | None) -> Any:
    """Return what `models.caches` takes as a config: a mapping, a path or layers."""
    given = [key for key in ("name", "config", "layers") if key in model.content]
    if len(given) != 1:
        raise model.error("", f"{given or 'nothing'}", "one of name, config and [[model.layers]]")
    if given == ["name"]:
        config: Any = BUILT_IN[model.take("name", _one_of(*BUILT_IN))]
    elif given == ["config"]:
        config = model.take("config", _text)
        if folder is None:
            raise model.error("config", config, "name or [[model.layers]]: there is no folder to look in")
        config = folder / config
    else:
        config = []
        for table in model.tables("layers"):
            config += _layers(table)
            if len(config) > MAX_REGIONS:
                raise model.error("layers", f"{len(config)} layers and more", f"at most {MAX_REGIONS}")
        config = [layer._replace(name=f"layers.{number}") for number, layer in enumerate(config)]
    model.end()
    return config


def _layers(table: "_Keys") -> list[models.Layer]:
    """Return ``count`` equal layers, each keeping one thing, or several where it says ``keeps``."""
    count = table.take("count", _size(MAX_REGIONS), 1)
    parts = table.tables("keeps") if "keeps" in table.content else [table]
    keeps = tuple(_keep(part) for part in parts)
    table.end()
    return [models.Layer("", keeps)] * count


def _keep(table: "_Keys") -> Any:
    kind = KEEPS[table.take("kind", _one_of(*KEEPS))]
    values = {}
    for field in dataclasses.fields(kind):
        check = _text if field.type is str else _boolean if field.type is bool else _size(2**31 - 1)
        default = _REQUIRED if field.default is dataclasses.MISSING else field.default
        values[field.name] = table.take(field.name, check, default)
    table.end()
    return kind(**values)


class _Settings(NamedTuple):
    """What a side's table says: where it stands, the options of `models.caches`, and how many replicas there are."""

    where: str
    options: dict[str, Any]
    replicas: int

    @property
    def tp_size(self) -> int:
        return int(self.options.get("tp_size", 1))

    @property
    def stages(self) -> int:
        size = self.options.get("pp_size", 1)
        return size if isinstance(size, int) else len(size)

    @property
    def ranks(self) -> int:
        return self.tp_size * self.stages * self.replicas


def _settings(side: "_Keys") -> _Settings:
    size, few = _size(2**31 - 1), _size(1 << 12)
    sizes = _either(size, _by_name(size))
    options = side.known(
        tp_size=size, pp_size=_either(few, _many(size)), dcp_size=size, dcp_interleave=size, align=sizes,
        block_size=size, kernel_block_size=sizes, num_blocks=sizes, null_block=_number, overlay=_boolean, mtp=_boolean,
        order=_text, kv_dtype=_text, state_dtype=_text, conv_order=_text,
    )  # fmt: skip
    replicas = side.take("dp_size", size, 1)
    side.end()
    return _Settings(f"{side.file}, [{side.where}]", options, replicas)


def _build(side: _Settings, config: Any) -> tuple[list[Cache], list[str]]:
    """Make the caches of a side, and name them."""
    tp_size, stages, replicas = side.tp_size, side.stages, side.replicas
    try:
        if tp_size * replicas * _count(config) > MAX_REGIONS:
            raise LayoutError(f"tp_size {tp_size}, dp_size {replicas}: expected at most {MAX_REGIONS} layers of ranks")
        caches = models.caches(config, **side.options)
    except KVCompileError as error:
        raise LayoutError(f"{side.where}: {error}") from error
    names = [_name(n // tp_size, stages, n % tp_size, tp_size) for n in range(len(caches))]
    if replicas == 1:
        return caches, names
    spread = [replace(cache, dp_rank=dp, dp_size=replicas) for dp in range(replicas) for cache in caches]
    return spread, [f"dp{dp} {name}" for dp in range(replicas) for name in names]


def _count(config: Any) -> int:
    """Return how many layers a config has, as far as it says so without being looked at closely."""
    return len(config) if isinstance(config, list) else len(models.layers_of(config))


def _name(stage: int, stages: int, rank: int, ranks: int) -> str:
    parts = [f"pp{stage}"] * (stages > 1) + [f"tp{rank}"] * (ranks > 1)
    return " ".join(parts) or "0"


_REQUIRED: Any = object()
_Check = Callable[[Any], str | None]
"""Return what was expected instead of a value, None where it is right."""


class _Keys:
    """A table of the file. It hands out each key once, and names what is left over."""

    def __init__(self, file: str, where: str, content: Mapping[str, Any]) -> None:
        self.file, self.where, self.content = file, where, content
        self.left = set(content)

    def take(self, key: str, check: _Check, default: Any = _REQUIRED) -> Any:
        """Return the value of a key that ``check`` accepts."""
        self.left.discard(key)
        if key not in self.content:
            if default is _REQUIRED:
                raise self.error(key, "missing", check(_REQUIRED) or "it")
            return default
        expected = check(self.content[key])
        if expected is not None:
            raise self.error(key, repr(self.content[key]), expected)
        return self.content[key]

    def known(self, **checks: _Check) -> dict[str, Any]:
        """Return those of some optional keys that are there."""
        return {key: self.take(key, check) for key, check in checks.items() if key in self.content}

    def table(self, key: str) -> "_Keys":
        """Return a table inside this one; an empty one where it is absent."""
        return _Keys(self.file, self.path(key), self.take(key, _table, {}))

    def tables(self, key: str) -> list["_Keys"]:
        """Return an array of tables."""
        found = self.take(key, _many(_table))
        return [_Keys(self.file, f"{self.path(key)}[{number}]", table) for number, table in enumerate(found)]

    def end(self) -> None:
        """Refuse keys that nobody took."""
        if self.left:
            raise LayoutError(f"{self.file}: unknown key {self.path(min(self.left))!r:.200}")

    def path(self, key: str) -> str:
        return ".".join(part for part in (self.where, key) if part)

    def error(self, key: str, got: str, expected: str) -> LayoutError:
        return LayoutError(f"{self.file}: {self.path(key)} is {got:.200}, expected {expected}")


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) else "a string"


def _boolean(value: Any) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def _number(value: Any) -> str | None:
    return None if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**62 else "an integer"


def _table(value: Any) -> str | None:
    return None if isinstance(value, dict) else "a table"


def _size(most: int) -> _Check:
    def check(value: Any) -> str | None:
        right = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most
        return None if right else f"an integer from 1 to {most}"

    return check


def _one_of(*names: str) -> _Check:
    return lambda value: None if isinstance(value, str) and value in names else f"one of {', '.join(names)}"


def _many(item: _Check) -> _Check:
    def check(value: Any) -> str | None:
        right = (
            isinstance(value, list)
            and value
            and len(value) <= MAX_REGIONS
            and all(item(each) is None for each in value)
        )
        return None if right else f"an array, each {item(_REQUIRED)}"

    return check


def _by_name(item: _Check) -> _Check:
    def check(value: Any) -> str | None:
        right = isinstance(value, dict) and all(item(each) is None for each in value.values())
        return None if right else f"a table, each {item(_REQUIRED)}"

    return check


def _either(one: _Check, other: _Check) -> _Check:
    return lambda value: (
        None if one(value) is None or other(value) is None else f"{one(_REQUIRED)}, or {other(_REQUIRED)}"
    )


def loads(text: str) -> dict[str, Any]:
    """Read TOML, whatever Python has for it."""
    if sys.version_info >= (3, 11):
        import tomllib  # noqa: PLC0415
    else:
        try:
            import tomli as tomllib  # noqa: PLC0415
        except ImportError:
            raise LayoutError("TOML files need tomli on Python 3.10: pip install 'kvcompile[cli]'") from None
    loaded: dict[str, Any] = tomllib.loads(text)
    return loaded
