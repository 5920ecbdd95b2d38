"""`run_ray`: searches on Ray actors, each with its own engine, on one or many machines, with identical results.

A fleet has the interface of one `Engine`, and each actor has its own scheduler. An actor with capacity receives the
next problem. An actor that dies is replaced and its open problems are searched again. This gives the same plans,
because a plan depends only on its problem and the seed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter, sleep
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from mas_gym.errors import ConfigError, EngineUnavailableError, need
from mas_gym.internal.json_types import JSONObject
from mas_gym.policies import load_policy
from mas_gym.policies.base import AsyncPolicy, Policy, as_policy
from mas_gym.policies.usage_meters import Meter
from mas_gym.systems.graph import MAS
from mas_gym.tasks.base import Problem, Task, as_problems
from search.budget import Allowance, Budget, Cost
from search.engine.progress import Journal, Listener, Progress, listener
from search.engine.run import Run
from search.engine.scheduler import Scheduler, SearchFuture
from search.plan import Plan
from search.planners.registry import load_planner
from search.prices import Prices, PricesSource, as_prices
from search.protocol import Critic, Planner, as_critic
from search.sampling import SampleRecord, Sampling
from search.setup import (
    FROM_CONFIG,
    FromConfig,
    ProgramSource,
    Setup,
    check_training,
    config_policies,
    make_setup,
    priced_setup,
    read_system,
)
from search.store import Store
from search.store.resume import open_record
from search.store.run_identity import engine_identity
from search.usage import Usage

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle


def run_ray(  # noqa: D417 - the other arguments are those of `search.run`
    planner: Planner | str,
    problems: Iterable[Problem],
    *,
    mas: MAS | str | None = None,
    program: ProgramSource | None = None,
    make_policy: Callable[[], Policy | AsyncPolicy] | FromConfig | None = None,
    make_critic: Callable[[], Critic] | None = None,
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
    fleet: Fleet | None = None,
) -> Run:
    """Search every problem on a fleet of actors and yield plans as searches finish.

    Arguments that are not described here are those of `search.run`.

    Args:
        problems: As for `search.run`; if there are few, they are shared among all actors, including those that load
            later.
        make_policy: Loads the policy inside an actor, such as ``functools.partial(load_policy, "vllm:PATH")``;
            ``"from-config"`` loads the policies in the config of ``mas``.
        make_critic: Loads the critic inside an actor.
        concurrency: Maximum number of open searches in each actor.
        run_budget: As for `search.run`; if the cost reported by the actors exceeds it, open searches are dropped.
        fleet: The number of actors, their resources, and their cluster.

    Raises:
        MissingDependencyError: Ray is not installed.
        TypeError: An argument cannot be pickled and sent to the actors (raised by Ray).
        EngineUnavailableError: More actors died than may be replaced; finished searches are in the store.
    """
    problems = as_problems(problems)
    check_training(problems, training)
    algorithm = load_planner(planner) if isinstance(planner, str) else planner
    system, loaded = read_system(mas, program)
    if make_policy is None or make_policy == FROM_CONFIG:
        make_policy = partial(load_policy, config_policies(system, make_policy))
    fleet, listen = fleet or Fleet(), listener(progress)
    more: dict[str, Any] = {"seed": seed, "sampling": sampling, "budget": budget, "training": training}
    setup = partial(make_setup, algorithm, system if loaded is None else None, program=loaded, **more)
    if isinstance(problems, Sized):
        concurrency = max(1, min(concurrency, math.ceil(len(problems) / fleet.actors)))
    _connect(fleet.address)
    # The task without its problems, used only for grading.
    task = problems[:0] if isinstance(problems, Task) else None
    costs = None if prices is None else as_prices(prices)
    arguments = (setup, concurrency, task, make_policy, make_critic, costs)
    pool = ActorPool(fleet, arguments, stored=store is not None)
    journal = partial(_journal, pool, setup, problems, store, run_name, listen, run_budget or Budget(), costs)
    return Run(pool, iter(problems), journal)


def _journal(
    pool: ActorPool,
    make: Callable[[SimpleNamespace | None], Setup],
    problems: Iterable[Problem],
    store: Store | str | os.PathLike[str] | None,
    run_name: str | None,
    listen: Listener | None,
    run_budget: Budget,
    prices: Prices | None,
) -> Journal:
    """Open the run's journal as soon as one actor has loaded and reported its policy and critic."""
    policy, critic = pool.facts()
    setup = make(None if critic is None else SimpleNamespace(**critic, score=list))
    setup = priced_setup(setup, policy["name"], prices)
    pool.allowance = Allowance(run_budget.priced(setup.rate), setup.budget)
    engine = SimpleNamespace(**policy, meters=pool.meters)
    record = open_record(store, setup, problems, engine, run_name) if store is not None else None
    total = len(problems) if isinstance(problems, Sized) else None
    journal = Journal(setup, total=total, record=record, listener=listen, policy=policy["name"], actors=pool.size)
    pool.earlier = journal.earlier
    return journal


