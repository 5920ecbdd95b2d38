"""`search.run`: searches every problem of a task in this process, and yields plans as searches finish.

A `Run` is the loop for every kind of engine: it reads problems as searches start, looks up each problem in the store,
submits the missing ones to its `Engine`, records finished searches, and yields the plans. The loop runs only while the
caller waits for the next plan.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakSet

from mas_gym.errors import ConfigError, DataError
from mas_gym.internal.event_loop import before_engines_close
from mas_gym.policies.base import AsyncPolicy, Policy
from mas_gym.systems.graph import MAS
from mas_gym.tasks.base import Problem, as_problems
from search.budget import Budget
from search.engine.progress import Journal, Listener, Progress, listener
from search.engine.scheduler import Scheduler, SearchFuture
from search.plan import Plan
from search.prices import PricesSource, as_prices
from search.protocol import Critic, Planner
from search.sampling import Sampling
from search.setup import FromConfig, ProgramSource, Setup, check_problems, make_setup, priced_setup, resolve_policy
from search.store import Recorded, Store
from search.store.recorded_runs import as_recorded
from search.store.resume import RunRecord, open_record
from search.usage import Usage


def run(
    planner: Planner | str,
    problems: Iterable[Problem] | None = None,
    *,
    recorded: Recorded | str | os.PathLike[str] | None = None,
    mas: MAS | str | None = None,
    program: ProgramSource | None = None,
    policy: Policy | AsyncPolicy | FromConfig | None = None,
    critic: Critic | None = None,
    seed: int = 42,
    concurrency: int = 64,
    training: bool = False,
    sampling: Sampling | None = None,
    budget: Budget | None = None,
    run_budget: Budget | None = None,
    prices: PricesSource | None = None,
    store: Store | str | os.PathLike[str] | None = None,
    run_name: str | None = None,
    progress: bool | Callable[[Progress], None] = False,
    raise_errors: bool = False,
) -> Run:
    """Search every problem and yield plans as searches finish.

    Args:
        planner: The algorithm, or its short form such as ``"mcts:10,3"``.
        problems: A task, a slice of a task, or any iterable of problems with distinct ids; read as searches start.
            By default, all problems of ``recorded``.
        recorded: A recorded run to search in place of a system and a policy, or the store that contains it; see
            `search.Recorded`.
        mas: The system, or a name or path for `mas_gym.load_mas`.
        program: An agent program in place of the system: a function, ``FILE.py:NAME``, a command, the URL of a service,
            or a `mas_gym.programs.Program`. If ``mas`` is also given, it describes the program's agents.
        policy: Writes the messages; ``"from-config"`` loads the policies in the config of ``mas``.
        critic: Scores states; not needed by planners that request no values.
        seed: Together with the problem's id, determines every sample and every choice of a search.
        concurrency: Maximum number of open searches; memory grows with it, but results do not depend on it.
        training: Answer `Reward` requests with the true reward, for data generation; rejected for a test split.
        sampling: Temperature, top-p and token limit; the paper's settings by default.
        budget: Limits of each search. A search that reaches a limit returns its best plan so far, or fails.
        run_budget: Limits of the whole run, including the cost of earlier calls with the same store. A search starts
            only if the remaining budget covers its expected cost, which is the cost of the most expensive search
            so far. The time limit ends open searches.
        prices: Prices of the models, as a YAML file or a mapping of the same form (`search.prices`). Plans then have a
            cost ``usd``, and budgets may limit ``usd``.
        store: A file (or an open `Store`) to which each finished search is written immediately. Searches that are
            already stored are not repeated; their plans are read back. Failed searches are retried.
        run_name: A name for this run in the store. Resuming a named run with different settings raises an error.
        progress: True for a bar on standard error; or a function called with a `Progress` when a search ends, and a few
            times per second in between.
        raise_errors: Raise the exception that ended a search, with its traceback, instead of returning a plan with an
            ``error``.

    Returns:
        An iterator of plans. After Ctrl-C or a stop, it still yields the finished plans.

    Raises:
        ConfigError: An argument is invalid, such as a critic that the planner cannot use.
        StoreError: The store has another format, is in use, or contains a run of that name with different settings.
    """
    recording = None if recorded is None else as_recorded(recorded)
    if recording is not None:
        if mas is not None or program is not None or policy is not None or training:
            raise ConfigError(
                "expected recorded= without mas=, program=, policy= or training=, got some of them; leave them out"
            )
        problems, policy = recording if problems is None else problems, recording.policy
    if problems is None:
        raise ConfigError("expected problems, or recorded= with a recorded run, got neither")
    more: dict[str, Any] = {"sampling": sampling, "budget": budget, "training": training}
    setup = make_setup(planner, mas, critic, program=program, seed=seed, recording=recording, **more)
    problems = as_problems(problems)
    policy = resolve_policy(setup.dynamics.mas, policy)
    setup = priced_setup(setup, policy.name, None if prices is None else as_prices(prices))
    run_budget = (run_budget or Budget()).priced(setup.rate)
    check_problems(problems, setup, policy)
    listen = listener(progress)
    scheduler = Scheduler(setup, policy, task=problems, concurrency=concurrency, run_budget=run_budget)

    def journal() -> Journal:
        record = open_record(store, setup, problems, policy, run_name) if store is not None else None
        return _journal(setup, problems, record, listen, policy=policy.name, concurrency=concurrency)

    return _opened(scheduler, problems, journal, raise_errors)


def _opened(
    scheduler: Scheduler, problems: Iterable[Problem], open_journal: Callable[[], Journal], raise_errors: bool
) -> Run:
    """Return a run; if an error is raised, close everything, including the store's lock."""
    try:
        source, journal = iter(problems), open_journal()
    except BaseException:
        scheduler.close()
        raise
    scheduler.earlier = journal.earlier
    return Run(scheduler, source, journal, raise_errors)


