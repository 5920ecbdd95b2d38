"""Comparison runs: run every pair of planner and critic with every seed, and reduce the plans to outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mas_gym.errors import ConfigError, MASGymError
from mas_gym.internal.parallel_jobs import run_jobs
from mas_gym.policies.base import AsyncPolicy, Policy
from mas_gym.policies.batch_queue import as_policy
from mas_gym.policies.shared_samples import SharedSamples
from search.critic_registry import load_critic
from search.plan import Plan
from search.planners.registry import load_planner, planner_spec
from search.protocol import Critic, Planner, as_critic, as_planner, planner_name
from search.results.outcomes import Outcome

if TYPE_CHECKING:
    from mas_gym.programs import Program
    from mas_gym.systems.graph import MAS
    from search.budget import Budget
    from search.engine.ray_actors import Fleet
    from search.progress import Progress
    from search.sampling import Sampling
    from search.store import Recorded

from search.prices import Prices
from search.results.outcomes import outcome_of
from search.setup import charged_critic

PAPER_PLANNERS = ("single", "sc:5", "sc:5,weights=critic", "sbs:5,1", "sbs:5,3", "mcts:10,3")
"""The search methods of the paper's main table."""


@dataclass(frozen=True)
class Row:
    """One row to measure: a planner and its critic, if it needs one.

    Attributes:
        name: The planner's name in tables.
        planner: The planner.
        critic: The critic; None for a planner without one.
        critic_name: The critic's name in tables.
        critic_spec: Argument of `rewardmodels.load_critic`; needed only on a fleet or in worker processes.
    """

    name: str
    planner: Planner
    critic: Critic | None = None
    critic_name: str = ""
    critic_spec: str = ""

    @property
    def label(self) -> str:
        """Planner and critic in one string."""
        return f"{self.name} + {self.critic_name}" if self.critic is not None else self.name


class Remote(NamedTuple):
    """A fleet and the functions that load the policy and critic in each actor."""

    fleet: Fleet
    make_policy: Callable[[], Policy | AsyncPolicy]
    make_critic: Callable[[str], Callable[[], Critic]]


