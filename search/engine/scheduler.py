"""`Scheduler`: many concurrent searches with one policy and one critic.

The scheduler admits searches, shares batches among them, counts their usage against the run's budget, and cancels them.
It runs in its caller's event loop, such as that of `search.run` or of the service. The result of a search depends only
on its problem and its seed, never on concurrent searches. `Searcher` is what a run needs of it: it may also be a fleet.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

from mas_gym.critics import Critic, Scores, ScoringContext, score_batch, scores_of
from mas_gym.errors import EngineUnavailableError, PolicyError, SearchError
from mas_gym.internal.event_loop import Threads, on_engine_loop, outside_loop, settle, without_requests
from mas_gym.policies.base import SamplingReply, SamplingRequest
from mas_gym.tasks.base import Problem
from search.costs import Allowance, Budget, Cost, Usage
from search.engine.one_search import ActiveSearch
from search.grading import ProblemGrader
from search.models.base import MakeModel, SampleOrigin, SearchModel
from search.plan import Plan
from search.setup import Setup


class DroppedError(SearchError):
    """A search was dropped before its end."""


class Searched(NamedTuple):
    """A finished search: its plan, the origin of each message, and the exception that made it fail."""

    problem: Problem
    plan: Plan
    origins: dict[tuple[bytes, str], SampleOrigin]
    failure: BaseException | None


class Searcher(ABC):
    """Searches problems on the running event loop, within the limits of a run.

    Attributes:
        concurrency: Maximum number of open searches.
        stopped: Reason for accepting no more problems; None while problems are accepted.
        closed: Whether no more problems are accepted.
        earlier: The cost of the run in earlier processes, which counts towards its budget.
    """

    def __init__(self, concurrency: int, run_budget: Budget, budget: Budget) -> None:
        """Start without searches; the budgets are those of the run and of each search."""
        self.concurrency = concurrency
        self.stopped: str | None = None
        self.closed = False
        self.earlier = Usage()
        self._started = perf_counter()
        self.limit(run_budget, budget)

    def limit(self, run_budget: Budget, budget: Budget) -> None:
        """Set the limits of the run and of each search, before the first search."""
        self._run_budget, self._allowance = run_budget, Allowance(run_budget, budget)

    @property
    @abstractmethod
    def usage(self) -> Usage:
        """The cost of all searches so far, including failed and dropped ones."""

    @property
    @abstractmethod
    def calls(self) -> int:
        """Agent calls made so far, including those without a reply."""

    @property
    @abstractmethod
    def active(self) -> int:
        """Number of searches in progress."""

    @property
    @abstractmethod
    def spent(self) -> Usage:
        """The cost that counts towards the run's budget; open searches may be covered by their grants instead."""

    @abstractmethod
    def rest(self) -> Cost:
        """Return the budget that is neither spent nor granted to open searches."""

    @abstractmethod
    async def search(self, problem: Problem) -> Searched:
        """Search a problem. Raises `DroppedError` if the search was dropped, and the errors of engines."""

    @abstractmethod
    async def close(self) -> None:
        """Drop open searches and release the engines; safe to call twice."""

    def stop(self, reason: str) -> None:
        """Accept no more problems, drop the open searches, and record the reason."""
        self.stopped, self.closed = self.stopped or reason, True

    def learn_cost(self, usage: Usage) -> None:
        """Update the expected cost of a search from a finished one."""
        self._allowance.learn_cost(self._allowance.cost(usage))

    def shortage(self, starting: int) -> str | None:
        """Return why the budget covers no further search beside the open and ``starting`` ones; None if it does."""
        alone = not self.active and not starting
        if self._allowance.limited and not self._allowance.pays(self.rest(), starting + 1, alone):
            return self._allowance.reason(self.spent)
        return None

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the run's time limit; None without a limit."""
        limit = self._run_budget.seconds
        return None if limit is None else limit - self.earlier.seconds - (perf_counter() - self._started)

    def out_of_time(self) -> None:
        """Stop because of the run's time limit."""
        self.stop(f"budget of {self._run_budget.seconds:g} seconds spent")


Observed = AbstractContextManager[Callable[..., None]]


