"""Block ids to descriptors: beside filling three arrays, beside the way connectors do it, and with ``sort=True``."""

import random
import statistics

import numpy as np

import kvcompile
from bench import baseline, loads, shapes, vllm_builder
from bench.figures import Figure
from bench.timing import medians_ms, times
from kvcompile import Request

__all__ = ["small", "sorting", "throughput"]

MANY = 100_000  # above so many descriptors the floor is writing them; below, not doing the work of the baseline
SMALL_CALLS = 2000


def throughput(seconds: float) -> list[Figure]:
    """Every case and published load, from Python lists and from int64 arrays, into memory used again."""
    named, published = shapes.cases(), loads.loads()
    return [figure for case in [*named, *published] for figure in _one(case, case in named, seconds)]


def _one(case: shapes.Case, named: bool, seconds: float) -> list[Figure]:
    """Time one case, after one call of each builder whose results are compared; ``named``: it is the facts page's."""
    plan, spans, request = kvcompile.compile(case.src, case.dst), baseline.spans(case.src, case.dst), case.request
    lists = [request]
    arrays = [
        Request("request", *([np.array(ids) for ids in side] for side in (request.src_blocks, request.dst_blocks)))
    ]
    out, theirs = plan.build(lists), baseline.build(spans, request.src_blocks, request.dst_blocks)
    vllm = vllm_builder.builder(case)
    if out.failed or len(theirs[0]) != case.descriptors or not _same(out, theirs):
        raise SystemExit(f"{case.name}: the builders disagree: {len(out)} and {len(theirs[0])}, failed: {out.failed}")
    if vllm is not None and sorted(zip(*vllm(), strict=True)) != sorted(zip(*theirs, strict=True)):
        raise SystemExit(f"{case.name}: the baseline is not what vLLM does")
    columns = out.src, out.dst, out.length  # the same memory: some is twice as fast as other

    def fill() -> None:
        for column in columns:
            column.fill(7)

    medians = medians_ms(
        {
            "baseline": (lambda: baseline.build(spans, request.src_blocks, request.dst_blocks), 1),
            **({} if vllm is None else {"vLLM": (vllm, 1)}),
            "arena": (lambda: plan.build(lists), 10),
            "fill": (fill, 40),
            "arrays": (lambda: plan.build(arrays, out=out), 40),
            "lists": (lambda: plan.build(lists, out=out), 40),
        },
        seconds,
    )
    many, section = len(out) >= MANY, "Descriptor build: medians"

    def figure(metric: str, value: float, unit: str = "ms", **target: float) -> Figure:
        return Figure(section, case.name, metric, value, unit, **target)

    found = [figure("descriptors", len(out), ""), *(figure(name, value) for name, value in medians.items())]
    found.append(figure("arrays / fill", medians["arrays"] / medians["fill"], "", **({"most": 1.3} if many else {})))
    found.append(figure("lists / fill", medians["lists"] / medians["fill"], "", **({"most": 2.5} if many else {})))
    least = {"least": 100.0} if named and not many else {}
    found.append(figure("baseline / lists", medians["baseline"] / medians["lists"], "", more_is_better=True, **least))
    if vllm is not None:
        found.append(figure("baseline / vLLM", medians["baseline"] / medians["vLLM"], "", least=0.7, most=1.5))
    elif case.vllm_ms is not None:
        found.append(figure("vLLM earlier", case.vllm_ms))
    return found


def _same(descriptors: kvcompile.Descriptors, lists: tuple[list[int], list[int], list[int]]) -> bool:
    """Tell whether both builders copy the same bytes: ours may have merged what theirs did not."""
    columns = (descriptors.src, descriptors.dst, descriptors.length)
    return _pieces(np.stack(columns).T) == _pieces(np.array(lists, np.uint64).T)


