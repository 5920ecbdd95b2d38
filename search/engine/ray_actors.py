"""`run_ray`: searches on Ray actors, each with its own `Scheduler`, on one or many machines, with identical results.

The least loaded actor receives the next problem. An actor that dies is replaced, and its open problems are searched
again. This gives the same plans, because a plan depends only on its problem and the seed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple, Unpack

from mas_gym.errors import ConfigError, EngineUnavailableError, need
from mas_gym.internal.json_types import JSONObject
from mas_gym.policies import load_policy
from mas_gym.policies.base import AsyncPolicy, Policy
from mas_gym.policies.batch_queue import as_policy
from mas_gym.policies.usage_meters import Meter
from mas_gym.tasks.base import Problem, Task
from search.costs import Budget, Cost, Usage
from search.engine.run import Journal, Run
from search.engine.scheduler import DroppedError, Scheduler, Searched, Searcher
from search.progress import Listener, listener
from search.protocol import Critic, Planner, as_critic
from search.runs import FROM_CONFIG, FleetSettings, FromConfig, config_policies, load_spec, shows
from search.setup import RunSpec, make_setup
from search.store.run_identity import engine_identity
from search.store.run_writer import open_run_writer

if TYPE_CHECKING:
    from ray.actor import ActorHandle


@shows(FleetSettings)
def run_ray(
    planner: Planner | str,
    problems: Iterable[Problem],
    *,
    make_policy: Callable[[], Policy | AsyncPolicy] | FromConfig | None = None,
    make_critic: Callable[[], Critic] | None = None,
    fleet: Fleet | None = None,
    **settings: Unpack[FleetSettings],
) -> Run:
    """Search every problem on a fleet of actors and yield plans as searches finish.

    Args:
        planner: As for `search.run`.
        problems: As for `search.run`; if there are few, they are shared among all actors, including those that load
            later.
        make_policy: Loads the policy inside an actor, such as ``functools.partial(load_policy, "vllm:PATH")``;
            ``"from-config"`` loads the policies in the config of ``mas``.
        make_critic: Loads the critic inside an actor.
        fleet: The number of actors, their resources, and their cluster.
        settings: As for `search.run`. ``concurrency`` is the maximum number of open searches in each actor; if the cost
            reported by the actors exceeds ``run_budget``, open searches are dropped.

    Raises:
        MissingDependencyError: Ray is not installed.
        TypeError: An argument cannot be pickled and sent to the actors (raised by Ray).
        EngineUnavailableError: More actors died than may be replaced; finished searches are in the store.
    """
    spec = load_spec(problems, planner, FleetSettings, **settings)
    if make_policy is None or make_policy == FROM_CONFIG:
        make_policy = partial(load_policy, config_policies(spec.mas, make_policy))
    return start_on_fleet(spec, fleet or Fleet(), make_policy, make_critic)


def start_on_fleet(
    spec: RunSpec,
    fleet: Fleet,
    make_policy: Callable[[], Policy | AsyncPolicy],
    make_critic: Callable[[], Critic] | None,
) -> Run:
    """Search every problem on a fleet, as `run_ray` does; the actors load the policy and the critic."""
    listen = listener(spec.progress)
    if isinstance(spec.problems, Sized):
        spec = replace(spec, concurrency=max(1, min(spec.concurrency, math.ceil(len(spec.problems) / fleet.actors))))
    _connect(fleet.address)
    pool = ActorPool(fleet, spec, make_policy, make_critic)
    return Run(pool, iter(spec.problems), partial(_journal, pool, spec, listen))


class FleetStart(NamedTuple):
    """Starts comparison runs on a fleet; see `search.compare.comparison_runs.measure`."""

    fleet: Fleet
    make_policy: Callable[[], Policy | AsyncPolicy]
    make_critic: Callable[[str], Callable[[], Critic]]

    def start(self, spec: RunSpec, critic_spec: str) -> Run:
        """Start a run; the actors load its policy and critic."""
        critic = None if spec.critic is None else self.make_critic(critic_spec)
        return start_on_fleet(replace(spec, policy=None, critic=None), self.fleet, self.make_policy, critic)


async def _journal(pool: ActorPool, spec: RunSpec, listen: Listener | None) -> Journal:
    """Open the run's journal as soon as one actor has loaded and reported its policy and critic."""
    policy, critic = await pool.facts()
    engine = as_policy(SimpleNamespace(**policy, sample=list, meters=pool.meters))
    guide = None if critic is None else as_critic(SimpleNamespace(**critic, score=list))
    setup = make_setup(replace(spec, policy=engine, critic=guide))
    pool.limit(setup.run_budget, setup.budget)
    return Journal(setup, open_run_writer(setup), listen, actors=pool.size)


