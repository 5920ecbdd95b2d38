"""`search.run`: every problem of a task searched in this process, plans streamed as they are finished."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sized
from typing import Any

from mas_gym.errors import ConfigError
from mas_gym.graph import MAS
from mas_gym.policies.base import AsyncPolicy, Policy
from mas_gym.tasks.base import Problem
from search.engine.journal import Journal, Progress, listener
from search.engine.loop import Run
from search.engine.scheduler import Scheduler
from search.protocol import Critic, Planner
from search.setup import (
    Budget,
    ProgramSource,
    Sampling,
    check_problems,
    make_setup,
    resolve_policy,
)
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
        training: Answer `Reward` requests with the true reward, for data generation; refused for a test split.
        sampling: Temperature, top-p and cap; the paper's by default.
        budget: Limits of each search. A search that meets one returns the best it has, or fails.
        run_budget: Limits of the whole run, with what earlier calls spent on it in the store; ends open searches.
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
    check_problems(problems, setup, policy)
    if concurrency < 1:
        raise ConfigError(f"expected concurrency >= 1, got {concurrency}")
    listen = listener(progress)
    record = open_record(store, setup, problems, policy, run_name) if store is not None else None
    total = len(problems) if isinstance(problems, Sized) else None
    journal = Journal(setup, total=total, record=record, listener=listen, policy=policy.name, concurrency=concurrency)
    limits: dict[str, Any] = {"concurrency": concurrency, "run_budget": run_budget, "earlier": journal.earlier}
    scheduler = Scheduler(setup, policy, task=problems, **limits)
    return Run(scheduler, problems, journal, raise_errors)


__all__ = ["Run", "run"]
