"""The values that say where bytes lie: field, region, group, buffer. How they fit together is `Cache`'s to check."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import msgspec
import numpy as np

from kvcompile.errors import LayoutError

__all__ = ["Buffer", "Field", "Group", "Region", "Value"]

INT64_MAX = 2**63 - 1


class Value(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A frozen value whose constructor checks what the annotations say."""

    def integers(self, least: int, *names: str, most: int = INT64_MAX) -> None:
        for name in names:
            value = getattr(self, name)
            if type(value) is not int:
                if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
                    self.refuse(name, value, "an integer")
                value = operator.index(value)
                self.put(name, value)
            if not least <= value <= most:
                self.refuse(name, value, f"an integer from {least} to {most}")

    def flags(self, *names: str) -> None:
        for name in names:
            if not isinstance(getattr(self, name), bool):
                self.refuse(name, getattr(self, name), "True or False")

    def sequence(self, name: str, kind: type) -> None:
        value = getattr(self, name)
        items = tuple(value) if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) else None
        if items is None or not all(isinstance(item, kind) for item in items):
            self.refuse(name, value, f"a sequence of {kind.__name__}")
        self.put(name, items)

    def text(self, name: str) -> None:
        """Refuse a string that no handshake can carry; keep those of derived types as plain ones."""
        value = str.__str__(getattr(self, name))
        try:
            value.encode()
        except UnicodeEncodeError:
            self.refuse(name, value, "a string that UTF-8 can write")
        self.put(name, value)

    def put(self, name: str, value: object) -> None:
        msgspec.structs.force_setattr(self, name, value)

    def refuse(self, name: str, value: object, expected: str) -> NoReturn:
        raise LayoutError(f"{self.where()}: {name} is {value!r:.200}, expected {expected}")

    def where(self) -> str:
        return type(self).__name__


class Field(Value, frozen=True):
    """One tensor inside a kernel block, with axes [heads, tokens, bytes of a cell].

    Byte ``c`` of (local head ``h``, cell ``n``) lies at ``offset + h*head_stride + n*token_stride + c``
    of its kernel block.

    Parameters
    ----------
    name : str
        ``kv``, ``k``, ``v``, ``k_scale``, ``latent``, ``conv_x``, ``ssm``, ... Same layer and name on both sides
        are the same tensor.
    heads : int
        Heads of the whole model; a rank's own follow from its place (`Cache.shard`).
    tokens : int
        Tokens of one kernel block; rows of state in a state group.
    cell_nbytes : int
        Contiguous bytes of one (head, token).
    offset, head_stride, token_stride : int
        Bytes, not negative.
    replicated : bool
        Every rank holds all heads (MLA latent, an indexer each rank keeps whole).
    dcp_sharded : bool
        Decode context parallelism divides the tokens.
    tokens_per_cell : int
        Tokens that one cell covers (compressed caches); divides ``tokens``, never together with ``dcp_sharded``.

    Raises
    ------
    LayoutError
        A size below one, a negative offset or stride, or a value of the wrong kind.
    """

    name: str
    heads: int
    tokens: int
    cell_nbytes: int
    offset: int
    head_stride: int
    token_stride: int
    replicated: bool = False
    dcp_sharded: bool = False
    tokens_per_cell: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            self.refuse("name", self.name, "a non-empty string")
        self.text("name")
        self.integers(1, "heads", "tokens", "cell_nbytes", "tokens_per_cell")
        self.integers(0, "offset", "head_stride", "token_stride")
        self.flags("replicated", "dcp_sharded")
        if self.tokens % self.tokens_per_cell or (self.dcp_sharded and self.tokens_per_cell != 1):
            expected = f"a divisor of tokens {self.tokens}, and 1 where dcp_sharded"
            self.refuse("tokens_per_cell", self.tokens_per_cell, expected)

    @property
    def cells(self) -> int:
        """Cells of one head in a kernel block: the token axis."""
        return self.tokens // self.tokens_per_cell

    @classmethod
    def hnd(cls, name: str, *, heads: int, tokens: int, cell_nbytes: int, offset: int = 0, **flags: Any) -> "Field":
        """Make a field in [head, token, byte] order, contiguous.

        Parameters and errors as for `Field`; the strides follow: a head after ``tokens`` cells, a token after one.
        """
        cells = tokens // max(flags.get("tokens_per_cell", 1), 1)
        return cls(name, heads, tokens, cell_nbytes, offset, cells * cell_nbytes, cell_nbytes, **flags)

    @classmethod
    def nhd(
        cls, name: str, *, heads: int, local_heads: int, tokens: int, cell_nbytes: int, offset: int = 0, **flags: Any
    ) -> "Field":
        """Make a field in [token, head, byte] order, contiguous.

        ``local_heads`` is the number of heads between two tokens in this rank's memory: its shard, or more where
        it is padded.
        Other parameters and errors as for `Field`.
        """
        return cls(name, heads, tokens, cell_nbytes, offset, cell_nbytes, local_heads * cell_nbytes, **flags)

    def where(self) -> str:
        return f"Field {self.name!r:.80}"


