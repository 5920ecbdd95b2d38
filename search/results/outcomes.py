"""Reduces searches to the rows of a table, one per planner and critic, with intervals and differences.

A failed search counts as a wrong answer, so that failing on hard problems never improves a result.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mas_gym.errors import ConfigError
from search.plan import Plan
from search.results.intervals import Difference, Interval, accuracy_interval, mean_std, paired_difference
from search.usage import ArmUsage, Usage

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
        usd: Cost in USD; None without prices.
        unrecorded: Messages asked for beyond those of a recorded run.
        stopped: Why the search ended early, as `Plan.stopped`; None if it did not.
        arms: What each arm contributed, as `Usage.arms`.
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
    usd: float | None = None
    unrecorded: int = 0
    stopped: str | None = None
    arms: tuple[ArmUsage, ...] = ()

    def hit(self, k: int) -> bool:
        """Return whether the chosen answer or one of the first ``k`` candidates was right."""
        return self.correct or (k > 1 and self.hit_rank is not None and self.hit_rank <= k)


def outcome_of(plan: Plan, planner: str, critic: str, seed: int) -> Outcome:
    """Reduce a plan to what tables need, under the names of its planner and critic."""
    ranks = [rank for rank, candidate in enumerate(plan.candidates, 1) if candidate.correct]
    return Outcome(
        planner=planner,
        critic=critic,
        seed=seed,
        problem_id=plan.problem_id,
        correct=bool(plan.correct) and plan.error is None,
        hit_rank=ranks[0] if ranks and plan.error is None else None,
        candidates=len(plan.candidates),
        tokens=plan.usage.generated_tokens,
        agent_calls=plan.usage.agent_calls,
        reward_calls=plan.usage.reward_calls,
        error=plan.error,
        anytime=tuple((point.generated_tokens, bool(point.correct)) for point in plan.anytime),
        seconds=plan.usage.seconds,
        critic_tokens=plan.usage.critic_tokens,
        grader_tokens=plan.usage.grader_tokens,
        order_varied=plan.order_varied,
        usd=plan.usd,
        unrecorded=plan.usage.unrecorded,
        stopped=plan.stopped,
        arms=plan.usage.arms,
    )


class ArmShare(NamedTuple):
    """What an arm contributed to the searches of a row.

    Attributes:
        arm: Its name.
        agent_calls: AC per problem.
        tokens: TOK per problem.
        chosen: Its share of the messages of chosen answers, in ``[0, 1]``.
    """

    arm: str
    agent_calls: float
    tokens: float
    chosen: float


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
        tokens: TOK per problem; NaN if messages were generated and no tokens were counted, as in logs without them.
        agent_calls: AC per problem.
        reward_calls: RC per problem.
        critic_tokens: Tokens generated by the critic, per problem.
        grader_tokens: Tokens generated by a judge to grade the answers, per problem.
        seconds: Wall-clock seconds per search; depends on the machine and on its load.
        failures: Reason to number of failed searches, most frequent first.
        shares: Problem id to the share of its searches that were right.
        curve: Tokens per problem and Hit@1 if every search had stopped at the same budget, for increasing budgets;
            empty for methods whose answer never changes.
        uneven: Whether its seeds ended different problems, so that Hit@1 averages unequal sets.
        usd: USD per problem; None without prices.
        bounded: Share of searches that asked for more messages than a recorded run holds.
        arms: What each arm contributed; empty for a policy without arms.
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
    uneven: bool = False
    usd: Spread | None = None
    bounded: float = 0.0
    arms: tuple[ArmShare, ...] = ()

    @cached_property
    def problem_set(self) -> str:
        """A short digest of its problems: rows with different ones are comparable on their common problems alone."""
        return blake2b(ascii(sorted(self.shares)).encode(), digest_size=4).hexdigest()

    @property
    def label(self) -> str:
        """Planner and critic in one string."""
        return f"{self.planner} + {self.critic}" if self.critic else self.planner

    @property
    def problems(self) -> int:
        """How many problems have at least one outcome."""
        return len(self.shares)

    def cost(self, name: str) -> Spread:
        """Return the mean of a cost by the name of its attribute, such as ``"tokens"``."""
        found: Spread = getattr(self, name)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return a flat JSON-able form, without the per-problem shares."""
        flat: dict[str, Any] = {"planner": self.planner, "critic": self.critic, "seeds": list(self.seeds)}
        flat |= {"problems": self.problems, "problem_set": self.problem_set, "uneven_seeds": self.uneven}
        flat["searches"] = self.searches
        for k in HIT_RANKS:
            flat[f"hit@{k}"], flat[f"hit@{k}_std"] = self.hits.get(k, (None, None))
        flat |= {"hit@1_low": self.interval.low, "hit@1_high": self.interval.high}
        for name in ("tokens", "agent_calls", "reward_calls", "critic_tokens", "grader_tokens", "seconds"):
            flat[name], flat[f"{name}_std"] = self.cost(name)
            if name == "tokens" and self.usd is not None:
                flat["usd"], flat["usd_std"] = self.usd
        flat["bounded"] = self.bounded
        if self.arms:
            flat["arms"] = [share._asdict() for share in self.arms]
        return flat | {"failed": sum(self.failures.values()), "failures": dict(self.failures)}


