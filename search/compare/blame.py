"""Blame: the turn with the largest fall in a critic's values."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from search.compare.reliability import CONFIDENT
from search.plan import Plan
from search.store.read_results import TreeValues


class Blame(NamedTuple):
    """The message that most lowered the value of a transcript.

    Attributes:
        problem_id: The problem.
        turn: Position of the message in the transcript, from 0.
        speaker: Index of the agent that wrote it.
        text: The message.
        values: The value before the first message and after each message.
        fall: The decrease in value after the message.
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
    """Return the stored values along the chosen transcript; empty if one of its states was never scored."""
    values = [plan.tree[node].value for node in chosen_path(plan)] if plan.tree is not None else []
    found = [value for value in values if value is not None]
    return found if len(found) == len(values) else []


def blame(plan: Plan, values: Sequence[float], before: float) -> Blame:
    """Return the message of the chosen transcript with the largest fall in value; in a tie, the first one.

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
    """Return the fall in value after each message."""
    return [old - new for old, new in zip((before, *values), values, strict=False)]


def largest_fall(values: Sequence[float], before: float) -> tuple[int, float]:
    """Return the position of the (first) largest fall, and half of that fall, or 0 if the value never falls."""
    found = falls(values, before)
    place = max(range(len(found)), key=found.__getitem__)
    return place, max(0.0, found[place]) / 2


def blamed(scored: Iterable[tuple[Plan, Sequence[float]]]) -> list[Blame]:
    """Return the blame for each wrong answer of one run.

    Args:
        scored: All plans of the run, including those with right answers, each with the values after the messages of its
            chosen transcript. The mean of the first values serves as the value before the first message.
    """
    first: list[float] = []
    wrong: list[tuple[Plan, Sequence[float]]] = []
    for plan, values in scored:
        first.append(values[0])
        wrong += [] if plan.correct else [(plan, values)]
    return [blame(plan, values, sum(first) / len(first)) for plan, values in wrong]


class Falls:
    """Counts the wrong answers of one run, grouped by the agent whose message has the largest fall in value."""

    def __init__(self) -> None:
        """Start without searches."""
        self._first = array("d")
        self._wrong: list[tuple[tuple[int, ...], tuple[float, ...]]] = []

    def add(self, tree: TreeValues, correct: bool) -> None:
        """Add a search, right or wrong; skip it if a state of its chosen transcript has no value."""
        path = tree.path(tree.candidates[0][0]) if tree.candidates else []
        values = tuple(value for node in path if (value := tree.values[node]) is not None)
        if not path or len(values) < len(path):
            return
        self._first.append(values[0])
        if not correct:
            self._wrong.append((tuple(tree.speakers[node] for node in path), values))

    def counts(self, agents: Sequence[str]) -> Counter[str]:
        """Count the wrong answers by blamed agent; those with confidence below `CONFIDENT` count as "nobody"."""
        found: Counter[str] = Counter()
        before = sum(self._first) / len(self._first) if self._first else 0.0
        for speakers, values in self._wrong:
            turn, confidence = largest_fall(values, before)
            found[agents[speakers[turn]] if confidence >= CONFIDENT else "nobody"] += 1
        return found
