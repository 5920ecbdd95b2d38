"""Reduction of searches to table rows, one per planner and critic, with intervals and differences.

A failed search counts as a wrong answer, so that failing on hard problems never improves a result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from math import nan
from typing import NamedTuple

from mas_gym.errors import ConfigError
from mas_gym.internal.json_types import JSONObject
from search.costs import Usage
from search.results.anytime_curve import CurvePoint, anytime_curve
from search.results.intervals import Difference, Interval, accuracy_interval, mean_std, paired_difference
from search.results.outcomes import Outcome

HIT_RANKS = (1, 3, 5)
SCHEMA = 1


class ArmShare(NamedTuple):
    """The contribution of an arm to the searches of a row.

    Attributes:
        agent_calls: AC per problem.
        tokens: TOK per problem.
        chosen: The arm's share of the messages in chosen answers, in ``[0, 1]``.
    """

    arm: str
    agent_calls: float
    tokens: float
    chosen: float


class Spread(NamedTuple):
    """A mean over seeds and the sample standard deviation, which is None with one seed."""

    mean: float
    std: float | None


@dataclass(frozen=True)
class ResultRow:
    """One line of the table: a planner with a critic.

    Attributes:
        planner: Spec of the search method.
        critic: Name of the critic, ``""`` for none.
        searches: Searches that ended.
        hits: Hit@k in ``[0, 1]`` by ``k``, mean and standard deviation over seeds; only Hit@1 for methods with one
            candidate.
        interval: 95% interval of Hit@1.
        tokens: TOK per problem; NaN if messages were generated but no tokens were counted, as in logs without token
            counts.
        agent_calls: AC per problem.
        reward_calls: RC per problem.
        critic_tokens: Per problem, as in `Outcome`.
        grader_tokens: Per problem, as in `Outcome`.
        seconds: Wall-clock seconds per search; depends on the machine and its load.
        failures: Number of failed searches by reason, most frequent first.
        shares: Share of correct searches by problem id, for problems with a known outcome.
        curve: The results if every search had stopped at the same budget, for increasing budgets; empty for methods
            with an answer that never changes.
        uneven: Whether the seeds finished different problems, so that Hit@1 averages different problem sets.
        usd: USD per problem; None without prices.
        bounded: Share of searches that requested more messages than a recorded run contains.
        cut: Problems with a prompt that was cut to fit the context window.
        unknown: Problems without a known outcome, as in logs without reference answers; they do not count in Hit@k.
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
    curve: tuple[CurvePoint, ...] = ()
    uneven: bool = False
    usd: Spread | None = None
    bounded: float = 0.0
    arms: tuple[ArmShare, ...] = ()
    cut: frozenset[str] = frozenset()
    reasoning_only: int = 0
    unknown: frozenset[str] = frozenset()

    @cached_property
    def problem_set(self) -> str:
        """Short digest of the row's problems; rows with different digests are comparable only on common problems."""
        return blake2b(ascii(sorted({*self.shares, *self.unknown})).encode(), digest_size=4).hexdigest()

    @property
    def label(self) -> str:
        """Planner and critic in one string."""
        return f"{self.planner} + {self.critic}" if self.critic else self.planner

    @property
    def problems(self) -> int:
        """Number of problems with at least one search."""
        return len(self.shares) + len(self.unknown)

    @property
    def drawable(self) -> bool:
        """Whether accuracy and tokens are known, so that plots can show the row."""
        return self.tokens.mean > 0 and bool(self.shares)

    def cost(self, name: str) -> Spread:
        """Return a cost by attribute name, such as ``"tokens"``."""
        found: Spread = vars(self)[name]
        return found

    def to_dict(self) -> JSONObject:
        """Return a flat JSON-serializable form, without the per-problem shares."""
        flat: JSONObject = {"planner": self.planner, "critic": self.critic, "seeds": list(self.seeds)}
        flat |= {"problems": self.problems, "problem_set": self.problem_set, "uneven_seeds": self.uneven}
        flat["searches"] = self.searches
        for k in HIT_RANKS:
            flat[f"hit@{k}"], flat[f"hit@{k}_std"] = self.hits.get(k, (None, None))
        flat |= {"hit@1_low": self.interval.low, "hit@1_high": self.interval.high}
        for name in ("tokens", "agent_calls", "reward_calls", "critic_tokens", "grader_tokens", "seconds"):
            flat[name], flat[f"{name}_std"] = self.cost(name)
            if name == "tokens" and self.usd is not None:
                flat["usd"], flat["usd_std"] = self.usd
        flat |= {"bounded": self.bounded, "cut": len(self.cut), "reasoning_only": self.reasoning_only}
        flat |= {"unknown": len(self.unknown), "arms": [share._asdict() for share in self.arms]}
        return flat | {"failed": sum(self.failures.values()), "failures": dict(self.failures)}


