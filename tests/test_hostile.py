"""Nothing that a peer or a file says does harm: one kind of error, bounded memory, no descriptor outside the buffers.

The long part, `make soak`, runs the same with other seeds.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

import kvcompile
from kvcompile import (
    Cache,
    Field,
    Group,
    HandshakeError,
    KVCompileError,
    LayoutError,
    Plan,
    Region,
    Request,
    handshake,
    lowering,
    models,
    spec,
)
from tests import hostile

ROOT = Path(__file__).resolve().parent.parent
HUGE = 2**36
MIB = 1 << 20


def test_mutated_handshakes(record_property: Callable[[str, object], None]) -> None:
    """A quarter mutated as bytes, the rest in the decoded structure; what is still valid is compiled and built."""
    seen = hostile.handshakes(Random(0), 3000)
    record_property("shares", hostile.figures(seen))
    assert seen["reached the validators"] > 0.2 * seen["inputs"]
    assert seen["accepted"] > 0.03 * seen["inputs"]
    assert seen["descriptors"] > 1000


def test_mutated_files(record_property: Callable[[str, object], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter mutated as text, the rest as tables. Deployments are kept small here: their size is what they cost."""
    monkeypatch.setattr(spec, "MAX_REGIONS", 256)
    seen = hostile.files(Random(0), 1000, ROOT / "examples")
    record_property("shares", hostile.figures(seen))
    assert seen["reached the validators"] > 0.5 * seen["inputs"]
    assert seen["accepted"] > 0.05 * seen["inputs"]


def frame(
    regions: Sequence[Any], groups: Sequence[Any], buffers: Sequence[Any] = ((0, 2**64 - 1),), **place: int
) -> bytes:
    """Bytes of a cache as a peer may send them, whatever our own constructors would say."""
    body = [regions, groups, buffers, 0, 1, 1, 1, 0, 1, ""]
    return msgspec.msgpack.encode(["kvcompile", handshake.VERSION, body])


def region(layer: str = "l", group: int = 0, **values: Any) -> list[Any]:
    defaults = {"base": 0, "block_stride": 8, "num_blocks": 4, "fields": [field()], "kernel_blocks": 1}
    return [layer, group, *({**defaults, **values}.values())]


def field(name: str = "kv", **values: Any) -> list[Any]:
    defaults = {"heads": 1, "tokens": 4, "cell_nbytes": 2, "offset": 0, "head_stride": 0, "token_stride": 2}
    return [name, *({**defaults, **values}.values())]


def byte(tokens: int) -> list[Any]:
    return [field(tokens=tokens, cell_nbytes=1, token_stride=1)]


WIDE = {"block_stride": 2**21, "num_blocks": 2, "fields": [field(tokens=2**18 - 1, token_stride=8)]}

