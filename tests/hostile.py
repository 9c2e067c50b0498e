"""Inputs from a peer or a user who means harm: mutated bytes and mutated structures, and what they may do."""

import json
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec

import kvcompile
from kvcompile import Buffer, Cache, Descriptors, Field, Group, HandshakeError, KVCompileError, Region, Request, spec

NASTY = [
    0, 1, -1, 2, 3, 7, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), -(2**31),
    1.5, float("inf"), float("nan"), None, True, False, "", "x", "layer", b"", b"\x00" * 9, [], {}, [[]], {"a": 1},
]  # fmt: skip
"""What may stand where something else should. msgpack has no larger integers; `deep` and `storm` make the rest."""


def peers() -> list[Cache]:
    """Caches as peers send them: every feature once, and addresses near the ends of what there is."""
    gqa = [
        Field.hnd("k", heads=4, tokens=4, cell_nbytes=8),
        Field.hnd("v", heads=4, tokens=4, cell_nbytes=8, offset=64),
    ]
    nhd = [
        Field.nhd("k", heads=4, local_heads=2, tokens=4, cell_nbytes=8),
        Field.nhd("v", heads=4, local_heads=2, tokens=4, cell_nbytes=8, offset=64),
    ]
    latent = Field.hnd("latent", heads=1, tokens=8, cell_nbytes=6, replicated=True)
    state = Field.hnd("ssm", heads=4, tokens=1, cell_nbytes=16)
    wide = Field("kv", 4, 4, 2, 0, 4096, 2)
    shared = Field.hnd("latent", heads=1, tokens=4, cell_nbytes=4, replicated=True, dcp_sharded=True)
    packed = Field.hnd("kv", heads=2, tokens=4, cell_nbytes=4, tokens_per_cell=2)
    top = 2**64 - 2**16
    return [
        Cache([Region(f"l{n}", 0, 4096 * n, 128, 16, gqa) for n in range(3)], [Group(4, 0)], tp_rank=1, tp_size=2),
        Cache([Region(f"l{n}", 0, 4096 * n, 160, 64, nhd, 4) for n in range(2)], [Group(16)], tp_rank=0, tp_size=2),
        Cache(
            [
                Region("a", 0, top, 48, 9, [latent]),
                Region("b", 1, top + 4096, 64, 9, [state]),
                Region("c", 2, top, 48, 9, [latent]),
            ],
            [Group(8), Group(8, state=True), Group(8, -1)],
            [Buffer(top - 16, 2**15)],
        ),
        Cache([Region("far", 0, 1 << 20, 8, 40, [wide])], [Group(4)], [Buffer(1 << 20, 1 << 20, 1 << 12)]),
        Cache([Region("d", 0, 0, 16, 8, [shared])], [Group(8)], tp_rank=3, tp_size=4, dcp_size=2, dcp_interleave=2),
        Cache([Region("s", 0, 0, 16, 8, [packed])], [Group(4)], dp_rank=1, dp_size=3),
    ]  # fmt: skip


def mutate_bytes(data: bytes, random: Random) -> bytes:
    """Flip, cut, lengthen, repeat or splice."""
    changed = bytearray(data)
    for _ in range(random.choice([1, 1, 1, 2, 5])):
        at = random.randrange(len(changed) + 1)
        match random.randrange(6):
            case 0 if at < len(changed):
                changed[at] ^= 1 << random.randrange(8)
            case 1 if at < len(changed):
                changed[at] = random.randrange(256)
            case 2:
                del changed[at:]
            case 3:
                changed[at:at] = random.randbytes(random.choice([1, 2, 8, 300]))
            case 4:
                start = random.randrange(len(changed) + 1)
                changed[at:at] = changed[start : start + random.randrange(200)]
            case _:
                del changed[at : at + random.randrange(1, 9)]
    return bytes(changed)


def mutate_structure(data: bytes, random: Random) -> bytes:
    """Decode, change one to three places of what was decoded, encode again."""
    tree: Any = msgspec.msgpack.decode(data)
    for _ in range(random.choice([1, 1, 1, 1, 2, 3])):
        tree = _mutate(tree, random)
    return msgspec.msgpack.encode(tree)


