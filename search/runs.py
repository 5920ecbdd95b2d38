"""`search.run`: loads the parts that its arguments name, and starts the searches of every problem in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields, replace
from inspect import Parameter, signature
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack

from mas_gym.errors import ConfigError
from mas_gym.internal.suggestions import refuse_unknown
from mas_gym.policies import load_policy
from mas_gym.policies.base import AsyncPolicy, Policy, Sampling
from mas_gym.systems.graph import MAS
from mas_gym.systems.loading import load_mas
from mas_gym.tasks.base import Problem, as_task, is_task
from search.costs import Budget
from search.engine.run import Journal, Run
from search.engine.scheduler import Scheduler
from search.models.base import SearchSource
from search.option_rules import check_options
from search.planners.registry import load_planner
from search.progress import Progress, listener
from search.protocol import Critic, Planner
from search.setup import RunSpec, make_setup, warn_of_misuse
from search.store.run_writer import open_run_writer
from search.store.store import Store

if TYPE_CHECKING:
    from search.models.programs import ProgramSource
    from search.prices import PricesSource
    from search.store.recorded_runs import Recorded

FromConfig = Literal["from-config"]
FROM_CONFIG: FromConfig = "from-config"
"""In place of a policy: the policies that the MAS config names. A config alone cannot make a run use them."""

_SOURCES = {"program": "search.models.programs:load_models", "recorded": "search.store.recorded_runs:as_recorded"}
"""The arguments that replace the system or the policy, and the functions that load their `SearchSource`.

The modules are imported only for the argument, so that runs without it do not need them.
"""


class SharedSettings(TypedDict, total=False):
    """Arguments of `search.run`, `search.compare` and `run_ray`."""

    mas: MAS | str | None
    program: ProgramSource | None
    sampling: Sampling | None
    budget: Budget | None
    run_budget: Budget | None
    prices: PricesSource | None
    concurrency: int
    store: Store | str | os.PathLike[str] | None


class CompareSettings(SharedSettings, total=False):
    """Arguments of `search.run` and `search.compare`."""

    recorded: Recorded | str | os.PathLike[str] | None
    policy: Policy | AsyncPolicy | FromConfig | None


class FleetSettings(SharedSettings, total=False):
    """Arguments of `search.run` and `run_ray`."""

    seed: int
    training: bool
    run_name: str | None
    progress: bool | Callable[[Progress], None]


class RunSettings(CompareSettings, FleetSettings, total=False):
    """All arguments of `search.run` besides the planner and the problems."""

    critic: Critic | None
    raise_errors: bool


F = TypeVar("F", bound=Callable[..., object])


def shows(takes: type[SharedSettings]) -> Callable[[F], F]:
    """Show the settings in a function's signature, for ``help``, notebooks and the API pages."""
    given = {field.name: None if field.default is MISSING else field.default for field in fields(RunSpec)}

    def decorate(function: F) -> F:
        own = signature(function)
        listed = [part for part in own.parameters.values() if part.kind is not part.VAR_KEYWORD]
        listed += [
            Parameter(name, Parameter.KEYWORD_ONLY, default=given.get(name), annotation=kind.__forward_arg__)
            for name, kind in takes.__annotations__.items()
        ]
        function.__signature__ = own.replace(parameters=listed)  # type: ignore[attr-defined]
        return function

    return decorate


def load_spec(
    problems: Iterable[Problem] | None,
    planner: Planner | str = "single",
    takes: type[SharedSettings] = RunSettings,
    **settings: Unpack[RunSettings],
) -> RunSpec:
    """Load the parts that are given by name.

    Args:
        problems: The problems; None for those of ``recorded``.
        planner: The planner or its short form.
        takes: The settings that the caller takes. Without ``policy``, other processes load the policy.
        settings: The settings.

    Raises:
        UnknownNameError: There is no such setting.
        ConfigError: A setting is missing, invalid, or excluded by another one.
    """
    known = list(takes.__annotations__)
    refuse_unknown("argument", settings, known)
    given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    check_options({name: f"{name}=" for name, value in given.items() if value is not False})
    described = [given.pop("mas")] if "mas" in given else []
    for name in filter(given.__contains__, _SOURCES):
        given["source"] = resolve_name(_SOURCES[name])(given.pop(name), *described)
    source: SearchSource | None = given.get("source")
    if source is None and not described:
        raise ConfigError("expected mas= or program=, got neither: pass mas='rpsv', or program='my_agents.py:solve'")
    mas = given["mas"] = load_mas(*described) if source is None else source.mas
    if source is not None and source.policy is not None:
        given["policy"] = source.policy
    elif "policy" not in takes.__annotations__:
        given["policy"] = None
    elif given.get("policy") in (None, FROM_CONFIG):
        given["policy"] = load_policy(config_policies(mas, given.get("policy")))
    problems = source.problems if problems is None and source is not None else problems
    if problems is None:
        raise ConfigError("expected problems, or recorded= with a recorded run, got neither")
    if "prices" in given:
        prices = resolve_name("search.prices:as_prices")(given.pop("prices"))
        given |= {name: replace(given.get(name, Budget()), prices=prices) for name in ("budget", "run_budget")}
    if isinstance(store := given.get("store"), Store):
        given["store"] = store.path
    return RunSpec(as_task(problems) if is_task(problems) else problems, planner=load_planner(planner), **given)


def config_policies(mas: MAS, policy: FromConfig | None) -> dict[str, str]:
    """Return the policies in a MAS's config, by agent.

    Raises:
        ConfigError: The config has no policies, or ``policy`` is None: the user has not allowed them.
    """
    if not mas.policies:
        raise ConfigError(
            f"expected a policy, but the MAS {mas.name!r} names none: pass policy=load_policy('tiny'), or add "
            f"policies: to its config and pass {FROM_CONFIG!r}"
        )
    if policy is None:
        raise ConfigError(
            f"expected a policy, got none; the config of the MAS {mas.name!r} names policies, which may run code, read "
            f"environment variables and open connections: to use them, pass --policy {FROM_CONFIG} (in Python, "
            f"policy={FROM_CONFIG!r}); mas-gym check lists them"
        )
    return dict(mas.policies)


@shows(RunSettings)
def run(planner: Planner | str, problems: Iterable[Problem] | None = None, **settings: Unpack[RunSettings]) -> Run:
    """Search every problem and yield plans as searches finish.

    Args:
        planner: The algorithm, or its short form such as ``"mcts:10,3"``.
        problems: The problems; by default, all problems of ``recorded``.
        settings: The settings of the run, such as ``mas="rpsv"``, as described for `search.RunSpec`, and

            * ``program``: an agent program in place of the system: a function, ``FILE.py:NAME``, a command, the URL of
              a service, or a `mas_gym.programs.Program`; if ``mas`` is also given, it describes the program's agents;
            * ``recorded``: a recorded run to search in place of a system and a policy, or the store that contains it
              (`search.Recorded`);
            * ``prices``: prices of the models, as a YAML file or a mapping of the same form (`search.prices`), for
              budgets in USD, the column USD of tables, and `Run.cost`.

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
    listen, problems = listener(setup.progress), iter(setup.problems)
    writer = open_run_writer(setup)
    try:
        journal = Journal(setup, writer, listen, concurrency=setup.concurrency)
        # Last, because it opens what the searches share, such as a program.
        return Run(Scheduler(setup), problems, journal, setup.raise_errors)
    except BaseException:
        if writer is not None:
            writer.close()
        raise
