"""`search.run`: searches every problem of a task in this process, and yields plans as searches finish."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Unpack

from mas_gym.tasks.base import Problem
from search.engine.journal import Journal
from search.engine.run import Run
from search.engine.scheduler import Scheduler
from search.progress import listener
from search.protocol import Planner
from search.setup import RunSpec, make_setup, warn_of_misuse
from search.spec_loading import RunSettings, load_spec, shows
from search.store.resume import open_run_writer


@shows(RunSettings)
def run(planner: Planner | str, problems: Iterable[Problem] | None = None, **settings: Unpack[RunSettings]) -> Run:
    """Search every problem and yield plans as searches finish.

    Args:
        planner: The algorithm, or its short form such as ``"mcts:10,3"``.
        problems: The problems; by default, all problems of ``recorded``.
        settings: The settings of the run, such as ``mas="rpsv"``: `search.RunSpec` describes each of them.

    Returns:
        An iterator of plans. After Ctrl-C or a stop, it still yields the finished plans.

    Raises:
        ConfigError: An argument is invalid, such as a critic that the planner cannot use.
        StoreError: The store has another format, is in use, or contains a run of that name with different settings.
    """
    return start(load_spec(problems, planner, **settings))


def start(spec: RunSpec) -> Run:
    """Search every problem in this process, as `run` does."""
    setup = make_setup(spec)
    warn_of_misuse(setup)
    listen, source = listener(setup.progress), iter(setup.problems)
    scheduler, record = Scheduler(setup), open_run_writer(setup)
    try:
        journal = Journal(setup, record, listen, concurrency=setup.concurrency)
    except BaseException:
        if record is not None:
            record.close()
        raise
    return Run(scheduler, source, journal, setup.raise_errors)