def _pieces(rows: np.ndarray) -> list[list[int]]:
    """Merge what touches on both sides, sorted: equal for two lists that copy the same bytes to the same places."""
    rows = rows[np.lexsort([rows[:, 0], rows[:, 0] - rows[:, 1]])]
    ends = rows[:-1, :2] + rows[:-1, 2:]
    opens = np.concatenate([[True], (ends != rows[1:, :2]).any(axis=1)])
    starts = np.flatnonzero(opens)
    return np.column_stack([rows[starts, :2], np.add.reduceat(rows[:, 2], starts)]).tolist()  # type: ignore[no-any-return]


def small(seconds: float) -> list[Figure]:
    """One request of 16 blocks over 94 layers, where the published median of 128 descriptors lives."""
    src, dst = (shapes.gqa(94, 4, 4096, base, 1, 4) for base in (shapes.SRC_BASE, shapes.DST_BASE))
    plan, found = kvcompile.compile(src, dst), []
    spans, section = baseline.spans(src, dst), "Small request: 16 blocks, 94 layers, lists to Descriptors"
    for case, run in (("contiguous", 16), ("runs of 4", 4), ("scattered", 1)):
        left, right = [shapes.ids(16, run, 1)], [shapes.ids(16, run, 2)]
        requests = [Request("request", left, right)]
        taken = times(
            {
                "ours": (lambda requests=requests: plan.build(requests), SMALL_CALLS),  # type: ignore[misc]
                "baseline": (lambda left=left, right=right: baseline.build(spans, left, right), 3),  # type: ignore[misc]
            },
            seconds,
        )
        ours = np.array(taken["ours"]) * 1e6
        found.append(Figure(section, case, "descriptors", len(plan.build(requests))))
        found.append(Figure(section, case, "median", float(np.median(ours)), "us", most=30.0))
        found.append(Figure(section, case, "p99", float(np.quantile(ours, 0.99)), "us"))
        found.append(Figure(section, case, "baseline", statistics.median(taken["baseline"]) * 1e6, "us"))
    return found


def sorting(seconds: float) -> list[Figure]:
    """``sort=True`` beside the unsorted build, on ids in order, in runs out of order, and in no order."""
    found = []
    qwen = [shapes.gqa(94, 4, 8192, base, 1, 4) for base in (shapes.SRC_BASE, shapes.DST_BASE)]
    cut = [shapes.gqa(94, 4, 8192, shapes.SRC_BASE, 1, 4), shapes.gqa(94, 4, 8192, shapes.DST_BASE, 0, 1)]
    order = random.Random(0).sample(range(2048), 2048)
    patterns = {
        "in order": ([*range(2048)], [*range(5, 2053)]),
        "scattered alike": (order, [block + 5 for block in order]),
        "scattered apart": (shapes.ids(2048, 1, 1), shapes.ids(2048, 1, 2)),
    }
    for shape, (src, dst) in {"equal TP": qwen, "TP4 to TP1": cut}.items():
        plan = kvcompile.compile(src, dst)
        for name, (left, right) in patterns.items():
            requests = [Request("request", [left], [right])]
            out, sorted_out = plan.build(requests), plan.build(requests, sort=True)
            medians = medians_ms(
                {
                    "unsorted": (lambda plan=plan, requests=requests, out=out: plan.build(requests, out=out), 20),
                    "sorted": (
                        lambda plan=plan, requests=requests, out=sorted_out: plan.build(requests, sort=True, out=out),
                        20,
                    ),
                },
                seconds / 2,
            )
            case, section = f"{shape}, {name}", "sort=True: 94 layers, 2,048 blocks"
            found.append(Figure(section, case, "descriptors", len(out)))
            found.append(Figure(section, case, "sorted descriptors", len(sorted_out)))
            found += [Figure(section, case, metric, value, "ms") for metric, value in medians.items()]
            found.append(Figure(section, case, "sorted / unsorted", medians["sorted"] / medians["unsorted"], most=1.5))
    return found
