"""Calibration of a critic's values on stored trees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from search.plan import Plan

BINS = 10

CONFIDENT = 0.3
"""Blame of less confidence is not stated. Chosen on dev problems of Arithmetic, see benchmarks/LOG.md."""


class ScoredState(NamedTuple):
    """A scored state of a search tree.

    Attributes:
        depth: Messages so far.
        value: The critic's value.
        right: Share of the graded answers below it that are right.
        speaker: Index of the agent that wrote its last message, if known.
    """

    depth: int
    value: float
    right: float
    speaker: int = -1


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
            state = scored.state
            found.append(ScoredState(state.depth, scored.value, sum(graded) / len(graded), state.speaker))
    return found


def calibration(states: Iterable[ScoredState], by: Literal["depth", "speaker"] = "depth") -> dict[int, list[Bin]]:
    """Return, for each depth or speaker, `BINS` bins of equally many states by value; fewer if there are few states."""
    groups: dict[int, list[ScoredState]] = {}
    for state in states:
        groups.setdefault(getattr(state, by), []).append(state)
    return {key: _bins(sorted(groups[key], key=lambda state: state.value)) for key in sorted(groups)}


def _bins(ordered: Sequence[ScoredState]) -> list[Bin]:
    count = min(BINS, len(ordered))
    edges = [round(i * len(ordered) / count) for i in range(count + 1)]
    groups = [ordered[low:high] for low, high in pairwise(edges)]
    return [
        Bin(sum(s.value for s in group) / len(group), sum(s.right for s in group) / len(group), len(group))
        for group in groups
    ]
