"""`search.run`: every problem of a task searched in this process, plans streamed as they are finished."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

from mas_gym.errors import ConfigError
from mas_gym.graph import MAS
from mas_gym.policies.base import AsyncPolicy, Policy
from mas_gym.tasks.base import Problem
from search.engine.journal import Journal, Progress, listener
from search.engine.scheduler import Scheduler, SearchFuture
from search.engine.source import Source
from search.plan import Plan, Usage
from search.protocol import Critic, Planner
from search.setup import Budget, ProgramSource, Sampling, make_setup, resolve_policy
from search.store import Store, open_record


def run(
    planner: Planner | str,
    problems: Iterable[Problem],
    *,
    mas: MAS | str | None = None,
    program: ProgramSource | None = None,
    policy: Policy | AsyncPolicy | None = None,
    critic: Critic | None = None,
    seed: int = 42,
    concurrency: int = 64,
    training: bool = False,
    sampling: Sampling | None = None,
    budget: Budget | None = None,
    run_budget: Budget | None = None,
    store: Store | str | os.PathLike[str] | None = None,
    run_name: str | None = None,
    progress: bool | Callable[[Progress], None] = False,
    raise_errors: bool = False,
) -> Run:
    """Search every problem and stream the plans as they are finished.

    Args:
        planner: The algorithm, or its short form such as ``"mcts:10,3"``.
        problems: A task or a slice of one, or any iterable of problems with distinct ids; read as searches start.
            An iterable without a length is read on a thread of its own, so that it may block.
        mas: The system, or the name or path that `mas_gym.load_mas` takes.
        program: An agent program in place of the system: a function, ``FILE.py:NAME``, a command, the URL of a service,
            or a `mas_gym.programs.Program`. With ``mas``, too, the system describes the program's agents.
        policy: Writes the messages; by default the one that the MAS names under ``policies``.
        critic: Scores states; not needed by planners that ask for no values.
        seed: With the problem's id it determines every sample and every choice of a search.
        concurrency: Maximum number of open searches; memory grows with it, results do not depend on it.
        training: Answer `Reward` requests with the true reward, for data generation; never at evaluation.
        sampling: Temperature, top-p and cap; the paper's by default.
        budget: Limits of each search. A search that meets one returns the best it has, or fails.
        run_budget: Limits of the whole run, which ends when one is met; open searches are dropped. With a store,
            what earlier calls have spent on the run counts too.
        store: A file (or an open `Store`) to which each finished search is written at once. Searches that it
            already holds are not repeated: their plans are read back. Failed ones are tried again.
        run_name: A name for this run in the store, which then refuses to continue it with other settings.
        progress: True for a bar on standard error; or a function that is called with a `Progress` when a search
            ends, and a few times a second in between.
        raise_errors: Raise what failed a search, with its traceback, instead of returning a plan with an ``error``.

    Returns:
        An iterator of plans. After Ctrl-C or a stop it still returns what was finished.

    Raises:
        ConfigError: An argument does not fit, such as a critic that the planner cannot use.
        StoreError: The store is of another kind, in use, or holds a run of that name with other settings.
    """
    more: dict[str, Any] = {"seed": seed, "sampling": sampling, "budget": budget, "training": training}
    setup = make_setup(planner, mas, critic, program=program, **more)
    policy = resolve_policy(setup.dynamics.mas, policy)
    listen = listener(progress)
    if concurrency < 1:
        raise ConfigError(f"expected concurrency >= 1, got {concurrency}")
    record = open_record(store, setup, problems, policy, run_name) if store is not None else None
    total = len(problems) if isinstance(problems, Sized) else None
    journal = Journal(setup, total=total, record=record, listener=listen, policy=policy.name, concurrency=concurrency)
    scheduler = Scheduler(setup, policy, concurrency=concurrency, task=problems, run_budget=run_budget, journal=journal)
    return Run(scheduler, problems, raise_errors)


class Run(Iterator[Plan]):
    """A run in progress; made by `run`. Works only while its user waits for the next plan."""

    def __init__(self, scheduler: Scheduler, problems: Iterable[Problem], raise_errors: bool = False) -> None:
        """Read ``problems`` into ``scheduler``; nothing starts before the first plan is asked for."""
        self._scheduler, self._source = scheduler, Source(problems, scheduler.wake)
        self._raise_errors = raise_errors
        self._ended: deque[SearchFuture] = deque()
        self._late: Exception | None = None

    @property
    def usage(self) -> Usage:
        """What this run has spent so far, failed and dropped searches included; nothing for stored plans."""
        return self._scheduler.usage

    @property
    def stopped(self) -> str | None:
        """Why the run ended before its problems did; None if it did not."""
        return self._scheduler.stopped

    def __iter__(self) -> Run:
        """Return the run itself."""
        return self

    def __next__(self) -> Plan:
        """Return the next finished plan, working until there is one."""
        try:
            while (future := self._next_ended()) is None and self._turn():
                pass
        except BaseException as error:
            self.stop("interrupted" if isinstance(error, KeyboardInterrupt) else str(error))
            if not isinstance(error, Exception) or (future := self._next_ended()) is None:
                raise
            self._late = error
        if future is None:
            self.close()
            if self._late is not None:
                late, self._late = self._late, None
                raise late
            raise StopIteration
        if self._raise_errors and future.failure is not None:
            self.stop(str(future.failure))
            raise future.failure
        return future.result()

    def _next_ended(self) -> SearchFuture | None:
        while self._ended:
            future = self._ended.popleft()
            # A search that was dropped when the run ended has no plan.
            if future.exception() is None:
                return future
        return None

    def _turn(self) -> bool:
        """Do one piece of work; False when there is nothing left to do."""
        scheduler, source = self._scheduler, self._source
        while scheduler.has_capacity and not self._ended and (problem := source.poll()) is not None:
            # Not a method of this object: a run that is no longer referenced closes at once.
            scheduler.submit(problem).add_done_callback(self._ended.append)  # type: ignore[arg-type]
        if self._ended or scheduler.turn() or self._ended:
            return True
        if scheduler.closed or source.exhausted:
            return False
        scheduler.wait()
        return True

    def stop(self, reason: str = "stopped") -> None:
        """End the run: open searches are dropped, what is finished is still returned."""
        self._scheduler.stop(reason)
        self.close()

    def close(self) -> None:
        """Drop open searches and let the engines and the store go; safe to call twice."""
        self._source.close()
        self._scheduler.close()

    def __enter__(self) -> Run:
        """Return the run itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the run."""
        self.close()

    def __del__(self) -> None:
        """Close a run that nobody iterates any more."""
        if hasattr(self, "_late"):
            self.close()


__all__ = ["Run", "run"]
