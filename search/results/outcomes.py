"""The results of searches, reduced to the fields that tables need; a failed search counts as wrong."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

from search.costs import TagUsage
from search.plan import Plan


class Outcome(NamedTuple):
    """A `Plan` as one flat row without candidates and tree, as a store holds it; tables read only these rows.

    Attributes:
        planner: Spec of the search method, such as ``"mcts:10,3"``.
        critic: Name of the critic, ``""`` for none.
        correct: Whether the chosen answer is right (Hit@1); None if that is not known, as in logs without outcomes.
        hit_rank: Rank, from 1, of the first right terminal candidate; None if none was right.
        candidates: Number of ranked terminal candidates.
        tokens: Generated tokens (TOK).
        agent_calls: LLM generations (AC).
        reward_calls: Forward passes of the critic (RC).
        error: Reason for the failure; None if the search did not fail.
        anytime: The anytime curve: tokens spent at each change of the answer, and whether that answer was right.
        seconds: Wall-clock seconds from start to end, including time spent on concurrent searches.
        critic_tokens: Tokens that the critic generated, such as a judge's verdicts; not included in TOK.
        grader_tokens: Tokens that a judge generated to grade the answers; not included in TOK.
        order_varied: Whether concurrent calls of a program arrived too late to be ordered by content; see
            `search.Plan`.
        usd: Cost in USD; None without prices.
        unrecorded: Messages requested beyond those of a recorded run.
        stopped: Reason for stopping early, as in `Plan.stopped`; None if the search did not stop early.
        cut: Whether a prompt was cut to fit the context window.
        reasoning_only: Messages without text, as in `Usage.reasoning_only`.
    """

    planner: str
    critic: str
    seed: int
    problem_id: str
    correct: bool | None = False
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
    tags: tuple[TagUsage, ...] = ()
    cut: bool = False
    reasoning_only: int = 0
    answer: str | None = None

    @property
    def label(self) -> str:
        """Planner and critic in one string."""
        return f"{self.planner} + {self.critic}" if self.critic else self.planner

    def hit(self, k: int) -> bool:
        """Return whether the chosen answer or one of the first ``k`` candidates was right."""
        return bool(self.correct) or (k > 1 and self.hit_rank is not None and self.hit_rank <= k)


def outcome_of(plan: Plan, planner: str, critic: str, seed: int, usd: float | None = None) -> Outcome:
    """Reduce a plan to an outcome with the names of its planner and critic, and its cost in USD."""
    ranks = [rank for rank, candidate in enumerate(plan.candidates, 1) if candidate.correct]
    usage = plan.usage
    return Outcome(
        planner=planner,
        critic=critic,
        seed=seed,
        problem_id=plan.problem_id,
        correct=plan.correct if plan.error is None else False,
        hit_rank=ranks[0] if ranks and plan.error is None else None,
        candidates=len(plan.candidates),
        tokens=usage.generated_tokens,
        agent_calls=usage.agent_calls,
        reward_calls=usage.reward_calls,
        error=plan.error,
        anytime=tuple((point.generated_tokens, bool(point.correct)) for point in plan.anytime),
        seconds=usage.seconds,
        critic_tokens=usage.critic_tokens,
        grader_tokens=usage.grader_tokens,
        order_varied=plan.order_varied,
        usd=usd,
        unrecorded=usage.unrecorded,
        stopped=plan.stopped,
        tags=usage.tags,
        cut=usage.dropped_tokens > 0,
        reasoning_only=usage.reasoning_only,
        answer=plan.answer,
    )


def outcomes_of(columns: Mapping[str, Sequence[Any]], planner: str, critic: str, seed: int) -> Iterable[Outcome]:
    """Return the outcomes of stored searches from their columns, without their trees.

    Each equals `outcome_of` the plan in the store.
    """
    graded = zip(columns["correct"], columns["error"], strict=True)
    found = {
        **columns,
        "planner": repeat(planner),
        "critic": repeat(critic),
        "seed": repeat(seed),
        "problem_id": columns["problem"],
        "correct": [None if correct is None else bool(correct) and error is None for correct, error in graded],
        "tokens": columns["generated_tokens"],
        # One document is parsed faster than many.
        "anytime": [tuple(map(tuple, curve)) for curve in json.loads(f"[{','.join(columns['curve'])}]")],
        "order_varied": repeat(False),
        "usd": repeat(None),
        "cut": [tokens > 0 for tokens in columns["dropped_tokens"]],
    }
    return map(Outcome._make, zip(*(found[name] for name in Outcome._fields), strict=False))
