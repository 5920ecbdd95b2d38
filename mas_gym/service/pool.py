"""The searches of a service: one scheduler, a bounded queue, one seed and sampling per request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mas_gym.tasks import Problem

if TYPE_CHECKING:
    from mas_gym.graph import MAS
    from mas_gym.policies.base import AsyncPolicy, Policy
    from mas_gym.programs import Program
    from mas_gym.tasks.base import Kind
    from search import Budget, Critic, Planner, Sampling
    from search.engine.scheduler import SearchFuture

PROBLEM_ID = "question"
"""The problem id that `mas-gym solve` uses too, so that both give the same answer for the same seed."""


class PoolFullError(Exception):
    """The queue is full."""


@dataclass(frozen=True)
class Service:
    """The setup shared by all searches of a service.

    Attributes:
        planner: The search algorithm.
        mas: The system.
        policy: Writes the messages.
        critic: Scores states; None for planners that need none.
        kind: Kind of answer.
        budget: Limits of one search.
        concurrency: Maximum number of open searches.
        queue: Maximum number of waiting searches.
        program: The agent program behind ``mas``; None for a MAS.
    """

    planner: Planner
    mas: MAS
    policy: Policy | AsyncPolicy
    critic: Critic | None = None
    kind: Kind = "number"
    budget: Budget | None = None
    concurrency: int = 32
    queue: int = 256
    program: Program | None = None


class SearchPool:
    """A running scheduler with a bounded queue; not thread-safe, used only by the server's event loop."""

    def __init__(self, service: Service) -> None:
        """Start without searches."""
        from mas_gym.tasks.graders import Ungraded
        from mas_gym.tasks.sequences import ProblemTask
        from search.engine.journal import Journal
        from search.engine.scheduler import Scheduler
        from search.setup import make_setup

        self.service = service
        mas = service.mas if service.program is None else None
        setup = make_setup(service.planner, mas, service.critic, program=service.program, budget=service.budget)
        self._journal = Journal(setup, policy=service.policy.name, concurrency=service.concurrency)
        # Clients send no reference answers.
        task = ProblemTask.of([], grader=Ungraded())
        self._scheduler = Scheduler(setup, service.policy, concurrency=service.concurrency, task=task).start()

    @property
    def active(self) -> int:
        """Searches in progress."""
        return self._scheduler.active

    @property
    def waiting(self) -> int:
        """Searches that have not started."""
        return self._scheduler.waiting

    def submit(self, question: str, seed: int, sampling: Sampling, changed: Callable[[], None]) -> SearchFuture:
        """Queue a search.

        Args:
            question: The question.
            seed: Determines the answer together with the question, as far as the engine allows.
            sampling: How the agents sample.
            changed: Called on another thread after each message.

        Raises:
            PoolFullError: The queue is full.
        """
        if self.waiting + self.active >= self.service.concurrency + self.service.queue:
            raise PoolFullError
        problem = Problem(PROBLEM_ID, question, "", self.service.kind)
        future = self._scheduler.submit(problem, seed=seed, sampling=sampling, on_progress=lambda step: changed())
        future.add_done_callback(self._ended)  # type: ignore[arg-type]
        return future

    def _ended(self, future: SearchFuture) -> None:
        """Log a search on the scheduler's thread."""
        if not future.cancelled() and future.exception() is None:
            self._journal.ended(future.problem, future.result(), {})

    def close(self) -> None:
        """Cancel every search and wait for the scheduler's thread."""
        self._scheduler.close()
        self._journal.close(self._scheduler.usage, self._scheduler.calls, self._scheduler.stopped)