def _journal(
    setup: Setup, problems: Iterable[Problem], record: RunRecord | None, listen: Listener | None, **facts: object
) -> Journal:
    total = len(problems) if isinstance(problems, Sized) else None
    try:
        return Journal(setup, total=total, record=record, listener=listen, **facts)
    except BaseException:
        if record is not None:
            record.close()
        raise


class Engine(Protocol):
    """The interface that searches a run's problems: a `Scheduler` in this process, or a fleet of actors.

    The work is done in `turn` and `wait` on the caller's thread, where futures are also completed.

    Attributes:
        stopped: Reason for accepting no more problems, such as a spent budget; None while problems are accepted.
    """

    stopped: str | None

    @property
    def usage(self) -> Usage:
        """The cost of all searches so far, including failed and dropped ones."""

    @property
    def calls(self) -> int:
        """Agent calls made so far, including those without a reply."""

    @property
    def active(self) -> int:
        """Searches in progress."""

    @property
    def closed(self) -> bool:
        """Whether no more problems are accepted."""

    @property
    def has_capacity(self) -> bool:
        """Whether another search would begin immediately."""

    def submit(self, problem: Problem) -> SearchFuture:
        """Queue a search."""

    def observe(self, usage: Usage) -> None:
        """Update the expected cost from a stored search."""

    def turn(self, timeout: float | None = None) -> bool:
        """Do one unit of work, or wait at most ``timeout`` seconds for one; return False if no search is open."""

    def wait(self, timeout: float | None = None) -> None:
        """Wait at most ``timeout`` seconds for an event; called while no search is open."""

    def wake(self) -> None:
        """End a `wait` soon; safe to call from any thread."""

    def stop(self, reason: str) -> None:
        """Close, and record the reason."""

    def close(self) -> None:
        """Drop open searches and release the engines; safe to call twice."""


