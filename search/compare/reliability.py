"""Calibration of a critic's values on stored trees."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from search.store.search_rows import Document

BINS = 10


class ScoredState(NamedTuple):
    """A scored state of a search tree or a transcript.

    Attributes:
        group: Number of messages so far, or index of the agent that wrote the last message.
        value: The critic's value.
        right: Share of the graded answers below it that are right.
    """

    group: int
    value: float
    right: float


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


def tree_states(search: Document) -> Iterator[ScoredState]:
    """Yield the scored states of a stored search that have graded answers below them, grouped by speaker."""
    tree = search.tree or {"parent": [], "speaker": [], "value": []}
    parents = tree["parent"]
    graded, right = [0] * len(parents), [0] * len(parents)
    for node, _, _, correct in search.candidates:
        while node > 0 and correct is not None:
            graded[node] += 1
            right[node] += correct
            node = parents[node]
    for speaker, value, below, found in zip(tree["speaker"], tree["value"], graded, right, strict=True):
        if below and value is not None:
            yield ScoredState(speaker, value, found / below)


def value_bins(states: Iterable[ScoredState]) -> dict[int, list[Bin]]:
    """Return, for each group, at most `BINS` bins with about the same number of states, in order of value.

    Equal values share a bin, so the order of the states does not matter. A state takes 16 bytes of memory.
    """
    groups: defaultdict[int, tuple[array[float], array[float]]] = defaultdict(lambda: (array("d"), array("d")))
    for group, value, right in states:
        values, shares = groups[group]
        values.append(value)
        shares.append(right)
    return {key: _bins(*map(np.asarray, groups[key])) for key in sorted(groups)}


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
