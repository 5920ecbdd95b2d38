"""Votes over finished paths."""

from __future__ import annotations

import math
from collections.abc import Sequence

from search.plan import AnytimePoint
from search.planners.common import (
    anytime_point,
)
from search.protocol import ValueKind
from search.tree import Tree


def sigmoid(x: float) -> float:
    """Return ``1 / (1 + exp(-x))`` without overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def vote(answers: Sequence[str | None], weights: Sequence[float]) -> int:
    """Return the index of the pass that represents the winning answer.

    Weights are summed per answer; the answer seen first wins a tie, and its pass with the
    largest weight represents it. Passes without an answer vote only if no pass has one.
    """
    totals: dict[str, float] = {}
    for answer, weight in zip(answers, weights, strict=True):
        if answer is not None:
            totals[answer] = totals.get(answer, 0.0) + weight
    winner = max(totals, key=totals.__getitem__) if totals else None
    return max((i for i, answer in enumerate(answers) if answer == winner), key=weights.__getitem__)


def scored_ends(tree: Tree, ends: Sequence[int], kind: ValueKind) -> Sequence[int]:
    """Return the nodes that the critic scores: the ends alone if values are of outcomes."""
    return ends if kind in ("outcome", "reward") else range(1, len(tree))


def vote_curve(tree: Tree, ends: Sequence[int], chosen: Sequence[int]) -> tuple[AnytimePoint, ...]:
    """Return the anytime curve of paths that end one after another, with the leader after each."""
    calls = tokens = 0
    curve: list[AnytimePoint] = []
    for end, leader in zip(ends, chosen, strict=True):
        path = tree.path(end)[1:]
        calls += len(path)
        tokens += sum(tree.tokens[node] for node in path)
        if not curve or curve[-1].state is not tree.states[leader]:
            curve.append(anytime_point(tree, calls, tokens, leader))
    return tuple(curve)
