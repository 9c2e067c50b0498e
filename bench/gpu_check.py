"""Check and time the CUDA kernels on a real GPU: ``python -m bench.gpu_check``. Under five minutes, one table.

Everything is compared with what the CPU builds, or with the bytes themselves; a difference makes the exit code 1, and a
machine without a GPU, 2. Times on the device are between two events; a long copy in front of the first one keeps the
device busy until all is enqueued, so that the host's time, which is printed beside them, does not count.
"""

import argparse
import importlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import kvcompile
from bench import shapes
from kvcompile import Buffer, Cache, Descriptors, Field, Group, KVCompileError, Plan, Region, Request, device

HIGH = 0xFF00000000000000
BLOCKS = 4096
"""In each layer of `plans`: enough for all requests of a batch to have blocks of their own."""


class Report:
    """The table, and whether anything differed."""

    def __init__(self) -> None:
        self.differences = 0

    def line(self, what: str, value: str, target: str = "") -> None:
        """Print one line of the table."""
        print(f"| {what:<52} | {value:<44} | {target:<24} |", flush=True)

    def compared(self, what: str, found: Iterator[str | None]) -> None:
        """Print how many comparisons there were, and the first difference."""
        results = list(found)
        wrong = [result for result in results if result]
        self.differences += len(wrong)
        self.line(
            what, f"{len(results)} compared, {len(wrong)} differ" + (f": {wrong[0]}" if wrong else ""), "0 differ"
        )


