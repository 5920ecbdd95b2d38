"""95% intervals over problems: for an accuracy, for the difference of two accuracies, and for other statistics.

The unit is the problem. A run with several seeds answers each problem several times. These answers are not
independent, so they are first averaged per problem, and only problems are treated as independent.

| statistic | interval |
|---|---|
| an accuracy, one search per problem | Wilson's score interval |
| an accuracy, several searches per problem | Student's t with one pseudo-problem at 0 and one at 1 |
| a difference of two accuracies on the same problems | Student's t with one pseudo-problem at -1 and one at 1 |
| other statistics, such as F1 | percentile bootstrap |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mas_gym.errors import ConfigError, shown

FEWEST_PROBLEMS = 6
"""Minimum for a difference's interval to exclude zero: five of five discordant pairs have p = 0.0625."""

_NORMAL = 1.959964
_STUDENT = (math.inf, 12.7062, 4.3027, 3.1824, 2.7764)
_CHUNK = 2_000_000

Counts = NDArray[np.int64]


class Interval(NamedTuple):
    """A confidence interval."""

    low: float
    high: float


class Difference(NamedTuple):
    """The difference of two accuracies on the same problems.

    Attributes:
        mean: Mean of ``a - b`` over the problems, in ``[-1, 1]``.
        problems: Number of problems that both sides have.
    """

    mean: float
    low: float
    high: float
    problems: int

    @property
    def significant(self) -> bool:
        """Whether there are enough problems and the interval excludes zero."""
        return self.problems >= FEWEST_PROBLEMS and (self.low > 0 or self.high < 0)

    @property
    def verdict(self) -> str:
        """``"excludes 0"``, ``"includes 0"`` or, below `FEWEST_PROBLEMS`, ``"too few problems"``."""
        if self.problems < FEWEST_PROBLEMS:
            return "too few problems"
        return "excludes 0" if self.significant else "includes 0"


def accuracy_interval(shares: Sequence[float] | NDArray[np.float64], searches: int) -> Interval:
    """Return the interval of an accuracy.

    Args:
        shares: One number in ``[0, 1]`` per problem: its share of correct searches.
        searches: Total number of searches; the interval is Wilson's if there is one search per problem.
    """
    return wilson(shares) if searches == len(shares) else mean_interval(shares, 0.0, 1.0)


def wilson(correct: ArrayLike) -> Interval:
    """Return the score interval of Wilson (1927, JASA 22:209) for an accuracy with one search per problem.

    The interval is ``(0, 1)`` if there are no problems.
    """
    values = _bounded(correct, 0.0, 1.0)
    if not (size := values.size):
        return Interval(0.0, 1.0)
    mean, z = float(values.mean()), _NORMAL
    shrink = 1 + z * z / size
    center = (mean + z * z / (2 * size)) / shrink
    half = z * math.sqrt(mean * (1 - mean) / size + z * z / (4 * size * size)) / shrink
    return Interval(max(0.0, center - half), min(1.0, center + half))


def mean_interval(values: ArrayLike, low: float, high: float) -> Interval:
    """Return an interval for the mean of values in ``[low, high]``.

    One pseudo-problem is added at each end of the range, and Student's t quantile is taken with ``n - 1`` degrees of
    freedom. For differences of single answers this is the adjusted Wald interval of Bonett and Price (2012, JEBS
    37:479) with the t quantile in place of the normal one. The pseudo-problems keep the width above zero if all values
    are equal. In that case, a percentile bootstrap has width zero; it is also too narrow for few problems.

    Args:
        values: One number per problem.
        low: Smallest possible value.
        high: Largest possible value.

    Returns:
        The interval; the whole range for fewer than two problems.
    """
    found = _bounded(values, low, high)
    widened = np.concatenate([found, [low, high]])
    if found.size < 2:
        return Interval(low, high)
    center = float(widened.mean())
    half = _student(found.size - 1) * float(widened.std()) / math.sqrt(widened.size)
    return Interval(max(low, center - half), min(high, center + half))


def _student(freedom: int) -> float:
    """Return the 97.5% quantile of Student's t (Abramowitz and Stegun, 26.7.5, for 5 or more degrees of freedom)."""
    if freedom < len(_STUDENT):
        return _STUDENT[freedom]
    z = _NORMAL
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, 1))


def _bounded(values: ArrayLike, low: float, high: float) -> NDArray[np.float64]:
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 1 or (found.size and not (low <= float(found.min()) <= float(found.max()) <= high)):
        raise ConfigError(
            f"expected one number in [{low:g}, {high:g}] per problem, got shape {found.shape} with values "
            f"{shown(found.tolist())}"
        )
    return found


def paired_difference(a: Mapping[str, float], b: Mapping[str, float]) -> Difference:
    """Return the difference of two accuracies, paired by problem so that problem difficulty cancels.

    Args:
        a: Share of correct searches by problem id.
        b: The same for the other side; only problems that both sides have are compared.

    Raises:
        ConfigError: The two sides have no problem in common.
    """
    common = sorted(a.keys() & b.keys())
    if not common:
        raise ConfigError("expected results on the same problems, got none in common; run all on one task and split")
    gaps = [a[key] - b[key] for key in common]
    return Difference(math.fsum(gaps) / len(gaps), *mean_interval(gaps, -1.0, 1.0), len(common))


def bootstrap(problems: int, statistic: Callable[[Counts], ArrayLike], *, resamples: int = 10_000) -> Interval:
    """Return the percentile bootstrap interval of a statistic, resampling problems with replacement.

    Args:
        problems: Number of problems.
        statistic: Function that maps the counts of the drawn problems, of shape (resamples, problems), to numbers of
            shape (resamples,).
        resamples: Number of bootstrap samples.
    """
    rng = np.random.default_rng(0)
    step = max(1, _CHUNK // problems)
    sizes = [min(step, resamples - start) for start in range(0, resamples, step)]
    found = [statistic(rng.multinomial(problems, np.full(problems, 1 / problems), size=size)) for size in sizes]
    low, high = np.quantile(np.concatenate(found), [0.025, 0.975])
    return Interval(float(low), float(high))


def mean_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and sample standard deviation (``n - 1``), as in the paper's Table 1 over its seeds.

    The deviation is None for fewer than two values; the mean is NaN for no values.
    """
    if not values:
        return math.nan, None
    array = np.asarray(values, dtype=np.float64)
    return float(array.mean()), float(array.std(ddof=1)) if array.size > 1 else None
