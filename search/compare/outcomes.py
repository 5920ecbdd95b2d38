"""From single searches to the rows of a table, one per planner and critic, with intervals and differences.

The unit is the problem. A run over several seeds asks each problem several
times, and those answers are not independent, so they are averaged per problem
first and only the problems are treated as a sample. A failed search counts as a
wrong answer, so that failing on hard problems never improves a result.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mas_gym.errors import ConfigError

RESAMPLES = 10_000
_CHUNK = 2_000_000


class Interval(NamedTuple):
    """A confidence interval.

    Attributes:
        low: Lower end.
        high: Upper end.
    """

    low: float
    high: float


class Difference(NamedTuple):
    """The difference of two accuracies on the same problems.

    Attributes:
        mean: Mean of ``a - b`` over the problems, in ``[-1, 1]``.
        low: Lower end of the interval.
        high: Upper end of the interval.
        problems: How many problems both have.
    """

    mean: float
    low: float
    high: float
    problems: int

    @property
    def significant(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0


def wilson(correct: ArrayLike, trials: int | None = None, level: float = 0.95) -> Interval:
    """Return an interval for an accuracy, from one average per problem.

    This is the score interval of Wilson (1927, JASA 22:209) with the effective sample size of Korn and Graubard
    (1998, Survey Methodology 24:193) in place of ``n``, the variance being taken over problems. With one seed it is the
    plain Wilson interval; it needs no random numbers and stays inside ``[0, 1]`` for 0 and 100% correct, where a
    bootstrap gives an interval of width zero.

    Args:
        correct: One number in ``[0, 1]`` per problem: the share of its searches that were right.
        trials: How many searches were run in all, an upper bound on the effective sample size; one per problem if None.
        level: Confidence level.

    Returns:
        The interval; ``(0, 1)`` without problems.
    """
    shares = _shares(correct)
    if shares.size == 0:
        return Interval(0.0, 1.0)
    mean, variance = float(shares.mean()), float(shares.var())
    size = float(shares.size)
    bernoulli = mean * (1 - mean)
    if bernoulli > 0 and trials is not None:
        size = min(size * bernoulli / variance, float(trials)) if variance > 0 else float(trials)
    z = NormalDist().inv_cdf(0.5 + level / 2)
    shrink = 1 + z * z / size
    centre = (mean + z * z / (2 * size)) / shrink
    half = z * math.sqrt(bernoulli / size + z * z / (4 * size * size)) / shrink
    return Interval(max(0.0, centre - half), min(1.0, centre + half))


def paired_bootstrap(
    a: Mapping[str, float], b: Mapping[str, float], *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Difference:
    """Return the difference of two accuracies with a paired bootstrap interval over problems.

    Problems are drawn with replacement, and both sides use the same draw, so that problem difficulty cancels
    (percentile method of Efron and Tibshirani, 1993, ch. 13; paired as in Koehn, 2004, EMNLP).

    Args:
        a: Problem id to the share of its searches that were right.
        b: The same for the other side; only problems that both have are compared.
        level: Confidence level.
        resamples: Bootstrap samples.
        seed: Seed of the resampling.

    Raises:
        ConfigError: The two have no problem in common.
    """
    common = sorted(a.keys() & b.keys())
    if not common:
        raise ConfigError(
            "expected two results on the same problems, got none in common; run both on one task and split"
        )
    gaps = np.array([a[key] - b[key] for key in common], dtype=np.float64)
    low, high = _bootstrap_means(gaps, level, resamples, seed)
    return Difference(float(gaps.mean()), low, high, len(common))


def nested_bootstrap(
    a: Sequence[Mapping[str, float]],
    b: Sequence[Mapping[str, float]],
    *,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Difference:
    """Return the difference of two accuracies with a bootstrap interval over problems and trainings.

    Each side is measured with several trainings of its critic. Problems are drawn with replacement, the same for
    both sides; trainings are drawn with replacement on each side by itself, so that the interval also covers how
    much results vary between trainings. With ``k`` trainings that part is too narrow by about the factor
    ``sqrt((k - 1) / k)``, as in any bootstrap of few values.

    Args:
        a: One mapping per training, of problem id to the share of its searches that were right. One mapping for a
            side that is not trained, such as policy likelihood.
        b: The same for the other side; only problems that every mapping has are compared.
        level: Confidence level.
        resamples: Bootstrap samples.
        seed: Seed of the resampling.

    Raises:
        ConfigError: A side has no training, or there is no problem in common.
    """
    if not a or not b:
        raise ConfigError(f"expected at least one training on each side, got {len(a)} and {len(b)}")
    common = sorted(set.intersection(*(set(one) for one in (*a, *b))))
    if not common:
        raise ConfigError("expected results on the same problems, got none in common; run all on one task and split")
    sides = [np.array([[one[key] for key in common] for one in side], dtype=np.float64) for side in (a, b)]
    mean = float(sides[0].mean() - sides[1].mean())
    rng = np.random.default_rng(seed)
    step = max(1, _CHUNK // len(common))
    found: list[NDArray[np.float64]] = []
    for start in range(0, resamples, step):
        size = min(step, resamples - start)
        problems = rng.multinomial(len(common), np.full(len(common), 1 / len(common)), size=size) / len(common)
        first, second = (_drawn_trainings(problems @ side.T, rng) for side in sides)
        found.append(first - second)
    low, high = np.quantile(np.concatenate(found), [(1 - level) / 2, (1 + level) / 2])
    return Difference(mean, float(low), float(high), len(common))


def _drawn_trainings(means: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Return the mean over as many trainings, drawn with replacement, from means of shape (resamples, trainings)."""
    count = means.shape[1]
    weights = rng.multinomial(count, np.full(count, 1 / count), size=means.shape[0]) / count
    averages: NDArray[np.float64] = (weights * means).sum(axis=1)
    return averages