class Workers(NamedTuple):
    """Worker processes that run one row at a time, and the functions that load their policy and critics.

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


@dataclass(frozen=True)
class Bench:
    """The settings that all rows share.

    Attributes:
        task: The problems.
        mas: The system.
        policy: Writes the messages; None if a fleet's actors or worker processes load it.
        seeds: Run seeds.
        concurrency: Maximum number of open searches, divided evenly among worker processes.
        store: Stores finished searches.
        remote: The fleet to search on; None for this process.
        budget: Limits of each search.
        run_budget: Limits of each run (one row with one seed).
        sampling: How agents sample; the paper's settings by default.
        workers: Processes to run rows in; None for this process. Planners must be picklable, and critics need a spec.
        program: The agent program behind ``mas``; None for a MAS.
        training: Whether searches may request the true reward, to generate training data.
        prices: Prices of the models, or None.
        recorded: The recorded run to search in place of ``mas`` and ``policy``, or None.
    """

    task: Any
    mas: MAS
    policy: AsyncPolicy | None
    seeds: Sequence[int]
    concurrency: int = 64
    store: str | Path | None = None
    remote: Remote | None = None
    budget: Budget | None = None
    run_budget: Budget | None = None
    sampling: Sampling | None = None
    workers: Workers | None = None
    program: Program | None = None
    training: bool = False
    prices: Prices | None = None
    recorded: Recorded | None = None


def named_planners(planners: str | Planner | Mapping[str, Any] | Iterable[str | Planner]) -> dict[str, Planner]:
    """Load planners and return them keyed by the names that result tables show.

    Args:
        planners: Planners or their short forms, or a mapping from custom names.

    Raises:
        ConfigError: Two different planners have the same name.
    """
    if isinstance(planners, Mapping):
        return {str(name): load_planner(p) if isinstance(p, str) else as_planner(p) for name, p in planners.items()}
    items = _listed(planners)
    loaded = [load_planner(item) if isinstance(item, str) else as_planner(item) for item in items]
    named = [(planner_spec(planner), planner) for planner in loaded]
    found: dict[str, Planner] = {}
    for item, (name, planner) in zip(items, named, strict=True):
        # Names omit some settings of the short form, such as the kind of values.
        shared = any(other != planner for same, other in named if same == name)
        if isinstance(item, str) and (name == planner_name(planner) or shared):
            name = item
        if name in found and found[name] != planner:
            raise ConfigError(f"expected distinct planner names, got {name!r} twice; pass {{'a': first, 'b': second}}")
        found[name] = planner
    return found


def named_critics(
    critics: str | Critic | Mapping[str, Critic] | Iterable[str | Critic], lazy: bool = False
) -> dict[str, tuple[str, Critic]]:
    """Load critics and return each spec and critic by its name in tables.

    The name is the critic's name, or its spec if several critics have that name. Lazy critics load their weights when
    they first score; see `rewardmodels.load_critic`.
    """
    if isinstance(critics, Mapping):
        return {name: ("", as_critic(critic)) for name, critic in critics.items()}
    pairs = [
        (item, load_critic(item, lazy=lazy)) if isinstance(item, str) else ("", as_critic(item))
        for item in _listed(critics)
    ]
    common = Counter(critic.name for _, critic in pairs)
    found: dict[str, tuple[str, Critic]] = {}
    for spec, critic in pairs:
        name = spec if spec and common[critic.name] > 1 else critic.name
        if name in found and found[name][1] != critic and (not spec or found[name][0] != spec):
            raise ConfigError(f"expected distinct critic names, got {name!r} twice; pass {{'a': first, 'b': second}}")
        found.setdefault(name, (spec, critic))
    return found


def _listed(parts: str | object | Iterable[object]) -> list[object]:
    return list(parts) if isinstance(parts, Iterable) and not isinstance(parts, str) else [parts]


def pair(
    planners: Mapping[str, Planner],
    critics: Mapping[str, tuple[str, Critic]],
    refused: Callable[[str], None] = lambda reason: None,
) -> list[Row]:
    """Pair each planner that needs a critic with every critic; the others run once, without a critic.

    Args:
        planners: Planners by name.
        critics: Critics by name, as returned by `named_critics`.
        refused: Called with the reason for each incompatible pair.

    Raises:
        ConfigError: No pair is left.
    """
    rows: list[Row] = []
    reasons: list[str] = []
    for name, planner in planners.items():
        guides = critics if planner.needs_critic else {"": ("", None)}
        if not guides:
            reasons.append(f"{name} skipped: it needs a critic; pass critics=[...], such as 'policy-likelihood'")
        for critic_name, (spec, critic) in guides.items():
            row = Row(name, planner, critic, critic_name, spec)
            try:
                planner.for_run(critic, False)
            except (MASGymError, ValueError) as error:
                reasons.append(f"{row.label} skipped: {error}")
            else:
                rows.append(row)
    if not rows:
        raise ConfigError("; ".join(reasons) or "expected at least one planner, got none")
    for reason in reasons:
        refused(reason)
    return rows


def measure(
    rows: Sequence[Row],
    bench: Bench,
    look: Callable[[Row, Plan], None] = lambda row, plan: None,
    listen: Callable[[Row, int, Progress], None] | bool = False,
) -> tuple[list[Outcome], BaseException | None]:
    """Run every row with every seed.

    Args:
        rows: The rows.
        bench: The shared settings.
        look: Called with every plan, in the order in which searches end.
        listen: Called with the row, the seed and every progress update; True for a bar per run in this process.

    Returns:
        The outcomes of the searches that ended, and the exception that stopped the measurement early: Ctrl-C or an
        error that affects all searches, such as an unavailable engine; None if it is complete.
    """
    for row in rows:
        if row.critic is not None:
            as_critic(row.critic).check_graph(bench.mas)
        if bench.prices is not None and bench.policy is not None:
            bench.prices.rate(bench.policy.name, charged_critic(row.planner, row.critic))
    if bench.workers is not None:
        return _measure_in_processes(rows, bench, bench.workers, look, listen)
    if len(rows) > 1 and bench.policy is not None and bench.policy.local_batch is None:
        bench = replace(bench, policy=SharedSamples(bench.policy))
    outcomes: list[Outcome] = []
    for row in rows:
        for seed in bench.seeds:
            found: list[Outcome] = []

            def take(plan: Plan, row: Row = row, seed: int = seed, found: list[Outcome] = found) -> None:
                found.append(outcome_of(plan, row.name, row.critic_name, seed))
                look(row, plan)

            def update(now: Progress, row: Row = row, seed: int = seed) -> None:
                if callable(listen):
                    listen(row, seed, now)

            stop = drain(start(row, bench, seed, update if callable(listen) else listen), take)
            # A fixed order makes sums over searches reproducible to the last bit.
            outcomes += sorted(found, key=lambda outcome: outcome.problem_id)
            if stop is not None:
                return outcomes, stop
    return outcomes, None


class _Loaded:
    """The components loaded in a worker process; calling it runs one row with one seed."""

    def __init__(self, bench: Bench, workers: Workers) -> None:
        self._bench, self._make_critic = replace(bench, policy=as_policy(workers.make_policy())), workers.make_critic
        self._critic: tuple[str, Critic] | None = None

    def __call__(self, job: tuple[Row, int], report: Callable[[Any], None]) -> BaseException | None:
        row, seed = job
        if row.critic_spec:
            if self._critic is None or self._critic[0] != row.critic_spec:
                # Load only one critic at a time, because a critic keeps a cache.
                self._critic = None
                self._critic = row.critic_spec, self._make_critic(row.critic_spec)()
            row = replace(row, critic=self._critic[1])
        return drain(start(row, self._bench, seed, report), report)


def _measure_in_processes(
    rows: Sequence[Row],
    bench: Bench,
    workers: Workers,
    look: Callable[[Row, Plan], None],
    listen: Callable[[Row, int, Progress], None] | bool,
) -> tuple[list[Outcome], BaseException | None]:
    for row in rows:
        if row.critic is not None and not row.critic_spec:
            raise ConfigError(
                f"{row.label}: expected the name of a critic, got an object, which worker processes cannot load; pass "
                "a name, or use workers=1"
            )
    # Planners are usually listed from cheap to expensive. Long runs start first, so that no core is idle at the end.
    runs = [(row, seed) for row in rows for seed in bench.seeds][::-1]
    found: list[list[Outcome]] = [[] for _ in runs]

    def take(index: int, message: Plan | Progress) -> None:
        row, seed = runs[index]
        if isinstance(message, Plan):
            found[index].append(outcome_of(message, row.name, row.critic_name, seed))
            look(row, message)
        elif callable(listen):
            listen(row, seed, message)

    share = max(1, bench.concurrency // workers.processes)
    prepare = partial(_Loaded, replace(bench, policy=None, workers=None, concurrency=share), workers)
    jobs = [(replace(row, critic=None), seed) for row, seed in runs]
    stop = run_jobs(jobs, prepare, workers.processes, take, workers.imports)
    ordered = [sorted(outcomes, key=lambda outcome: outcome.problem_id) for outcomes in found[::-1]]
    return [outcome for outcomes in ordered for outcome in outcomes], stop


def drain(run: Iterator[Plan], take: Callable[[Plan], None]) -> BaseException | None:
    """Consume a run's plans; after Ctrl-C or an error, only the finished ones. Return that exception or None."""
    stop: BaseException | None = None
    while True:
        try:
            for plan in run:
                take(plan)
            return stop
        except (KeyboardInterrupt, MASGymError) as error:
            # The run still yields its finished plans.
            stop = stop or error


