"""Coverage of the intervals of comparisons, and how often two identical planners are reported as different.

``python -m benchmarks.intervals`` prints both for few and many problems, and for one and three seeds; it takes under a
minute. Problems are equally hard, or differ widely (their success rates have a Beta distribution with concentration
1). Each line has the worst case. The nominal values are at most 5% and at least 95%.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from search.results.intervals import accuracy_interval, paired_difference

RATES = (0.05, 0.2, 0.5, 0.8, 0.95)
PAIRS = ((1.0, 0.95), (1.0, 0.8), (1.0, 0.5), (0.95, 0.9), (0.05, 0.0), (0.98, 0.02), (0.6, 0.5))
PROBLEMS = (2, 5, 6, 10, 20, 100)
CONCENTRATIONS = (None, 1.0)


def answers(rates: NDArray[np.float64], seeds: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return each problem's share of right answers over seeds."""
    return rng.binomial(seeds, rates) / seeds


def named(values: Iterable[float]) -> dict[str, float]:
    """Return values by problem id."""
    return dict(zip(map(str, range(1000)), map(float, values), strict=False))


def rates_of(mean: float, problems: int, concentration: float | None, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return the rate of right answers of each problem."""
    if concentration is None:
        return np.full(problems, mean)
    return rng.beta(mean * concentration, (1 - mean) * concentration, problems)


def false_alarms(problems: int, seeds: int, rate: float, concentration: float | None = None, runs: int = 2000) -> float:
    """Return how often two identical planners differ significantly."""
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(runs):
        rates = rates_of(rate, problems, concentration, rng)
        a, b = (named(answers(rates, seeds, rng)) for _ in range(2))
        found += paired_difference(a, b).significant
    return found / runs


def coverage(problems: int, seeds: int, better: float, worse: float, runs: int = 2000) -> float:
    """Return how often the interval contains the difference of two planners with these rates."""
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(runs):
        a, b = (named(answers(np.full(problems, rate), seeds, rng)) for rate in (better, worse))
        gap = paired_difference(a, b)
        found += gap.low <= better - worse + 1e-12 and gap.high >= better - worse - 1e-12
    return found / runs


def accuracy_coverage(problems: int, seeds: int, rate: float, concentration: float | None, runs: int = 2000) -> float:
    """Return how often the interval of an accuracy contains the accuracy."""
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(runs):
        shares = answers(rates_of(rate, problems, concentration, rng), seeds, rng)
        low, high = accuracy_interval(shares.tolist(), problems * seeds)
        found += low <= rate <= high
    return found / runs


def main() -> None:
    """Print the table."""
    print("seeds  problems  differ though identical, at most  difference covered, at least  accuracy covered, at least")
    for seeds in (1, 3):
        for n in PROBLEMS:
            alarms = max(false_alarms(n, seeds, p, c) for p in RATES for c in CONCENTRATIONS)
            covered = min(coverage(n, seeds, *pair) for pair in PAIRS)
            single = min(accuracy_coverage(n, seeds, p, c) for p in RATES for c in CONCENTRATIONS)
            print(f"{seeds:5}  {n:8}  {100 * alarms:31.1f}%  {100 * covered:27.1f}%  {100 * single:25.1f}%")


if __name__ == "__main__":
    main()