class Run(Iterator[Plan]):
    """A run in progress, created by `search.run` or `run_ray`; it works only while the caller waits for a plan."""

    _closed = True

    def __init__(
        self,
        engine: Engine,
        problems: Iterator[Problem],
        journal: Journal | Callable[[], Journal],
        raise_errors: bool = False,
    ) -> None:
        """Connect the parts; work starts when the first plan is requested.

        Args:
            engine: Searches the problems.
            problems: The problems, read as searches start.
            journal: The run's journal, or a function that opens it when the first plan is requested.
            raise_errors: Raise the exception that made a search fail instead of returning its plan.
        """
        self._engine, self._problems = engine, problems
        self._exhausted, self._seen = False, set[str]()
        self._raise_errors = raise_errors
        self._closed = self._leaving = False
        self._owner = os.getpid()
        self._turning = threading.RLock()
        self._ended: deque[SearchFuture] = deque()
        self._ready: deque[SearchFuture] = deque()
        self._late: Exception | None = None
        self._journal = journal
        _OPEN.add(self)

    @property
    def usage(self) -> Usage:
        """The cost of this run so far, including failed and dropped searches; stored plans cost nothing."""
        return self._engine.usage

    @property
    def stopped(self) -> str | None:
        """Reason for stopping early; None if the run did not stop early."""
        return self._engine.stopped

    def __iter__(self) -> Run:
        """Return the run itself."""
        return self

    def __next__(self) -> Plan:
        """Return the next finished plan, working until there is one."""
        with self._turning:
            return self._next()

    def _next(self) -> Plan:
        try:
            while not self._ready and not self._leaving and self._turn():
                pass
        except BaseException as error:
            self.stop("interrupted" if isinstance(error, KeyboardInterrupt) else str(error))
            if not isinstance(error, Exception) or not self._ready:
                raise
            self._late = error
        if not self._ready:
            self.close()
            if self._late is not None:
                late, self._late = self._late, None
                raise late
            raise StopIteration
        future = self._ready.popleft()
        if self._raise_errors and future.failure is not None:
            self.stop(str(future.failure))
            raise future.failure
        return future.result()

    def _turn(self) -> bool:
        """Do one unit of work and record the searches that ended; return False when no work is left."""
        if self._engine.closed:
            return False
        if not isinstance(self._journal, Journal):
            self._journal = self._journal()
        engine, journal = self._engine, self._journal
        while engine.has_capacity and not self._ended and (problem := self._next_problem()) is not None:
            stored = journal.lookup(problem)
            if stored is not None:
                future = SearchFuture(problem)
                future.set_result(stored)
                self._ready.append(future)
                engine.observe(stored.usage)
                self._show(journal)
                return True
            # The callback is not a method of this object, so that an unreferenced run closes immediately.
            engine.submit(problem).add_done_callback(self._ended.append)  # type: ignore[arg-type]
        if not (self._ended or engine.turn(journal.patience) or self._ended):
            if engine.closed or self._exhausted:
                return False
            engine.wait(journal.patience)
        self._write_down(journal)
        if journal.due:
            self._show(journal)
        return True

    def _next_problem(self) -> Problem | None:
        """Return the next problem; None if there is none.

        Raises:
            DataError: Two problems have the same id.
        """
        problem = next(self._problems, None)
        if problem is None:
            self._exhausted = True
        elif problem.id in self._seen:
            raise DataError(f"two problems have the id {problem.id!r}; ids must be distinct within a run")
        else:
            self._seen.add(problem.id)
        return problem

    def _write_down(self, journal: Journal) -> None:
        while self._ended:
            future = self._ended.popleft()
            # Searches dropped at the end of the run have no plan.
            if future.exception() is None:
                journal.ended(future.problem, future.result(), future.samples)
                self._ready.append(future)
                self._show(journal)

    def _show(self, journal: Journal) -> None:
        if journal.watched:
            journal.update(self._engine.usage, self._engine.active)

    def stop(self, reason: str = "stopped") -> None:
        """End the run: open searches are dropped, and finished plans are still returned."""
        self._engine.stop(reason)
        self._engine.wake()
        self.close()

    def close(self) -> None:
        """Drop open searches and release the engines and the store; safe to call twice."""
        with self._turning:
            self._engine.close()
            if isinstance(self._journal, Journal):
                try:
                    self._write_down(self._journal)
                finally:
                    # Clear it even if the store fails, so that nothing is written when this object is deleted.
                    self._closed = True
                    self._journal.close(self._engine.usage, self._engine.calls, self._engine.stopped)
            self._closed = True

    def __enter__(self) -> Run:
        """Return the run itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the run."""
        self.close()

    def __del__(self) -> None:
        """Close an abandoned run."""
        if not self._closed:
            self.close()

    def leave(self) -> None:
        """Close the run at interpreter exit; another thread may be waiting for its next plan.

        No-op in a forked child, because the run belongs to the parent.
        """
        if os.getpid() != self._owner:
            return
        self._leaving = True
        self._engine.wake()
        if self._turning.acquire(timeout=_EXIT_SECONDS):
            try:
                self.close()
            finally:
                self._turning.release()


_EXIT_SECONDS = 5.0
_OPEN: WeakSet[Run] = WeakSet()
"""Runs to close at exit while their modules are still loaded; `__del__` may run too late."""


def _close_open() -> None:
    for run in list(_OPEN):
        # No caller is left to handle an error.
        with suppress(Exception):
            run.leave()


before_engines_close(_close_open)
