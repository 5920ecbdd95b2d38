"""How well values distinguish right items from wrong ones: AUC over all pairs, with intervals over problems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from search.results.intervals import Difference, bootstrap

RESAMPLES = 4000

Array = NDArray[np.float64]


class Ranking(NamedTuple):
    """How values rank right items above wrong ones, as counts per pair of problems.

    Attributes:
        wins: Pairs of a right item of problem i above a wrong one of problem j, half for ties, shape (n, n).
        right: Right items of each problem.
        wrong: Wrong items of each problem.
    """

    wins: Array
    right: Array
    wrong: Array

    @property
    def problems(self) -> int:
        return len(self.right)

    def auc(self, counts: Array) -> Array:
        """Return the AUC when problems are drawn ``counts`` times, shape (..., n); 0.5 without both classes."""
        pairs = (counts @ self.right) * (counts @ self.wrong)
        above = np.einsum("...i,ij,...j->...", counts, self.wins, counts)
        found: Array = np.where(pairs > 0, above / np.maximum(pairs, 1.0), 0.5)
        return found


def rank(truth: Sequence[Array], values: Sequence[Sequence[Array]]) -> Ranking:
    """Compare all items of all problems.

    Args:
        truth: For each problem whether each item is right.
        values: For each training of the critic and each problem the values.
    """
    place = np.concatenate([np.full(len(t), i) for i, t in enumerate(truth)])
    right = np.concatenate(truth).astype(bool)
    wins = np.zeros((len(truth), len(truth)))
    for one in values:
        flat = np.concatenate(one)
        above = (flat[right][:, None] > flat[~right]) + 0.5 * (flat[right][:, None] == flat[~right])
        np.add.at(wins, (place[right][:, None], place[~right]), above / len(values))
    count = [np.bincount(place[part], minlength=len(truth)).astype(float) for part in (right, ~right)]
    return Ranking(wins, *count)


def auc_cells(ranking: Ranking) -> tuple[str, str]:
    interval = bootstrap(ranking.problems, lambda counts: ranking.auc(counts.astype(float)), resamples=RESAMPLES)
    return f"{float(ranking.auc(np.ones(ranking.problems))):.3f}", f"{interval.low:.3f} to {interval.high:.3f}"


def auc_difference(better: Ranking, worse: Ranking) -> Difference:
    """Return the difference of two AUCs of the same items, with an interval over problems."""

    def statistic(counts: Array) -> Array:
        return better.auc(counts) - worse.auc(counts)

    interval = bootstrap(better.problems, lambda counts: statistic(counts.astype(float)), resamples=RESAMPLES)
    return Difference(float(statistic(np.ones(better.problems))), *interval, better.problems)
