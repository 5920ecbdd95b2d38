"""Votes over the answers of finished paths."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

from search.plan import AnytimePoint
from search.protocol import ValueKind
from search.tree import Tree


def sigmoid(x: float) -> float:
    """Return ``1 / (1 + exp(-x))`` without overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def vote(answers: Sequence[str | None], weights: Sequence[float]) -> int:
    """Return the index of the pass that represents the winning answer.

    Weights are summed per answer, and ties go to the answer seen first. The pass with the largest weight represents an
    answer. Passes without an answer vote only if no pass has an answer.
    """
    totals: dict[str, float] = {}
    for answer, weight in zip(answers, weights, strict=True):
        if answer is not None:
            totals[answer] = totals.get(answer, 0.0) + weight
    winner = max(totals, key=totals.__getitem__) if totals else None
    return max((i for i, answer in enumerate(answers) if answer == winner), key=weights.__getitem__)


def majority_probability(lead: int, second: int) -> float:
    """Return the probability that the leading answer is more frequent than the second in the limit of many passes.

    This is the Beta form of the criterion of Adaptive-Consistency (Aggarwal et al., EMNLP 2023,
    https://aclanthology.org/2023.emnlp-main.761, Sec. 3): with ``a`` and ``b`` votes for the two most frequent answers
    and a uniform prior, the leader's share p of their votes has the posterior Beta(a + 1, b + 1), and
    P(p > 1/2) = P(X <= a) for X ~ Binomial(a + b + 1, 1/2). It is 1/2 at a = b and grows with the leader's votes::

        P(p > 1/2) = 1/2 + sum over i = b ... a - 1 of C(i + b + 1, b) / 2^(i + b + 2)

    >>> majority_probability(3, 0)
    0.9375
    """
    gains = (math.comb(i + second + 1, second) / 2 ** (i + second + 2) for i in range(second, lead))
    return min(1.0, 0.5 + math.fsum(gains))


def leading_votes(answers: Sequence[str | None]) -> tuple[int, int]:
    """Return the votes of the two most frequent answers; passes without an answer do not vote."""
    most = Counter(answer for answer in answers if answer is not None).most_common(2)
    lead, second = ([count for _, count in most] + [0, 0])[:2]
    return lead, second


def passes_to_settle(answers: Sequence[str | None], stop: float, limit: int) -> int:
    """Return the smallest number of further passes that can settle a vote, at most ``limit``.

    This is the number needed if all further passes give the leading answer.
    """
    lead, second = leading_votes(answers)
    return bisect_right(range(limit), stop, key=lambda more: majority_probability(lead + more, second))


def scored_ends(tree: Tree, ends: Sequence[int], kind: ValueKind, first: int = 1) -> Sequence[int]:
    """Return the nodes to score: ``ends`` if the critic values only outcomes, else all nodes from ``first`` on."""
    return ends if kind in ("outcome", "reward") else range(first, len(tree))


def vote_curve(tree: Tree, ends: Sequence[int], chosen: Sequence[int]) -> tuple[AnytimePoint, ...]:
    """Return the anytime curve of paths that end one after another; ``chosen`` is the leader after each path."""
    calls = tokens = 0
    curve: list[AnytimePoint] = []
    for end, leader in zip(ends, chosen, strict=True):
        path = tree.path(end)[1:]
        calls += len(path)
        tokens += sum(tree.tokens[node] for node in path)
        if not curve or curve[-1].state is not tree.states[leader]:
            curve.append(AnytimePoint(calls, tokens, tree.states[leader], leader))
    return tuple(curve)
