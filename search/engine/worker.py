"""The part of a fleet that runs inside an actor: an engine with the ordinary driver."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mas_gym.dynamics import Dynamics
from mas_gym.graph import MAS
from mas_gym.policies.base import AsyncPolicy, Policy
from mas_gym.policies.meter import Meter, meters_of
from mas_gym.tasks.base import Problem
from search.engine.active import Made, Setup
from search.engine.run import Run
from search.engine.settings import Budget, Sampling
from search.plan import Plan, Usage
from search.protocol import Critic, Planner, bind_planner
from search.store import engine_identity

READY = "ready"
"""What an actor says first."""

_CRITIC_FACTS = ("terminal_only", "free", "scores_actions")


class Job(NamedTuple):
    """What every actor is told; see `search.run`."""

    planner: Planner
    mas: MAS
    seed: int
    concurrency: int
    training: bool
    sampling: Sampling
    budget: Budget


class Found(NamedTuple):
    """A finished search, with what the store keeps of it and what the actor's engines have cost by then."""

    problem: Problem
    plan: Plan
    made: Mapping[tuple[bytes, str], Made]
    meters: Mapping[str, Meter]


class _Outbox:
    """Stands in for the store inside an actor: keeps what is finished until it is sent off."""

    def __init__(self) -> None:
        self.found: deque[Found] = deque()
        self.spent = Usage()

    def load(self, problem: Problem) -> None:
        return None

    def save(self, problem: Problem, plan: Plan, made: Mapping[tuple[bytes, str], Made]) -> None:
        self.found.append(Found(problem, plan, made, {}))

    def spend(self, usage: Usage) -> None:
        """Dropped searches: the head has ended the run, and nobody listens."""

    def close(self) -> None:
        return None


class _Inbox(Iterator[Problem]):
    """The problems that an actor is given, with the task's own grading; ends at None."""

    def __init__(self, graders: Any) -> None:
        self._problems: queue.SimpleQueue[Problem | None] = queue.SimpleQueue()
        self._early: dict[int, Sequence[Problem | None]] = {}
        self._due, self._lock = 0, threading.Lock()
        if hasattr(graders, "grade") and hasattr(graders, "extract"):
            self.grade, self.extract = graders.grade, graders.extract

    def put(self, number: int, problems: Sequence[Problem | None]) -> None:
        """Take parcel ``number``; an actor with several threads may start its calls in another order."""
        with self._lock:
            self._early[number] = problems
            while self._due in self._early:
                for problem in self._early.pop(self._due):
                    self._problems.put(problem)
                self._due += 1

    def __next__(self) -> Problem:
        problem = self._problems.get()
        if problem is None:
            raise StopIteration
        return problem


class Worker:
    """An engine with its driver, on some machine."""

    def __init__(
        self,
        job: Job,
        graders: Any,
        make_policy: Callable[[], Policy | AsyncPolicy],
        make_critic: Callable[[], Critic] | None,
    ) -> None:
        """Load the engines."""
        self._job, self._inbox = job, _Inbox(graders)
        self._policy = make_policy()
        self._critic = make_critic() if make_critic is not None else None

    def facts(self, stored: bool) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Return what the head must know of policy and critic: for a store, their identities too."""

        def stated(role: str, engine: Any) -> dict[str, Any]:
            return engine_identity(role, engine) if stored else {"name": engine.name}

        policy, critic = stated("policy", self._policy), self._critic
        if critic is None:
            return policy, None
        more = {name: getattr(critic, name) for name in _CRITIC_FACTS if hasattr(critic, name)}
        return policy, stated("critic", critic) | more

    def give(self, number: int, problems: Sequence[Problem | None]) -> None:
        """Take more problems, in parcels counted from 0; None says that these were the last."""
        self._inbox.put(number, problems)

    def work(self) -> Iterator[Any]:
        """Say that the engine is there, then yield what is found until the problems end."""
        yield READY
        outbox = _Outbox()
        setup = setup_of(self._job, self._critic)
        outbox_as_record: Any = outbox
        with Run(setup, self._inbox, self._policy, self._job.concurrency, Budget(), outbox_as_record, None) as run:
            for _ in run:
                while outbox.found:
                    yield outbox.found.popleft()._replace(meters=meters_of(self._policy))


def setup_of(job: Job, critic: Critic | None) -> Setup:
    """Return what a run of the job's searches has in common."""
    settled = bind_planner(job.planner, critic, job.training)
    return Setup(settled, Dynamics(job.mas), critic, job.seed, job.sampling, job.budget, job.training)