def start(row: Row, bench: Bench, seed: int, listen: Callable[[Progress], None] | bool = False) -> Iterator[Plan]:
    """Start searching every problem with one row and one seed, in this process or on a fleet."""
    common: dict[str, Any] = {
        "mas": bench.mas if bench.program is None and bench.recorded is None else None,
        "program": bench.program,
        "seed": seed,
        "concurrency": bench.concurrency,
        "training": bench.training,
        "sampling": bench.sampling,
        "budget": bench.budget,
        "run_budget": bench.run_budget,
        "prices": bench.prices,
        "progress": listen,
    }
    if bench.remote is None:
        from search.runs import run

        common |= {"policy": bench.policy, "store": bench.store, "recorded": bench.recorded}
        return run(row.planner, bench.task, critic=row.critic, **common)
    from search.engine.ray_actors import run_ray

    fleet, make_policy, make_critic = bench.remote
    critic = None if row.critic is None else make_critic(row.critic_spec)
    store = None if bench.store is None else str(bench.store)
    return run_ray(
        row.planner, bench.task, make_policy=make_policy, make_critic=critic, fleet=fleet, store=store, **common
    )


def calibration_store(store: str | Path) -> Path:
    """Return the path of the file for calibration searches next to a store: ``runs.calibration.db`` for ``runs.db``."""
    path = Path(store)
    return path.with_suffix(f".calibration{path.suffix}")
