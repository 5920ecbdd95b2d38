"""Many engines on one or many machines: searches spread over Ray actors, one writer, the same rows.

Each actor owns an engine with a scheduler of its own. An actor with capacity gets the next
problems; an actor that dies is replaced and its open problems are searched again, which
gives the same plans, because a plan depends on its problem and the seed alone.
"""

from __future__ import annotations

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

from mas_gym.errors import ConfigError, EngineUnavailableError, MissingDependencyError
from mas_gym.graph import MAS
from mas_gym.policies.base import AsyncPolicy, Meter, Policy
from mas_gym.tasks.base import Problem
from search.engine.journal import Journal, Listener, Progress, listener
from search.engine.source import Source
from search.engine.worker import Worker
from search.plan import Plan, Usage
from search.protocol import Critic, Planner
from search.setup import Budget, ProgramSource, Sampling, make_setup, read_system, resolve_policy
from search.store import Store, open_record

logger = logging.getLogger("search")

_SOURCE_SECONDS = 0.1
"""How often to look for a problem of a slow iterator while actors are at work."""


@dataclass(frozen=True)
class Fleet:
    """Where the engines run.

    Attributes:
        actors: Number of engines; actors beyond the cluster's capacity join when resources free up.
        gpus: GPUs of each, fractions allowed.
        cpus: CPU cores of each.
        address: Of a Ray cluster, or ``"local"`` to start one on this machine; None uses a running one, or starts one.
        replacements: Maximum number of dead actors to replace; one more ends the run.
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


@dataclass(eq=False)
class _Member:
    """An actor as the head sees it, with the call that ends when it has loaded, and its searches by call."""

    actor: Any
    number: int
    loading: Any
    open: dict[Any, Problem] = field(default_factory=dict)


def run_ray(
    planner: Planner | str,
    problems: Iterable[Problem],
    *,
    mas: MAS | str | None = None,
    program: ProgramSource | None = None,
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
        planner: As for `search.run`, like every argument not described here.
        problems: A task or a slice of one, or any iterable of problems with distinct ids.
        mas: As for `search.run`.
        program: As for `search.run`.
        make_policy: Loads the policy inside an actor, such as ``functools.partial(load_policy, "vllm:PATH")``; by
            default the one that the MAS names under ``policies``.
        make_critic: Loads the critic there.
        seed: As for `search.run`.
        concurrency: Searches open at once in each actor.
        training: As for `search.run`.
        sampling: As for `search.run`.
        budget: As for `search.run`.
        run_budget: Limits of the whole run, compared with what ended searches have spent; open ones are dropped.
        store: Written by this process alone.
        run_name: As for `search.run`.
        progress: As for `search.run`; usage is that of the searches that have ended.
        fleet: How many actors, with what, and where.

    Raises:
        MissingDependencyError: Ray is not installed.
        ConfigError: An argument cannot be pickled and sent to the actors.
        EngineUnavailableError: More actors died than may be replaced; what is finished is in the store.
    """
    from search.registry import load_planner

    algorithm = load_planner(planner) if isinstance(planner, str) else planner
    system, loaded = read_system(mas, program)
    make_policy = make_policy or partial(resolve_policy, system, None)
    fleet = fleet or Fleet()
    if isinstance(problems, Sized):
        # With few problems, the first actors to load leave the others their share.
        concurrency = max(1, min(concurrency, math.ceil(len(problems) / fleet.actors)))
    more: dict[str, Any] = {"seed": seed, "sampling": sampling, "budget": budget, "training": training}
    setup = partial(make_setup, algorithm, system if loaded is None else None, program=loaded, **more)
    listen = listener(progress)
    _connect(fleet.address)
    # The task without its problems, for its grading alone.
    task = problems[:0] if hasattr(problems, "grade") else None  # type: ignore[index]
    _check_picklable(planner=setup, task=task, make_policy=make_policy, make_critic=make_critic)
    head = _Head(fleet, (setup, concurrency, task, make_policy, make_critic), problems, run_budget or Budget())
    return head.run(store, run_name, listen)


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


def _check_picklable(**arguments: Any) -> None:
    from ray import cloudpickle

    for name, value in arguments.items():
        try:
            cloudpickle.dumps(value)
        except Exception as error:
            raise ConfigError(
                f"{name}: expected something that can be pickled and sent to the actors, got {_line_of(error)}; "
                "pass a function of a module, or functools.partial of one, that opens files and connections itself"
            ) from None