def _mutate(tree: Any, random: Random) -> Any:
    """Change one place: mostly a leaf in depth, sometimes a whole branch."""
    if isinstance(tree, list) and tree and random.randrange(12):
        at = random.choice([n for n, item in enumerate(tree) if isinstance(item, list)] or range(len(tree)))
        at = at if random.randrange(3) else random.randrange(len(tree))
        return [*tree[:at], _mutate(tree[at], random), *tree[at + 1 :]]
    match random.randrange(8):
        case 0 if isinstance(tree, list) and tree:
            at = random.randrange(len(tree))
            return [*tree[:at], *tree[at + 1 :]]
        case 1 if isinstance(tree, list) and tree:
            return [*tree, random.choice(tree)]
        case 2 if isinstance(tree, list) and tree:
            return storm(random.choice(tree), random)
        case 3 if isinstance(tree, list):
            return deep(random.choice([3, 30, 2000]))
        case 4 if isinstance(tree, list):
            return random.sample(tree, len(tree))
    if isinstance(tree, int) and not isinstance(tree, bool) and random.randrange(8):
        near = [
            tree + 1,
            tree - 1,
            tree * 2,
            tree // 2,
            tree + 2**32,
            tree * 2**20,
            2**40,
            2**62,
            2**63 - 1,
            2**64 - 1,
            0,
            -tree,
        ]
        value = random.choice(near)
        return value if -(2**63) <= value < 2**64 else 2**64 - 1
    if isinstance(tree, str) and random.randrange(2):
        return random.choice(["", "k", "v", "kv", "l0", "x" * 3000, "\x00", 0, 7])
    return random.choice(NASTY)


def storm(item: Any, random: Random) -> list[Any]:
    """Repeat an item many times; where it has a name, some under names of their own."""
    count = random.choice([2, 50, 300])
    if isinstance(item, list) and item and isinstance(item[0], str) and random.randrange(2):
        return [[f"{item[0]}{n}", *item[1:]] for n in range(count)]
    return [item] * count


def deep(depth: int) -> msgspec.Raw:
    """Lists in lists, as bytes: no encoder goes so deep."""
    return msgspec.Raw(b"\x91" * depth + b"\x90")


def offer(data: bytes, seen: Counter[str]) -> Cache | None:
    """Give bytes to `Cache.from_bytes`: a cache, or a HandshakeError and nothing else. Counts how far they came."""
    seen["inputs"] += 1
    try:
        cache = Cache.from_bytes(data)
    except HandshakeError as error:
        seen["refused"] += 1
        seen["reached the validators"] += isinstance(error.__cause__, KVCompileError)
        return None
    seen["reached the validators"] += 1
    seen["accepted"] += 1
    return cache


def deal(ours: Cache, theirs: Cache, random: Random, seen: Counter[str]) -> None:
    """Do with a valid peer what a connector does, both ways: compile, explain, build; no descriptor leaves a buffer."""
    for src, dst in ((ours, theirs), (theirs, ours)):
        for election in ("nearest", "balanced", "striped"):
            try:
                bridged = bool(random.randrange(2))
                plan = kvcompile.compile(src, dst, election=election, bridge_padding=bridged)
            except KVCompileError:
                seen["compile refused"] += 1
                continue
            seen["compiled"] += 1
            plan.explain()
            built = plan.build([wide_request(src, dst, random, n) for n in range(2)])
            seen["descriptors"] += len(built)
            assert_inside(built, src, dst)