def _connect(address: str | None) -> None:
    """Connect this process to the cluster, or start one, unless it is already connected."""
    ray = need("ray", "running on a fleet", "ray")
    if not ray.is_initialized():
        # Actors run the searches; at Ray's default niceness, other programs on the machine would starve them.
        os.environ.setdefault("RAY_worker_niceness", "0")
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)


# ------------------------------------------------------------------ actors

logger = logging.getLogger("search")

_COSTS_SECONDS = 2.0
"""Maximum wait at the end for the actors' cost of dropped searches."""


class Costs(NamedTuple):
    """The cost of an actor so far."""

    usage: Usage = Usage()
    calls: int = 0
    meters: Mapping[str, Meter] = {}


class Worker:
    """An engine as an asynchronous Ray actor, so that open calls need no threads."""

    def __init__(
        self,
        spec: RunSpec,
        make_policy: Callable[[], Policy | AsyncPolicy],
        make_critic: Callable[[], Critic] | None,
    ) -> None:
        policy = make_policy()
        critic = None if make_critic is None else make_critic()
        self._setup = make_setup(replace(spec, policy=policy, critic=critic))
        self._scheduler = Scheduler(self._setup)

    async def facts(self, stored: bool) -> tuple[JSONObject, JSONObject | None]:
        """Return facts about the policy and the critic, with their identities if the run has a store."""

        def stated(role: str, engine: Policy | AsyncPolicy | Critic) -> JSONObject:
            return engine_identity(role, engine) if stored else {"name": engine.name}

        policy, critic = stated("policy", self._setup.policy), self._setup.critic
        if critic is None:
            return policy, None
        more = {"terminal_only": critic.terminal_only, "free": critic.free, "scores_actions": critic.scores_actions}
        return policy, stated("critic", critic) | more

    async def search(self, problem: Problem) -> tuple[Searched, Costs]:
        """Search one problem; return the search and the cost of this actor so far.

        Raises:
            EngineUnavailableError: No request can succeed.
        """
        searched = await self._scheduler.search(problem)
        return searched._replace(failure=None), await self.costs()

    async def costs(self) -> Costs:
        """Return the cost of this actor so far."""
        return Costs(self._scheduler.usage, self._scheduler.calls, self._setup.policy.meters)


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
        if self.actors < 1 or self.gpus < 0 or self.cpus < 0 or self.replacements < 0:
            raise ConfigError(f"expected at least one actor and no negative numbers, got {self}")


@dataclass(eq=False)
class _Member:
    """An actor, the number of searches assigned to it, and whether its engine has loaded."""

    number: int
    actor: ActorHandle
    open: int = 0
    loaded: bool = False


