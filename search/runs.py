"""`search.run`: searches every problem of a task in this process, and yields plans as searches finish."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sized

from mas_gym.errors import ConfigError
from mas_gym.policies.base import AsyncPolicy, Policy
from mas_gym.systems.graph import MAS
from mas_gym.tasks.base import Problem, as_problems
from search.budget import Budget
from search.engine.journal import Journal
from search.engine.run import Run
from search.engine.scheduler import Scheduler
from search.prices import PricesSource, as_prices
from search.progress import Progress, listener
from search.protocol import Critic, Planner
from search.sampling import Sampling
from search.setup import FromConfig, ProgramSource, check_problems, make_setup, priced_setup, resolve_policy
from search.store import Recorded, Store
from search.store.recorded_runs import as_recorded
from search.store.resume import open_record


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
    setup = make_setup(
        planner,
        mas,
        critic,
        program=program,
        seed=seed,
        sampling=sampling,
        budget=budget,
        training=training,
        recording=recording,
    )
    problems = as_problems(problems)
    policy = resolve_policy(setup.dynamics.mas, policy)
    setup = priced_setup(setup, policy.name, None if prices is None else as_prices(prices))
    run_budget = (run_budget or Budget()).priced(setup.rate)
    check_problems(problems, setup, policy)
    listen = listener(progress)
    scheduler = Scheduler(setup, policy, task=problems, concurrency=concurrency, run_budget=run_budget)
    source = iter(problems)
    record = open_record(store, setup, problems, policy, run_name) if store is not None else None
    try:
        total = len(problems) if isinstance(problems, Sized) else None
        facts: dict[str, object] = {"policy": policy.name, "concurrency": concurrency}
        journal = Journal(setup, total=total, record=record, listener=listen, **facts)
    except BaseException:
        if record is not None:
            record.close()
        raise
    return Run(scheduler, source, journal, raise_errors)