def wide_request(src: Cache, dst: Cache, random: Random, name: int) -> Request:
    """Ids of all kinds: first, last, too large, negative, null; with positions or without."""
    lists: list[list[list[int]]] = []
    for cache in (src, dst):
        lists.append([])
        for number, group in enumerate(cache.groups):
            bound = cache.bound(number) or 1
            ids = random.choices(
                [0, bound - 1, bound // 2, group.null_block or 0, random.randrange(bound)], k=random.randrange(5)
            )
            if random.randrange(8) == 0:
                ids.append(random.choice([bound, -1, 2**62, 2**63 - 1]))
            lists[-1].append(ids)
    firsts = [[random.choice([0, 0, 1, 5]) for _ in cache.groups] for cache in (src, dst)]
    return Request(f"r{name}", *lists, *(firsts if random.randrange(2) else ()))


def assert_inside(built: Descriptors, src: Cache, dst: Cache) -> None:
    """Every descriptor lies in one buffer of either cache."""
    for column, cache in ((built.src, src), (built.dst, dst)):
        for start, length in zip(column.tolist(), built.length.tolist(), strict=True):
            inside = any(b.base <= start and start + length <= b.base + b.nbytes for b in cache.buffers)
            assert inside, f"[{start}, {start + length}) is in no buffer of {cache.buffers}"


def peak_of(call: Callable[[], object]) -> int:
    """Return the bytes that a call held at most; NumPy's arrays are counted too."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def toml(value: Any) -> str:
    """Write a value as TOML, tables inline; what TOML has no word for becomes a string."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "")


def mutate_toml(text: str, random: Random) -> str:
    """Change one to three places of a parsed file, and write it again."""
    tree: Any = spec.loads(text)
    for _ in range(random.choice([1, 1, 2, 3])):
        tree = _mutate_table(tree, random)
    items = tree.items() if isinstance(tree, dict) else [("model", tree)]
    return "\n".join(f"{json.dumps(str(key))} = {toml(value)}" for key, value in items)


def _mutate_table(tree: Any, random: Random) -> Any:
    if isinstance(tree, dict) and tree:
        key = random.choice(list(tree))
        match random.randrange(10):
            case 0:
                return {name: value for name, value in tree.items() if name != key}
            case 1:
                return {**tree, random.choice(["", "x", "tp", "layers", "name", "config", "kind", "count"]): tree[key]}
            case 2:
                return {**tree, random.choice(list(tree)): random.choice(list(tree.values()))}
        return {**tree, key: _mutate_table(tree[key], random)}
    if isinstance(tree, list) and tree and random.randrange(3):
        at = random.randrange(len(tree))
        changed = _mutate_table(tree[at], random)
        return [*tree[:at], changed, *tree[at + 1 :], *[changed] * random.choice([0, 0, 1, 200])]
    if isinstance(tree, int) and random.randrange(3):
        return random.choice(
            [tree + 1, tree * 2, 0, -1, 2**12, 2**17, 2**31 - 1, 2**31, 2**62, 2**63, 2**64, 10**400, -tree]
        )
    nested: Any = []
    for _ in range(random.choice([1, 40, 400])):
        nested = [nested]
    return random.choice([*NASTY, nested, {"kind": "attention"}, "nhd", "fp8", "nvfp4", "LBHNC", "BLHNC", "x" * 5000])


def offer_toml(text: str, seen: Counter[str]) -> spec.Deployment | None:
    """Give a file to `spec.parse`: a deployment, or a KVCompileError and nothing else."""
    seen["inputs"] += 1
    try:
        found = spec.parse(text.encode("utf-8", "surrogatepass"))
    except KVCompileError as error:
        seen["refused"] += 1
        seen["reached the validators"] += "no TOML" not in str(error)
        return None
    seen["reached the validators"] += 1
    seen["accepted"] += 1
    return found


def handshakes(random: Random, count: int) -> Counter[str]:
    """Offer so many mutated caches, and deal with those that are valid."""
    seen: Counter[str] = Counter()
    caches = peers()
    data = [cache.to_bytes() for cache in caches]
    for _ in range(count):
        which = random.randrange(len(caches))
        mutate = mutate_structure if random.randrange(4) else mutate_bytes
        cache = offer(mutate(data[which], random), seen)
        if cache is not None:
            deal(caches[which], cache, random, seen)
    return seen


def files(random: Random, count: int, folder: Path) -> Counter[str]:
    """Offer so many mutated TOML files."""
    seen: Counter[str] = Counter()
    texts = [path.read_text() for path in sorted(folder.glob("*.toml"))]
    for _ in range(count):
        text = random.choice(texts)
        if random.randrange(4):
            offer_toml(mutate_toml(text, random), seen)
        else:
            offer_toml(mutate_bytes(text.encode(), random).decode("utf-8", "surrogateescape"), seen)
    return seen


def figures(seen: Counter[str]) -> str:
    """Say how many inputs came how far."""
    share = seen["reached the validators"] / max(1, seen["inputs"])
    return ", ".join([
        f"{seen['inputs']:,} inputs", f"{share:.0%} reached the validators", f"{seen['accepted']:,} valid",
        *(f"{seen[name]:,} {name}" for name in ("compiled", "descriptors") if seen[name]),
    ])  # fmt: skip
