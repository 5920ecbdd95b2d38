"""Accuracy against tokens: the accuracy of a row if all its searches stopped at the same number of tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from search.results.intervals import Interval, accuracy_interval
from search.results.outcomes import Outcome

_CURVE_POINTS = 40
_ANSWERED = 0.95


class CurvePoint(NamedTuple):
    """The result of searches that stop at one budget: mean tokens spent, and Hit@1 with its 95% interval."""

    tokens: float
    hit: float
    interval: Interval


def anytime_curve(outcomes: Iterable[Outcome]) -> list[CurvePoint]:
    """Average the anytime answers of one row at increasing token budgets; empty if its answers never change.

    The curve starts at the budget at which nearly all searches have an answer.
    """
    group = [outcome for outcome in outcomes if outcome.error is None and outcome.correct is not None]
    changing = [outcome for outcome in group if outcome.anytime]
    if not changing or len(changing) < _ANSWERED * len(group) or max(len(o.anytime) for o in changing) < 2:
        return []
    first = sorted(outcome.anytime[0][0] for outcome in changing)
    low = max(1, first[min(len(first) - 1, int(_ANSWERED * len(group)))])
    high = max(low, *(outcome.tokens for outcome in group))
    budgets = [round(low * (high / low) ** (step / (_CURVE_POINTS - 1))) for step in range(_CURVE_POINTS)]
    budgets = sorted(set(budgets))
    right, spent = _right_at(group, budgets), np.array([outcome.tokens for outcome in group])
    numbers: dict[str, int] = {}
    problem = np.array([numbers.setdefault(outcome.problem_id, len(numbers)) for outcome in group])
    asked = np.bincount(problem)
    points = []
    for place, budget in enumerate(budgets):
        shares = np.bincount(problem, right[:, place]) / asked
        tokens = int(np.minimum(spent, budget).sum()) / len(group)
        interval = accuracy_interval(shares, len(group))
        points.append(CurvePoint(tokens, int(right[:, place].sum()) / len(group), interval))
    return points


def _right_at(group: Sequence[Outcome], budgets: Sequence[int]) -> NDArray[np.bool_]:
    """Return, for each search and budget, whether the search is right if it stops at that budget."""
    right = np.zeros((len(group), len(budgets)), dtype=np.bool_)
    for row, outcome in zip(right, group, strict=True):
        for tokens, correct in (*outcome.anytime, (outcome.tokens, outcome.correct)):
            row[bisect_left(budgets, tokens) :] = correct
    return right
