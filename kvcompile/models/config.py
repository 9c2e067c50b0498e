"""Read a Hugging Face config, and say which of its keys are missing. It knows no model."""

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcompile.errors import LayoutError

__all__ = ["BY_HAND", "Keys", "read"]

BY_HAND = (
    "To describe the cache by hand: caches([Layer('layers.0', (Attention(heads=8, k_dim=128),)), ...], tp_size=...) "
    "with the values of kvcompile.models, or regions with the builders of kvcompile.fields"
)

LARGEST = 16 << 20
"""Bytes of a config file; a larger one is none."""

MOST_LAYERS = 1 << 12
"""Layers of a model: far above any, so that a wrong number costs no memory."""


class Keys:
    """The keys of one config, of the text model where there is one.

    Parameters
    ----------
    config : mapping
        As read; what stands outside ``text_config`` is looked up second.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        text = config.get("text_config")
        if text is None and isinstance(config.get("llm_config"), Mapping):
            text = config["llm_config"]
        self.inner = text if isinstance(text, Mapping) else config
        self.outer = config

    @property
    def model_types(self) -> list[str]:
        """What the config calls the model, the text model's name first."""
        return [str(name) for name in (self.inner.get("model_type"), self.outer.get("model_type")) if name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value; the default where the key is absent or null."""
        for config in (self.inner, self.outer):
            if config.get(name) is not None:
                return config[name]
        return default

    def need(self, *names: str) -> list[Any]:
        """Return values, in order.

        Raises
        ------
        LayoutError
            Keys that are absent or null, all of them by name.
        """
        missing = [name for name in names if self.get(name) is None]
        if missing:
            raise LayoutError(
                f"config of model_type {' / '.join(self.model_types) or None}: keys {missing} are missing. {BY_HAND}"
            )
        return [self.get(name) for name in names]

    def integer(self, *names: str, default: int | None = None) -> int:
        """Return the first of several keys that is there, a positive integer; else the default, if there is one."""
        for name in names:
            value = self.get(name)
            if value is not None:
                return positive(name, value)
        if default is not None:
            return default
        raise LayoutError(
            f"config of model_type {' / '.join(self.model_types) or None}: keys {list(names)} are all missing, "
            f"expected one of them. {BY_HAND}"
        )

    def table(self, name: str) -> Mapping[str, Any]:
        """Return a value that has to be a mapping."""
        (value,) = self.need(name)
        if not isinstance(value, Mapping):
            raise LayoutError(f"config key {name!r} is {value!r:.80}, expected a mapping")
        return value

    @property
    def layers(self) -> int:
        """Hidden layers of the model."""
        layers = self.integer("num_hidden_layers")
        if layers > MOST_LAYERS:
            raise LayoutError(f"config key 'num_hidden_layers' is {layers}, expected at most {MOST_LAYERS}")
        return layers

    @property
    def kv_heads(self) -> int:
        """KV heads; as many as query heads where the config gives no number."""
        return self.integer("num_key_value_heads", "num_attention_heads")

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        if self.get("head_dim") is not None or self.get("attention_head_dim") is not None:
            return self.integer("head_dim", "attention_head_dim")
        hidden, heads = (self.integer(name) for name in ("hidden_size", "num_attention_heads"))
        return hidden // heads

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the model's own type."""
        name = str(self.get("dtype", self.get("torch_dtype", "bfloat16"))).removeprefix("torch.")
        sizes = {"float32": 4, "bfloat16": 2, "float16": 2}
        if name not in sizes:
            raise LayoutError(f"dtype of the config is {name!r:.80}, expected one of {', '.join(sizes)}")
        return sizes[name]


def read(config: Any) -> Keys:
    """Read a config.

    Parameters
    ----------
    config : path, mapping or config object
        A config.json, a folder that holds one, its content, or what has ``to_dict()``.

    Raises
    ------
    LayoutError
        Not a config.
    """
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if isinstance(config, (str, os.PathLike)):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            if not stat.S_ISREG(path.stat().st_mode) or path.stat().st_size > LARGEST:
                raise LayoutError(f"{path}: no file, or over {LARGEST} bytes, expected a config.json")
            config = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise LayoutError(f"{path}: expected a readable config.json, got {type(error).__name__}: {error}") from None
    if not isinstance(config, Mapping):
        raise LayoutError(f"config is a {type(config).__name__}, expected a path, a mapping or a config object")
    return Keys(config)


def positive(name: str, value: Any) -> int:
    """Return a value that has to be a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise LayoutError(f"config key {name!r} is {value!r:.80}, expected a positive integer")
    return value
