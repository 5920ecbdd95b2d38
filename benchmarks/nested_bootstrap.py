"""Intervals for the difference of critics that were trained several times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mas_gym.errors import ConfigError
from search.results.intervals import Counts, Difference, bootstrap


def nested_bootstrap(
    a: Sequence[Mapping[str, float]], b: Sequence[Mapping[str, float]], *, resamples: int = 10_000, seed: int = 0
) -> Difference:
    """Return the difference of two accuracies with a bootstrap interval over problems and training runs.

    Each side is measured with several training runs of its critic. Problems are drawn with replacement, the same for
    both sides. Training runs are drawn with replacement separately on each side, so the interval also covers the
    variation between them. With ``k`` training runs, that part is too narrow by a factor of about
    ``sqrt((k - 1) / k)``, as in any bootstrap of few values.

    Args:
        a: One mapping per training run, from problem id to the share of correct searches. A side without training,
            such as policy likelihood, has one mapping.
        b: The same for the other side; only problems that every mapping has are compared.
        resamples: Bootstrap samples.
        seed: Seed for drawing the training runs.

    Raises:
        ConfigError: A side has no training run, or the sides have no problem in common.
    """
    if not a or not b:
        raise ConfigError(f"expected at least one training run on each side, got {len(a)} and {len(b)}")
    common = sorted(set.intersection(*map(set, (*a, *b))))
    if not common:
        raise ConfigError("expected results on the same problems, got none in common")
    sides = [np.array([[one[key] for key in common] for one in side], dtype=np.float64) for side in (a, b)]
    rng = np.random.default_rng([seed, 1])

    def statistic(counts: Counts) -> NDArray[np.float64]:
        first, second = (_drawn_trainings(counts @ side.T / len(common), rng) for side in sides)
        return first - second

    interval = bootstrap(len(common), statistic, resamples=resamples)
    return Difference(float(sides[0].mean() - sides[1].mean()), *interval, len(common))


def _drawn_trainings(means: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Return the mean over resampled training runs, from means of shape (resamples, training runs)."""
    count = means.shape[1]
    weights = rng.multinomial(count, np.full(count, 1 / count), size=means.shape[0]) / count
    averages: NDArray[np.float64] = (weights * means).sum(axis=1)
    return averages
