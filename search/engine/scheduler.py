"""The scheduler: many concurrent searches with one policy and one critic.

The scheduler is responsible for admission, batching, budgets and cancellation. Policy requests of all searches are
submitted immediately. States to score are collected while the engine is busy and are sent to the critic as a batch, at
the latest when the engine has free capacity. The result of a search depends only on its problem and its seed, never on
concurrent searches. A search passes through these stages::

    submit -> waiting -> [at most `concurrency` active searches] -> ended -> SearchFuture
                               calls |  ^ outcomes
                                     v  |
              policy requests, critic batches, grading threads, agent program

There are two ways to run the loop. A `search.engine.run.Run` calls `Scheduler.turn` whenever its caller requests the
next plan. The service and the Ray actors call `Scheduler.start`, which runs the loop on one background thread. In both
cases, `submit` and `SearchFuture.cancel` are thread-safe.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple

from mas_gym.envs.critic_base import Scores, scores_of
from mas_gym.errors import ConfigError, EngineUnavailableError, SearchError
from mas_gym.policies.base import AsyncPolicy, Policy, as_policy
from mas_gym.tasks.base import Problem, as_problems
from search.budget import Allowance, Budget, Cost
from search.engine.one_search import (
    Account,
    ActiveSearch,
    Call,
    CriticCall,
    GradingCall,
    PolicyCall,
    ProgramStep,
    agent_calls,
)
from search.engine.otel_spans import Spans
from search.engine.queues import BATCH_DONE, CriticBatches, GradingThreads, Mail, PolicyRequests, policy_requests
from search.grading import ProblemGrader
from search.plan import Plan
from search.protocol import Planner
from search.sampling import SampleRecord, Sampling
from search.setup import Setup
from search.usage import Usage

_CANCELLED, _WAKE = "cancelled", "wake"


class SearchProgress(NamedTuple):
    """The progress of a search: the agent of its latest message and its cost so far."""

    agent: str
    agent_calls: int
    generated_tokens: int


class SearchFuture(Future[Plan]):
    """The plan of a search, once it has ended; await it with `asyncio.wrap_future`.

    A failed search returns a plan with an ``error``; the future raises only if the engine is unavailable, the scheduler
    was closed, or the search was cancelled.

    Attributes:
        problem: The problem.
        step: The latest progress; None before the first message.
        samples: The origin of each message, once the search has ended; see `ActiveSearch.samples`.
        failure: The exception that made the search fail.
    """

    def __init__(
        self,
        problem: Problem,
        on_cancel: Callable[[], object] | None = None,
        on_progress: Callable[[SearchProgress], object] | None = None,
    ) -> None:
        """Created by an engine's ``submit``."""
        super().__init__()
        self.problem = problem
        self.step: SearchProgress | None = None
        self.samples: dict[tuple[bytes, str], SampleRecord] = {}
        self.failure: BaseException | None = None
        self._on_cancel, self._on_progress = on_cancel, on_progress

    def cancel(self) -> bool:
        """Drop the search with its open requests; safe at any time. Returns False if it has ended."""
        if not super().cancel():
            return False
        if self._on_cancel is not None:
            self._on_cancel()
        return True

    def _advance(self, agent: str, usage: Usage) -> None:
        self.step = SearchProgress(agent, usage.agent_calls, usage.generated_tokens)
        if self._on_progress is not None:
            self._on_progress(self.step)


@dataclass(eq=False, slots=True)
class _Entry:
    """A search with its number, its future and the keys of its open requests.

    Attributes:
        granted: The part of the run's budget reserved for the search.
        asked: The agent calls made so far, including those without a reply.
        held: Calls that the remaining budget of the run does not cover.
    """

    number: int
    search: ActiveSearch
    future: SearchFuture
    keys: set[int] = field(default_factory=set)
    granted: Cost = field(default_factory=Cost)
    asked: int = 0
    held: list[Call] | None = None


