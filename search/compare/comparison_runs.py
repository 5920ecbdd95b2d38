"""Comparison runs: run every pair of planner and critic with every seed, and reduce the plans to outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from mas_gym.errors import ConfigError, MASGymError
from mas_gym.policies.batch_queue import as_policy
from mas_gym.policies.cache import SharedSamples
from search.critic_registry import load_critic
from search.engine.run import Run
from search.plan import Plan
from search.planners.registry import load_planner, planner_spec
from search.progress import Progress
from search.protocol import Critic, Planner, as_critic, planner_name
from search.results.outcomes import Outcome, outcome_of
from search.runs import start
from search.setup import RunSpec, charged_critic

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
        critic_spec: Argument of `rewardmodels.load_critic`; needed only if other processes load the critic.
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

    def of(self, spec: RunSpec, seed: int, progress: bool | Callable[[Progress], None] = False) -> RunSpec:
        """Return the settings of this row's run with a seed."""
        return replace(spec, planner=self.planner, critic=self.critic, seed=seed, progress=progress)


def named_planners(planners: str | Planner | Mapping[str, Any] | Iterable[str | Planner]) -> dict[str, Planner]:
    """Load planners and return them keyed by the names that result tables show.

    Args:
        planners: Planners or their short forms, or a mapping from custom names.

    Raises:
        ConfigError: Two different planners have the same name.
    """
    if isinstance(planners, Mapping):
        return {str(name): load_planner(planner) for name, planner in planners.items()}
    items = _listed(planners)
    loaded: list[Planner] = [load_planner(item) for item in items]  # type: ignore[arg-type]
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


Start = Callable[[RunSpec, str], Run]
"""Starts the searches of one row and seed; takes their settings and the row's `Row.critic_spec`."""


def start_here(spec: RunSpec, critic_spec: str) -> Run:
    """Start a run in this process."""
    return start(spec)


Listen = Callable[[str, int, Progress], None] | bool
"""Takes a row's label, the seed and every progress update; True for a bar per run in this process."""


def measure(
    rows: Sequence[Row],
    spec: RunSpec,
    seeds: Sequence[int] = (),
    look: Callable[[Row, Plan], None] = lambda row, plan: None,
    listen: Listen = False,
    start: Start = start_here,
) -> tuple[list[Outcome], BaseException | None]:
    """Run every row with every seed.

    Args:
        rows: The rows.
        spec: The settings that all rows share. Its policy may be None if ``start`` loads it.
        seeds: Run seeds; by default that of ``spec``.
        look: Called with every plan, in the order in which searches end.
        listen: Called with every progress update.
        start: Starts each run.

    Returns:
        The outcomes of the searches that ended, and the exception that stopped the measurement early: Ctrl-C or an
        error that affects all searches, such as an unavailable engine; None if it is complete.
    """
    check_rows(rows, spec)
    if len(rows) > 1 and spec.policy is not None and (policy := as_policy(spec.policy)).local_batch is None:
        spec = replace(spec, policy=SharedSamples(policy))
    outcomes: list[Outcome] = []
    for row, seed in product(rows, seeds or (spec.seed,)):
        found: list[Outcome] = []
        progress = partial(listen, row.label, seed) if callable(listen) else listen
        run = start(row.of(spec, seed, progress), row.critic_spec)

        def take(plan: Plan, row: Row = row, seed: int = seed, run: Run = run, found: list[Outcome] = found) -> None:
            found.append(outcome_of(plan, row.name, row.critic_name, seed, run.cost(plan.usage)))
            look(row, plan)

        stop = drain(run, take)
        outcomes += in_order(found)
        if stop is not None:
            return outcomes, stop
    return outcomes, None


def check_rows(rows: Iterable[Row], spec: RunSpec) -> None:
    """Check before the first run that each critic fits the system, and that each model has a price."""
    for row in rows:
        if row.critic is not None:
            as_critic(row.critic).check_graph(spec.mas)
        if spec.policy is not None:
            spec.budget.priced(spec.policy.name, charged_critic(row.planner, row.critic))


def in_order(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the outcomes of a run in a fixed order, which makes sums over them reproducible to the last bit."""
    return sorted(outcomes, key=lambda outcome: outcome.problem_id)


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