class Region(Value, frozen=True):
    """Equally spaced kernel blocks of one layer inside a buffer.

    Parameters
    ----------
    layer : str or int
        The layer's name in the model; pairs the two sides.
    group : int
        Index into `Cache.groups`.
    base : int
        Address of kernel block 0, unsigned 64-bit.
    block_stride : int
        Bytes from one kernel block to the next.
    num_blocks : int
        Kernel blocks.
    fields : sequence of Field
    kernel_blocks : int
        Kernel blocks of one block id: id ``i`` is kernel blocks ``i*kernel_blocks`` and the next ones.

    Raises
    ------
    LayoutError
        As for `Field`; or a field named twice.
    """

    layer: str | int
    group: int
    base: int
    block_stride: int
    num_blocks: int
    fields: Sequence[Field]
    kernel_blocks: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.layer, bool) or not isinstance(self.layer, (str, int)):
            self.refuse("layer", self.layer, "a string or an integer")
        if isinstance(self.layer, str):
            self.text("layer")
        else:
            self.integers(-(2**63), "layer", most=2**64 - 1)
        self.integers(0, "group", "block_stride")
        self.integers(0, "base", most=2**64 - 1)
        self.integers(1, "num_blocks", "kernel_blocks")
        self.sequence("fields", Field)
        names = [field.name for field in self.fields]
        if not names or len(set(names)) != len(names):
            self.refuse("fields", names, "at least one field, each name once")

    def where(self) -> str:
        return f"Region of layer {self.layer!r:.80}"


class Group(Value, frozen=True):
    """Layers that share one block table.

    Parameters
    ----------
    block_size : int
        Tokens that one block id stands for.
    null_block : int, optional
        The id that stands for no block; pairs with it are dropped.
    state : bool
        Recurrent state: a block is one unit, the token axis counts rows of state.

    Raises
    ------
    LayoutError
        A size below one or a value of the wrong kind.
    """

    block_size: int
    null_block: int | None = None
    state: bool = False

    def __post_init__(self) -> None:
        self.integers(1, "block_size")
        if self.null_block is not None:
            # The extremes are left out: ids beyond 64 bits are clipped to them, and must not turn into the null id.
            self.integers(1 - 2**63, "null_block", most=INT64_MAX - 1)
        self.flags("state")


class Buffer(Value, frozen=True):
    """One registered span of memory, ``nbytes`` from address ``base``; its end lies below 2**64.

    ``chunk_nbytes``, if given: it is registered in pieces of that size from its base, and no descriptor
    crosses an edge.

    Raises
    ------
    LayoutError
        An empty span, one that ends at or past 2**64, or a value of the wrong kind.
    """

    base: int
    nbytes: int
    chunk_nbytes: int | None = None

    def __post_init__(self) -> None:
        self.integers(0, "base", most=2**64 - 1)
        self.integers(1, "nbytes", most=2**64 - 1)
        if self.chunk_nbytes is not None:
            self.integers(1, "chunk_nbytes")
        if self.end >= 2**64:
            self.refuse("base", self.base, f"an end below 2**64 with nbytes {self.nbytes}")

    @property
    def end(self) -> int:
        """First address after the buffer."""
        return self.base + self.nbytes

    @property
    def chunks(self) -> "tuple[Buffer, ...]":
        """The spans that are registered: the buffer itself, or its chunks, the last of them what is left."""
        if self.chunk_nbytes is None:
            return (self,)
        starts = range(self.base, self.end, self.chunk_nbytes)
        return tuple(Buffer(start, min(self.chunk_nbytes, self.end - start)) for start in starts)
