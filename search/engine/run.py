"""`Run`: a run in progress, which yields plans as searches finish.

A run reads problems as searches start, looks up each in the store, searches the missing ones, records finished
searches, and yields the plans. Its event loop runs only while the caller waits for the next plan. Its `Journal` passes
searches to and from the store, and reports the progress.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from time import perf_counter
from typing import TypeVar
from weakref import WeakSet

from mas_gym.errors import DataError, StoreError
from mas_gym.internal.event_loop import before_engines_close
from mas_gym.internal.json_types import JSONMapping
from mas_gym.tasks.base import Problem
from search.costs import Usage
from search.engine.scheduler import DroppedError, Searched, Searcher
from search.plan import Plan
from search.planners.registry import planner_spec
from search.progress import Listener, Progress
from search.setup import Setup
from search.store.run_writer import RunWriter

T = TypeVar("T")

logger = logging.getLogger("search")


class Run(Iterator[Plan]):
    """A run in progress, created by `search.run` or `run_ray`; it works only while the caller waits for a plan."""

    _closed = True

    def __init__(
        self,
        scheduler: Searcher,
        problems: Iterator[Problem],
        journal: Journal | Callable[[], Awaitable[Journal]],
        raise_errors: bool = False,
    ) -> None:
        """Connect the parts; work starts when the first plan is requested.

        Args:
            scheduler: Searches the problems.
            problems: The problems, read as searches start.
            journal: The run's journal, or a coroutine function that opens it when the first plan is requested.
            raise_errors: Raise the exception that made a search fail instead of returning its plan.
        """
        self._scheduler, self._problems = scheduler, problems
        self._open_journal = None if isinstance(journal, Journal) else journal
        self._journal = journal if isinstance(journal, Journal) else None
        # A temporary file keeps the ids that were read, so that memory does not grow with the number of problems.
        self._seen = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._seen.executescript("PRAGMA journal_mode=OFF; CREATE TABLE seen (id BLOB PRIMARY KEY) WITHOUT ROWID")
        self._open = set[asyncio.Task[Searched]]()
        self._raise_errors, self._exhausted = raise_errors, False
        self._owner = os.getpid()
        self._turning = threading.RLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._ended: deque[asyncio.Task[Searched]] = deque()
        self._ready: deque[tuple[Plan, BaseException | None]] = deque()
        self._late: Exception | None = None
        self._reason: str | None = None
        self._closed = False
        _OPEN.add(self)

    @property
    def usage(self) -> Usage:
        """The cost of this run so far, including failed and dropped searches; stored plans cost nothing."""
        return self._scheduler.usage

    def cost(self, usage: Usage) -> float | None:
        """Return the cost of a search in USD; None before the first plan and without prices."""
        budget = None if self._journal is None else self._journal.budget
        return None if budget is None or budget.rate is None else budget.cost(usage)

    @property
    def stopped(self) -> str | None:
        """Reason for stopping early; None if the run did not stop early."""
        return self._scheduler.stopped

    def __iter__(self) -> Run:
        return self

    def __next__(self) -> Plan:
        """Return the next finished plan, working until there is one."""
        with self._turning:
            return self._next()

    def _next(self) -> Plan:
        if not self._ready and not self._closed:
            try:
                self._drive(self._work())
            except BaseException as error:
                self.stop("interrupted" if isinstance(error, KeyboardInterrupt) else str(error))
                if not isinstance(error, Exception) or not self._ready:
                    raise
                self._late = error
        if not self._ready:
            # This may record a search that has just ended.
            self.close()
        if not self._ready:
            if self._late is not None:
                late, self._late = self._late, None
                raise late
            raise StopIteration
        plan, failure = self._ready.popleft()
        if self._raise_errors and failure is not None:
            self.stop(str(failure))
            raise failure
        return plan

    # ---- the event loop

    def _drive(self, work: Coroutine[object, object, T]) -> T:
        """Run a coroutine on the run's event loop: on this thread, or on another one while an event loop runs here."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        task = self._loop.create_task(work)
        if asyncio._get_running_loop() is None:
            return _result(self._loop, task)
        with ThreadPoolExecutor(1, "mas-gym-run") as thread:
            done = thread.submit(_result, self._loop, task)
            try:
                return done.result()
            except BaseException:
                self._loop.call_soon_threadsafe(task.cancel)
                raise

    async def _work(self) -> None:
        """Search until a plan is ready or no work is left."""
        if self._journal is None and self._open_journal is not None:
            self._journal = await self._open_journal()
        journal = self._journal
        assert journal is not None
        scheduler = self._scheduler
        scheduler.earlier = journal.earlier
        while not self._ready and self._reason is None and self._start_searches(journal):
            if self._ready:
                # A stored search needs no wait.
                break
            # Once the run's time is up, remote searches go on to their end.
            limit = None if scheduler.closed else scheduler.seconds_left
            waits = [seconds for seconds in (journal.patience, limit) if seconds is not None]
            with suppress(TimeoutError):
                async with asyncio.timeout(min(waits, default=None)):
                    await self._changed.wait()
            self._changed.clear()
            failed = self._collect(journal)
            if failed is not None:
                raise failed
            if journal.due:
                journal.update(scheduler.usage, len(self._open))
        if self._reason is not None:
            scheduler.stop(self._reason)

    def _start_searches(self, journal: Journal) -> bool:
        """Start searches of the next problems; return False if no search is open and none can start."""
        scheduler = self._scheduler
        left = scheduler.seconds_left
        if left is not None and left <= 0:
            scheduler.out_of_time()
        while not scheduler.closed and not self._exhausted and len(self._open) < scheduler.concurrency:
            # The searches of new tasks have not begun yet.
            if self._open and scheduler.shortage(max(0, len(self._open) - scheduler.active)):
                break
            problem = self._next_problem()
            if problem is None:
                break
            stored = journal.lookup(problem)
            if stored is not None:
                self._ready.append((stored, None))
                scheduler.learn_cost(stored.usage)
                journal.update(scheduler.usage, len(self._open))
                return True
            reason = None if self._open else scheduler.shortage(0)
            if reason is not None:
                scheduler.stop(reason)
                break
            task = asyncio.get_running_loop().create_task(scheduler.search(problem))
            self._open.add(task)
            # The callbacks are not methods of this object, so that an unreferenced run closes immediately.
            task.add_done_callback(self._open.discard)
            task.add_done_callback(self._ended.append)
            task.add_done_callback(partial(_set, self._changed))
        return bool(self._open or self._ended)

    def _next_problem(self) -> Problem | None:
        """Return the next problem; None if there is none.

        Raises:
            DataError: Two problems have the same id.
        """
        problem = next(self._problems, None)
        if problem is None:
            self._exhausted = True
            return None
        key = str(problem.id).encode("utf-8", "surrogatepass")
        if not self._seen.execute("INSERT OR IGNORE INTO seen VALUES (?)", (key,)).rowcount:
            raise DataError(f"two problems have the id {problem.id!r}; ids must be distinct within a run")
        return problem

    def _collect(self, journal: Journal) -> BaseException | None:
        """Record the searches that ended; return the error of an engine, if there is one."""
        failed: BaseException | None = None
        ended = []
        while self._ended:
            task = self._ended.popleft()
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            if error is None:
                ended.append(task.result())
            elif not isinstance(error, DroppedError | asyncio.CancelledError):
                failed = failed or error
        for search in journal.written(ended):
            self._ready.append((search.plan, search.failure))
        if ended:
            journal.update(self._scheduler.usage, len(self._open))
        return failed

    # ---- the end

    def stop(self, reason: str = "stopped") -> None:
        """End the run: open searches are dropped, and finished plans are still returned; safe on any thread."""
        self._wake(reason)
        with self._turning:
            if self._loop is None or not self._loop.is_running():
                self._scheduler.stop(reason)
                self.close()

    def _wake(self, reason: str) -> None:
        """End the wait for a plan."""
        self._reason = self._reason or reason
        if self._loop is not None and self._loop.is_running():
            # It may have ended since.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._changed.set)

    def close(self) -> None:
        """Drop open searches and release the engines and the store; safe to call twice."""
        with self._turning:
            if self._closed:
                return
            # Set it even if the store fails, so that nothing is written when this object is deleted.
            self._closed = True
            try:
                self._drive(self._end())
                if self._journal is not None:
                    self._collect(self._journal)
            finally:
                self._seen.close()
                if self._loop is not None:
                    self._loop.close()
                if self._journal is not None:
                    self._journal.close(self._scheduler.usage, self._scheduler.calls, self._scheduler.stopped)

    async def _end(self) -> None:
        """Drop open searches, release the engines, and end all tasks of the event loop."""
        await self._scheduler.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            # After an interrupt, a task may have lost the reply that it waits for.
            await asyncio.wait(tasks, timeout=_END_SECONDS)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._closed:
            self.close()

    def leave(self) -> None:
        """Close the run at interpreter exit; another thread may be waiting for its next plan.

        No-op in a forked child, because the run belongs to the parent.
        """
        if os.getpid() != self._owner:
            return
        self._wake("interpreter exit")
        if self._turning.acquire(timeout=_EXIT_SECONDS):
            try:
                self.close()
            finally:
                self._turning.release()


