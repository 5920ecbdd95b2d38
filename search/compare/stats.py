"""Means, intervals and differences of accuracies measured on the same problems.

The unit is the problem. A run over several seeds asks each problem several
times, and those answers are not independent, so they are averaged per problem
first and only the problems are treated as a sample. A failed search counts as a
wrong answer, so that failing on hard problems never improves a result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mas_gym.errors import ConfigError

RESAMPLES = 10_000
_CHUNK = 2_000_000


class Interval(NamedTuple):
    """A confidence interval.

    Attributes:
        low: Lower end.
        high: Upper end.
    """

    low: float
    high: float


class Difference(NamedTuple):
    """The difference of two accuracies on the same problems.

    Attributes:
        mean: Mean of ``a - b`` over the problems, in ``[-1, 1]``.
        low: Lower end of the interval.
        high: Upper end of the interval.
        problems: How many problems both have.
    """

    mean: float
    low: float
    high: float
    problems: int

    @property
    def significant(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0


def wilson(correct: ArrayLike, trials: int | None = None, level: float = 0.95) -> Interval:
    """Return an interval for an accuracy, from one average per problem.

    This is the score interval of Wilson (1927, JASA 22:209) with the effective sample size of Korn and Graubard
    (1998, Survey Methodology 24:193) in place of ``n``, the variance being taken over problems. With one seed it is the
    plain Wilson interval; it needs no random numbers and stays inside ``[0, 1]`` for 0 and 100% correct, where a
    bootstrap gives an interval of width zero.

    Args:
        correct: One number in ``[0, 1]`` per problem: the share of its searches that were right.
        trials: How many searches were run in all, an upper bound on the effective sample size; one per problem if None.
        level: Confidence level.

    Returns:
        The interval; ``(0, 1)`` without problems.
    """
    shares = _shares(correct)
    if shares.size == 0:
        return Interval(0.0, 1.0)
    mean, variance = float(shares.mean()), float(shares.var())
    size = float(shares.size)
    bernoulli = mean * (1 - mean)
    if bernoulli > 0 and trials is not None:
        size = min(size * bernoulli / variance, float(trials)) if variance > 0 else float(trials)
    z = NormalDist().inv_cdf(0.5 + level / 2)
    shrink = 1 + z * z / size
    centre = (mean + z * z / (2 * size)) / shrink
    half = z * math.sqrt(bernoulli / size + z * z / (4 * size * size)) / shrink
    return Interval(max(0.0, centre - half), min(1.0, centre + half))


def paired_bootstrap(
    a: Mapping[str, float], b: Mapping[str, float], *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Difference:
    """Return the difference of two accuracies with a paired bootstrap interval over problems.

    Problems are drawn with replacement, and both sides use the same draw, so that problem difficulty cancels
    (percentile method of Efron and Tibshirani, 1993, ch. 13; paired as in Koehn, 2004, EMNLP).

    Args:
        a: Problem id to the share of its searches that were right.
        b: The same for the other side; only problems that both have are compared.
        level: Confidence level.
        resamples: Bootstrap samples.
        seed: Seed of the resampling.

    Raises:
        ConfigError: The two have no problem in common.
    """
    common = sorted(a.keys() & b.keys())
    if not common:
        raise ConfigError(
            "expected two results on the same problems, got none in common; run both on one task and split"
        )
    gaps = np.array([a[key] - b[key] for key in common], dtype=np.float64)
    low, high = _bootstrap_means(gaps, level, resamples, seed)
    return Difference(float(gaps.mean()), low, high, len(common))


def _bootstrap_means(values: NDArray[np.float64], level: float, resamples: int, seed: int) -> Interval:
    rng = np.random.default_rng(seed)
    distinct, counts = np.unique(values, return_counts=True)
    # Drawing how often each distinct value comes up is the same as drawing the problems, and much faster.
    weights = counts / values.size
    step = max(1, _CHUNK // distinct.size)
    means: list[NDArray[np.float64]] = []
    for start in range(0, resamples, step):
        draws = rng.multinomial(values.size, weights, size=min(step, resamples - start))
        means.append(draws @ distinct / values.size)
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high))


def mean_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Return mean and sample standard deviation (``n - 1``), as in the paper's Table 1 over its seeds.

    Returns:
        Mean and deviation; the deviation is None for fewer than two values, the mean NaN for none.
    """
    if not values:
        return math.nan, None
    array = np.asarray(values, dtype=np.float64)
    return float(array.mean()), float(array.std(ddof=1)) if array.size > 1 else None


def _shares(correct: ArrayLike) -> NDArray[np.float64]:
    shares = np.asarray(correct, dtype=np.float64)
    if shares.ndim != 1 or (shares.size and not (0 <= float(shares.min()) <= float(shares.max()) <= 1)):
        raise ConfigError(f"expected one number in [0, 1] per problem, got an array of shape {shares.shape}")
    return shares
