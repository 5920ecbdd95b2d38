"""The results of searches, reduced to the fields that tables need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from search.plan import Plan
from search.usage import ArmUsage, Usage


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one search, reduced to what a table needs.

    Attributes:
        planner: Spec of the search method, such as ``"mcts:10,3"``.
        critic: Name of the critic, ``""`` for none.
        seed: Run seed.
        problem_id: The problem.
        correct: Whether the chosen answer is right (Hit@1).
        hit_rank: Rank, from 1, of the first right terminal candidate; None if none was right.
        candidates: Number of ranked terminal candidates.
        tokens: Generated tokens (TOK).
        agent_calls: LLM generations (AC).
        reward_calls: Forward passes of the critic (RC).
        critic_tokens: Tokens that the critic generated, such as a judge's verdicts; not included in TOK.
        grader_tokens: Tokens that a judge generated to grade the answers; not included in TOK.
        error: Reason for the failure; None if the search did not fail.
        anytime: The anytime curve: tokens spent at each change of the answer, and whether that answer was right.
        seconds: Wall-clock seconds from start to end, including time spent on concurrent searches.
        order_varied: Whether concurrent calls of a program arrived too late to be ordered by content; see
            `search.Plan`.
        usd: Cost in USD; None without prices.
        unrecorded: Messages requested beyond those of a recorded run.
        stopped: Reason for stopping early, as in `Plan.stopped`; None if the search did not stop early.
        arms: The contribution of each arm, as in `Usage.arms`.
        cut: Whether a prompt was cut to fit the context window.
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
    cut: bool = False

    def hit(self, k: int) -> bool:
        """Return whether the chosen answer or one of the first ``k`` candidates was right."""
        return self.correct or (k > 1 and self.hit_rank is not None and self.hit_rank <= k)


def outcome_of(plan: Plan, planner: str, critic: str, seed: int) -> Outcome:
    """Reduce a plan to an outcome with the names of its planner and critic."""
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
        cut=plan.usage.dropped_tokens > 0,
    )


class RunSums(NamedTuple):
    """The searches of one seed, reduced to grades and sums.

    Attributes:
        seed: The seed.
        right: The problem of each search, and whether its chosen answer is right.
        failures: Number of failed searches by reason.
        usage: The cost of the searches that did not fail.
    """

    seed: int
    right: Sequence[tuple[str, bool]]
    failures: Mapping[str, int]
    usage: Usage


def sums_of(seed: int, outcomes: Sequence[Outcome]) -> RunSums:
    """Return the sums of the outcomes of one seed."""
    ended = [outcome for outcome in outcomes if outcome.error is None]
    return RunSums(
        seed,
        [(outcome.problem_id, outcome.correct) for outcome in outcomes],
        Counter(outcome.error for outcome in outcomes if outcome.error is not None),
        Usage(
            agent_calls=sum(outcome.agent_calls for outcome in ended),
            generated_tokens=sum(outcome.tokens for outcome in ended),
            reward_calls=sum(outcome.reward_calls for outcome in ended),
            critic_tokens=sum(outcome.critic_tokens for outcome in ended),
            grader_tokens=sum(outcome.grader_tokens for outcome in ended),
            seconds=sum(outcome.seconds for outcome in ended),
        ),
    )
