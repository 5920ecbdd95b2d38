"""`run_ray`: many engines on one or many machines, searches spread over Ray actors, one writer, the same rows."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Sized
from functools import partial
from types import SimpleNamespace
from typing import Any

from mas_gym.errors import ConfigError, need
from mas_gym.graph import MAS
from mas_gym.policies.base import AsyncPolicy, Policy
from mas_gym.tasks.base import Problem
from search.engine.actors import ActorPool, Fleet, line_of
from search.engine.journal import Journal, Listener, Progress, listener
from search.engine.loop import Run
from search.protocol import Critic, Planner
from search.registry import load_planner
from search.setup import (
    Budget,
    ProgramSource,
    Sampling,
    Setup,
    check_training,
    make_setup,
    read_system,
    resolve_policy,
)
from search.store import Store, open_record


def run_ray(  # noqa: D417 - the other arguments are those of `search.run`
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
) -> Run:
    """Search every problem on a fleet of actors and stream the plans as they are finished.

    Arguments that are not described here are those of `search.run`.

    Args:
        problems: As there; with few, the first actors to load leave the others their share.
        make_policy: Loads the policy inside an actor, such as ``functools.partial(load_policy, "vllm:PATH")``; by
            default the one that the MAS names under ``policies``.
        make_critic: Loads the critic there.
        concurrency: Searches open at once in each actor.
        run_budget: Limits of the whole run, compared with what the actors have reported; open searches are dropped.
        fleet: How many actors, with what, and where.

    Raises:
        MissingDependencyError: Ray is not installed.
        ConfigError: An argument cannot be pickled and sent to the actors.
        EngineUnavailableError: More actors died than may be replaced; what is finished is in the store.
    """
    check_training(problems, training)
    algorithm = load_planner(planner) if isinstance(planner, str) else planner
    system, loaded = read_system(mas, program)
    make_policy, fleet, listen = (
        make_policy or partial(resolve_policy, system, None),
        fleet or Fleet(),
        listener(progress),
    )
    more: dict[str, Any] = {"seed": seed, "sampling": sampling, "budget": budget, "training": training}
    setup = partial(make_setup, algorithm, system if loaded is None else None, program=loaded, **more)
    if isinstance(problems, Sized):
        concurrency = max(1, min(concurrency, math.ceil(len(problems) / fleet.actors)))
    _connect(fleet.address)
    # The task without its problems, for its grading alone.
    task = problems[:0] if hasattr(problems, "grade") else None  # type: ignore[index]
    _check_picklable(planner=setup, task=task, make_policy=make_policy, make_critic=make_critic)
    arguments = (setup, concurrency, task, make_policy, make_critic)
    pool = ActorPool(fleet, arguments, run_budget or Budget(), stored=store is not None)
    return Run(pool, problems, partial(_journal, pool, setup, problems, store, run_name, listen))


def _journal(
    pool: ActorPool,
    make: Callable[[Any], Setup],
    problems: Iterable[Problem],
    store: Store | str | os.PathLike[str] | None,
    run_name: str | None,
    listen: Listener | None,
) -> Journal:
    """Open the run's journal as soon as an actor has loaded, and says what policy and critic are."""
    policy, critic = pool.facts()
    setup = make(None if critic is None else SimpleNamespace(**critic, score=list))
    engine = SimpleNamespace(**policy, meters=pool.meters)
    record = open_record(store, setup, problems, engine, run_name) if store is not None else None
    total = len(problems) if isinstance(problems, Sized) else None
    journal = Journal(setup, total=total, record=record, listener=listen, policy=policy["name"], actors=pool.size)
    pool.earlier = journal.earlier
    return journal


def _connect(address: str | None) -> None:
    """Join the cluster, or start one, if this process has not."""
    ray = need("ray", "running on a fleet", "ray")
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
                f"{name}: expected something that can be pickled and sent to the actors, got {line_of(error)}; "
                "pass a function of a module, or functools.partial of one, that opens files and connections itself"
            ) from None


__all__ = ["Fleet", "run_ray"]
