"""Many engines on one or many machines: searches spread over Ray actors, one writer, the same rows.

Each actor owns an engine and runs the ordinary driver. A free actor takes the next
problems; an actor that dies is replaced and its open problems are searched again,
which gives the same plans, because a plan depends on its problem and the seed alone.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from types import SimpleNamespace
from typing import Any

from mas_gym.errors import ConfigError, DataError, EngineUnavailableError, MissingDependencyError
from mas_gym.graph import MAS
from mas_gym.policies.base import AsyncPolicy, Policy
from mas_gym.policies.meter import Meter
from mas_gym.tasks.base import Problem
from search.engine import events
from search.engine.ports import settled_policy
from search.engine.progress import Listener, Progress, listener
from search.engine.settings import Budget, Sampling
from search.engine.worker import READY, Job, Worker, setup_of
from search.plan import Plan, Usage
from search.protocol import Critic, Planner
from search.store import Store, open_record

logger = logging.getLogger("search")


@dataclass(frozen=True)
class Fleet:
    """Where the engines run.

    Attributes:
        actors: Engines wanted; those that the cluster has no room for join when it has.
        gpus: GPUs of each, fractions allowed.
        cpus: CPU cores of each.
        address: Of a Ray cluster, or ``"local"`` to start one on this machine; None uses a running one, or starts one.
        replacements: Deaths of actors to make up for; one more ends the run.
    """

    actors: int = 2
    gpus: float = 0.0
    cpus: float = 1.0
    address: str | None = None
    replacements: int = 8

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.actors < 1 or self.gpus < 0 or self.cpus < 0 or self.replacements < 0:
            raise ConfigError(f"expected at least one actor and no negative numbers, got {self}")


@dataclass
class _Member:
    """An actor as the head sees it."""

    actor: Any
    stream: Any
    number: int
    ready: bool = False
    told_last: bool = False
    parcels: int = 0
    open: dict[str, Problem] = field(default_factory=dict)


def run_ray(
    planner: Planner | str,
    problems: Iterable[Problem],
    *,
    mas: MAS | str,
    make_policy: Callable[[], Policy | AsyncPolicy] | None = None,
    make_critic: Callable[[], Critic] | None = None,
    seed: int = 42,
    concurrency: int = 64,
    training: bool = False,
    sampling: Sampling | None = None,
    budget: Budget | None = None,
    run_budget: Budget | None = None,
    store: Store | str | os.PathLike[str] | None = None,
    run_name: str | None = None,
    progress: bool | Callable[[Progress], None] = False,
    fleet: Fleet | None = None,
) -> Iterator[Plan]:
    """Search every problem on a fleet of actors and stream the plans as they are finished.

    Args:
        planner: As for `search.run`, like all that is not listed here.
        problems: A task or a slice of one, or any iterable of problems with distinct ids.
        mas: The system.
        make_policy: Loads the policy inside an actor, such as ``functools.partial(load_policy, "vllm:PATH")``; by
            default what the MAS names under ``policies``.
        make_critic: Loads the critic there.
        seed: As for `search.run`.
        concurrency: Searches open at once in each actor.
        training: As for `search.run`.
        sampling: As for `search.run`.
        budget: As for `search.run`.
        run_budget: Limits of the whole run, met by the searches that have ended; open ones are dropped.
        store: Written by this process alone.
        run_name: As for `search.run`.
        progress: As for `search.run`; usage is that of the searches that have ended.
        fleet: How many actors, with what, and where.

    Raises:
        MissingDependencyError: Ray is not installed.
        EngineUnavailableError: More actors died than may be replaced; what is finished is in the store.
    """
    from mas_gym.loading import load_mas
    from search.registry import load_planner

    algorithm = load_planner(planner) if isinstance(planner, str) else planner
    system = load_mas(mas)
    make_policy = make_policy or partial(settled_policy, system, None)
    fleet = fleet or Fleet()
    if isinstance(problems, Sized):
        # Where there are few problems, an actor that is ready first leaves the others theirs.
        concurrency = max(1, min(concurrency, math.ceil(len(problems) / fleet.actors)))
    job = Job(algorithm, system, seed, concurrency, training, sampling or Sampling(), budget or Budget())
    _connect(fleet.address)
    head = _Head(job, problems, make_policy, make_critic, fleet, run_budget or Budget(), listener(progress))
    return head.run(store, run_name)


def _connect(address: str | None) -> None:
    """Join the cluster, or start one, if this process has not."""
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError("running on a fleet needs Ray: pip install 'mas-gym[ray]'") from error
    if not ray.is_initialized():
        # An actor is the search itself: at Ray's default niceness any other program on the machine would starve it.
        os.environ.setdefault("RAY_worker_niceness", "0")
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)


class _Head:
    """Gives problems out, takes plans in, and makes up for the dead."""

    def __init__(
        self,
        job: Job,
        problems: Iterable[Problem],
        make_policy: Any,
        make_critic: Any,
        fleet: Fleet,
        budget: Budget,
        listen: Listener | None,
    ) -> None:
        self.job, self.problems, self.fleet, self._listen = job, problems, fleet, listen
        self._budget = budget
        self._stopped: str | None = None
        self._arguments = (job, _graders(problems), make_policy, make_critic)
        self._source = iter(problems)
        self._again: deque[Problem] = deque()
        self._members: list[_Member] = []
        self._numbers = itertools.count(1)
        self._meters: dict[str, Meter] = {}
        self._seen: set[str] = set()
        self._deaths = 0
        self._dry = False
        self._progress = Progress(total=len(problems) if isinstance(problems, Sized) else None)
        self._spent, self._started = Usage(), perf_counter()

    def run(self, store: Any, run_name: str | None) -> Iterator[Plan]:
        import ray

        try:
            for _ in range(self.fleet.actors):
                self._hire()
            try:
                policy, critic = ray.get(self._members[0].actor.facts.remote(store is not None))
            except ray.exceptions.RayError as error:
                raise _cause(error) from error
            told: Any = None if critic is None else SimpleNamespace(**critic)
            setup = setup_of(self.job, told)
            events.run_started(setup, self._progress.total, policy=policy["name"], actors=self.fleet.actors)
            record = None
            if store is not None:
                engines = SimpleNamespace(**policy, meters=self._meters)
                record = open_record(store, setup, self.problems, engines, run_name)
            try:
                yield from self._collect(record)
            finally:
                if record is not None:
                    record.close()
        finally:
            for member in self._members:
                ray.kill(member.actor)
            events.run_ended(self._snapshot())
            if self._listen is not None:
                self._listen.close(self._snapshot())

    def _tell(self, plan: Plan, fresh: bool) -> None:
        events.search_ended(plan, fresh)
        self._progress = self._progress.with_plan(plan, fresh)
        if fresh:
            self._spent += plan.usage
        if self._listen is not None:
            self._listen.show(self._snapshot())

    def _snapshot(self) -> Progress:
        spent = replace(self._spent, seconds=perf_counter() - self._started)
        return self._progress.with_run(spent, sum(len(member.open) for member in self._members), self._stopped)

    def _hire(self) -> None:
        import ray

        actor_class = ray.remote(Worker).options(
            num_cpus=self.fleet.cpus, num_gpus=self.fleet.gpus, max_concurrency=3, max_restarts=0
        )
        actor = actor_class.remote(*self._arguments)
        stream = actor.work.options(num_returns="streaming").remote()
        self._members.append(_Member(actor, stream, next(self._numbers)))

    def _collect(self, record: Any) -> Iterator[Plan]:
        import ray

        while True:
            yield from self._share(record)
            if self._dry and not self._again and not any(member.open for member in self._members):
                return
            usage = self._snapshot().usage
            if record is not None:
                usage += record.spent
            self._stopped = self._budget.spent(usage, 1)
            if self._stopped is not None:
                return
            left = None if self._budget.seconds is None else self._budget.seconds - usage.seconds
            heard, _ = ray.wait([member.stream for member in self._members], num_returns=1, timeout=left)
            if not heard:
                continue
            member = next(member for member in self._members if member.stream is heard[0])
            try:
                found = ray.get(next(member.stream))
            except StopIteration:
                self._members.remove(member)
                ray.kill(member.actor)
                continue
            except ray.exceptions.RayError as error:
                self._replace(member, error)
                continue
            if found == READY:
                member.ready = True
                continue
            del member.open[found.problem.id]
            self._meters.update({f"{member.number} {name}": meter for name, meter in found.meters.items()})
            if record is not None:
                record.save(found.problem, found.plan, found.made)
            self._tell(found.plan, fresh=True)
            yield found.plan

    def _share(self, record: Any) -> Iterator[Plan]:
        """Keep every actor supplied a little beyond what it can have open; plans in the store are handed out."""
        ahead = self.job.concurrency + self.job.concurrency // 8 + 1
        for member in self._members:
            given: list[Problem | None] = []
            while member.ready and not member.told_last and len(member.open) < ahead:
                problem = self._again.popleft() if self._again else self._next()
                if problem is None:
                    self._dry = member.told_last = True
                    given.append(None)
                    break
                stored = record.load(problem) if record is not None else None
                if stored is not None:
                    self._tell(stored, fresh=False)
                    yield stored
                    continue
                member.open[problem.id] = problem
                given.append(problem)
            if given:
                member.actor.give.remote(member.parcels, given)
                member.parcels += 1

    def _next(self) -> Problem | None:
        problem = next(self._source, None)
        if problem is not None:
            if problem.id in self._seen:
                raise DataError(f"two problems have the id {problem.id!r}; ids must be distinct within a run")
            self._seen.add(problem.id)
        return problem

    def _replace(self, member: _Member, error: Exception) -> None:
        """Make up for a dead actor; its open problems come first."""
        import ray

        self._members.remove(member)
        ray.kill(member.actor)
        self._again.extend(member.open.values())
        self._deaths += 1
        if self._deaths > self.fleet.replacements:
            raise EngineUnavailableError(
                f"{self._deaths} actors died, one more than may be replaced; the last: {_cause(error)}. "
                "Mend the cause and repeat the command; what a run with a store has finished is kept in it"
            ) from error
        logger.warning("an actor died and is replaced, %d searches begin anew: %s", len(member.open), _said(error))
        if member.open or not self._dry:
            self._hire()


def _graders(problems: Any) -> Any:
    """Return the task without its problems, for its grading alone."""
    return problems[:0] if hasattr(problems, "grade") else None


def _cause(error: Any) -> Exception:
    """Return what an actor raised, if it told."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, Exception) else EngineUnavailableError(f"an actor failed: {_said(error)}")


def _said(error: object) -> str:
    """Return the line of Ray's long messages that says what happened: a traceback's last, else the first."""
    lines = str(error).strip().splitlines()
    return lines[-1] if any("Traceback" in line or "creation task" in line for line in lines) else lines[0]


__all__ = ["Fleet", "run_ray"]
