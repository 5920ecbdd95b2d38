"""Calibration of a critic's values on stored trees."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from search.store.results import TreeValues

BINS = 10

CONFIDENT = 0.3
"""Minimum confidence for reporting blame. Chosen on dev problems of Arithmetic, see benchmarks/LOG.md."""


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
        states: Number of states.
    """

    value: float
    right: float
    states: int


def gap(bins: Sequence[Bin]) -> float:
    """Return the mean distance between value and ``2 right - 1`` over states in bins."""
    return sum(abs(one.value - (2 * one.right - 1)) * one.states for one in bins) / sum(one.states for one in bins)


def scored_states(tree: TreeValues) -> list[ScoredState]:
    """Return the scored states of a search tree that have graded answers below them."""
    parents = tree.parents
    depths, graded, right = ([0] * len(parents) for _ in range(3))
    for node, parent in enumerate(parents):
        if parent >= 0:
            depths[node] = depths[parent] + 1
    for node, correct in tree.candidates:
        while node > 0:
            graded[node] += 1
            right[node] += correct
            node = parents[node]
    return [
        ScoredState(depths[node], value, right[node] / graded[node], tree.speakers[node])
        for node, value in enumerate(tree.values)
        if graded[node] and value is not None
    ]


class ScoredStates:
    """The scored states of many searches by depth or speaker, at 16 bytes each."""

    def __init__(self, by: Literal["depth", "speaker"]) -> None:
        """Start without states."""
        self._key = attrgetter(by)
        self._groups: dict[int, tuple[array[float], array[float]]] = {}

    def add(self, states: Iterable[ScoredState]) -> None:
        """Add states."""
        for state in states:
            key = self._key(state)
            if key not in self._groups:
                self._groups[key] = array("d"), array("d")
            values, right = self._groups[key]
            values.append(state.value)
            right.append(state.right)

    def bins(self) -> dict[int, list[Bin]]:
        """Return, for each depth or speaker, at most `BINS` bins of about equally many states, in order of value.

        Equal values share a bin, so the order of the states does not matter.
        """
        return {key: _bins(*map(np.asarray, self._groups[key])) for key in sorted(self._groups)}


def calibration(states: Iterable[ScoredState], by: Literal["depth", "speaker"] = "depth") -> dict[int, list[Bin]]:
    """Return the bins of states by depth or speaker, as `ScoredStates.bins` does."""
    groups = ScoredStates(by)
    groups.add(states)
    return groups.bins()


def _bins(values: NDArray[np.float64], right: NDArray[np.float64]) -> list[Bin]:
    order = np.argsort(values, kind="stable")
    count, ordered = min(BINS, len(order)), values[order]
    starts = [ordered[round(i * len(order) / count)] for i in range(count)]
    edges = [*sorted(set(np.searchsorted(ordered, starts).tolist())), len(order)]
    groups = [order[low:high] for low, high in pairwise(edges)]
    return [
        Bin(sum(values[group].tolist()) / len(group), sum(right[group].tolist()) / len(group), len(group))
        for group in groups
    ]