def _bootstrap_means(values: NDArray[np.float64], level: float, resamples: int, seed: int) -> Interval:
    rng = np.random.default_rng(seed)
    distinct, counts = np.unique(values, return_counts=True)
    # Drawing how often each distinct value comes up is the same as drawing the problems, and much faster.
    weights = counts / values.size
    step = max(1, _CHUNK // distinct.size)
    means: list[NDArray[np.float64]] = []
    for start in range(0, resamples, step):
        draws = rng.multinomial(values.size, weights, size=min(step, resamples - start))
        means.append(draws @ distinct / values.size)
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high))


def mean_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Return mean and sample standard deviation (``n - 1``), as in the paper's Table 1 over its seeds.

    Returns:
        Mean and deviation; the deviation is None for fewer than two values, the mean NaN for none.
    """
    if not values:
        return math.nan, None
    array = np.asarray(values, dtype=np.float64)
    return float(array.mean()), float(array.std(ddof=1)) if array.size > 1 else None


def _shares(correct: ArrayLike) -> NDArray[np.float64]:
    shares = np.asarray(correct, dtype=np.float64)
    if shares.ndim != 1 or (shares.size and not (0 <= float(shares.min()) <= float(shares.max()) <= 1)):
        raise ConfigError(f"expected one number in [0, 1] per problem, got an array of shape {shares.shape}")
    return shares


HIT_RANKS = (1, 3, 5)
SCHEMA = 1
_CURVE_POINTS = 40
_ANSWERED = 0.95


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one search, reduced to what a table needs.

    Attributes:
        planner: Spec of the search method, such as ``"mcts:10,3"``.
        critic: Name of the critic, ``""`` for none.
        seed: Run seed.
        problem_id: The problem.
        correct: Whether the chosen answer was right (Hit@1).
        hit_rank: Rank, from 1, of the first right terminal candidate; None if none was right.
        candidates: How many terminal candidates were ranked.
        tokens: Generated tokens (TOK).
        agent_calls: LLM generations (AC).
        reward_calls: Critic forwards (RC).
        critic_tokens: Tokens that the critic generated, such as a judge's verdicts; no part of TOK.
        grader_tokens: Tokens that a judge generated to grade the answers; no part of TOK.
        error: Why the search failed; None if it did not.
        anytime: The anytime curve: tokens spent at each change of the answer, and whether that answer was right.
        seconds: Wall-clock seconds from start to end, including time spent on concurrent searches.
        order_varied: Whether concurrent calls of a program came too late to be ordered by content: see `search.Plan`.
    """

    planner: str
    critic: str
    seed: int
    problem_id: str
    correct: bool = False
    hit_rank: int | None = None
    candidates: int = 0
    tokens: int = 0
    agent_calls: int = 0
    reward_calls: int = 0
    error: str | None = None
    anytime: tuple[tuple[int, bool], ...] = ()
    seconds: float = 0.0
    critic_tokens: int = 0
    grader_tokens: int = 0
    order_varied: bool = False

    def hit(self, k: int) -> bool:
        """Return whether the chosen answer or one of the first ``k`` candidates was right."""
        return self.correct or (k > 1 and self.hit_rank is not None and self.hit_rank <= k)


