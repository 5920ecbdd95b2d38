"""Comparison runs in worker processes, each of which runs one row with one seed at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from mas_gym.errors import ConfigError
from mas_gym.internal.parallel_jobs import run_jobs
from mas_gym.policies.base import AsyncPolicy, Policy
from search.compare.comparison_runs import Listen, Row, check_rows, drain, in_order
from search.plan import Plan
from search.progress import Progress
from search.protocol import Critic
from search.results.outcomes import Outcome, outcome_of
from search.runs import start
from search.setup import RunSpec

Priced = tuple[Plan, float | None]
"""A plan and its cost in USD; None without prices."""


class Workers(NamedTuple):
    """Worker processes, and the functions that load their policy and critics.

    They parallelize policies and critics that are limited to one core, at one core per process.

    Attributes:
        processes: Number of processes.
        make_policy: Loads the policy.
        make_critic: Returns a function that loads the critic of a spec.
        imports: Modules that policy and critics need.
    """

    processes: int
    make_policy: Callable[[], Policy | AsyncPolicy]
    make_critic: Callable[[str], Callable[[], Critic]]
    imports: tuple[str, ...] = ()


def measure_in_workers(
    workers: Workers,
    rows: Sequence[Row],
    spec: RunSpec,
    seeds: Sequence[int],
    look: Callable[[Row, Plan], None] = lambda row, plan: None,
    listen: Listen = False,
) -> tuple[list[Outcome], BaseException | None]:
    """Run every row with every seed in worker processes; see `search.compare.comparison_runs.measure`.

    The processes share the concurrency of ``spec`` evenly and load the policy. Planners must be picklable, and critics
    need a spec.
    """
    check_rows(rows, spec)
    for row in rows:
        if row.critic is not None and not row.critic_spec:
            raise ConfigError(
                f"{row.label}: expected the name of a critic, got an object, which worker processes cannot load; pass "
                "a name, or use workers=1"
            )
    # Planners are usually listed from cheap to expensive. Long runs start first, so that no core is idle at the end.
    runs = [(row, seed) for row in rows for seed in seeds][::-1]
    found: list[list[Outcome]] = [[] for _ in runs]

    def take(index: int, message: Priced | Progress) -> None:
        row, seed = runs[index]
        if isinstance(message, tuple):
            plan, usd = message
            found[index].append(outcome_of(plan, row.name, row.critic_name, seed, usd))
            look(row, plan)
        elif callable(listen):
            listen(row.label, seed, message)

    prepare = partial(_Loaded, replace(spec, concurrency=max(1, spec.concurrency // workers.processes)), workers)
    jobs = [(replace(row, critic=None), seed) for row, seed in runs]
    stop = run_jobs(jobs, prepare, workers.processes, take, workers.imports)
    return [outcome for outcomes in found[::-1] for outcome in in_order(outcomes)], stop


class _Loaded:
    """The components loaded in a worker process; calling it runs one row with one seed."""

    def __init__(self, spec: RunSpec, workers: Workers) -> None:
        self._spec, self._make_critic = replace(spec, policy=workers.make_policy()), workers.make_critic
        self._critic: tuple[str, Critic] | None = None

    def __call__(self, job: tuple[Row, int], report: Callable[[Priced | Progress], None]) -> BaseException | None:
        row, seed = job
        if row.critic_spec:
            if self._critic is None or self._critic[0] != row.critic_spec:
                # Load only one critic at a time, because a critic keeps a cache.
                self._critic = None
                self._critic = row.critic_spec, self._make_critic(row.critic_spec)()
            row = replace(row, critic=self._critic[1])
        run = start(row.of(self._spec, seed, report))
        return drain(run, lambda plan: report((plan, run.cost(plan.usage))))
