"""A search as an outcome of a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from search.plan import Plan
from search.results.outcomes import Outcome

if TYPE_CHECKING:
    pass


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
    )