class Spread(NamedTuple):
    """A mean over seeds and its sample standard deviation; None with one seed."""

    mean: float
    std: float | None


@dataclass(frozen=True)
class ResultRow:
    """One line of the table: a planner with a critic.

    Attributes:
        planner: Spec of the search method.
        critic: Name of the critic, ``""`` for none.
        seeds: Seeds that have outcomes, ascending.
        searches: Searches that ended.
        hits: ``k`` to Hit@k in ``[0, 1]``, mean and deviation over seeds; only Hit@1 for methods that return one
            candidate.
        interval: 95% interval of Hit@1.
        tokens: TOK per problem.
        agent_calls: AC per problem.
        reward_calls: RC per problem.
        critic_tokens: Tokens generated by the critic, per problem.
        grader_tokens: Tokens generated by a judge to grade the answers, per problem.
        seconds: Wall-clock seconds per search; depends on the machine and on its load.
        failures: Reason to number of failed searches, most frequent first.
        shares: Problem id to the share of its searches that were right.
        curve: Tokens per problem and Hit@1 if every search had stopped at the same budget, for increasing budgets;
            empty for methods whose answer never changes.
    """

    planner: str
    critic: str
    seeds: tuple[int, ...]
    searches: int
    hits: dict[int, Spread]
    interval: Interval
    tokens: Spread
    agent_calls: Spread
    reward_calls: Spread
    critic_tokens: Spread
    grader_tokens: Spread
    seconds: Spread
    failures: dict[str, int]
    shares: dict[str, float]
    curve: tuple[tuple[float, float], ...] = ()

    @property
    def label(self) -> str:
        """Planner and critic in one string."""
        return f"{self.planner} + {self.critic}" if self.critic else self.planner

    @property
    def problems(self) -> int:
        """How many problems have at least one outcome."""
        return len(self.shares)

    def to_dict(self) -> dict[str, Any]:
        """Return a flat JSON-able form, without the per-problem shares."""
        flat: dict[str, Any] = {"planner": self.planner, "critic": self.critic, "seeds": list(self.seeds)}
        flat |= {"problems": self.problems, "searches": self.searches}
        for k in HIT_RANKS:
            flat[f"hit@{k}"], flat[f"hit@{k}_std"] = self.hits.get(k, (None, None))
        flat |= {"hit@1_low": self.interval.low, "hit@1_high": self.interval.high}
        for name in ("tokens", "agent_calls", "reward_calls", "critic_tokens", "grader_tokens", "seconds"):
            flat[name], flat[f"{name}_std"] = getattr(self, name)
        return flat | {"failed": sum(self.failures.values()), "failures": dict(self.failures)}


def summarise(outcomes: Iterable[Outcome]) -> list[ResultRow]:
    """Group outcomes by planner and critic, in order of appearance, and average them.

    TOK, AC and RC are averaged over the searches that did not fail.
    """
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.planner, outcome.critic), []).append(outcome)
    return [_row(planner, critic, group) for (planner, critic), group in groups.items()]


def differences(rows: Sequence[ResultRow], baseline: str = "") -> list[tuple[ResultRow, ResultRow, Difference]]:
    """Compare the Hit@1 of each row with the baseline's, on the problems that both have.

    Args:
        rows: From `summarise`.
        baseline: The label of the row to compare with, or its planner if only one row has it; the first row by default.

    Returns:
        For each other row: the row, the baseline, and the difference row - baseline.

    Raises:
        ConfigError: No row has that name, or several do.
    """
    first = find_row(rows, baseline)
    return [
        (row, first, paired_bootstrap(row.shares, first.shares))
        for row in rows
        if row is not first and row.shares.keys() & first.shares.keys()
    ]