class ActorPool(Searcher):
    """Assigns problems to actors, and replaces dead actors.

    Attributes:
        meters: The last reported usage meters of the actors' policies.
        size: The number of actors.
    """

    def __init__(
        self,
        fleet: Fleet,
        spec: RunSpec,
        make_policy: Callable[[], Policy | AsyncPolicy],
        make_critic: Callable[[], Critic] | None,
    ) -> None:
        """Start the actors.

        Args:
            fleet: The number of actors and their resources.
            spec: The run; ``concurrency`` is the maximum number of open searches of an actor.
            make_policy: Loads the policy inside an actor.
            make_critic: Loads the critic inside an actor, if there is one.
        """
        import ray

        # The task without its problems, used only for grading.
        task = spec.problems[:0] if isinstance(spec.problems, Task) else ()
        actors = replace(spec, problems=task, run_budget=Budget(), store=None, progress=False)
        self._arguments, self._stored = (actors, make_policy, make_critic), spec.store is not None
        # Each actor prefetches slightly more problems than it searches at once.
        self._ahead = spec.concurrency + spec.concurrency // 8 + 1
        super().__init__(self._ahead * fleet.actors, Budget(), Budget())
        self._ray, self.size, self.meters = ray, fleet.actors, dict[str, Meter]()
        self._fleet = fleet
        self._members: list[_Member] = []
        self._loading = set[asyncio.Task[None]]()
        self._changed = asyncio.Event()
        self._grants: list[Cost] = []
        self._costs: dict[int, Costs] = {}
        self._finished = Usage()
        self._facts: tuple[JSONObject, JSONObject | None] | None = None
        self._failure: Exception | None = None
        self._hired = self._deaths = 0
        for _ in range(fleet.actors):
            self._hire()

    async def facts(self) -> tuple[JSONObject, JSONObject | None]:
        """Wait for the first actor to load, and return its facts about the policy and the critic.

        If an actor raises an error before any actor has loaded, it is raised here.
        """
        self._loading |= {asyncio.create_task(self._load(member)) for member in self._members}
        while self._facts is None:
            await self._change()
        return self._facts

    async def _change(self) -> None:
        """Wait until an actor loads, ends a search or dies. Raises the error that ends the run."""
        if self._failure is not None:
            raise self._failure
        self._changed.clear()
        await self._changed.wait()
        if self._failure is not None:
            raise self._failure

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
        return len(self._grants)

    @property
    def spent(self) -> Usage:
        """The cost of finished searches; the cost of open searches so far is part of their grants."""
        return self.earlier + self._finished

    def rest(self) -> Cost:
        """Return the budget that is neither spent nor granted to open searches."""
        return self._allowance.rest(self.spent, ((granted, Cost()) for granted in self._grants))

    async def search(self, problem: Problem) -> Searched:
        """Search a problem on the least loaded actor, and again on another one if the actor dies.

        Raises:
            EngineUnavailableError: More actors died than may be replaced.
        """
        granted = self._allowance.grant
        self._grants.append(granted)
        try:
            searched = await self._searched(problem)
        finally:
            self._grants.remove(granted)
        self._finished += searched.plan.usage
        if searched.plan.error is None:
            self.learn_cost(searched.plan.usage)
        reason = self._allowance.exceeded(self.earlier + replace(self.usage, agent_calls=self.calls))
        if reason:
            self.stop(reason)
        return searched

    async def _searched(self, problem: Problem) -> Searched:
        while True:
            while (member := self._least_loaded()) is None:
                await self._change()
            member.open += 1
            try:
                searched, costs = await member.actor.search.remote(problem)
            except self._ray.exceptions.RayError as error:
                self._replace(member, error)
            else:
                self._note(member, costs)
                return searched  # type: ignore[no-any-return]
            finally:
                member.open -= 1
                self._changed.set()

    def _least_loaded(self) -> _Member | None:
        loaded = (member for member in self._members if member.loaded and member.open < self._ahead)
        return min(loaded, key=lambda member: member.open, default=None)

    def stop(self, reason: str) -> None:
        """Accept no more problems, drop the open searches, and record the reason."""
        super().stop(reason)
        self._failure = self._failure or DroppedError(f"the search was dropped: {self.stopped}")
        self._changed.set()

    async def close(self) -> None:
        """Collect the cost of open searches, and end every actor."""
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

    # ---- actors

    def _hire(self) -> _Member:
        actor_class = self._ray.remote(Worker).options(
            num_cpus=self._fleet.cpus, num_gpus=self._fleet.gpus, max_concurrency=self._ahead + 2, max_restarts=0
        )
        self._hired += 1
        member = _Member(self._hired, actor_class.remote(*self._arguments))
        self._members.append(member)
        return member

    async def _load(self, member: _Member) -> None:
        try:
            facts = await member.actor.facts.remote(self._stored)
        except self._ray.exceptions.RayError as error:
            self._replace(member, error)
            return
        member.loaded, self._facts = True, self._facts or facts
        self._changed.set()

    def _note(self, member: _Member, costs: Costs) -> None:
        self._costs[member.number] = costs
        self.meters.update({f"{member.number} {name}": meter for name, meter in costs.meters.items()})

    def _replace(self, member: _Member, error: Exception) -> None:
        """Replace a dead actor; its searches start again. An error before any actor has loaded ends the run."""
        if member not in self._members or self.closed:
            return
        cause = error.cause if isinstance(error, self._ray.exceptions.RayTaskError) else None
        self._members.remove(member)
        self._ray.kill(member.actor)
        self._deaths += 1
        if isinstance(cause, Exception) and self._facts is None:
            self._failure = cause
        elif self._deaths > self._fleet.replacements:
            self._failure = EngineUnavailableError(
                f"more actors died than replacements={self._fleet.replacements} allows: {self._deaths}; last error: "
                f"{cause or line_of(error)}. Fix the cause and repeat the command; a store keeps finished searches"
            )
        else:
            logger.warning("replaced an actor that died; restarting its %d searches: %s", member.open, line_of(error))
            self._loading.add(asyncio.create_task(self._load(self._hire())))
        self._changed.set()


def line_of(error: object) -> str:
    """Return the informative line of a long Ray message: a traceback's last line, otherwise the first line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1] if any("Traceback" in line or "creation task" in line for line in lines) else lines[0]
