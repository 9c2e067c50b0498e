"""How the benchmarks measure: interleaved rounds, medians, intervals. It measures nothing itself."""

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

__all__ = ["interval", "median_ms", "medians_ms", "times"]


def times(functions: dict[str, tuple[Callable[[], object], int]], seconds: float) -> dict[str, list[float]]:
    """Return all times of some functions, in seconds.

    In each round every function is called a number of times of its own, so that what else the machine does falls on
    all of them alike; five rounds at least.
    """
    found: dict[str, list[float]] = {name: [] for name in functions}
    until = time.perf_counter() + seconds
    rounds = 0
    while rounds < 5 or time.perf_counter() < until:
        rounds += 1
        for name, (function, calls) in functions.items():
            for _ in range(calls):
                start = time.perf_counter()
                function()
                found[name].append(time.perf_counter() - start)
    return found


def medians_ms(functions: dict[str, tuple[Callable[[], object], int]], seconds: float) -> dict[str, float]:
    """Return the median time of some functions in milliseconds; see `times`."""
    return {name: statistics.median(found) * 1e3 for name, found in times(functions, seconds).items()}


def median_ms(function: Callable[[], object], seconds: float, calls: int = 1) -> float:
    """Return the median time of one function in milliseconds."""
    return medians_ms({"": (function, calls)}, seconds)[""]


def interval(ratios: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """Return a 95 % interval of the median of a sample, from resampling it."""
    random = np.random.default_rng(0)
    sample = np.array(ratios)
    medians = np.median(sample[random.integers(0, len(sample), (draws, len(sample)))], axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(low), float(high)
