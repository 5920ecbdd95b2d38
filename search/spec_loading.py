"""`load_spec`: a `RunSpec` from the arguments of `search.run`, in which parts may be given by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from inspect import Parameter, signature
from typing import Any, Literal, TypedDict, TypeVar, Unpack

from mas_gym.errors import ConfigError
from mas_gym.internal.suggestions import refuse_unknown
from mas_gym.policies import load_policy
from mas_gym.policies.base import AsyncPolicy, Policy
from mas_gym.programs import Program, load_program
from mas_gym.systems.graph import MAS
from mas_gym.systems.loading import load_mas
from mas_gym.tasks.base import Problem, as_problems
from search.budget import Budget
from search.option_rules import check_options
from search.planners.registry import load_planner
from search.prices import PricesSource, as_prices
from search.progress import Progress
from search.protocol import Critic, Planner
from search.run_spec import RunSpec
from search.sampling import Sampling
from search.store import Recorded, Store
from search.store.recorded_runs import as_recorded

FromConfig = Literal["from-config"]
FROM_CONFIG: FromConfig = "from-config"
"""In place of a policy: the policies that the MAS config names. A config alone cannot make a run use them."""


ProgramSource = Program | str | Callable[..., object]
"""Argument types of `mas_gym.programs.load_program`."""


class SharedSettings(TypedDict, total=False):
    """Arguments of `search.run`, `search.compare` and `run_ray`; see `search.run_spec.RunSpec`."""

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
            Parameter(name, Parameter.KEYWORD_ONLY, default=given[name], annotation=kind.__forward_arg__)
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
    if "recorded" in given:
        recorded = given["recorded"] = as_recorded(given["recorded"])
        given |= {"mas": recorded.mas, "policy": recorded.policy}
        problems = recorded if problems is None else problems
    else:
        given["mas"], given["program"] = read_system(given.get("mas"), given.get("program"))
        given["policy"] = (
            resolve_policy(given["mas"], given.get("policy")) if "policy" in takes.__annotations__ else None
        )
    if problems is None:
        raise ConfigError("expected problems, or recorded= with a recorded run, got neither")
    if "prices" in given:
        given["prices"] = as_prices(given["prices"])
    if isinstance(store := given.get("store"), Store):
        given["store"] = store.path
    return RunSpec(
        as_problems(problems), planner=load_planner(planner) if isinstance(planner, str) else planner, **given
    )


def read_system(mas: MAS | str | None, program: ProgramSource | None) -> tuple[MAS, Program | None]:
    """Load a system, or a program and the system that represents it in search; ``mas`` may describe the program.

    Raises:
        ConfigError: Neither a system nor a program is given, or the program already has a description.
    """
    if program is not None:
        loaded = load_program(program) if mas is None else load_program(program, mas=mas)
        return loaded.mas, loaded
    if mas is None:
        raise ConfigError("expected mas= or program=, got neither: pass mas='rpsv', or program='my_agents.py:solve'")
    return load_mas(mas), None


def resolve_policy(mas: MAS, policy: Policy | AsyncPolicy | FromConfig | None) -> Policy | AsyncPolicy:
    """Return the given policy, or load the policies in the MAS's config for `FROM_CONFIG`.

    Raises:
        ConfigError: As for `config_policies` without a policy.
    """
    return load_policy(config_policies(mas, policy)) if policy is None or policy == FROM_CONFIG else policy


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
