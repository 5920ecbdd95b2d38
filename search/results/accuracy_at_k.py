"""Exact mean accuracy of selection rules over all draws of ``k`` recorded samples.

Each question has ``n`` samples. If a rule selects among ``k`` of them, drawn without replacement, the probability of a
correct selection has a closed form:

* ``"any"``: one of the ``k`` is correct, ``1 - C(n - c, k) / C(n, k)`` with ``c`` correct samples: pass@k (Chen et
  al. 2021, arXiv:2107.03374, Eq. 1);
* ``"best"``: the sample with the highest score, as in `search.BestOfN`. Samples are grouped by score, in descending
  order. A group of ``m`` samples that follows ``b`` better ones contains the selected sample with probability
  ``(C(n - b, k) - C(n - b - m, k)) / C(n, k)``, and all samples of the group are equally likely;
* ``"majority"``: the answer with the most votes, as in `search.SelfConsistency`; tied answers are equally likely
  to come first.

If a question has fewer than ``k`` samples, all are drawn; `SelectionPoint.bounded` is the share of such questions.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from mas_gym.errors import ConfigError, whole_number
from mas_gym.internal.suggestions import choice
from search.plan import Candidate, Plan
from search.results.intervals import Difference, Interval, mean_interval, paired_difference

Rule = Literal["any", "majority", "best"]


class SelectionPoint(NamedTuple):
    """The accuracy of a rule with ``k`` samples per question.

    Attributes:
        accuracy: Mean over the questions.
        interval: Its 95% interval over questions; the mean over draws is exact.
        bounded: Share of questions with fewer than ``k`` samples; all their samples are drawn.
        tokens: Mean tokens of the samples drawn, per question.
    """

    k: int
    accuracy: float
    interval: Interval
    bounded: float
    tokens: float


@dataclass(frozen=True)
class SelectionCurve:
    """The accuracy of one rule against the number of samples.

    Attributes:
        critic: The critic that scored the samples; ``""`` if there is none.
        points: One point per ``k``, in ascending order.
        shares: For each ``k``, the probability of a correct selection, by problem.
    """

    rule: Rule
    critic: str
    points: tuple[SelectionPoint, ...]
    shares: Mapping[int, Mapping[str, float]]

    @property
    def label(self) -> str:
        """Rule and critic in one string."""
        return f"{self.rule} + {self.critic}" if self.critic else self.rule

    def difference(self, other: SelectionCurve, k: int) -> Difference:
        """Return the accuracy with ``k`` samples minus that of another curve, paired by problem."""
        return paired_difference(self.shares[k], other.shares[k])


def selection_curve(plans: Iterable[Plan], rule: Rule, ks: Sequence[int], critic: str = "") -> SelectionCurve:
    """Return the accuracy of a rule over the candidates of plans, which are the samples of their problems.

    Args:
        plans: One graded plan per problem, such as the plans of ``bon:N`` on a recorded run with at most ``N``
            samples per problem. A failed search counts as wrong.
        rule: The selection rule.
        ks: Numbers of samples.
        critic: Name of the critic that scored the candidates, for ``"best"``.

    Raises:
        ConfigError: The rule or a ``k`` is invalid, or a candidate has no score.
    """
    choice("rule", rule, get_args(Rule))
    sizes = sorted({whole_number("k", k, at_least=1) for k in ks})
    found = list(plans)
    shares = {k: {plan.problem_id: _probability(plan, rule, k) for plan in found} for k in sizes}
    points = [_point(k, found, shares[k]) for k in sizes]
    return SelectionCurve(rule, critic, tuple(points), shares)


def _point(k: int, plans: Sequence[Plan], shares: Mapping[str, float]) -> SelectionPoint:
    values = list(shares.values())
    mean = math.fsum(values) / len(values) if values else math.nan
    short = sum(len(plan.candidates) < k for plan in plans) / max(len(plans), 1)
    tokens = [min(k, len(plan.candidates)) * _mean_tokens(plan) for plan in plans]
    return SelectionPoint(
        k, mean, mean_interval(values, 0.0, 1.0), short, math.fsum(tokens) / len(tokens) if tokens else math.nan
    )


def _mean_tokens(plan: Plan) -> float:
    tree = plan.tree
    if tree is None or not plan.candidates:
        return 0.0
    paths = [tree.path(one.node) for one in plan.candidates if one.node is not None]
    return sum(tree.tokens[node] for path in paths for node in path) / len(plan.candidates)


def _probability(plan: Plan, rule: Rule, k: int) -> float:
    samples = plan.candidates
    if plan.error is not None or not samples:
        return 0.0
    k = min(k, len(samples))
    if rule == "any":
        return any_right([bool(one.correct) for one in samples], k)
    if rule == "majority":
        return majority_right([(one.answer, bool(one.correct)) for one in samples], k)
    return best_right([(_score(plan, one), bool(one.correct)) for one in samples], k)


def _score(plan: Plan, one: Candidate) -> float:
    if one.score is None:
        raise ConfigError(
            f"rule 'best': expected scored candidates, got one without a score in {plan.problem_id}; "
            "search with bon:N and a critic"
        )
    return one.score


def any_right(correct: Sequence[bool], k: int) -> float:
    """Return the probability that at least one of ``k`` drawn samples is right, for ``k`` up to ``len(correct)``."""
    return 1 - math.comb(len(correct) - sum(correct), k) / math.comb(len(correct), k)


def best_right(scored: Sequence[tuple[float, bool]], k: int) -> float:
    """Return the probability that the best of ``k`` drawn samples is right; a sample is given as score and grade."""
    groups: defaultdict[float, list[bool]] = defaultdict(list)
    for score, correct in scored:
        groups[score].append(correct)
    left, total, whole = len(scored), 0.0, math.comb(len(scored), k)
    for score in sorted(groups, reverse=True):
        group = groups[score]
        chosen = (math.comb(left, k) - math.comb(left - len(group), k)) / whole
        total += chosen * sum(group) / len(group)
        left -= len(group)
    return min(1.0, total)


def majority_right(answered: Sequence[tuple[str | None, bool]], k: int) -> float:
    """Return the probability that the majority of ``k`` drawn samples is right; a sample is given as answer and grade.

    Samples without an answer have no vote; if no drawn sample has an answer, the first one is chosen.
    """
    right: defaultdict[str | None, list[bool]] = defaultdict(list)
    for answer, correct in answered:
        right[answer].append(correct)
    silent = right.pop(None, [])
    counts = [len(found) for found in right.values()]
    wins = {count: _wins(count, counts, len(silent), k) for count in set(counts)}
    total = math.fsum(wins[len(found)] * sum(found) / len(found) for found in right.values())
    if len(silent) >= k:
        total += math.comb(len(silent), k) / math.comb(len(answered), k) * sum(silent) / len(silent)
    # The sum may exceed 1 by rounding errors.
    return min(1.0, total)


def _wins(count: int, counts: Sequence[int], silent: int, k: int) -> float:
    """Return the probability that an answer with ``count`` samples wins the vote of ``k`` drawn samples.

    Each sample is drawn independently with probability ``k / n``, conditional on a total of ``k``. This is the same as
    drawing without replacement, but its terms do not overflow.
    """
    n = sum(counts) + silent
    rate = k / n
    whole = _binomial(n, rate)[k]
    # The answer itself is included in those with its count.
    others = Counter(counts)
    others[count] -= 1
    chance = 0.0
    for votes in range(1, min(count, k) + 1):
        fewer = sum(size * number for size, number in others.items() if size < votes) + silent
        # Entry [v, t]: the others have v votes, and t of them tie.
        table = np.zeros((k - votes + 1, (k - votes) // votes + 1))
        table[:, 0] = _padded(_binomial(fewer, rate), k - votes + 1)
        for size, number in others.items():
            for _ in range(number if size >= votes else 0):
                table = _with_answer(table, _binomial(size, rate), votes)
        ties = table[k - votes] / np.arange(1, table.shape[1] + 1)
        chance += float(_binomial(count, rate)[votes]) * float(ties.sum())
    return chance / float(whole)


def _with_answer(table: NDArray[np.float64], chances: NDArray[np.float64], votes: int) -> NDArray[np.float64]:
    """Return the table with one more answer, which has at most ``votes`` votes."""
    found: NDArray[np.float64] = chances[0] * table
    for more in range(1, min(votes, len(table))):
        found[more:] += chances[more] * table[:-more]
    if votes < len(table):
        found[votes:, 1:] += chances[votes] * table[:-votes, :-1]
    return found


def _binomial(n: int, rate: float) -> NDArray[np.float64]:
    """Return the probabilities of 0 to ``n`` successes."""
    if rate == 1:
        certain: NDArray[np.float64] = np.eye(1, n + 1, n)[0]
        return certain
    logs = [math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in range(n + 1)]
    steps = np.arange(n + 1)
    chances: NDArray[np.float64] = np.exp(logs + steps * math.log(rate) + (n - steps) * math.log1p(-rate))
    return chances


def _padded(values: NDArray[np.float64], length: int) -> NDArray[np.float64]:
    return np.pad(values[:length], (0, max(0, length - len(values))))
