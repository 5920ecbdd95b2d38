"""Votes over the answers of finished paths."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence

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


_ROUNDING = 1e-12


def vote_gain(lead: int, second: int, passes: int) -> float:
    """Return the expected gain in `majority_probability` from ``passes`` more passes, which may change the leader.

    The further votes are distributed over the two leading answers by the posterior predictive distribution. The gain of
    one pass is 0 if the pass cannot change the answer.

    >>> round(vote_gain(2, 2, 1), 3), vote_gain(2, 1, 1), round(vote_gain(1, 0, 2), 4)
    (0.156, 0.0, 0.0625)
    """
    after = 0.0
    for votes in range(passes + 1):
        ends = sorted((lead + votes, second + passes - votes))
        weight = math.comb(passes, votes) * _beta_ratio(lead, second, votes, passes - votes)
        after += weight * majority_probability(ends[1], ends[0])
    gain = after - majority_probability(lead, second)
    return gain if gain > _ROUNDING else 0.0


def _beta_ratio(a: int, b: int, more_a: int, more_b: int) -> float:
    """Return B(a + more_a + 1, b + more_b + 1) / B(a + 1, b + 1)."""
    logs = [math.lgamma(n) for n in (a + more_a + 1, b + more_b + 1, a + b + 2)]
    logs += [-math.lgamma(n) for n in (a + b + more_a + more_b + 2, a + 1, b + 1)]
    return math.exp(math.fsum(logs))


def largest_mean(gain: Callable[[int], float], left: int) -> float:
    """Return the largest mean gain per pass or check, over 1, 2, 4, ..., ``left`` further ones; 0 if there is no gain.

    The largest mean is used instead of the gain of the next pass, because one more pass seldom changes an answer that
    several passes would change.
    """
    ahead, best = 1, 0.0
    while ahead <= left:
        best = max(best, gain(ahead) / ahead)
        ahead = min(2 * ahead, left) if ahead < left else left + 1
    return best


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