def summarize(outcomes: Iterable[Outcome]) -> list[ResultRow]:
    """Group outcomes by planner and critic, in order of appearance, and average them.

    TOK, USD, AC and RC are averaged over the searches that did not fail.
    """
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.planner, outcome.critic), []).append(outcome)
    return [_row(planner, critic, group) for (planner, critic), group in groups.items()]


def hit_differences(rows: Sequence[ResultRow], baseline: str = "") -> list[tuple[ResultRow, ResultRow, Difference]]:
    """Compare the Hit@1 of each row with the baseline's, on their common problems.

    Args:
        rows: From `summarize`.
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
    """Return the row with a label, or the only row of a planner; the first row if ``name`` is empty.

    Raises `ConfigError` if no row has that name, or several do.
    """
    if not name:
        return rows[0]
    found = [row for row in rows if row.label == name] or [row for row in rows if row.planner == name]
    if len(found) != 1:
        labels = ", ".join(repr(row.label) for row in rows)
        raise ConfigError(f"expected the label of one row ({labels}), got {name!r}")
    return found[0]


def _row(planner: str, critic: str, group: list[Outcome]) -> ResultRow:
    by_seed: dict[int, list[Outcome]] = {}
    for outcome in group:
        by_seed.setdefault(outcome.seed, []).append(outcome)
    runs = [by_seed[seed] for seed in sorted(by_seed)]
    ended = [[o for o in run if o.error is None] for run in runs]
    graded = [known for run in runs if (known := [o for o in run if o.correct is not None])]
    grades: dict[str, list[bool]] = {}
    for outcome in chain(*by_seed.values()):
        if outcome.correct is not None:
            grades.setdefault(outcome.problem_id, []).append(outcome.correct)
    shares = {key: sum(right) / len(right) for key, right in grades.items()}
    problems = [{o.problem_id for o in run} for run in runs]
    counted = any(o.tokens for run in ended for o in run) or not any(o.agent_calls for run in ended for o in run)

    def mean(cost: Callable[[Outcome], float]) -> Spread:
        return _spread([sum(map(cost, run)) / len(run) for run in ended if run])

    return ResultRow(
        planner=planner,
        critic=critic,
        seeds=tuple(sorted(by_seed)),
        searches=len(group),
        hits={
            k: _spread([sum(o.hit(k) for o in run) / len(run) for run in graded])
            for k in (HIT_RANKS if max(o.candidates for o in group) > 1 else HIT_RANKS[:1])
        },
        interval=accuracy_interval(list(shares.values()), sum(map(len, graded))) if shares else Interval(nan, nan),
        tokens=mean(lambda o: o.tokens) if counted else _spread([]),
        agent_calls=mean(lambda o: o.agent_calls),
        reward_calls=mean(lambda o: o.reward_calls),
        critic_tokens=mean(lambda o: o.critic_tokens),
        grader_tokens=mean(lambda o: o.grader_tokens),
        seconds=mean(lambda o: o.seconds),
        failures=dict(Counter(o.error for o in chain(*runs) if o.error is not None).most_common()),
        shares=shares,
        curve=tuple(anytime_curve(group)),
        uneven=any(some != problems[0] for some in problems),
        usd=mean(lambda o: o.usd or 0.0) if all(o.usd is not None for o in group) else None,
        bounded=sum(o.unrecorded > 0 for o in group) / len(group),
        arms=_arm_shares(list(chain(*ended))),
        cut=frozenset(o.problem_id for o in group if o.cut),
        reasoning_only=sum(o.reasoning_only for o in group),
        unknown=frozenset().union(*problems) - shares.keys(),
    )


def _arm_shares(outcomes: Sequence[Outcome]) -> tuple[ArmShare, ...]:
    total = sum((Usage(tags=outcome.tags) for outcome in outcomes if outcome.tags), Usage()).tags
    chosen, n = max(1, sum(arm.chosen for arm in total)), len(outcomes)
    return tuple(ArmShare(a.tag, a.calls / n, a.generated_tokens / n, a.chosen / chosen) for a in total)


def _spread(means: Sequence[float]) -> Spread:
    return Spread(*mean_std(means))