class Observer:
    """An observer that records nothing; base class of the others."""

    def __init__(self, policy: str = "") -> None:
        """Observe a scheduler with a policy of this name."""

    def search(self, setup: Setup, problem: Problem) -> Observed:
        """Observe a search; the result is its plan and the exception that made it fail."""
        return nullcontext(lambda *result: None)

    def call(self, request: SamplingRequest) -> Observed:
        """Observe a request to the policy; the result is the reply."""
        return nullcontext(lambda *result: None)

    def scores(self, critic: Critic, contexts: Sequence[ScoringContext]) -> Observed:
        """Observe the scoring of states; the result is the scores."""
        return nullcontext(lambda *result: None)


_observer: Callable[[str], Observer] = Observer
"""Returns the observer of a new scheduler with a policy of this name."""


@contextmanager
def observed(make: Callable[[str], Observer]) -> Iterator[None]:
    """Use another observer in all schedulers that start inside this context in this process."""
    global _observer
    before, _observer = _observer, make
    try:
        yield
    finally:
        _observer = before


class _Entry(NamedTuple):
    """The task of an open search, and the part of the run's budget reserved for it."""

    task: asyncio.Task[object]
    granted: Cost


Unscored = dict[asyncio.Future[Scores], Sequence[ScoringContext]]
"""States that wait for the critic, by the future that takes their values."""


