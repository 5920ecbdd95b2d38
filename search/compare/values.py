"""What a critic's values say about finished searches: calibration by depth, and which message lost a failed one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from search.plan import Plan

BINS = 10

CONFIDENT = 0.25
"""Blame of less confidence is not stated. Chosen on dev problems of Arithmetic, see benchmarks/LOG.md."""


class ScoredState(NamedTuple):
    """A scored state of a search tree.

    Attributes:
        depth: Messages so far.
        value: The critic's value.
        right: Share of the graded answers below it that are right.
    """

    depth: int
    value: float
    right: float


class Bin(NamedTuple):
    """States of similar value.

    Attributes:
        value: Their mean value.
        right: Mean share of right answers below them.
        states: How many there are.
    """

    value: float
    right: float
    states: int


def scored_states(plan: Plan) -> list[ScoredState]:
    """Return the scored states of a plan's tree that have graded answers below them."""
    if plan.tree is None:
        return []
    below: dict[int, list[bool]] = {}
    for candidate in plan.candidates:
        if candidate.node is not None and candidate.correct is not None:
            for node in plan.tree.path(candidate.node)[1:]:
                below.setdefault(node, []).append(candidate.correct)
    found = []
    for index, graded in below.items():
        scored = plan.tree[index]
        if scored.value is not None:
            found.append(ScoredState(scored.state.depth, scored.value, sum(graded) / len(graded)))
    return found


def calibration(states: Iterable[ScoredState]) -> dict[int, list[Bin]]:
    """Return, for each depth, `BINS` bins of equally many states by value; fewer bins if there are few states."""
    by_depth: dict[int, list[ScoredState]] = {}
    for state in states:
        by_depth.setdefault(state.depth, []).append(state)
    return {depth: _bins(sorted(by_depth[depth], key=lambda state: state.value)) for depth in sorted(by_depth)}


def _bins(ordered: Sequence[ScoredState]) -> list[Bin]:
    count = min(BINS, len(ordered))
    edges = [round(i * len(ordered) / count) for i in range(count + 1)]
    groups = [ordered[low:high] for low, high in pairwise(edges)]
    return [
        Bin(sum(s.value for s in group) / len(group), sum(s.right for s in group) / len(group), len(group))
        for group in groups
    ]


def auc(scores: ArrayLike, labels: ArrayLike) -> float:
    """Return the area under the ROC curve, in ``[0, 1]``; ties count half; 0.5 if one class is missing.

    >>> auc([0.1, 0.4, 0.4, 0.9], [False, True, False, True])
    0.875
    """
    values, positive = np.asarray(scores, dtype=np.float64), np.asarray(labels, dtype=bool)
    ups = int(positive.sum())
    if ups in (0, positive.size):
        return 0.5
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    # The mean rank of each value, from 1 (Mann and Whitney 1947).
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return float((ranks[positive].sum() - ups * (ups + 1) / 2) / (ups * (positive.size - ups)))


class Blame(NamedTuple):
    """The message that most lowered the value of a transcript.

    Attributes:
        problem_id: The problem.
        turn: Its place in the transcript, from 0.
        speaker: Index of the agent that wrote it.
        text: The message.
        values: The value before the first message and after each.
        fall: By how much it lowered the value.
        confidence: Half of the fall, in ``[0, 1]`` for values in ``[-1, 1]``; 0 if the value never falls.
    """

    problem_id: str
    turn: int
    speaker: int
    text: str
    values: tuple[float, ...]
    fall: float
    confidence: float


def chosen_path(plan: Plan) -> list[int]:
    """Return the nodes of the chosen transcript, without the root; empty for a plan without an answer or a tree."""
    if plan.tree is None or plan.best is None or plan.best.node is None:
        return []
    return list(plan.tree.path(plan.best.node)[1:])


def path_values(plan: Plan) -> list[float]:
    """Return the stored values along the chosen transcript; none if one of its states was never scored."""
    values = [plan.tree[node].value for node in chosen_path(plan)] if plan.tree is not None else []
    found = [value for value in values if value is not None]
    return found if len(found) == len(values) else []


def blame(plan: Plan, values: Sequence[float], before: float) -> Blame:
    """Return the message of the chosen transcript after which the value fell most; of equal falls, the first.

    Args:
        plan: A plan with a tree.
        values: A critic's value after each message of the chosen transcript.
        before: The value before the first message.
    """
    assert plan.tree is not None
    path = chosen_path(plan)
    turn, confidence = largest_fall(values, before)
    state = plan.tree[path[turn]].state
    fall = falls(values, before)[turn]
    return Blame(plan.problem_id, turn, state.speaker, state.text, (before, *values), fall, confidence)


def falls(values: Sequence[float], before: float) -> list[float]:
    """Return by how much each message lowered the value.

    Args:
        values: After each message.
        before: The value before the first.
    """
    return [old - new for old, new in zip((before, *values), values, strict=False)]


def largest_fall(values: Sequence[float], before: float) -> tuple[int, float]:
    """Return the place of the largest fall, the first of equal ones, and half of it, or 0 if the value never falls."""
    found = falls(values, before)
    place = max(range(len(found)), key=found.__getitem__)
    return place, max(0.0, found[place]) / 2


def blamed(scored: Iterable[tuple[Plan, Sequence[float]]]) -> list[Blame]:
    """Return the blame of the wrong answers of one run.

    Args:
        scored: The plans of the run, right answers too, each with the values after the messages of its chosen
            transcript. The mean of the first values is the value before the first message.
    """
    first: list[float] = []
    wrong: list[tuple[Plan, Sequence[float]]] = []
    for plan, values in scored:
        first.append(values[0])
        wrong += [] if plan.correct else [(plan, values)]
    return [blame(plan, values, sum(first) / len(first)) for plan, values in wrong]
