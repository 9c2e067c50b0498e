"""How a build grows with blocks and layers, and how much memory it takes beside its output."""

import gc
import tracemalloc

import kvcompile
from bench import loads, shapes
from bench.figures import Figure
from bench.timing import median_ms
from kvcompile import Request, arena

__all__ = ["growth", "memory"]

BLOCKS = (16, 64, 256, 1024, 4096, 16_384, 65_536)
LAYERS = (1, 2, 4, 8, 16, 32, 64, 128)


def growth(seconds: float) -> list[Figure]:
    """Time over blocks (94 layers) and over layers (2,048 blocks), scattered and contiguous."""
    found = []
    for axis, values in (("blocks", BLOCKS), ("layers", LAYERS)):
        for value in values:
            blocks, layers = (value, 94) if axis == "blocks" else (2048, value)
            room = 2 * blocks
            src, dst = (shapes.gqa(layers, 4, room, base, 1, 4) for base in (shapes.SRC_BASE, shapes.DST_BASE))
            plan = kvcompile.compile(src, dst)
            for name, run in (("scattered", 1), ("contiguous", blocks)):
                requests = [Request("request", [shapes.ids(blocks, run, 1)], [shapes.ids(blocks, run, 2)])]
                out = plan.build(requests)
                took = median_ms(lambda p=plan, r=requests, o=out: p.build(r, out=o), seconds / 10, 3)  # type: ignore[misc]
                case, section = f"{value:,} {axis}", f"Growth with {axis}"
                found.append(Figure(section, case, f"{name}: descriptors", len(out)))
                found.append(Figure(section, case, name, took, "ms"))
                each = (len(out), "ns a descriptor") if name == "scattered" else (blocks, "ns a block id")
                found.append(Figure(section, case, name, took * 1e6 / each[0], each[1]))
    return found


def memory(seconds: float) -> list[Figure]:
    """Peak of what a build allocates, with no memory to use again, beside its output (24 bytes a descriptor)."""
    found = []
    named = ("equal TP, scattered", "TP4 to TP1, contiguous", "TP4 to TP8, 80 x 8,192, runs of 8")
    cases = [case for case in shapes.cases() if case.name in named] + [loads.fragments()]
    for case in cases:
        plan, requests = kvcompile.compile(case.src, case.dst), [case.request]
        plan.build(requests)
        for name, sort in (("", False), (", sorted", True)):
            gc.collect()
            arena.clear()
            tracemalloc.start()
            out = plan.build(requests, sort=sort)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            section, output = "Memory of one build", 24 * len(out)
            found.append(Figure(section, case.name + name, "output", output / 2**20, "MiB"))
            found.append(Figure(section, case.name + name, "peak", peak / 2**20, "MiB"))
            found.append(Figure(section, case.name + name, "peak / output", peak / output, most=1.2))
    return found