def summarise(outcomes: Iterable[Outcome]) -> list[ResultRow]:
    """Group outcomes by planner and critic, in order of appearance, and average them.

    TOK, USD, AC and RC are averaged over the searches that did not fail.
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
        (row, first, paired_difference(row.shares, first.shares))
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
    priced = all(outcome.usd is not None for outcome in group)
    counted = any(outcome.tokens for outcome in group) or not any(outcome.agent_calls for outcome in group)
    return ResultRow(
        planner=planner,
        critic=critic,
        seeds=tuple(sorted(by_seed)),
        searches=len(group),
        hits=hits,
        interval=accuracy_interval(list(shares.values()), len(group)),
        tokens=_spread([[o.tokens for o in run] for run in ended] if counted else []),
        agent_calls=_spread([[o.agent_calls for o in run] for run in ended]),
        reward_calls=_spread([[o.reward_calls for o in run] for run in ended]),
        critic_tokens=_spread([[o.critic_tokens for o in run] for run in ended]),
        grader_tokens=_spread([[o.grader_tokens for o in run] for run in ended]),
        seconds=_spread([[o.seconds for o in run] for run in ended]),
        failures=dict(Counter(o.error for o in group if o.error is not None).most_common()),
        shares=shares,
        curve=tuple((point.tokens, point.hit) for point in anytime_curve(group)),
        usd=_spread([[o.usd for o in run if o.usd is not None] for run in ended]) if priced else None,
        bounded=sum(outcome.unrecorded > 0 for outcome in group) / len(group),
        arms=_arm_shares([outcome for run in ended for outcome in run]),
        uneven=len({frozenset(outcome.problem_id for outcome in run) for run in runs}) > 1,
    )


def _arm_shares(outcomes: Sequence[Outcome]) -> tuple[ArmShare, ...]:
    total = sum((Usage(arms=outcome.arms) for outcome in outcomes), Usage()).arms
    chosen, n = max(1, sum(arm.chosen for arm in total)), len(outcomes)
    return tuple(ArmShare(a.arm, a.calls / n, a.generated_tokens / n, a.chosen / chosen) for a in total)


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
    budgets = sorted(set(budgets))
    right, spent = _right_at(group, budgets), np.array([outcome.tokens for outcome in group])
    numbers: dict[str, int] = {}
    problem = np.array([numbers.setdefault(outcome.problem_id, len(numbers)) for outcome in group])
    asked = np.bincount(problem)
    points = []
    for place, budget in enumerate(budgets):
        shares = np.bincount(problem, right[:, place]) / asked
        tokens = int(np.minimum(spent, budget).sum()) / len(group)
        interval = accuracy_interval(shares, len(group))
        points.append(CurvePoint(tokens, int(right[:, place].sum()) / len(group), interval))
    return points


def _right_at(group: Sequence[Outcome], budgets: Sequence[int]) -> NDArray[np.bool_]:
    """Return whether each search is right if it stops at each budget."""
    right = np.zeros((len(group), len(budgets)), dtype=np.bool_)
    for row, outcome in zip(right, group, strict=True):
        for tokens, correct in (*outcome.anytime, (outcome.tokens, outcome.correct)):
            row[bisect_left(budgets, tokens) :] = correct
    return right


def _spread(runs: Sequence[Sequence[float]]) -> Spread:
    means = [sum(run) / len(run) for run in runs if run]
    mean, std = mean_std(means)
    return Spread(mean if means else math.nan, std)
