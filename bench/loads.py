"""The published loads: what people who run prefill/decode disaggregation reported of their descriptors.

From the reports are the counts, sizes and strides named below; (ours) marks what was chosen so that they come out.
"""

import random

from bench import shapes
from kvcompile import Buffer, Cache, Field, Group, Region, Request

__all__ = ["loads"]

MEMORY = 1 << 44
ROW = 1_040_000


def batches() -> list[shapes.Case]:
    """Mooncake#826: batches of 128, 2,176, 12,416 and 119,296 descriptors; (ours) K and V of 32 layers, scattered."""
    src, dst = (shapes.gqa(64, 1, 4096, base, 0, 1) for base in (MEMORY, 2 * MEMORY))
    names = {"p50": 128, "p80": 2_176, "p90": 12_416, "p99": 119_296}
    return [shapes.case(f"Mooncake#826 {name}", src, dst, count // 64, 1, count, None) for name, count in names.items()]


def rows() -> shapes.Case:
    """vllm#53825: 43 layers in 5 groups, rows of 1.04 MB, payloads of 0.8 to 100 KB.

    (ours) which layer has which size; 64 bytes of padding between layers on one side; 200 blocks a group in runs of 4.
    """
    sizes = [819, 4_608, 9_216, 18_432, 36_864, 73_728, 102_400]

    def cache(base: int, gap: int) -> Cache:
        regions = []
        for group in range(5):
            at = 0
            for number in range(9 if group < 3 else 8):
                nbytes = sizes[(number + group) % len(sizes)]
                field = Field.hnd("kv", heads=1, tokens=1, cell_nbytes=nbytes)
                regions.append(Region(f"{group}.{number}", group, base + at, ROW, 8192, [field]))
                at += nbytes + gap
        return Cache(regions, [Group(1)] * 5, [Buffer(base, ROW * 8192)])

    taken = [shapes.ids(200 * 5, 4, seed) for seed in (1, 2)]  # one pool of rows: an id belongs to one group
    lists = [[ids[group * 200 : (group + 1) * 200] for group in range(5)] for ids in taken]
    request = Request("request", *lists)
    return shapes.Case("vllm#53825 rows of 1.04 MB", cache(MEMORY, 0), cache(2 * MEMORY, 64), request, 43 * 200, None)


def fragments() -> shapes.Case:
    """vllm#55434: 101 regions over fragmented runs, about 112,000 descriptors; (ours) 1,109 runs of 1 to 5 blocks."""
    src, dst = (shapes.gqa(101, 1, 16_384, base, 0, 1) for base in (MEMORY, 2 * MEMORY))
    sizes = [random.Random(0).randrange(1, 6) for _ in range(1109)]
    lists = []
    for seed in (1, 2):
        slots = list(range(0, 6 * 1109, 6))
        random.Random(seed).shuffle(slots)
        lists.append([slot + i for slot, size in zip(slots, sizes, strict=True) for i in range(size)])
    request = Request("request", lists[:1], lists[1:])
    return shapes.Case("vllm#55434 fragmented runs", src, dst, request, 101 * 1109, None)


def loads() -> list[shapes.Case]:
    """Return all of them."""
    return [*batches(), rows(), fragments()]