def find_row(rows: Sequence[ResultRow], name: str = "") -> ResultRow:
    """Return the row with a label, or the only row of a planner; the first row without a name.

    Raises:
        ConfigError: No row has that name, or several do.
    """
    if not name:
        return rows[0]
    found = [row for row in rows if row.label == name] or [row for row in rows if row.planner == name]
    if len(found) != 1:
        labels = ", ".join(repr(row.label) for row in rows)
        raise ConfigError(f"baseline {name!r}: expected the label of one row, one of {labels}")
    return found[0]


def _row(planner: str, critic: str, group: list[Outcome]) -> ResultRow:
    by_seed: dict[int, list[Outcome]] = {}
    by_problem: dict[str, list[bool]] = {}
    for outcome in group:
        by_seed.setdefault(outcome.seed, []).append(outcome)
        by_problem.setdefault(outcome.problem_id, []).append(outcome.correct)
    runs = [by_seed[seed] for seed in sorted(by_seed)]
    ranked = max(outcome.candidates for outcome in group) > 1
    hits = {k: _spread([[o.hit(k) for o in run] for run in runs]) for k in HIT_RANKS if k == 1 or ranked}
    ended = [[o for o in run if o.error is None] for run in runs]
    shares = {key: sum(right) / len(right) for key, right in by_problem.items()}
    return ResultRow(
        planner=planner,
        critic=critic,
        seeds=tuple(sorted(by_seed)),
        searches=len(group),
        hits=hits,
        interval=wilson(list(shares.values()), trials=len(group)),
        tokens=_spread([[o.tokens for o in run] for run in ended]),
        agent_calls=_spread([[o.agent_calls for o in run] for run in ended]),
        reward_calls=_spread([[o.reward_calls for o in run] for run in ended]),
        critic_tokens=_spread([[o.critic_tokens for o in run] for run in ended]),
        grader_tokens=_spread([[o.grader_tokens for o in run] for run in ended]),
        seconds=_spread([[o.seconds for o in run] for run in ended]),
        failures=dict(Counter(o.error for o in group if o.error is not None).most_common()),
        shares=shares,
        curve=tuple((point.tokens, point.hit) for point in anytime_curve(group)),
    )


class CurvePoint(NamedTuple):
    """A point of an averaged anytime curve: what searches that stop at one budget reach.

    Attributes:
        tokens: Mean tokens spent.
        hit: Hit@1.
        interval: Its 95% interval.
    """

    tokens: float
    hit: float
    interval: Interval


def anytime_curve(outcomes: Iterable[Outcome]) -> list[CurvePoint]:
    """Average the anytime answers of one row at increasing token budgets; empty if its answers never change.

    The curve starts where nearly all searches have an answer.
    """
    group = [outcome for outcome in outcomes if outcome.error is None]
    changing = [outcome for outcome in group if outcome.anytime]
    if not changing or len(changing) < _ANSWERED * len(group) or max(len(o.anytime) for o in changing) < 2:
        return []
    first = sorted(outcome.anytime[0][0] for outcome in changing)
    low = max(1, first[min(len(first) - 1, int(_ANSWERED * len(group)))])
    high = max(low, *(outcome.tokens for outcome in group))
    budgets = [round(low * (high / low) ** (step / (_CURVE_POINTS - 1))) for step in range(_CURVE_POINTS)]
    return [_point(group, budget) for budget in sorted(set(budgets))]


def _point(group: list[Outcome], budget: int) -> CurvePoint:
    by_problem: dict[str, list[bool]] = {}
    for outcome in group:
        by_problem.setdefault(outcome.problem_id, []).append(_right_at(outcome, budget))
    hits = [hit for found in by_problem.values() for hit in found]
    shares = [sum(found) / len(found) for found in by_problem.values()]
    spent = sum(min(outcome.tokens, budget) for outcome in group) / len(group)
    return CurvePoint(spent, sum(hits) / len(hits), wilson(shares, trials=len(group)))


def _right_at(outcome: Outcome, budget: int) -> bool:
    if budget >= outcome.tokens:
        return outcome.correct
    known = [correct for tokens, correct in outcome.anytime if tokens <= budget]
    return bool(known and known[-1])


def _spread(runs: Sequence[Sequence[float]]) -> Spread:
    means = [sum(run) / len(run) for run in runs if run]
    mean, std = mean_std(means)
    return Spread(mean if means else math.nan, std)
