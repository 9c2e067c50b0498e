"""Odd but legal deployments of made-up models: what is proved is what is built, against the oracle, byte by byte.

Context parallelism, cells of several tokens, heads kept by several ranks, every order of axes, kernel blocks, padding
that is bridged, chunks, state, windows with null blocks: all at once, where the generated deployments of test_property
have few of them. Caches are those that `models.caches` lays out.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

import kvcompile
from kvcompile import Buffer, Cache, LayoutError, Request, models, prove
from kvcompile.models import Attention, Layer, Lightning, Mamba2, caches
from tests import oracle, replay

SEEDS = 120
ORDERS = ["hnd", "nhd", "LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "LPBNHC", "LBHPNC", "BHLNC", "HLBNC"]
ELECTIONS = ["nearest", "balanced", "striped"]


def model(random: Random) -> list[Layer]:
    """One to three layers, each keeping one to three things."""
    heads = random.choice([1, 2, 3, 4, 6])
    kinds: list[Any] = [
        *[Attention(heads, random.choice([1, 2]), random.choice([None, 1, 2]))] * 2,
        Attention(heads, 2, window=random.choice([8, 16])),
        models.Latent(2, 1),
        models.Indexer(2, scaled=random.random() < 0.5, tokens_per_cell=random.choice([1, 2, 4])),
        models.Compressed("c", 449, random.choice([2, 4]), raw_nbytes=3),
        models.Mamba1(random.choice([4, 6]), 2, 3),
        Mamba2(heads, 2, random.choice([1, 2]), 2, 3),
        models.Delta(random.choice([1, 2]), heads, 2, 2, 3),
        Lightning(heads, 2),
    ]
    drawn = random.sample(kinds, random.choice([1, 1, 2, 3]))
    return [
        Layer(
            f"l{n}", tuple({kind.kind: kind for kind in random.sample(drawn, random.randint(1, len(drawn)))}.values())
        )
        for n in range(random.choice([1, 2, 3]))
    ]


def side(random: Random, layers: list[Layer], kv_dtype: str, base: int) -> list[Cache]:
    """All ranks of one side, each in memory of its own."""
    tp, size = random.choice([1, 2, 3, 4, 6, 8]), random.choice([4, 8, 8, 12, 16])
    dcp = random.choice([1, 1, 1, *(places for places in (2, 4) if tp % places == 0)])
    free = [base]

    def place(nbytes: int) -> int:
        free.append(free[-1] + nbytes + 256 + nbytes % 7)
        return free[-2]

    made = caches(
        layers, place=place, tp_size=tp, dcp_size=dcp, dcp_interleave=random.choice([1, 2, 4]) if dcp > 1 else 1,
        pp_size=random.choice([1, 1, len(layers)]), block_size=size, kernel_block_size=random.choice([None, None, 4]),
        order=random.choice(ORDERS), kv_dtype=kv_dtype, num_blocks=random.choice([5, 9, 14]),
        align=random.choice([1, 1, 8, 64]), null_block=random.choice([0, None, 3]), overlay=random.random() < 0.15,
    )  # fmt: skip
    if random.random() < 0.6:
        return made
    return [
        replace(
            cache, buffers=tuple(replace(b, chunk_nbytes=random.choice([None, 64, 77, 1000])) for b in cache.buffers)
        )
        for cache in made
    ]


def requests(random: Random, src: list[Cache], dst: Cache) -> list[Request]:
    """One or two requests: with positions and ``num_tokens`` or without, with nulls, runs or shuffled ids."""
    uneven = any(a.block_size != b.block_size for a, b in zip(src[0].groups, dst.groups, strict=True))
    used: dict[int, set[int]] = defaultdict(set)  # by id space of dst
    made = []
    for name in ("a", "b")[: random.randint(1, 2)]:
        start, length, positions = random.randrange(24), random.choice([8, 16, 32]), uneven or random.random() < 0.6
        lists: list[list[list[int]]] = [[], []]
        firsts: list[list[int]] = [[], []]
        for number, ranks in enumerate((src, [dst])):
            for group, about in enumerate(ranks[0].groups):
                taken = used[dst.overlays[group]] if number else set()
                bound = min(oracle.bound(cache, group) or 0 for cache in ranks)
                free = [block for block in range(bound) if block != about.null_block and block not in taken]
                first = max(0, start // about.block_size + random.choice([0, 0, 1, -1])) if positions else 0
                last = (start + length) // about.block_size + random.choice([0, 1, 2]) if positions else 3 - number
                if random.random() < 0.5:
                    random.shuffle(free)
                ids = free[: max(0, last - first)]
                taken.update(ids)
                if about.null_block is not None:
                    ids = [about.null_block if random.random() < 0.25 else block for block in ids]
                lists[number].append(ids)
                firsts[number].append(first)
        tokens = start + random.randrange(length + 4) if positions and random.random() < 0.4 else None
        made.append(Request(name, *lists, *(firsts if positions else (None, None)), tokens))
    return made


def deployment(random: Random) -> tuple[list[Cache], list[Cache]]:
    """Both sides, in three of ten alike; LayoutError where what was drawn does not go together."""
    layers, kv_dtype = model(random), random.choice(["auto", "auto", "fp8", "fp8_per_token_head"])
    seeds = [random.random()] * 2 if random.random() < 0.3 else [random.random(), random.random()]
    src, dst = (side(Random(seed), layers, kv_dtype, 1 << base) for seed, base in zip(seeds, (24, 44), strict=True))
    return src, dst


def check(random: Random, seen: Counter[str]) -> None:
    """Prove one deployment, and build for one of its dst ranks."""
    srcs, dsts = deployment(random)
    election, bridged = random.choice(ELECTIONS), random.random() < 0.35
    plans = {
        (i, j): kvcompile.compile(src, dst, election=election, bridge_padding=bridged)
        for i, src in enumerate(srcs)
        for j, dst in enumerate(dsts)
    }
    proof = prove(srcs, dsts, plans)
    assert proof.exact, str(proof)
    peer = random.randrange(len(dsts))
    dst = dsts[peer]
    given = requests(random, srcs, dst)
    written: dict[int, list[tuple[int, int]]] = defaultdict(list)  # dst byte -> (src rank, src byte) sent there
    wanted: dict[int, set[tuple[int, int]]] = defaultdict(set)  # dst byte -> (src rank, src byte) that hold it
    for number, src in enumerate(srcs):
        failed = oracle.faults(given, src, dst)
        built = plans[number, peer].build(given, sort=random.random() < 0.3, max_length=random.choice([None, 7, 64]))
        assert built.failed.keys() == failed.keys()
        good = [request for request in given if request.id not in failed]
        missing = {request.id: oracle.uncovered(request, src, dst) for request in good}
        assert {name: list(places) for name, places in built.uncovered.items()} == {
            k: v for k, v in missing.items() if v
        }
        for source, target, length in replay.triples(built):
            assert in_one_chunk(src, source, length)
            assert in_one_chunk(dst, target, length)
        for source, target in replay.moved(replay.triples(built)):
            written[target].append((number, source))
        for request in good:
            for source, target in oracle.copies(request, src, dst):
                wanted[target].add((number, source))
    assert wanted.keys() <= written.keys()
    for target, senders in written.items():
        if target in wanted:
            assert len(senders) == 1
            assert senders[0] in wanted[target]
    extra = written.keys() - wanted.keys()
    assert bridged or not extra
    if extra and len(set(dst.overlays)) == len(dst.groups):
        assert not any(
            extra & oracle.block_addresses(dst, group, block)
            for group in range(len(dst.groups))
            for block in range(oracle.bound(dst, group) or 0)
        ), "padding was copied onto a field"
    seen["with bytes"] += bool(written)
    seen["bytes"] += len(written)
    seen["bridged"] += bool(extra)


def in_one_chunk(cache: Cache, start: int, length: int) -> bool:
    def inside(span: Buffer) -> bool:
        return span.base <= start and start + length <= span.end

    return any(inside(chunk) for buffer in cache.buffers for chunk in buffer.chunks)


def test_odd_deployments(record_property: Callable[[str, object], None]) -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        try:
            check(Random(seed), seen)
        except LayoutError:
            seen["refused"] += 1
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    record_property("shares", ", ".join(f"{count:,} {name}" for name, count in sorted(seen.items())))
    assert seen["refused"] < SEEDS / 2
    assert seen["with bytes"] > SEEDS / 3
    assert seen["bridged"] > 0


@pytest.mark.parametrize(
    ("layers", "settings"),
    [
        # A packed row of one layer, several kernel blocks an id; the memory ends behind all of them.
        (
            [Layer("a", (Attention(4, 1),)), Layer("b", (Mamba2(1, 2, 2, 2, 3),))],
            {"block_size": 12, "kernel_block_size": 4},
        ),
        # State has an order of axes of its own, but lies in packed rows like the rest.
        ([Layer(f"l{n}", (Lightning(3, 2),)) for n in range(3)], {}),
    ],
)
@pytest.mark.parametrize("order", ["BLNHC", "BHLNC"])
def test_packed_rows(layers: list[Layer], settings: dict[str, Any], order: str) -> None:
    (packed,), (plain,) = (caches(layers, num_blocks=5, order=each, **settings) for each in (order, "hnd"))
    assert sum(buffer.nbytes for buffer in packed.buffers) == sum(buffer.nbytes for buffer in plain.buffers)
    assert prove([packed], [plain]).exact
    assert prove([plain], [packed]).exact


def test_overlaid_groups_need_equal_distances() -> None:
    """Heads outside blocks: blocks of equal bytes, and yet id 2 of one group would lie on id 1 of the other."""
    layers = [Layer("a", (Attention(4, 8, window=16),)), Layer("b", (Attention(2, 16),))]
    for order in ("hnd", "BLNHC"):
        (cache,) = caches(layers, num_blocks=5, order=order, overlay=True)
        assert cache.overlays == (0, 0)
        assert prove([cache], [cache]).exact
    with pytest.raises(LayoutError, match=r"overlay: blocks of \[512, 1024\] bytes, \[5\] of them, expected equal"):
        caches(layers, num_blocks=5, order="HLBNC", overlay=True)