class Scheduler:
    """Runs submitted searches; a context manager.

    Attributes:
        stopped: Reason for admitting no more searches; None while they are admitted.
        calls: Agent calls made so far, including those without a reply.
        earlier: The cost of the run in earlier processes, which counts towards its budget.
    """

    def __init__(
        self,
        setup: Setup,
        policy: Policy | AsyncPolicy,
        *,
        concurrency: int = 64,
        task: Iterable[Problem] | None = None,
        run_budget: Budget | None = None,
    ) -> None:
        """Start without searches.

        Args:
            setup: The setup shared by searches; `submit` can override parts of it.
            policy: Writes the messages.
            concurrency: Maximum number of open searches; memory grows with it, but results do not depend on it.
            task: Grades the answers, if the task has custom grading.
            run_budget: Limits of all searches together. A search starts only if the remaining calls, tokens and USD
                cover its expected cost; a search that exceeds its expected cost may be dropped. The time limit
                ends open searches.
        """
        if concurrency < 1:
            raise ConfigError(f"expected concurrency >= 1, got {concurrency}")
        self.stopped: str | None = None
        policy = as_policy(policy)
        self._setup, self._engine = setup, policy
        self._task: Iterable[Problem] = () if task is None else as_problems(task)
        self._concurrency, self._budget, self.earlier = concurrency, run_budget or Budget(), Usage()
        self._allowance = Allowance(self._budget, setup.budget)
        self._mail: Mail = SimpleQueue()
        self._policy: PolicyRequests = policy_requests(policy, self._mail)
        self._runner = None if setup.program is None else setup.program.open(policy)
        self._critic = None if setup.critic is None or setup.critic.free else CriticBatches(setup.critic, self._mail)
        self._grading: GradingThreads | None = None
        self._waiting: OrderedDict[int, _Entry] = OrderedDict()
        self._active: dict[int, _Entry] = {}
        self._open: dict[Hashable, tuple[_Entry, Call]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._numbers, self._keys = itertools.count(), itertools.count()
        self.calls, self._account, self._ended = 0, Account(run_budget or Budget()), 0
        self._spans = None if Spans.current is None else Spans.current()
        self._started = perf_counter()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = self._shut = False

    @property
    def usage(self) -> Usage:
        """The cost of all searches so far, including failed and dropped ones."""
        return replace(self._account.usage, seconds=perf_counter() - self._started)

    @property
    def waiting(self) -> int:
        """Number of searches that have not begun."""
        return len(self._waiting)

    @property
    def active(self) -> int:
        """Number of searches in progress."""
        return len(self._active)

    @property
    def closed(self) -> bool:
        """Whether no more searches are admitted."""
        return self._closed

    @property
    def has_capacity(self) -> bool:
        """Whether another search would begin immediately, or is needed to detect that the budget is exhausted."""
        if self._closed or self.waiting + self.active >= self._concurrency:
            return False
        return not self._allowance.limited or not self.waiting or self._pays(self.waiting + 1)

    def observe(self, usage: Usage) -> None:
        """Update the expected cost from a stored search."""
        self._allowance.observe(self._allowance.cost(usage))

    def submit(
        self,
        problem: Problem,
        *,
        seed: int | None = None,
        sampling: Sampling | None = None,
        budget: Budget | None = None,
        planner: Planner | None = None,
        on_progress: Callable[[SearchProgress], object] | None = None,
    ) -> SearchFuture:
        """Queue a search; it begins when fewer than `concurrency` are open.

        Args:
            problem: The problem to search.
            seed: Replaces the setup's seed.
            sampling: Replaces the setup's sampling.
            budget: Replaces the setup's budget.
            planner: Replaces the setup's planner; must be adapted to the setup's critic (`search.Planner.for_run`).
            on_progress: Called on the scheduler's thread after each message.

        Raises:
            SearchError: The scheduler is closed.
        """
        limited = None if sampling is None else sampling.for_system(self._setup.dynamics.mas)
        given = {"seed": seed, "sampling": limited, "budget": budget, "planner": planner}
        changed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        number = next(self._numbers)
        future = SearchFuture(problem, partial(self._mail.put, (_CANCELLED, number)), on_progress)
        setup = replace(self._setup, **changed) if changed else self._setup
        world = None if setup.recording is None else setup.recording.world(problem)
        grader = ProblemGrader(
            self._task, problem, setup.dynamics.mas.final_text, None if world is None else world.grades
        )
        account, runner, arms = self._account, self._runner, self._engine.arms
        search = ActiveSearch(setup, problem, grader, account, runner, world, future._advance, arms)
        with self._lock:
            if self._closed:
                raise SearchError(f"expected an open scheduler, got one that has ended: {self.stopped or 'closed'}")
            self._waiting[number] = _Entry(number, search, future)
        self.wake()
        return future

    def start(self) -> Scheduler:
        """Run the loop on a background thread until `close`; an engine failure ends open searches, but not the loop."""
        self._thread = threading.Thread(target=self._serve, name="mas-gym-scheduler", daemon=True)
        self._thread.start()
        return self

    def stop(self, reason: str) -> None:
        """Close the scheduler, and record the reason."""
        self.stopped = self.stopped or reason
        self.close()

    def close(self) -> None:
        """End every open or waiting search with a `SearchError` and release the engines; safe to call twice."""
        with self._lock:
            self._closed = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self.wake()
            self._thread.join()
        else:
            self._shut_down()

    def __enter__(self) -> Scheduler:
        """Return the scheduler."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the scheduler."""
        self.close()

    # ---- the loop

    def turn(self, timeout: float | None = None) -> bool:
        """Do one unit of work, or wait at most ``timeout`` seconds for an engine; return False if no search is open.

        Raises:
            EngineUnavailableError: No request can succeed. Other exceptions of an engine are also propagated.
        """
        ended = self._ended
        progressed = self._read_mail()
        if self._allowance.limited:
            self._send_held()
        if not self._admit():
            self.stop(self._allowance.reason(self._spent))
        if not self._active or self._out_of_time():
            return False
        self._expire()
        if not progressed and self._ended == ended:
            self._work(timeout)
        return True

    def wake(self) -> None:
        """End a `wait`."""
        self._mail.put((_WAKE, None))

    def wait(self, timeout: float | None = None) -> None:
        """Wait at most ``timeout`` seconds for an event from another thread or the next deadline."""
        try:
            self._take(*self._mail.get(timeout=self._patience(timeout)))
        except Empty:
            self._out_of_time()

    def _serve(self) -> None:
        while not self._closed:
            try:
                if not self.turn() and not self._closed:
                    self.wait()
            except BaseException as error:
                self._abort(error)
        self._shut_down()

    def _abort(self, error: BaseException) -> None:
        """End every open search with an engine error; waiting searches use a new session."""
        for number in list(self._active):
            self._drop(number, error)
        # A failed engine may also fail to close.
        with suppress(Exception):
            self._policy.close()
        self._policy = policy_requests(self._engine, self._mail)

    def _shut_down(self) -> None:
        if self._shut:
            return
        self._shut = True
        error = SearchError(f"the search was dropped: {self.stopped or 'the scheduler was closed'}")
        for number in [*self._active, *self._waiting]:
            self._drop(number, error)
        self._policy.close()
        if self._runner is not None:
            self._runner.close()
        if self._critic is not None:
            self._critic.close()
        if self._grading is not None:
            self._grading.close()

    # ---- admission

    def _admit(self) -> bool:
        """Begin waiting searches up to `concurrency`; return False if the budget covers no search and none is open."""
        while self._waiting and len(self._active) < self._concurrency:
            if self._allowance.limited and not self._pays(1):
                return bool(self._active)
            with self._lock:
                if not self._waiting:
                    break
                number, entry = self._waiting.popitem(last=False)
                self._active[number] = entry
            entry.granted = self._allowance.grant
            self._begin(entry)
        return True

    def _begin(self, entry: _Entry) -> None:
        if self._spans is not None:
            self._spans.begin(entry.number, entry.search.setup, entry.search.problem.id)
        calls = entry.search.begin()
        if (deadline := entry.search.deadline) is not None:
            heapq.heappush(self._deadlines, (deadline, entry.number))
        self._send(entry, calls)

    @property
    def _spent(self) -> Usage:
        """The cost of the run, including calls in flight, which are not yet recorded in any search."""
        return self.earlier + replace(self.usage, agent_calls=self.calls)

    def _rest(self, but: _Entry | None = None) -> Cost:
        """Return the budget that is neither spent nor granted to open searches other than ``but``."""
        others = ((entry.granted, self._cost(entry)) for entry in self._active.values() if entry is not but)
        return self._allowance.rest(self._spent, others)

    def _cost(self, entry: _Entry) -> Cost:
        """Return a search's cost, including the calls that it has requested."""
        return self._allowance.cost(entry.search.spent)._replace(calls=entry.asked)

    def _pays(self, searches: int) -> bool:
        return self._allowance.pays(self._rest(), searches, alone=not self._active)

    def _covers(self, entry: _Entry, wanted: int) -> bool:
        """Return whether the budget covers ``wanted`` more calls of a search in addition to other searches' grants."""
        if not wanted or not self._allowance.limited:
            return True
        rest = self._rest(entry)
        return rest.calls >= wanted and rest.tokens > 0 and rest.usd > 0

    def _send_held(self) -> None:
        """Send held requests that the budget now covers.

        If all open searches have held requests, the one with the fewest calls is dropped, which frees its grant.
        """
        while held := [entry for entry in self._active.values() if entry.held is not None]:
            for entry in held:
                calls = entry.held
                if calls is not None and self._covers(entry, agent_calls(calls)):
                    entry.held = None
                    self._send(entry, calls)
            if any(entry.held is None for entry in self._active.values()):
                return
            least = min(self._active.values(), key=lambda entry: entry.asked)
            assert least.held is not None
            self._allowance.observe(self._cost(least)._replace(calls=least.asked + agent_calls(least.held)))
            self.stopped = self.stopped or self._allowance.reason(self._spent)
            self._drop(least.number, SearchError(f"the search was dropped: {self.stopped}"))

    def _drop(self, number: int, error: BaseException | None = None) -> None:
        """Remove a search with its open requests; its future raises ``error`` unless it was cancelled."""
        with self._lock:
            entry = self._active.pop(number, None) or self._waiting.pop(number, None)
        if entry is None:
            return
        self._release(entry)
        if self._spans is not None:
            self._spans.finish(number, None, error)
        entry.search.close()
        if entry.future.set_running_or_notify_cancel():
            entry.future.set_exception(error or SearchError("the search was dropped"))

    def _release(self, entry: _Entry) -> None:
        """Cancel the open requests of a search."""
        entry.held = None
        for key in entry.keys:
            _, call = self._open.pop(key)
            if self._spans is not None:
                self._spans.answer(key, None)
            if isinstance(call, PolicyCall):
                self._policy.cancel(key)
            elif isinstance(call, GradingCall) and self._grading is not None:
                self._grading.cancel(key)
            elif isinstance(call, CriticCall) and self._critic is not None:
                self._critic.cancel(key)
        entry.keys.clear()

    # ---- from planners to engines

    def _send(self, entry: _Entry, calls: list[Call] | None) -> None:
        """Submit a search's calls, or hold them if the budget does not cover them.

        If ``calls`` is None, end the search.
        """
        while calls:
            wanted = agent_calls(calls)
            if not self._covers(entry, wanted):
                entry.held = calls
                return
            self.calls += wanted
            entry.asked += wanted
            *others, last = calls
            for call in others:
                self._submit(entry, call)
            if isinstance(last, CriticCall) and self._critic is None:
                calls = entry.search.take(last, self._free_scores(entry, last))
            else:
                self._submit(entry, last)
                calls = []
        if calls is None:
            self._end(entry)

    def _submit(self, entry: _Entry, call: Call) -> None:
        """Submit one call; its outcome arrives in `_deliver`."""
        key = next(self._keys)
        entry.keys.add(key)
        self._open[key] = (entry, call)
        match call:
            case PolicyCall():
                if self._spans is not None:
                    self._spans.ask(entry.number, key, self._engine.name, call.request)
                self._policy.submit(key, call.request)
            case CriticCall():
                assert self._critic is not None
                if self._spans is not None:
                    self._spans.score(entry.number, key, self._critic.name, call.contexts)
                self._critic.submit(key, call.contexts)
            case GradingCall():
                self._grading = self._grading or GradingThreads(self._mail)
                self._grading.submit(key, call.grader, call.texts)
            case ProgramStep():
                session = entry.search.session
                assert session is not None
                arrived = partial(self._arrived, key)
                if call.state is None:
                    session.begin(arrived)
                else:
                    session.extend(call.state, call.text, arrived)

    def _free_scores(self, entry: _Entry, call: CriticCall) -> Scores | Exception:
        """Return the values of a critic that needs no model, or the error."""
        critic, key = self._setup.critic, next(self._keys)
        assert critic is not None
        if self._spans is not None:
            self._spans.score(entry.number, key, critic.name, call.contexts)
        outcome: Scores | Exception
        try:
            outcome = scores_of(critic, call.contexts)
        except Exception as error:
            outcome = error
        if self._spans is not None:
            self._spans.answer(key, outcome)
        return outcome

    def _arrived(self, key: int, outcome: object) -> None:
        self._mail.put((key, outcome))

    def _out_of_time(self) -> bool:
        """Stop if the run's time limit has expired; return whether it has."""
        reason = self._budget.spent(self._spent, 0)
        if reason:
            self.stop(reason)
        return bool(reason)

    # ---- from engines to planners

    def _work(self, timeout: float | None) -> None:
        """Score states if a batch is ready, otherwise generate, otherwise wait."""
        critic, policy = self._critic, self._policy
        if critic is not None and critic.ready(policy.has_capacity):
            self._deliver(critic.step())
        elif policy.inline and policy.has_pending_work:
            self._deliver(policy.step())
        elif self._open:
            self.wait(timeout)
        else:
            raise SearchError("no open search can continue: a policy or critic never answered a request")

    def _read_mail(self) -> bool:
        """Process all mail from other threads; return whether it contained an outcome."""
        progressed = False
        while True:
            try:
                key, content = self._mail.get_nowait()
            except Empty:
                return progressed
            self._take(key, content)
            progressed = progressed or key is not _WAKE

    def _take(self, key: Hashable, content: Any) -> None:
        if key is BATCH_DONE and self._critic is not None:
            self._critic.done()
        elif key is _CANCELLED:
            self._drop(content)
        elif key is not _WAKE:
            self._deliver([(key, content)])

    def _deliver(self, outcomes: Iterable[tuple[Hashable, object]]) -> None:
        """Deliver outcomes to their searches and submit the next calls."""
        for key, outcome in outcomes:
            if key not in self._open:
                continue
            entry, call = self._open.pop(key)
            entry.keys.discard(key)
            if self._spans is not None:
                self._spans.answer(key, outcome)
            # An unavailable judge fails the searches that it grades; an unavailable policy or critic ends the run.
            if isinstance(outcome, EngineUnavailableError) and not isinstance(call, GradingCall):
                raise outcome
            self._send(entry, entry.search.take(call, outcome))

    def _end(self, entry: _Entry) -> None:
        """Complete a search's future with its plan."""
        search, future = entry.search, entry.future
        assert search.plan is not None
        self._release(entry)
        if search.session is not None:
            search.session.close()
        self._active.pop(entry.number)
        if self._spans is not None:
            self._spans.finish(entry.number, search.plan, search.failure)
        self._ended += 1
        if search.failure is None:
            self._allowance.observe(self._cost(entry))
        future.samples, future.failure = search.samples, search.failure
        if future.set_running_or_notify_cancel():
            future.set_result(search.plan)

    # ---- deadlines

    def _expire(self) -> None:
        """Stop the searches that have exceeded their time limit."""
        while self._deadlines and self._deadlines[0][0] <= perf_counter():
            _, number = heapq.heappop(self._deadlines)
            entry = self._active.get(number)
            if entry is None or entry.search.measured:
                continue
            calls = entry.search.stop(f"budget of {entry.search.setup.budget.seconds:g} seconds spent")
            self._release(entry)
            self._send(entry, calls)

    def _patience(self, timeout: float | None) -> float | None:
        """Return the maximum wait for other threads; None for no limit."""
        moments = [] if timeout is None else [perf_counter() + timeout]
        moments += [self._deadlines[0][0]] if self._deadlines else []
        if self._budget.seconds is not None:
            moments.append(self._started + self._budget.seconds - self.earlier.seconds)
        return max(0.0, min(moments) - perf_counter()) if moments else None