class _Head:
    """Gives problems to actors, collects plans, and replaces dead actors."""

    def __init__(self, fleet: Fleet, arguments: tuple[Any, ...], problems: Iterable[Problem], budget: Budget) -> None:
        self._fleet, self._arguments, self._problems, self._budget = fleet, arguments, problems, budget
        concurrency: int = arguments[1]
        # An actor holds a little more than it can have open.
        self._ahead = concurrency + concurrency // 8 + 1
        self._source = Source(problems, lambda: None)
        self._again: deque[Problem] = deque()
        self._members: list[_Member] = []
        self._meters: dict[str, Meter] = {}
        self._hired = self._deaths = 0
        self._stored = self._loaded = False
        self._spent, self._started = Usage(), perf_counter()

    def run(self, store: Any, run_name: str | None, listen: Listener | None) -> Iterator[Plan]:
        import ray

        self._stored = store is not None
        journal: Journal | None = None
        stopped = None
        try:
            for _ in range(self._fleet.actors):
                self._hire()
            journal = self._open_journal(store, run_name, listen)
            while True:
                yield from self._supply(journal)
                if self._source.exhausted and not self._again and not any(m.open for m in self._members):
                    return
                stopped = self._budget.spent(journal.earlier + self._usage, 1)
                if stopped is not None:
                    return
                yield from self._collect(journal)
        finally:
            self._source.close()
            for member in self._members:
                ray.kill(member.actor)
            if journal is not None:
                journal.close(self._usage, 0, stopped)

    @property
    def _usage(self) -> Usage:
        return replace(self._spent, seconds=perf_counter() - self._started)

    def _hire(self) -> None:
        import ray

        actor_class = ray.remote(Worker).options(
            num_cpus=self._fleet.cpus, num_gpus=self._fleet.gpus, max_concurrency=self._ahead + 1, max_restarts=0
        )
        self._hired += 1
        actor = actor_class.remote(*self._arguments)
        self._members.append(_Member(actor, self._hired, actor.facts.remote(self._stored)))

    def _open_journal(self, store: Any, run_name: str | None, listen: Listener | None) -> Journal:
        """Wait for the first actor that has loaded, which says what policy and critic are."""
        while not self._loaded:
            _, facts = self._hear(None)
        policy, critic = facts
        setup = self._arguments[0](None if critic is None else SimpleNamespace(**critic, score=list))
        record = None
        if store is not None:
            engines = SimpleNamespace(**policy, meters=self._meters)
            record = open_record(store, setup, self._problems, engines, run_name)
        total = len(self._problems) if isinstance(self._problems, Sized) else None
        facts = {"policy": policy["name"], "actors": self._fleet.actors}
        return Journal(setup, total=total, record=record, listener=listen, **facts)

    def _supply(self, journal: Journal) -> Iterator[Plan]:
        """Give problems to actors with capacity, yield the plans that are stored, and let actors go at the end."""
        import ray

        for member in list(self._members):
            while member.loading is None and len(member.open) < self._ahead:
                problem = self._again.popleft() if self._again else self._source.poll()
                if problem is None:
                    break
                stored = journal.lookup(problem)
                if stored is None:
                    member.open[member.actor.search.remote(problem)] = problem
                else:
                    self._show_progress(journal)
                    yield stored
            if self._source.exhausted and not self._again and member.loading is None and not member.open:
                self._members.remove(member)
                ray.kill(member.actor)

    def _collect(self, journal: Journal) -> Iterator[Plan]:
        """Wait for an actor to end a search, to load or to die."""
        timeouts = [] if self._source.exhausted else [_SOURCE_SECONDS]
        if self._budget.seconds is not None:
            timeouts.append(max(0.0, self._budget.seconds - (journal.earlier + self._usage).seconds))
        problem, found = self._hear(min(timeouts, default=None))
        if problem is not None:
            journal.ended(problem, found.plan, found.samples)
            self._spent += found.plan.usage
            self._show_progress(journal)
            yield found.plan

    def _show_progress(self, journal: Journal) -> None:
        if journal.watched:
            journal.update(self._usage, sum(len(member.open) for member in self._members))

    def _hear(self, timeout: float | None) -> tuple[Problem | None, Any]:
        """Return an actor's next answer, with the problem if it is a search's; None twice if none came."""
        import ray

        calls = {call: m for m in self._members for call in ([*m.open] if m.loading is None else [m.loading])}
        heard, _ = ray.wait(list(calls), num_returns=1, timeout=timeout)
        if not heard:
            return None, None
        [call] = heard
        member = calls[call]
        try:
            answer = ray.get(call)
        except ray.exceptions.RayError as error:
            self._replace(member, error)
            return None, None
        if member.loading is not None:
            member.loading, self._loaded = None, True
            return None, answer
        self._meters.update({f"{member.number} {name}": meter for name, meter in answer.meters.items()})
        return member.open.pop(call), answer

    def _replace(self, member: _Member, error: Exception) -> None:
        """Replace a dead actor; its open problems come first. What the first to load raises is raised here."""
        import ray

        cause = getattr(error, "cause", None)
        if isinstance(cause, Exception) and not self._loaded:
            raise cause from error
        self._members.remove(member)
        ray.kill(member.actor)
        self._again.extend(member.open.values())
        self._deaths += 1
        if self._deaths > self._fleet.replacements:
            raise EngineUnavailableError(
                f"{self._deaths} actors died, one more than may be replaced; the last: {cause or _line_of(error)}. "
                "Fix the cause and repeat the command; what a run with a store has finished is kept in it"
            ) from error
        logger.warning("an actor died and is replaced, %d searches start again: %s", len(member.open), _line_of(error))
        if member.open or not self._source.exhausted or not self._members:
            self._hire()


def _line_of(error: object) -> str:
    """Return the line of Ray's long messages that says what happened: a traceback's last, else the first."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1] if any("Traceback" in line or "creation task" in line for line in lines) else lines[0]


__all__ = ["Fleet", "run_ray"]