def _result(loop: asyncio.AbstractEventLoop, task: asyncio.Task[T]) -> T:
    """Run a loop until a task has ended."""
    try:
        return loop.run_until_complete(task)
    except BaseException:
        # Cancel an unfinished task, so that it does not run during the next call. A finished task has scheduled a stop
        # of the loop; run it now, or it stops the loop during the next call.
        if not task.cancel():
            loop.call_soon(loop.stop)
            loop.run_forever()
        raise


def _set(changed: asyncio.Event, task: object) -> None:
    changed.set()


_END_SECONDS = 1.0
_EXIT_SECONDS = 5.0
_OPEN: WeakSet[Run] = WeakSet()
"""Runs to close at exit while their modules are still loaded; `__del__` may run too late."""


def _close_open() -> None:
    for run in list(_OPEN):
        # No caller is left to handle an error.
        with suppress(Exception):
            run.leave()


before_engines_close(_close_open)


# ---- the store, the log and the progress

UPDATE_SECONDS = 0.25
"""Maximum interval between progress updates, in seconds; a single search can take minutes."""


class Journal:
    """Updates the store, the log and the progress display of one run.

    Attributes:
        earlier: The cost of the run in earlier processes.
        budget: The limits of each search, with the run's prices.
    """

    def __init__(
        self,
        setup: Setup,
        writer: RunWriter | None = None,
        listener: Listener | None = None,
        **facts: object,
    ) -> None:
        """Log the start of a run.

        Args:
            setup: The run's settings.
            writer: Stores finished searches.
            listener: Displays the progress.
            **facts: More fields for the log.
        """
        self._writer, self._listener, self.budget = writer, listener, setup.budget
        total = len(setup.problems) if isinstance(setup.problems, Sized) else None
        self._progress = Progress(total=total)
        self._updated = perf_counter()
        self.earlier = writer.earlier if writer is not None else Usage()
        self._saved = Usage()
        _log_start(setup, total, facts)

    def lookup(self, problem: Problem) -> Plan | None:
        """Return the stored plan of a problem, or None."""
        stored = self._writer.load(problem) if self._writer is not None else None
        if stored is not None:
            self._count(stored, fresh=False)
        return stored

    def written(self, searches: Sequence[Searched]) -> Iterator[Searched]:
        """Record searches that have just ended, and yield each that is written. Raises `StoreError` at the end."""
        # Store first, so that no finished search is lost if the program ends next.
        if self._writer is not None and searches:
            cost = sum((search.plan.usage for search in searches), Usage())
            try:
                self._writer.save((search[:3] for search in searches), cost)
            except StoreError as error:
                if len(searches) == 1:
                    raise
                # One of them cannot be stored.
                for search in searches:
                    with suppress(StoreError):
                        yield from self.written([search])
                raise error
            self._saved += cost
        for search in searches:
            self._count(search.plan, fresh=True)
            yield search

    def _count(self, plan: Plan, fresh: bool) -> None:
        now = self._progress
        self._progress = replace(
            now,
            done=now.done + 1,
            correct=now.correct + bool(plan.correct),
            failed=now.failed + (plan.error is not None),
            stored=now.stored + (not fresh),
        )
        _log_search(plan, fresh)

    @property
    def due(self) -> bool:
        """Whether a progress update is due."""
        return self._listener is not None and perf_counter() - self._updated > UPDATE_SECONDS

    @property
    def patience(self) -> float | None:
        """Maximum wait until the next progress update, in seconds; None for no limit."""
        return None if self._listener is None else UPDATE_SECONDS

    def update(self, usage: Usage, open_searches: int) -> None:
        """Show progress."""
        self._updated = perf_counter()
        if self._listener is not None:
            self._listener(replace(self._progress, usage=usage, open=open_searches), False)

    def close(self, usage: Usage, calls: int, stopped: str | None) -> None:
        """Close the store and log how the run ended.

        Args:
            usage: Total cost, including dropped searches.
            calls: Agent calls made, including those without a reply.
            stopped: Reason for stopping early; None if the run did not stop early.
        """
        if self._writer is not None:
            self._writer.spend(replace(usage, agent_calls=max(calls, usage.agent_calls)) - self._saved)
            self._writer.close()
        last = replace(self._progress, usage=usage, stopped=stopped)
        logger.info("run ended: %s", last, extra={"fields": {"event": "run ended", **asdict(last)}})
        if self._listener is not None:
            self._listener(last, True)


def _log_start(setup: Setup, total: int | None, facts: JSONMapping) -> None:
    if logger.isEnabledFor(logging.INFO):
        fields = {
            "event": "run started",
            "planner": planner_spec(setup.planner),
            "mas": setup.dynamics.mas.name,
            "critic": None if setup.critic is None else setup.critic.name,
            "seed": setup.seed,
            "training": setup.training,
            "problems": total,
            "policy": setup.policy.name,
            **facts,
        }
        logger.info("run started: %s, seed %d", fields["planner"], setup.seed, extra={"fields": fields})


def _log_search(plan: Plan, fresh: bool) -> None:
    level = logging.INFO if plan.error is None else logging.WARNING
    if logger.isEnabledFor(level):
        fields = {
            "event": "search ended",
            "problem": plan.problem_id,
            "answer": plan.answer,
            "correct": plan.correct,
            "error": plan.error,
            "stopped": plan.stopped,
            "stored": not fresh,
            "usage": plan.usage.to_dict(),
        }
        words = ("search of %s failed: %s", plan.problem_id, plan.error) if plan.error is not None else None
        extra = {"fields": fields, "details": plan.error_details}
        logger.log(level, *(words or ("search of %s ended", plan.problem_id)), extra=extra)
