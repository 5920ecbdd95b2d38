"""Searches on request, side by side over one engine and one critic, each of which can be called off."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from mas_gym.errors import PolicyError
from mas_gym.policies.as_async import as_async
from mas_gym.policies.base import AsyncPolicy, Policy, SamplingReply, SamplingRequest
from mas_gym.policies.loop import engine_loop

if TYPE_CHECKING:
    from mas_gym.graph import MAS
    from mas_gym.tasks.base import Kind
    from search import Budget, Critic, Plan, Planner, Sampling, ScoringContext

PROBLEM_ID = "question"
"""The id that `mas-gym solve` gives a question, so that both give the same answer for the same seed."""


class PoolFullError(Exception):
    """As many searches wait as may."""


class Step(NamedTuple):
    """How far a search has come: who spoke last, and what was spent."""

    agent: str
    agent_calls: int
    generated_tokens: int


@dataclass(frozen=True)
class Service:
    """What every search of a service has in common.

    Attributes:
        planner: The search algorithm.
        mas: The system.
        policy: Writes the messages.
        critic: Scores states; None for planners that need none.
        kind: How answers are read.
        budget: Limits of one search.
        concurrency: Searches at work at once.
        queue: Searches that may wait beside them.
    """

    planner: Planner
    mas: MAS
    policy: Policy | AsyncPolicy
    critic: Critic | None = None
    kind: Kind = "number"
    budget: Budget | None = None
    concurrency: int = 32
    queue: int = 256


@dataclass(eq=False)
class Ticket:
    """A search that was asked for.

    Attributes:
        step: How far it has come; None before the first message.
        changed: Called, on any thread, whenever `step` has changed.
    """

    changed: Callable[[], None]
    step: Step | None = None
    _cancelled: bool = False
    _future: Future[Plan] | None = None
    _calls: set[asyncio.Task[Any]] = field(default_factory=set)

    async def plan(self) -> Plan:
        """Wait for the plan."""
        assert self._future is not None
        return await asyncio.wrap_future(self._future)

    def cancel(self) -> None:
        """Call the search off: its open requests end, no further ones are made; safe at any time."""
        self._cancelled = True
        if self._future is not None and not self._future.cancel() and not self._future.done():
            engine_loop().call_soon_threadsafe(self._stop_calls)

    def _stop_calls(self) -> None:
        for call in tuple(self._calls):
            call.cancel()


class _WatchedPolicy:
    """The pool's policy as one search sees it: counts its messages, and stops when the search is called off."""

    def __init__(self, policy: AsyncPolicy, ticket: Ticket) -> None:
        self.name, self.max_concurrency = policy.name, policy.max_concurrency
        self._policy, self._ticket = policy, ticket

    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        ticket = self._ticket
        if ticket._cancelled:
            raise PolicyError("the search was called off")
        call = asyncio.current_task()
        assert call is not None
        ticket._calls.add(call)
        try:
            reply = await self._policy.sample_async(request)
        finally:
            ticket._calls.discard(call)
        before = ticket.step or Step("", 0, 0)
        tokens = sum(sample.tokens for sample in reply.samples)
        ticket.step = Step(request.agent, before.agent_calls + len(reply.samples), before.generated_tokens + tokens)
        ticket.changed()
        return reply


class _SharedCritic:
    """A critic that scores what the searches of several threads ask for at the same time as one batch."""

    def __init__(self, critic: Critic) -> None:
        self._critic = critic
        self._lock = threading.Lock()
        self._waiting: list[tuple[Sequence[ScoringContext], Future[Sequence[float]]]] = []
        self._busy = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="mas-gym-critic")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._critic, name)

    def score(self, contexts: Sequence[ScoringContext]) -> Sequence[float]:
        future: Future[Sequence[float]] = Future()
        with self._lock:
            self._waiting.append((contexts, future))
            start, self._busy = not self._busy, True
        if start:
            self._worker.submit(self._work)
        return future.result()

    def _work(self) -> None:
        while True:
            with self._lock:
                batch, self._waiting = self._waiting, []
                if not batch:
                    self._busy = False
                    return
            try:
                values = list(self._critic.score([context for contexts, _ in batch for context in contexts]))
            except BaseException as error:
                self._settle_alone(batch, error)
                continue
            for contexts, future in batch:
                share, values = values[: len(contexts)], values[len(contexts) :]
                future.set_result(share)

    def _settle_alone(self, batch: list[tuple[Any, Future[Sequence[float]]]], error: BaseException) -> None:
        for contexts, future in batch:
            try:
                if len(batch) == 1:
                    raise error
                future.set_result(self._critic.score(contexts))
            except BaseException as own:
                future.set_exception(own)

    def close(self) -> None:
        self._worker.shutdown()


class SearchPool:
    """Runs searches on threads of its own; their requests meet in one engine, where they fill its batches.

    Attributes:
        service: What was asked for at the start.
        waiting: Searches that have not begun.
        active: Searches at work.
    """

    def __init__(self, service: Service) -> None:
        """Start without searches."""
        self.service = service
        self._policy = as_async(service.policy)
        critic = service.critic
        self._shared = None if critic is None or critic.free else _SharedCritic(critic)
        self._critic: Any = self._shared or critic
        self._threads = ThreadPoolExecutor(service.concurrency, thread_name_prefix="mas-gym-search")
        self._lock = threading.Lock()
        self._tickets: set[Ticket] = set()
        self.waiting = self.active = 0

    def submit(self, question: str, seed: int, sampling: Sampling, changed: Callable[[], None]) -> Ticket:
        """Queue a search.

        Args:
            question: The question.
            seed: With the question it determines the answer, as far as the engine allows.
            sampling: How the agents sample.
            changed: Called on another thread after each message.

        Raises:
            PoolFullError: The queue is full.
        """
        ticket = Ticket(changed)
        with self._lock:
            if self.waiting + self.active >= self.service.concurrency + self.service.queue:
                raise PoolFullError
            self.waiting += 1
        future = self._threads.submit(self._search, question, seed, sampling, ticket)
        ticket._future = future
        future.add_done_callback(self._forget)
        return ticket

    def _forget(self, future: Future[Plan]) -> None:
        if future.cancelled():
            with self._lock:
                self.waiting -= 1

    def _search(self, question: str, seed: int, sampling: Sampling, ticket: Ticket) -> Plan:
        import search
        from mas_gym.tasks import Problem, ProblemTask

        with self._lock:
            self.waiting, self.active = self.waiting - 1, self.active + 1
            self._tickets.add(ticket)
        try:
            service = self.service
            problems = ProblemTask.of([Problem(PROBLEM_ID, question, "", service.kind)])
            policy = _WatchedPolicy(self._policy, ticket)
            with search.run(
                service.planner,
                problems,
                mas=service.mas,
                policy=policy,
                critic=self._critic,
                seed=seed,
                concurrency=1,
                sampling=sampling,
                budget=service.budget,
            ) as run:
                return next(run)
        finally:
            with self._lock:
                self.active -= 1
                self._tickets.discard(ticket)

    def close(self) -> None:
        """Call every search off and wait for the threads."""
        with self._lock:
            tickets = list(self._tickets)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for ticket in tickets:
            ticket.cancel()
        self._threads.shutdown()
        if self._shared is not None:
            self._shared.close()
