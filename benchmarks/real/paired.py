"""Folds of problems, and paired differences in points, for the pages about recorded runs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from search.results.intervals import Difference, paired_difference


def folds(number: int, count: int, seed: int) -> NDArray[np.int64]:
    """Return the fold of each problem; folds are of equal size up to one."""
    return np.random.default_rng(seed).permutation(number) % count


def paired(one: NDArray[np.float64], other: NDArray[np.float64]) -> Difference:
    """Return the difference of two accuracies, each given by problem in the same order."""
    sides = ({str(place): float(value) for place, value in enumerate(side)} for side in (one, other))
    return paired_difference(*sides)


def points(gap: Difference) -> str:
    """Return a difference in points with its interval."""
    return f"{100 * gap.mean:+.1f} ({100 * gap.low:+.1f} to {100 * gap.high:+.1f})"
