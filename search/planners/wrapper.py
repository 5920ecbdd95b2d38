"""Planners that answer the requests of another planner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Self

from mas_gym.errors import BudgetError
from search.plan import Plan
from search.protocol import Critic, PlanGenerator, Planner, Request, Steps, as_planner


@dataclass(frozen=True)
class PlannerWrapper(Planner):
    """Base class of planners that change the requests and replies of another planner.

    Attributes:
        planner: The wrapped planner; it determines critic, costs and size.
        setting: The name of the rule, which is also the name of its field and of a planner's setting.
        default: The rule for which a planner is not wrapped.
    """

    setting: ClassVar[str]
    default: ClassVar[str]
    planner: Planner

    def __post_init__(self) -> None:
        planner = as_planner(self.planner)
        own = {
            "planner": planner,
            "needs_critic": planner.needs_critic,
            "size_setting": planner.size_setting,
            "needs_costs": planner.needs_costs,
        }
        for name, value in own.items():
            object.__setattr__(self, name, value)

    def for_run(self, critic: Critic | None, training: bool) -> Self:
        """Bind the planner."""
        return replace(self, planner=self.planner.for_run(critic, training))

    def current_size(self) -> int:
        """Return the planner's size."""
        return self.planner.current_size()

    def resized(self, size: int) -> Self:
        """Return a copy with a resized planner."""
        return replace(self, planner=self.planner.resized(size))


def delegate(inner: PlanGenerator, answer: Callable[[list[Request]], Steps[list[object]]]) -> PlanGenerator:
    """Run a planner, answer its requests with a function, and return its plan.

    Args:
        inner: The planner's search.
        answer: Takes the requests of one round, yields requests to the scheduler, and returns the replies. A
            `BudgetError` that it raises is raised in the planner.
    """
    resume: Callable[[], list[Request]] = partial(next, inner)
    try:
        while True:
            try:
                requests = resume()
            except StopIteration as end:
                plan: Plan = end.value
                return plan
            try:
                resume = partial(inner.send, (yield from answer(requests)))
            except BudgetError as error:
                resume = partial(inner.throw, error)
    finally:
        inner.close()