def _connect(address: str | None) -> None:
    """Connect this process to the cluster, or start one, unless it is already connected."""
    ray = need("ray", "running on a fleet", "ray")
    if not ray.is_initialized():
        # Actors run the searches; at Ray's default niceness, other programs on the machine would starve them.
        os.environ.setdefault("RAY_worker_niceness", "0")
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)


# ------------------------------------------------------------------ actors

logger = logging.getLogger("search")

_POLL_SECONDS = 0.1
"""Maximum wait for actors before the run checks its problems, budget and progress again."""
_COSTS_SECONDS = 2.0
"""Maximum wait at the end for the actors' cost of dropped searches."""


def _poll(timeout: float | None) -> float:
    return _POLL_SECONDS if timeout is None else min(timeout, _POLL_SECONDS)


class Costs(NamedTuple):
    """The cost of an actor so far."""

    usage: Usage = Usage()
    calls: int = 0
    meters: Mapping[str, Meter] = {}


class Found(NamedTuple):
    """A finished search: its plan, further data for the store, and the actor's cost so far."""

    plan: Plan
    samples: Mapping[tuple[bytes, str], SampleRecord]
    costs: Costs


class Worker:
    """An engine as an asynchronous Ray actor, so that open calls need no threads."""

    def __init__(
        self,
        setup: Callable[[Critic | None], Setup],
        concurrency: int,
        task: Iterable[Problem] | None,
        make_policy: Callable[[], Policy | AsyncPolicy],
        make_critic: Callable[[], Critic] | None,
        prices: Prices | None,
    ) -> None:
        """Load the engines."""
        self._policy = as_policy(make_policy())
        self._critic = make_critic() if make_critic is not None else None
        priced = priced_setup(setup(self._critic), self._policy.name, prices)
        self._scheduler = Scheduler(priced, self._policy, concurrency=concurrency, task=task).start()

    async def facts(self, stored: bool) -> tuple[JSONObject, JSONObject | None]:
        """Return facts about the policy and the critic, with their identities if the run has a store."""

        def stated(role: str, engine: Policy | AsyncPolicy | Critic) -> JSONObject:
            return engine_identity(role, engine) if stored else {"name": engine.name}

        policy, critic = stated("policy", self._policy), self._critic
        if critic is None:
            return policy, None
        known = as_critic(critic)
        more = {"terminal_only": known.terminal_only, "free": known.free, "scores_actions": known.scores_actions}
        return policy, stated("critic", critic) | more

    async def search(self, problem: Problem) -> Found:
        """Search one problem. Raises `mas_gym.errors.EngineUnavailableError`."""
        future = self._scheduler.submit(problem)
        plan = await asyncio.wrap_future(future)
        return Found(plan, future.samples, await self.costs())

    async def costs(self) -> Costs:
        """Return the cost of this actor so far."""
        return Costs(self._scheduler.usage, self._scheduler.calls, self._policy.meters)