# Valid or not, each of these once took gigabytes, minutes or an error of another kind; or might have.
ATTACKS: dict[str, tuple[Callable[[], bytes], str | None]] = {
    "kernel blocks in overlaid groups": (
        lambda: frame(
            [
                region(name, group, block_stride=1, num_blocks=HUGE, kernel_blocks=HUGE, fields=byte(1))
                for group, name in enumerate("lm")
            ],
            [[HUGE], [HUGE]],
        ),
        None,
    ),
    "blocks of 2**24 tokens": (
        lambda: frame([region(block_stride=2**25, num_blocks=2, fields=[field(tokens=2**24)])], [[2**24]]),
        None,
    ),
    "blocks without a common period": (
        lambda: frame([region(block_stride=2**26, num_blocks=2, fields=[field(tokens=2**24 - 1)])], [[2**24 - 1]]),
        None,
    ),
    "blocks of 2**61 tokens": (
        lambda: frame([region(block_stride=0, num_blocks=1, fields=[field(tokens=2**61)])], [[2**61]]),
        None,
    ),
    "as many pieces as are validated": (lambda: frame([region(**WIDE)], [[2**18 - 1]]), None),
    "more pieces than are validated": (
        lambda: frame([region(**{**WIDE, "fields": [field(tokens=2**18 + 1, token_stride=8)]})], [[2**18 + 1]]),
        "contiguous pieces",
    ),
    "the same pieces twenty times in two groups": (
        lambda: frame([region(f"l{n}", n % 2, **WIDE) for n in range(20)], [[2**18 - 1]] * 2),
        None,
    ),
    "spans that hang together over all of memory": (
        lambda: frame(
            [region(f"l{n}", n % 2, base=n << 61, block_stride=2**62, num_blocks=2) for n in range(6)], [[4]] * 2
        ),
        None,
    ),
    "a storm of aliases": (lambda: frame([region(f"l{n}", n % 1000) for n in range(16000)], [[4]] * 1000), None),
    "too many groups": (lambda: frame([region()], [[4]] * 100_000), "groups has 100000 items"),
    "too many regions": (
        lambda: frame([region(f"l{n}", base=n * 64) for n in range(20_000)], [[4]]),
        "regions has 20000 items",
    ),
    "a layer a thousand times": (lambda: frame([region()] * 1000, [[4]]), "declared twice"),
    "chunks of one byte": (lambda: frame([region()], [[4]], [[0, 2**40, 1]]), "chunks, expected at most"),
    "a name of megabytes": (lambda: frame([region("x" * (3 * MIB))], [[4]]), None),
    "a field's name of megabytes": (lambda: frame([region(fields=[field("x" * (3 * MIB))])], [[4]]), None),
    "two million heads of nothing": (
        lambda: frame([region(fields=[field(heads=2**62, head_stride=0)])], [[4]]),
        "contiguous pieces",
    ),
    "sizes whose product is 2**64": (
        lambda: frame([region(block_stride=2**32, num_blocks=2**32)], [[4]]),
        "a span below 2\\*\\*63",
    ),
    "lists 100,000 deep": (lambda: b"\x93" + b"\x91" * 100_000 + b"\x90", "no valid Cache"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_cost_little(name: str) -> None:
    """Bounded memory, also for what is done with a valid peer: overlays, compile both ways, a build."""
    make, says = ATTACKS[name]
    data = make()
    kvcompile.warmup()
    ours = Cache([Region("l", 0, 0, 8, 64, [Field.hnd("kv", heads=1, tokens=4, cell_nbytes=2)])], [Group(4)])
    found: list[Cache] = []

    wrong: list[str] = []

    def receive() -> None:
        try:
            found.append(Cache.from_bytes(data))
        except HandshakeError as error:
            wrong.append(str(error))

    peak = hostile.peak_of(receive)
    assert peak < 128 * MIB
    assert bool(found) == (says is None), wrong
    assert all(re.search(says or "", text) for text in wrong), wrong
    seen: Counter[str] = Counter()
    for cache in found:
        peak = hostile.peak_of(lambda cache=cache: hostile.deal(ours, cache, Random(0), seen))
        assert peak < 512 * MIB


def nhd_against_hnd(tokens: int, layers: int) -> tuple[Cache, Cache]:
    """Our blocks of 16 tokens in HND, and a peer's that hardly merge with them."""
    sizes = {"heads": 8, "cell_nbytes": 256}
    sides = []
    for block, make in ((16, Field.hnd), (tokens, lambda *a, **k: Field.nhd(*a, local_heads=8, **k))):
        half = block * 8 * 256
        fields = [make("k", tokens=block, **sizes), make("v", tokens=block, offset=half, **sizes)]
        sides.append(Cache([Region(f"l{n}", 0, n << 40, 2 * half, 2, fields) for n in range(layers)], [Group(block)]))
    return sides[0], sides[1]


@pytest.mark.parametrize(("tokens", "layers", "rows"), [(768, 16, 12320), (4096, 16, 65568), (2**17, 2, None)])
def test_compile_is_bounded(tokens: int, layers: int, rows: int | None) -> None:
    """Large tables compile; beyond what deployments have it is a LayoutError, before the memory is taken."""
    ours, theirs = nhd_against_hnd(tokens, layers)
    found: list[Plan | str] = []

    def attempt() -> None:
        try:
            found.append(kvcompile.compile(ours, theirs))
        except KVCompileError as error:
            found.append(str(error))

    assert hostile.peak_of(attempt) < 512 * MIB
    if rows is None:
        assert "expected at most" in found[0]
    else:
        assert len(found[0].table) == rows


def test_a_table_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "MAX_ROWS", 5000)
    with pytest.raises(LayoutError, match="rows, expected at most 5000"):
        kvcompile.compile(*nhd_against_hnd(1040, 16))


LAYERS = [models.Layer(f"l{n}", (models.Attention(8, 128),)) for n in range(4)]
LAYER = '[[model.layers]]\nkind = "attention"\nheads = 8\nk_dim = 8\n'
TABLE = '{ kind = "attention", heads = 8, k_dim = 8, window = %d }'
MODEL = '[model]\nname = "llama-3.3-70b"\n'

# What a caller, or a file, says of sizes; and words of the error, None where it is none. Some took all memory.
SIZES: dict[str, tuple[dict[str, Any] | str, str | None]] = {
    "stages": ({"pp_size": 2**31 - 1}, "pp_size makes stages without layers: it is 2147483647, expected at most 4"),
    "stages by hand": ({"pp_size": [1] * 10**5}, r"pp_size makes stages of \[1, 1"),
    "stages of words": ({"pp_size": "22"}, "pp_size is '2', expected a positive integer"),
    "ranks": ({"tp_size": 2**31 - 1}, r"2147483647 ranks \(tp_size or tp_ranks\)"),
    "ranks beyond all": ({"tp_size": 10**30}, "0000 ranks"),
    "context-parallel ranks": ({"tp_size": 2**31 - 1, "dcp_size": 2**31 - 1}, "2147483647 ranks"),
    "chosen ranks": ({"tp_size": 2, "tp_ranks": range(10**12)}, "65537 ranks"),
    "one of many ranks": ({"tp_size": 2**31 - 1, "tp_ranks": [7]}, None),
    "blocks": ({"num_blocks": 2**31 - 1}, None),
    "padding": ({"align": 2**62}, "expected an integer from 0 to"),
    "stages of a file": (
        MODEL + "[src]\npp_size = 2147483647\n",
        "src.pp_size is 2147483647, expected an integer from 1",
    ),
    "ranks of a file": (
        MODEL + "[src]\ntp_size = 2147483647\n",
        "src.tp_size and dst.tp_size make 2147483647 src ranks",
    ),
    "replicas": (MODEL + "[dst]\ndp_size = 60000\n", "dp_size 60000: expected at most"),
    "layers": (LAYER + "count = 65536\n", "layers that keep 65536 caches"),
    "layers in many tables": ((LAYER + "count = 65536\n") * 3000, "model.layers is 131072 layers and more"),
    "groups": (f"[model]\nlayers = [{', '.join(TABLE % (n + 1) for n in range(1100))}]", "groups has 1100 items"),
    "what layers keep": (
        f"[model]\nlayers = [{{ count = 60000, keeps = [{', '.join([TABLE % 1] * 2000)}] }}]",
        "layers that keep 120000000 caches",
    ),
    "groups of many stages": (
        f"[model]\nlayers = [{', '.join(TABLE % (n % 1000 + 1) for n in range(4000))}]\n[src]\npp_size = 4000",
        r"4000 stages \(pp_size\)",
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_deployments_are_bounded(name: str) -> None:
    given, says = SIZES[name]
    wrong: list[str] = []

    def attempt() -> None:
        try:
            if isinstance(given, str):
                spec.parse(given.encode())
            else:
                models.caches(LAYERS, **given)
        except LayoutError as error:
            wrong.append(str(error))

    begun = time.monotonic()
    assert hostile.peak_of(attempt) < 128 * MIB
    assert time.monotonic() - begun < 30  # seconds; under a debugger of memory on a busy machine
    assert bool(wrong) == (says is not None), wrong
    assert all(re.search(says or "", text) and len(text) < 500 for text in wrong), wrong


def wide(heads: int, base: int = 0) -> Cache:
    field = Field.hnd("kv", heads=heads, tokens=1, cell_nbytes=1)
    return Cache([Region("l", 0, base, heads, 2, [field])], [Group(1)])


@pytest.mark.parametrize("heads", [2**31, 2**61])
def test_heads_without_number(heads: int) -> None:
    """One piece in memory, and yet each would be looked at: eight bytes a head were 16 GiB."""
    wrong: list[str] = []

    def attempt() -> None:
        for call in (
            lambda: kvcompile.compile(wide(heads), wide(heads, 2**62)),
            lambda: kvcompile.prove([], [wide(heads)]),
        ):
            with pytest.raises(LayoutError) as caught:
                call()
            wrong.append(str(caught.value))

    assert hostile.peak_of(attempt) < 16 * MIB
    assert f"both ranks hold {heads} heads, expected at most" in wrong[0]
    assert "pieces to be proved, expected at most" in wrong[1]


def test_a_config_without_end(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="/dev/zero: no file"):
        spec.parse(b'model.config = "/dev/zero"', folder=tmp_path)


def test_a_valid_peer_that_claims_all_of_memory_gets_its_own_descriptors_only() -> None:
    """What we read lies in our buffers, what it gets in its own; ids above either bound are refused."""
    cell = {"heads": 1, "tokens": 4, "cell_nbytes": 2}
    ours = Cache([Region("l", 0, 4096, 8, 16, [Field.hnd("kv", **cell)])], [Group(4)])
    theirs = Cache.from_bytes(frame([region(base=2**63, num_blocks=2**40)], [[4]]))
    plan = kvcompile.compile(ours, theirs)
    good, high = Request("good", [[15]], [[2**40 - 1]]), Request("high", [[16]], [[0]])
    built = plan.build([good, high, Request("beyond", [[0]], [[2**40]])])
    assert built.failed.keys() == {"high", "beyond"}
    hostile.assert_inside(built, ours, theirs)
    assert built.dst.tolist() == [2**63 + (2**40 - 1) * 8]