def main(arguments: list[str] | None = None) -> int:
    """Run all checks, print the table; return 0, 1 where something differs, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the script itself")
    options = parser.parse_args(arguments)
    try:
        device.warmup(options.device)
    except KVCompileError as error:
        print(error, file=sys.stderr)
        return 2
    cupy: Any = importlib.import_module("cupy")
    began, report = time.perf_counter(), Report()
    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    driver = cupy.cuda.runtime.driverGetVersion()
    print(f"\n{name}, CUDA driver {driver}, {time.strftime('%Y-%m-%d')}\n")
    report.line("what", "measured", "target")
    report.line("-" * 52, "-" * 44, "-" * 24)
    check = Check(cupy, options.device, options.small)
    report.compared("the seven cases of the facts page", check.facts())
    report.compared("lanes of every kind, nulls, positions, faults", check.kinds(1 if options.small else 150))
    report.compared("races: launches one behind the other on 4 streams", check.races(3 if options.small else 2000))
    report.compared("pack and unpack, any alignment", check.bytes_moved())
    for what, value, target in check.times():
        report.line(what, value, target)
    report.line("all of it", f"{time.perf_counter() - began:.0f} s", "under 300 s")
    print(f"\n{'nothing differs' if not report.differences else f'{report.differences} DIFFERENCES'}")
    return 1 if report.differences else 0


def difference(built: Descriptors, expected: Descriptors) -> str | None:
    """Return what differs first between two results, None if nothing does."""
    for name in ("spans", "src", "dst", "length"):
        found, wanted = getattr(built, name), getattr(expected, name)
        found = found if isinstance(found, np.ndarray) else found.get()
        if not np.array_equal(found, wanted):
            return f"{name} {found[:4]}, expected {wanted[:4]}"
    if {key: str(error) for key, error in built.failed.items()} != {k: str(e) for k, e in expected.failed.items()}:
        return f"failed {built.failed}, expected {expected.failed}"
    if built.uncovered != expected.uncovered:
        return f"uncovered {built.uncovered}, expected {expected.uncovered}"
    return None


class Check:
    """The checks, on one device."""

    def __init__(self, cupy: Any, name: str, small: bool) -> None:
        self.cupy, self.name, self.small = cupy, name, small

    def place(self, request: Request, src: str | None, dst: str | None) -> Request:
        """Put the ids of a side onto the device, as integers of a kind; None leaves them on the host."""

        def lists(given: Any, kind: str | None) -> Any:
            return given if kind is None else [self.cupy.asarray(np.array(ids, kind)) for ids in given]

        firsts = request.src_first, request.dst_first, request.num_tokens
        return Request(request.id, lists(request.src_blocks, src), lists(request.dst_blocks, dst), *firsts)

    def facts(self) -> Iterator[str | None]:
        """Every case, ids on the device, on the host and on both, to device and to pinned memory."""
        for case in shapes.cases():
            plan, request = kvcompile.compile(case.src, case.dst), case.request
            if self.small:
                request = Request(request.id, [request.src_blocks[0][:1]], [request.dst_blocks[0][:1]])
            expected = plan.build([request])
            for src, dst in (("i8", "i8"), ("i4", "i4"), (None, "i8"), ("u2", None), (None, None)):
                for pinned in (False,) if self.small else (False, True):
                    placed = self.place(request, src, dst)
                    yield difference(plan.build([placed], device=self.name, pinned=pinned), expected)
            if self.small:
                break

    def kinds(self, rounds: int) -> Iterator[str | None]:
        """Plans of every kind of lane, on random batches with nulls and faults; also cut."""
        for number in range(rounds):
            generator = random.Random(number)
            for plan in plans():
                requests = batch(plan, generator, 3 if self.small else generator.choice([3, 300]))
                most = generator.choice([None, None, 100])
                placed = [
                    self.place(request, generator.choice(["i8", "i4", None]), generator.choice(["i8", "i4", None]))
                    for request in requests
                ]
                built = plan.build(placed, device=self.name, max_length=most, pinned=generator.random() < 0.3)
                yield difference(built, plan.build(requests, max_length=most))

    def races(self, launches: int) -> Iterator[str | None]:
        """Batches in which requests fail and conflict beside others, on several streams: always the same result."""
        streams = [self.cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
        work = []
        # Of few requests one thread block goes through all phases of `settle`; of many, each phase is a launch.
        for number, (plan, count) in enumerate((plan, count) for plan in plans() for count in (800, 100)):
            requests = batch(plan, random.Random(1000 + number), 8 if self.small else count)
            work.append(
                (plan, requests, plan.build(requests), [self.place(request, "i8", "i4") for request in requests])
            )
        self.cupy.cuda.Device().synchronize()
        flying: list[tuple[Descriptors, Descriptors]] = []
        for number in range(launches):
            plan, _, expected, placed = work[number % len(work)]
            flying.append((plan.build(placed, device=self.name, stream=streams[number % 4]), expected))
            if len(flying) == 40 or number == launches - 1:
                yield from (difference(built, wanted) for built, wanted in flying)
                flying.clear()

    def bytes_moved(self) -> Iterator[str | None]:
        """Pieces of odd and even sizes and places, packed into a buffer at any offset, and unpacked again."""
        for cell, shift in (
            ((3, 5), (24, 8)) if self.small else ((1, 0), (3, 5), (16, 0), (24, 8), (1000, 1), (4096, 0))
        ):
            generator = np.random.default_rng(cell)
            src, dst = (
                self.cupy.asarray(generator.integers(0, 255, 2 * 64 * 16 * cell + 64, np.uint8)) for _ in range(2)
            )
            plan = kvcompile.compile(
                gqa(src.data.ptr + 3, cell, src.nbytes - 3, 64, tp_rank=1, tp_size=2),
                gqa(dst.data.ptr + 7, cell, dst.nbytes - 7, 64),
            )
            count = 4 if self.small else 48
            ids = [generator.permutation(64)[:count].tolist() for _ in range(2)]
            requests = [Request("a", [ids[0]], [ids[1]])]
            placed = [self.place(requests[0], "i8", "i8")]
            room = plan.packed_nbytes(requests)
            staging = self.cupy.asarray(np.full(room + shift, 0x5A, np.uint8))[shift:]
            packed = plan.pack(placed, staging, device=self.name)
            host_src, host_dst, named = src.get(), dst.get(), plan.build(requests)
            pieces = [host_src[at : at + n] for at, n in spans(named.src, named.length, src)]
            whole = np.concatenate(pieces)
            yield None if packed.nbytes == len(whole) else f"{packed.nbytes} bytes packed, expected {len(whole)}"
            yield None if np.array_equal(staging.get()[: len(whole)], whole) else f"pack of {cell}-byte cells"
            plan.unpack(placed, staging, device=self.name).wait()
            for piece, (at, n) in zip(pieces, spans(named.dst, named.length, dst), strict=True):
                host_dst[at : at + n] = piece
            yield None if np.array_equal(dst.get(), host_dst) else f"unpack of {cell}-byte cells"

    def times(self) -> Iterator[tuple[str, str, str]]:
        """Time builds and copies between events."""
        for case in shapes.cases():
            plan, request = kvcompile.compile(case.src, case.dst), self.place(case.request, "i8", "i8")
            if self.small:
                request = self.place(Request("a", [[1]], [[4]]), "i8", "i8")
            for pinned, target in ((False, 30), (True, 250)):
                on_device, on_host = self.timed(lambda p=plan, r=request, to=pinned: self.build(p, r, to))
                size = 24 * case.descriptors
                goal = f"at most {target} us" if case.name == "TP4 to TP1, scattered" else ""
                yield (
                    f"{case.name}, to {'pinned' if pinned else 'device'} memory",
                    f"{on_device * 1e6:.1f} us, {size / on_device / 1e9:.1f} GB/s; host {on_host * 1e6:.0f} us",
                    goal,
                )
            if self.small:
                break
        yield from self.copies()

    def build(self, plan: Plan, request: Request, pinned: bool) -> Any:
        """Build one request on the device."""
        return plan.build([request], device=self.name, pinned=pinned)

    def copies(self) -> Iterator[tuple[str, str, str]]:
        """Time pack and unpack against the device's own copy of as many bytes."""
        for piece in (256, 4096) if self.small else (256, 4096, 16384, 65536, 1 << 20):
            blocks = 4 if self.small else (1 << 29) // piece
            cell = piece // 32
            src, dst, staging = (self.cupy.empty(2 * blocks * piece, np.uint8) for _ in range(3))
            staging = staging[: blocks * piece]
            plan = kvcompile.compile(
                heads(src.data.ptr, cell, blocks, src.nbytes, tp_rank=0, tp_size=1),
                heads(dst.data.ptr, cell, blocks, blocks * piece, tp_rank=1, tp_size=2),
            )
            ids = np.random.default_rng(piece).permutation(blocks)
            request = self.place(Request("a", [ids], [ids[::-1]]), "i8", "i8")
            nbytes = plan.packed_nbytes([Request("a", [ids], [ids])])
            copied, _ = self.timed(lambda to=dst, n=nbytes, of=src: self.copy(to, of, n))
            for name, method in (("pack", plan.pack), ("unpack", plan.unpack)):
                took, on_host = self.timed(lambda m=method, r=request, s=staging: m([r], s, device=self.name))
                yield (
                    f"{name}, {blocks:,} pieces of {piece:,} bytes",
                    f"{2 * nbytes / took / 1e9:.0f} of {2 * nbytes / copied / 1e9:.0f} GB/s, "
                    f"{copied / took:.0%}; host {on_host * 1e6:.0f} us",
                    "at least 80%" if piece >= 4096 else "",
                )

    def copy(self, to: Any, source: Any, nbytes: int) -> None:
        """Let the device copy bytes by itself."""
        runtime = self.cupy.cuda.runtime
        stream = self.cupy.cuda.get_current_stream()
        runtime.memcpyAsync(to.data.ptr, source.data.ptr, nbytes, runtime.memcpyDeviceToDevice, stream.ptr)

    def timed(self, call: Callable[[], Any]) -> tuple[float, float]:
        """Return the median seconds of a call on the device, and on the host."""
        busy = [self.cupy.empty(1 << (10 if self.small else 30), np.uint8) for _ in range(2)]
        on_device, on_host = [], []
        for _ in range(1 if self.small else 25):
            start, stop = self.cupy.cuda.Event(), self.cupy.cuda.Event()
            for _ in range(8):
                self.copy(busy[0], busy[1], busy[0].nbytes)
            start.record()
            began = time.perf_counter()
            result = call()
            on_host.append(time.perf_counter() - began)
            stop.record()
            stop.synchronize()
            on_device.append(self.cupy.cuda.get_elapsed_time(start, stop) / 1e3)
            del result
        return statistics.median(on_device), statistics.median(on_host)