class Scheduler(Searcher):
    """Searches problems on the running event loop; not thread-safe."""

    def __init__(self, setup: Setup) -> None:
        """Start without searches.

        Args:
            setup: The settings shared by searches; `search` can override parts of them. A task in ``problems`` grades
                the answers. A search that exceeds its expected cost may be dropped to keep within ``run_budget``.
        """
        super().__init__(setup.concurrency, setup.run_budget, setup.budget)
        self._calls = self._rows = 0
        self._setup, self._policy = setup, setup.policy
        self._opened = ExitStack()
        self._make_model: MakeModel = partial(SearchModel, sample=self._sample, tags=self._policy.tags)
        if setup.source is not None:
            self._make_model = self._opened.enter_context(setup.source.opened(self._policy, self._sample))
        self._observer = _observer(self._policy.name)
        self._to_score: Unscored = {}
        self._scoring: asyncio.Task[None] | None = None
        self._critic_thread = Threads("mas-gym-critic")
        self._graders: dict[int, Threads] = {}
        self._open: dict[ActiveSearch, _Entry] = {}
        self._held: dict[ActiveSearch, tuple[int, asyncio.Future[None]]] = {}
        self._ends: dict[ActiveSearch, BaseException] = {}
        self._slots, self._call_slots = (
            asyncio.Semaphore(setup.concurrency),
            asyncio.Semaphore(max(1, self._policy.max_concurrency)),
        )
        self._usage = Usage()

    @property
    def usage(self) -> Usage:
        """The cost of all searches so far, including failed and dropped ones."""
        return replace(self._usage, seconds=perf_counter() - self._started)

    @property
    def calls(self) -> int:
        """Agent calls made so far, including those without a reply."""
        return self._calls

    @property
    def active(self) -> int:
        """Number of searches in progress."""
        return len(self._open)

    @property
    def spent(self) -> Usage:
        """The cost of the run, including calls in flight, which are not yet recorded in any search."""
        return self.earlier + replace(self.usage, agent_calls=self._calls)

    async def search(
        self, problem: Problem, on_message: Callable[[str, Usage], None] = lambda agent, usage: None, **changed: Any
    ) -> Searched:
        """Search a problem as soon as fewer than ``concurrency`` searches are open.

        Args:
            problem: The problem.
            on_message: Called with the agent and the usage so far after each message.
            **changed: Fields of the setup to replace for this search, such as ``seed``. A planner must be adapted to
                the setup's critic (`search.Planner.for_run`).

        Raises:
            SearchError: The scheduler is closed, or the search was dropped.
            EngineUnavailableError: No request can succeed. Other exceptions of a local engine are also propagated.
        """
        async with self._slots:
            setup = replace(self._setup, **changed) if changed else self._setup
            return await self._admitted(setup, problem, on_message)

    async def _admitted(self, setup: Setup, problem: Problem, on_message: Callable[[str, Usage], None]) -> Searched:
        if self.closed:
            raise SearchError(f"expected an open scheduler, got one that has ended: {self.stopped or 'closed'}")
        search = ActiveSearch(setup, problem, self._make_model, self, on_message)
        task = asyncio.current_task()
        assert task is not None
        self._open[search] = _Entry(task, self._allowance.grant)
        try:
            with self._observer.search(setup, problem) as observed:
                plan = await self._planned(search)
                observed(plan, search.failure)
        finally:
            del self._open[search]
            self._ends.pop(search, None)
            self._release_held()
        if search.failure is None:
            self._allowance.learn_cost(self._cost(search))
        return Searched(problem, plan, search.model.origins, search.failure)

    async def _planned(self, search: ActiveSearch) -> Plan:
        """Return a search's plan. Raises the exception that ended the search from outside, if there is one."""
        try:
            plan = await search.run()
        except asyncio.CancelledError:
            # One request to cancel is that of `_end`; with another, the caller has left and does not get the error.
            if search in self._ends and self._open[search].task.cancelling() == 1:
                raise self._ends[search] from None
            raise
        if search in self._ends:
            raise self._ends[search]
        return plan

    # ---- ends

    def _end(self, search: ActiveSearch, error: BaseException) -> None:
        entry = self._open.get(search)
        if entry is not None and search not in self._ends:
            self._ends[search] = error
            entry.task.cancel()

    def abort(self, error: BaseException) -> None:
        """End every open search with the error of an engine."""
        for search in [*self._open]:
            self._end(search, error)

    def stop(self, reason: str) -> None:
        """Admit no more searches, drop the open ones, and record the reason."""
        super().stop(reason)
        self._drop(reason)

    def _drop(self, reason: str) -> list[asyncio.Task[object]]:
        """End every open search, and return their tasks."""
        tasks = [entry.task for entry in self._open.values()]
        for search in [*self._open]:
            self._end(search, DroppedError(f"the search was dropped: {reason}"))
        return tasks

    async def close(self) -> None:
        """Drop every open search and release the engines; safe to call twice."""
        self.closed = True
        if tasks := self._drop(self.stopped or "the scheduler was closed"):
            await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)
        # A closed run may be kept, and a task keeps its event loop and the frames of its errors.
        scoring, self._scoring = self._scoring, None
        if scoring is not None:
            scoring.cancel()
            await asyncio.gather(scoring, return_exceptions=True)
        await without_requests()
        self._critic_thread.close()
        self._opened.close()
        for threads in self._graders.values():
            threads.close()

    # ---- services of searches

    def spend(self, usage: Usage) -> None:
        """Add to the cost of all searches."""
        self._usage += usage
        if self._held:
            self._release_held()

    async def _sample(self, request: SamplingRequest) -> SamplingReply:
        with self._observer.call(request) as observed:
            self._rows += len(request.seeds)
            try:
                reply = await self._reply(request)
            except Exception as error:
                unavailable = isinstance(error, EngineUnavailableError)
                if unavailable or (self._policy.local_batch is not None and not isinstance(error, PolicyError)):
                    self.abort(error)
                raise
            finally:
                self._rows -= len(request.seeds)
                self._score_waiting()
            if isinstance(reply, SamplingReply):
                self._run_budget.check_counted(reply.samples)
            observed(reply)
        return reply

    async def _reply(self, request: SamplingRequest) -> SamplingReply:
        if self._policy.local_batch is not None:
            return await self._policy.sample_async(request)
        try:
            async with self._call_slots:
                return await on_engine_loop(self._policy.sample_async(request))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise PolicyError(f"{self._policy.name}: the request was cancelled") from None

    async def score(self, search: ActiveSearch, contexts: Sequence[ScoringContext]) -> Scores:
        """Return the critic's values. Raises `CriticError`."""
        critic = search.setup.critic
        assert critic is not None
        with self._observer.scores(critic, contexts) as observed:
            try:
                scores = scores_of(critic, contexts) if critic.free else await self._scored(contexts)
            except EngineUnavailableError as error:
                self.abort(error)
                raise
            observed(scores)
        return scores

    async def _scored(self, contexts: Sequence[ScoringContext]) -> Scores:
        """Return the critic's values of one search's states, scored in a batch with those of other searches."""
        future: asyncio.Future[Scores] = asyncio.get_running_loop().create_future()
        self._to_score[future] = contexts
        self._score_waiting()
        try:
            return await future
        finally:
            self._to_score.pop(future, None)

    def _score_waiting(self) -> None:
        """Start scoring the states that wait for the critic."""
        if self._to_score and not self.closed and (self._scoring is None or self._scoring.done()):
            self._scoring = asyncio.get_running_loop().create_task(self._score_batches())

    async def _score_batches(self) -> None:
        """Score states on the event loop's thread, or on another one if the critic is concurrent.

        States wait until no search can go on without an engine, and until the critic's batch is full or the batch of a
        local policy is not. No value depends on when its state is scored.
        """
        critic, policy_batch = self._setup.critic, self._policy.local_batch
        assert critic is not None
        while True:
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            hurry = critic.concurrent or policy_batch is None or self._rows < policy_batch
            if not self._to_score or not (hurry or sum(map(len, self._to_score.values())) >= critic.max_batch):
                return
            batch = self._next_batch(critic.max_batch)
            score = partial(score_batch, critic, batch)
            try:
                outcomes = await self._critic_thread.run(score) if critic.concurrent else outside_loop(score)
            except Exception as error:
                outcomes = [(future, error) for future in batch]
            for future, outcome in outcomes:
                settle(future, outcome)

    def _next_batch(self, most: int) -> Unscored:
        """Take the states of the first searches that wait, ``most`` states unless one search has more."""
        batch: Unscored = {}
        size = 0
        for future, contexts in [*self._to_score.items()]:
            size += len(contexts)
            if batch and size > most:
                break
            batch[future] = self._to_score.pop(future)
        return batch

    async def grade(self, grader: ProblemGrader, keys: Iterable[str]) -> None:
        """Grade messages on daemon threads: most graders use one, and a few can process several messages at once."""
        count = max(1, grader.threads)
        threads = self._graders.setdefault(count, Threads("mas-gym-grading", count))
        for key in keys:
            await threads.run(partial(grader.grade, key))

    # ---- the run's budget

    def rest(self, but: ActiveSearch | None = None) -> Cost:
        """Return the budget that is neither spent nor granted to open searches other than ``but``."""
        others = ((entry.granted, self._cost(search)) for search, entry in self._open.items() if search is not but)
        return self._allowance.rest(self.spent, others)

    def _cost(self, search: ActiveSearch) -> Cost:
        """Return a search's cost, including the calls that it has requested."""
        return self._allowance.cost(search.spent)._replace(calls=search.asked)

    async def afford(self, search: ActiveSearch, wanted: int) -> None:
        """Return once the run's budget covers ``wanted`` more calls of a search beside other searches' grants."""
        if not self._allowance.limited or self.rest(search).covers(wanted):
            self._count(search, wanted)
            return
        self._held[search] = wanted, asyncio.get_running_loop().create_future()
        self._release_held()
        try:
            await self._held[search][1]
        finally:
            del self._held[search]

    def _count(self, search: ActiveSearch, calls: int) -> None:
        self._calls += calls
        search.asked += calls

    def _release_held(self) -> None:
        """Continue held searches that the budget now covers.

        If all open searches are held, the one with the fewest calls is dropped, which frees its grant.
        """
        held = {s: wanted for s, (wanted, future) in self._held.items() if not future.done() and s not in self._ends}
        for search, wanted in held.items():
            if self.rest(search).covers(wanted):
                self._count(search, wanted)
                self._held[search][1].set_result(None)
        if not held or any(search not in self._held or self._held[search][1].done() for search in self._open):
            return
        least = min(held, key=lambda search: search.asked)
        self._allowance.learn_cost(self._cost(least)._replace(calls=least.asked + held[least]))
        self.stopped = self.stopped or self._allowance.reason(self.spent)
        self._end(least, DroppedError(f"the search was dropped: {self.stopped}"))


_CLOSE_SECONDS = 5.0
"""Maximum wait for dropped searches to end."""

_TURNS = 5
"""Turns of the event loop between a reply and the requests that follow from it."""
