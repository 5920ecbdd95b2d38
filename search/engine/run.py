"""The driver: many searches at once over one engine and one critic.

A search waits for its own replies and for nothing else. Requests of all searches
flow into the engine as they arise; states to be scored gather while the engine is
busy and go to the critic together, at the latest when the engine would run dry.
What a search gets depends on its problem and on the seed, never on what runs
beside it::

    backlog -> [at most `concurrency` searches] -> finished -> store -> caller
                  |  ^                |  ^
                  v  |                v  |
                policy port         critic port
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sized
from dataclasses import replace
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any

from mas_gym.dynamics import Dynamics
from mas_gym.errors import ConfigError, DataError, EngineUnavailableError, SearchError
from mas_gym.graph import MAS
from mas_gym.policies.base import AsyncPolicy, Policy
from mas_gym.tasks.base import Problem
from search.engine import events
from search.engine.active import ActiveSearch, Sampled, Setup
from search.engine.ports import BATCH_DONE, CriticPort, Events, PolicyPort, ScoringJob, policy_port, settled_policy
from search.engine.progress import Listener, Progress, listener
from search.engine.settings import Budget, Sampling
from search.grading import Grader
from search.plan import Plan, Usage
from search.protocol import Critic, Planner, bind_planner
from search.store import RunRecord, Store, open_record

TELL_SECONDS = 0.25
"""How often at least progress is told while no search ends, for one search can take minutes."""


def run(
    planner: Planner | str,
    problems: Iterable[Problem],
    *,
    mas: MAS | str,
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
) -> Run:
    """Search every problem and stream the plans as they are finished.

    Args:
        planner: The algorithm, or its short form such as ``"mcts:10,3"``.
        problems: A task or a slice of one, or any iterable of problems with distinct ids; read as searches start.
        mas: The system, or the name or path that `mas_gym.load_mas` takes.
        policy: Writes the messages; by default what the MAS names under ``policies``.
        critic: Scores states; not needed by planners that ask for no values.
        seed: With the problem's id it determines every sample and every choice of a search.
        concurrency: How many searches are open at once; memory grows with it, results do not depend on it.
        training: Answer `Reward` requests with the true reward, for data generation; never at evaluation.
        sampling: Temperature, top-p and cap; the paper's by default.
        budget: Limits of each search. A search that meets one returns the best it has, or fails.
        run_budget: Limits of the whole run, which ends when they are met; open searches are dropped. With a store,
            what earlier calls have spent on the run counts too.
        store: A file (or an open `Store`) to which each finished search is written at once. Searches that it
            already holds are not repeated: their plans are read back. Failed ones are tried again.
        run_name: A name for this run in the store, which then refuses to go on with other settings.
        progress: True for a bar on standard error; or a function that is called with a `Progress` when a search
            ends, and a few times a second in between.

    Returns:
        An iterator of plans. After Ctrl-C or a stop it still hands out what was finished.

    Raises:
        ConfigError: An argument does not fit, such as a critic that the planner cannot use.
        StoreError: The store is of another kind, in use, or holds a run of that name with other settings.
    """
    from search.registry import load_planner

    if isinstance(planner, str):
        planner = load_planner(planner)
    if not isinstance(planner, Planner):
        raise ConfigError(f"expected a planner with a plan method, got {type(planner).__name__}")
    if concurrency < 1:
        raise ConfigError(f"expected concurrency >= 1, got {concurrency}")
    if not isinstance(mas, MAS):
        from mas_gym.loading import load_mas

        mas = load_mas(mas)
    policy = settled_policy(mas, policy)
    settled = bind_planner(planner, critic, training)
    setup = Setup(settled, Dynamics(mas), critic, seed, sampling or Sampling(), budget or Budget(), training)
    record = open_record(store, setup, problems, policy, run_name) if store is not None else None
    return Run(setup, problems, policy, concurrency, run_budget or Budget(), record, listener(progress))


class Run(Iterator[Plan]):
    """A run in progress; made by `run`.

    Attributes:
        usage: What this run has spent so far, failed and dropped searches included; nothing for stored plans.
        stopped: Why the run ended before its problems did; None if it did not.
    """

    def __init__(
        self,
        setup: Setup,
        problems: Iterable[Problem],
        policy: Policy | AsyncPolicy,
        concurrency: int,
        budget: Budget,
        record: RunRecord | None,
        listen: Listener | None,
    ) -> None:
        """Open the engines; nothing is asked of them yet."""
        self.stopped: str | None = None
        self._setup, self._problems, self._record, self._listen = setup, problems, record, listen
        self._concurrency, self._budget = concurrency, budget
        self._source: Iterator[Problem] | None = iter(problems)
        total = len(problems) if isinstance(problems, Sized) else None
        self._events: Events = SimpleQueue()
        self._policy: PolicyPort = policy_port(policy, self._events)
        self._critic = None if setup.critic is None or setup.critic.free else CriticPort(setup.critic, self._events)
        self._active: set[ActiveSearch] = set()
        self._open: dict[Hashable, tuple[ActiveSearch, Sampled | None]] = {}
        self._finished: deque[Plan] = deque()
        self._seen: set[str] = set()
        self._keys = self._calls = 0
        self._ended = Usage()
        self._earlier = record.spent if record is not None else Usage()
        self._started = self._told = perf_counter()
        self._error: Exception | None = None
        self._closed = False
        self._progress = Progress(total=total)
        events.run_started(setup, total, policy=policy.name, concurrency=concurrency)

    @property
    def usage(self) -> Usage:
        """What this run has spent so far."""
        spent = self._ended
        for search in self._active:
            spent += search.usage
        return replace(spent, seconds=perf_counter() - self._started)

    def __iter__(self) -> Run:
        """Return the run itself."""
        return self

    def __next__(self) -> Plan:
        """Return the next finished plan, working until there is one."""
        try:
            while not self._finished:
                if not self._turn():
                    break
        except BaseException as error:
            self.stopped = self.stopped or ("interrupted" if isinstance(error, KeyboardInterrupt) else str(error))
            self.close()
            if not isinstance(error, Exception) or not self._finished:
                raise
            self._error = error
        if self._finished:
            return self._finished.popleft()
        self.close()
        if self._error is not None:
            late, self._error = self._error, None
            raise late
        raise StopIteration

    def stop(self, reason: str = "stopped") -> None:
        """End the run: open searches are dropped, what is finished is still handed out."""
        self.stopped = self.stopped or reason
        self.close()

    def close(self) -> None:
        """Drop open searches and let the engines and the store go; safe to call twice."""
        if self._closed:
            return
        self._closed, self._source = True, None
        if self._record is not None:
            # Calls that were under way were asked for, though nobody waits for them.
            asked = replace(self.usage, agent_calls=max(self._calls, self.usage.agent_calls))
            self._record.spend(asked - self._ended)
        for search in self._active:
            self._ended += search.usage
        self._active.clear()
        self._open.clear()
        self._policy.close()
        if self._critic is not None:
            self._critic.close()
        if self._record is not None:
            self._record.close()
        events.run_ended(self._snapshot())
        if self._listen is not None:
            self._listen.close(self._snapshot())

    def __enter__(self) -> Run:
        """Return the run itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the run."""
        self.close()

    def __del__(self) -> None:
        """Close a run that nobody iterates any more."""
        if not getattr(self, "_closed", True):
            self.close()

    def _turn(self) -> bool:
        """Do one piece of work; False when there is nothing left to do."""
        if self._closed:
            return False
        self._admit()
        if not self._active:
            return bool(self._finished)
        if self._over_budget(0):
            return False
        self._expire()
        if not self._finished:
            self._work()
            if self._listen is not None and perf_counter() - self._told > TELL_SECONDS:
                self._tell(self._listen)
        return True

    def _admit(self) -> None:
        """Start searches, or read them back, until enough are open or something is finished."""
        while self._source is not None and len(self._active) < self._concurrency and not self._finished:
            problem = next(self._source, None)
            if problem is None:
                self._source = None
                return
            if problem.id in self._seen:
                raise DataError(f"two problems have the id {problem.id!r}; ids must be distinct within a run")
            self._seen.add(problem.id)
            stored = self._record.load(problem) if self._record is not None else None
            if stored is not None:
                self._hand_over(stored, fresh=False)
                continue
            search = ActiveSearch(self._setup, problem, Grader(self._problems, problem))
            self._active.add(search)
            self._advance(search)

    def _advance(self, search: ActiveSearch) -> None:
        """Run a search to its next requests and send them off."""
        while True:
            work = search.advance()
            if work is None:
                self._end(search)
                return
            wanted = sum(len(sampled.request.seeds) for sampled in work.sampling)
            if self._over_budget(wanted):
                return
            self._calls += wanted
            for sampled in work.sampling:
                self._policy.submit(self._key(search, sampled), sampled.request)
            if not work.scoring:
                return
            if self._critic is not None:
                self._critic.submit(ScoringJob(self._key(search, None), work.scoring))
                return
            self._score_free(search, work.scoring)
            if search.plan is not None:
                self._end(search)
                return
            if search.waiting:
                return

    def _over_budget(self, wanted: int) -> bool:
        """Stop the run if its budget forbids ``wanted`` more agent calls."""
        if self._budget == Budget():
            return False
        # Calls that are under way are spent, though no search has been billed for them yet.
        reason = self._budget.spent(self._earlier + replace(self.usage, agent_calls=self._calls), wanted)
        if reason:
            self.stop(reason)
        return bool(reason)

    def _score_free(self, search: ActiveSearch, contexts: Any) -> None:
        critic = self._setup.critic
        assert critic is not None
        try:
            search.scored(critic.score(contexts))
        except Exception as error:
            search.fail(error)

    def _key(self, search: ActiveSearch, sampled: Sampled | None) -> int:
        self._keys += 1
        self._open[self._keys] = (search, sampled)
        return self._keys

    def _work(self) -> None:
        """Take what has come in, else score, else generate, else wait."""
        if self._drain():
            return
        critic, policy = self._critic, self._policy
        if critic is not None and critic.waiting:
            ready = critic.works and (critic.waiting >= critic.max_batch or policy.hungry)
            if ready or critic.idle_thread:
                self._deliver(critic.step())
                return
        if policy.works and policy.busy:
            self._deliver(policy.step())
            return
        if not self._open:
            raise SearchError("searches are open and wait for nothing: a policy or critic has lost a request")
        try:
            self._take(self._events.get(timeout=self._patience()))
        except Empty:
            return

    def _drain(self) -> bool:
        """Take all outcomes that other threads have left; say whether there were any."""
        taken = False
        while True:
            try:
                event = self._events.get_nowait()
            except Empty:
                return taken
            self._take(event)
            taken = True

    def _take(self, event: tuple[Hashable, object]) -> None:
        if event[0] == BATCH_DONE and self._critic is not None:
            self._critic.done()
        else:
            self._deliver([event])

    def _deliver(self, outcomes: Iterable[tuple[Hashable, object]]) -> None:
        """Hand outcomes to their searches and run those that have all they wait for."""
        for key, outcome in outcomes:
            if isinstance(outcome, EngineUnavailableError):
                raise outcome
            if key not in self._open:
                continue
            search, sampled = self._open.pop(key)
            if search not in self._active:
                continue
            try:
                if sampled is None:
                    search.scored(outcome)
                else:
                    search.sampled(sampled, outcome)
            except Exception as error:
                search.fail(error)
                self._end(search)
                continue
            if not search.waiting:
                self._advance(search)

    def _end(self, search: ActiveSearch) -> None:
        """Store and queue a search's plan."""
        assert search.plan is not None
        self._active.discard(search)
        self._ended += search.plan.usage
        # Stored first: what ends the program in between costs no finished search.
        if self._record is not None:
            self._record.save(search.problem, search.plan, search.made)
        self._hand_over(search.plan, fresh=True)

    def _hand_over(self, plan: Plan, fresh: bool) -> None:
        self._finished.append(plan)
        self._progress = self._progress.with_plan(plan, fresh)
        events.search_ended(plan, fresh)
        if self._listen is not None:
            self._tell(self._listen)

    def _tell(self, listen: Listener) -> None:
        self._told = perf_counter()
        listen.show(self._snapshot())

    def _snapshot(self) -> Progress:
        return self._progress.with_run(self.usage, len(self._active), self.stopped)

    def _deadlines(self) -> list[float]:
        deadlines = [d for search in self._active if (d := search.deadline) is not None]
        if self._budget.seconds is not None:
            deadlines.append(self._started + self._budget.seconds - self._earlier.seconds)
        return deadlines

    def _patience(self) -> float | None:
        """Return how long to wait for other threads at most; None for as long as it takes."""
        deadlines = self._deadlines()
        return max(0.0, min(deadlines) - perf_counter()) if deadlines else None

    def _expire(self) -> None:
        """Stop the searches whose seconds are spent."""
        if self._setup.budget.seconds is None:
            return
        now = perf_counter()
        for search in [s for s in self._active if s.deadline is not None and s.deadline <= now]:
            search.stop(f"budget of {self._setup.budget.seconds:g} seconds spent")
            self._end(search)


__all__ = ["Run", "run"]