def spans(address: Any, length: Any, array: Any) -> Iterator[tuple[int, int]]:
    """Yield (start, size) of each descriptor's bytes in an array that holds them."""
    starts = (address - np.uint64(array.data.ptr)).astype(np.int64)
    yield from zip(starts.tolist(), length.tolist(), strict=True)


def gqa(base: int, cell: int, nbytes: int | None = None, blocks: int = BLOCKS, **place: Any) -> Cache:
    """Make one rank of two layers: blocks of 4 heads and 4 tokens."""
    nulls = {"null_block": place.pop("null", None)}
    tokens, padding, chunk = place.pop("tokens", 4), place.pop("padding", 0), place.pop("chunk", None)
    local = 4 // place.get("tp_size", 1)
    if place.pop("nhd", False):
        field = Field.nhd("kv", heads=4, local_heads=local, tokens=tokens, cell_nbytes=cell)
    else:
        field = Field.hnd("kv", heads=4, tokens=tokens, cell_nbytes=cell)
    stride = local * tokens * cell + padding
    regions = [Region(layer, 0, base + layer * blocks * stride, stride, blocks, [field]) for layer in range(2)]
    buffers = [Buffer(base, nbytes or 2 * blocks * stride, chunk)]
    return Cache(regions, [Group(tokens, **nulls)], buffers, **place)