@dataclass(frozen=True)
class Fleet:
    """The number of actors, their resources, and their cluster.

    Attributes:
        actors: Number of actors; those beyond the cluster's capacity start when resources become available.
        gpus: GPUs per actor; fractions are allowed.
        cpus: CPU cores per actor.
        address: Address of a Ray cluster, or ``"local"`` to start one on this machine; None uses a running cluster or
            starts one.
        replacements: Maximum number of dead actors to replace; one more death ends the run.
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
    """An actor with its loading call, and the search and grant of each open call."""

    number: int
    actor: ActorHandle
    loading: ObjectRef
    open: dict[ObjectRef, tuple[SearchFuture, Cost]] = field(default_factory=dict)


class ActorPool:
    """An `Engine` of several actors that assigns problems to actors and replaces dead actors.

    Attributes:
        earlier: Cost of the run in earlier processes, which counts towards the budget.
        stopped: Reason for accepting no more problems; None while problems are accepted.
        closed: Whether no more problems are accepted.
        meters: The last reported usage meters of the actors' policies.
        size: The number of actors.
        allowance: Admits searches; set by the run before the first search, when the models and their prices are known.
    """

    def __init__(self, fleet: Fleet, arguments: tuple[Any, ...], stored: bool) -> None:
        """Start the actors.

        Args:
            fleet: The number of actors and their resources.
            arguments: Arguments of `Worker`; the second is the concurrency.
            stored: Whether the actors report the identities of their engines.
        """
        import ray

        self._ray = ray
        self.earlier, self.closed, self.meters = Usage(), False, dict[str, Meter]()
        self.stopped: str | None = None
        self.size, self.allowance = fleet.actors, Allowance(Budget(), Budget())
        self._fleet, self._arguments, self._stored = fleet, arguments, stored
        concurrency: int = arguments[1]
        # Each actor prefetches slightly more problems than its concurrency.
        self._ahead = concurrency + concurrency // 8 + 1
        self._members: list[_Member] = []
        self._costs: dict[int, Costs] = {}
        self._finished = Usage()
        self._again: deque[SearchFuture] = deque()
        self._facts: tuple[JSONObject, JSONObject | None] | None = None
        self._hired = self._deaths = 0
        self._started = perf_counter()
        for _ in range(fleet.actors):
            self._hire()

    def facts(self) -> tuple[JSONObject, JSONObject | None]:
        """Wait for the first actor to load, and return its facts about the policy and the critic.

        If an actor raises an error before any actor has loaded, it is raised here.
        """
        while self._facts is None:
            self._hear(None)
        return self._facts

    @property
    def usage(self) -> Usage:
        """The last reported usage of all actors, including failed and dropped searches."""
        spent = sum((costs.usage for costs in self._costs.values()), Usage())
        return replace(spent, seconds=perf_counter() - self._started)

    @property
    def calls(self) -> int:
        """Agent calls made so far, including those without a reply."""
        return sum(costs.calls for costs in self._costs.values())

    @property
    def active(self) -> int:
        """Searches in progress."""
        return len(self._again) + sum(len(member.open) for member in self._members)

    @property
    def has_capacity(self) -> bool:
        """Whether a loaded actor has capacity for another search."""
        return not self.closed and not self._again and self._roomiest() is not None and (not self._open or self._pays())

    def observe(self, usage: Usage) -> None:
        """Update the expected cost from a stored search."""
        self.allowance.observe(self.allowance.cost(usage))

    def submit(self, problem: Problem) -> SearchFuture:
        """Assign a problem to the actor with the most free capacity, or queue it until an actor has capacity."""
        future = SearchFuture(problem)
        self._again.append(future)
        self._assign()
        return future

    def turn(self, timeout: float | None = None) -> bool:
        """Wait briefly for an actor to end a search, load or die; return False if no search is open.

        Raises:
            EngineUnavailableError: More actors died than may be replaced.
        """
        if not self.active or self._over_budget():
            return False
        self._hear(_poll(timeout))
        self._assign()
        if self._again and not self._open and not self._pays():
            self.stop(self.allowance.reason(self.earlier + self._finished))
            return False
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Wait briefly for an actor to load; sleep if all actors have loaded."""
        if not self._over_budget():
            self._hear(_poll(timeout))

    def wake(self) -> None:
        """No-op: waits are short polls."""

    def stop(self, reason: str) -> None:
        """Close, and record the reason."""
        self.stopped = self.stopped or reason
        self.close()

    def close(self) -> None:
        """Collect the cost of open searches, and end every actor."""
        if self.closed:
            return
        self.closed, ray = True, self._ray
        # At interpreter exit, Ray may have shut down before this run.
        if not ray.is_initialized():
            return
        try:
            with suppress(ray.exceptions.RayError):
                asked = {member.actor.costs.remote(): member for member in self._members if member.open}
                for call, member in asked.items():
                    self._note(member, ray.get(call, timeout=_COSTS_SECONDS))
        finally:
            for member in self._members:
                ray.kill(member.actor)
            self._members.clear()
            self._again.clear()

    @property
    def _open(self) -> list[Cost]:
        """The grants of the searches assigned to actors."""
        return [granted for member in self._members for _, granted in member.open.values()]

    def _pays(self) -> bool:
        """Return whether the budget covers another search in addition to the assigned ones."""
        if not self.allowance.limited:
            return True
        # The cost of open searches so far is part of their grants.
        held = self._open
        rest = self.allowance.rest(self.earlier + self._finished, ((granted, Cost()) for granted in held))
        return self.allowance.pays(rest, 1, alone=not held)

    def _over_budget(self) -> bool:
        """Stop if the run's time limit has expired, or if searches cost more than expected and exceed the budget."""
        reason = self.allowance.exceeded(self.earlier + replace(self.usage, agent_calls=self.calls))
        if reason:
            self.stop(reason)
        return reason is not None

    def _roomiest(self) -> _Member | None:
        loaded = (m for m in self._members if m.loading is None and len(m.open) < self._ahead)
        return min(loaded, key=lambda member: len(member.open), default=None)

    def _assign(self) -> None:
        while self._again and (member := self._roomiest()) is not None and self._pays():
            future = self._again.popleft()
            member.open[member.actor.search.remote(future.problem)] = future, self.allowance.grant

    def _hire(self) -> None:
        actor_class = self._ray.remote(Worker).options(
            num_cpus=self._fleet.cpus, num_gpus=self._fleet.gpus, max_concurrency=self._ahead + 2, max_restarts=0
        )
        self._hired += 1
        actor = actor_class.remote(*self._arguments)
        self._members.append(_Member(self._hired, actor, actor.facts.remote(self._stored)))

    def _note(self, member: _Member, costs: Costs) -> None:
        self._costs[member.number] = costs
        self.meters.update({f"{member.number} {name}": meter for name, meter in costs.meters.items()})

    def _hear(self, timeout: float | None) -> None:
        """Process all available results of actors, or wait for the next one."""
        ray, calls = (
            self._ray,
            {call: m for m in self._members for call in ([*m.open] if m.loading is None else [m.loading])},
        )
        if not calls:
            sleep(timeout or 0.0)
            return
        heard, others = ray.wait(list(calls), num_returns=1, timeout=timeout)
        if heard and others:
            # The cost of a wait grows with the number of open searches, so all available results are taken at once.
            heard += ray.wait(others, num_returns=len(others), timeout=0)[0]
        dead: dict[_Member, Exception] = {}
        for call in heard:
            member = calls[call]
            try:
                answer = ray.get(call)
            except ray.exceptions.RayError as error:
                dead[member] = error
                continue
            if member.loading is not None:
                member.loading, self._facts = None, self._facts or answer
                continue
            future, _ = member.open.pop(call)
            self._note(member, answer.costs)
            self._finished += answer.plan.usage
            if answer.plan.error is None:
                self.observe(answer.plan.usage)
            future.samples = answer.samples
            future.set_result(answer.plan)
        for member, cause in dead.items():
            self._replace(member, cause)

    def _replace(self, member: _Member, error: Exception) -> None:
        """Replace a dead actor and requeue its open problems; raise its error if no actor has loaded yet."""
        cause = error.cause if isinstance(error, self._ray.exceptions.RayTaskError) else None
        if isinstance(cause, Exception) and self._facts is None:
            raise cause from error
        self._members.remove(member)
        self._ray.kill(member.actor)
        self._again.extend(future for future, _ in member.open.values())
        self._deaths += 1
        if self._deaths > self._fleet.replacements:
            raise EngineUnavailableError(
                f"more actors died than replacements={self._fleet.replacements} allows: {self._deaths}; last error: "
                f"{cause or line_of(error)}. Fix the cause and repeat the command; a store keeps finished searches"
            ) from error
        logger.warning("replaced an actor that died; restarting its %d searches: %s", len(member.open), line_of(error))
        self._hire()


def line_of(error: object) -> str:
    """Return the informative line of a long Ray message: a traceback's last line, otherwise the first line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1] if any("Traceback" in line or "creation task" in line for line in lines) else lines[0]