def heads(base: int, cell: int, blocks: int, nbytes: int, **place: int) -> Cache:
    """Make one rank of one layer: blocks of two heads, of which a rank of two holds one."""
    field = Field.hnd("kv", heads=2, tokens=32, cell_nbytes=cell)
    region = Region(0, 0, base, 2 // place["tp_size"] * 32 * cell, blocks, [field])
    return Cache([region], [Group(32)], [Buffer(base, nbytes)], **place)


def plans() -> list[Plan]:
    """Make a plan with each kind of lane, with and without what ids can do to it."""
    cell = 8
    pairs = [
        (gqa(HIGH, cell), gqa(2**40, cell)),  # whole blocks
        (gqa(HIGH, cell, null=0), gqa(2**40, cell, null=5)),
        (gqa(HIGH, cell, tp_rank=1, tp_size=2), gqa(2**40, cell)),  # head slices
        (gqa(HIGH, cell, tokens=16, null=0, tp_rank=1, tp_size=4), gqa(2**40, cell, tokens=16)),
        (gqa(HIGH, cell, tokens=4, tp_size=4, null=3), gqa(2**40, cell, tokens=16, tp_size=4)),  # chains
        (gqa(HIGH, cell, tokens=12, tp_size=4), gqa(2**40, cell, tokens=8, tp_size=4, null=1)),
        (gqa(HIGH, cell, nhd=True), gqa(2**40, cell, nhd=True, tp_rank=1, tp_size=2)),  # strided rows
        (gqa(HIGH, cell, padding=8), gqa(2**40, cell, padding=8)),
        (gqa(HIGH, cell, chunk=1000), gqa(2**40, cell, chunk=777)),  # cut at edges
    ]
    made = [kvcompile.compile(src, dst) for src, dst in pairs]
    return [*made, kvcompile.compile(*pairs[7], bridge_padding=True), kvcompile.compile(*pairs[6], election="striped")]


def batch(plan: Plan, generator: random.Random, count: int) -> list[Request]:
    """Draw requests whose ids come in runs, most of them good; some ids are out of bounds or given twice."""
    positions = plan.src.block_size != plan.dst.block_size
    made, given, free = [], [], list(range(BLOCKS))
    for number in range(count):
        size = generator.randint(1, 6)
        start = generator.randrange(BLOCKS - 8)
        src = [start + k if generator.random() < 0.9 else generator.randrange(BLOCKS) for k in range(size + 2)]
        at = generator.randrange(len(free) - size)
        dst, free = free[at : at + size], free[:at] + free[at + size :]
        given.append(dst)
        if generator.random() < 0.05:
            dst[-1] = generator.choice(given)[0]
        if generator.random() < 0.05:
            src[generator.randrange(len(src))] = generator.choice([-1, BLOCKS, 2**31 - 1])
        firsts = ([0], [generator.randrange(2)], generator.choice([None, 9])) if positions else ()
        made.append(Request(number if generator.random() < 0.98 else 0, [src], [dst], *firsts))
    return made


if __name__ == "__main__":
    raise SystemExit(main())
