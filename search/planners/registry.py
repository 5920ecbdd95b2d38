"""Planners by name: ``"mcts:10,3,leaf=bootstrap"``, ``"my.py:Lookahead:2,3"``, and names of installed packages."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pkgutil import resolve_name
from typing import Any

from mas_gym.errors import ConfigError
from mas_gym.plugins import Registry, Spec, write_settings
from search import planners
from search.planners.stop_rules import read_stop
from search.planners.wrapper import PlannerWrapper
from search.protocol import Planner, as_planner, planner_name

_CASCADE = "cascade"


def _cascade(stages: str = "single>mcts:10,3@0.9") -> Planner:
    """Searches of increasing size; the next search runs only if the answer is uncertain."""
    first, *later = stages.split(">")
    pairs = [stage.rpartition("@") for stage in later]
    if not later or any(not at for _, at, _ in pairs):
        raise ConfigError(
            f"planner cascade:{stages}: expected planners separated by > with a probability after each but the first, "
            "as in cascade:single>mcts:20,2@0.8>mcts:20,6@0.6"
        )
    rules: Any = tuple(read_stop(rule.strip()) for _, _, rule in pairs)
    return planners.Cascade(tuple(map(load_planner, [first, *(stage for stage, _, _ in pairs)])), rules)


PLANNERS = Registry(
    "planner",
    "mas_gym.planners",
    {
        "single": planners.SinglePass,
        "sc": planners.SelfConsistency,
        "bon": planners.BestOfN,
        "sbs": planners.StepBeamSearch,
        "mcts": planners.MCTS,
        "puct": planners.PUCT,
        "halving": planners.SequentialHalving,
        "dvts": planners.DVTS,
        "rebase": planners.REBASE,
        "adaptive": planners.AdaptiveBranching,
        "siblings": planners.Siblings,
        _CASCADE: _cascade,
    },
)
_WRAPPERS = {
    "arms": "search.planners.chosen_arms:ChosenArms",
    "recipients": "search.planners.chosen_recipients:ChosenRecipients",
}
"""Settings that every shipped planner takes, and the wrappers that apply them, which are imported on use."""


def planner_names() -> list[str]:
    """Return the names that `load_planner` accepts, including those of installed packages."""
    return PLANNERS.names()


def load_planner(spec: str | Planner) -> Planner:
    """Build a planner from its short form; return a planner unchanged.

    Args:
        spec: A name, then a colon and the settings in order or by name: ``"single"``, ``"sc:5"``,
            ``"sc:5,weights=critic"``, ``"bon:5"``, ``"sbs:5,3"`` (B2, B1), ``"mcts:10,3"``,
            ``"mcts:10,3,leaf=bootstrap,c=2"``; ``"cascade:single>mcts:20,2@0.8>mcts:20,6@0.6"``, where each later
            planner runs if the probability that the answer so far is right is at most its ``@`` number; or
            ``"FILE.py:NAME"`` with settings in the same form (see `mas_gym.plugins`). Every other shipped planner also
            takes ``arms=``, a rule of `search.planners.chosen_arms`, and ``recipients=``, a rule of
            `search.planners.chosen_recipients`.

    Returns:
        The planner.

    Raises:
        UnknownNameError: No planner has that name; the message lists the known ones.
        ConfigError: A setting is unknown, missing its value, or out of range.

    >>> load_planner("sbs:5,3")
    StepBeamSearch(stop=None, b2=5, b1=3)
    """
    if not isinstance(spec, str):
        return as_planner(spec)
    name, colon, stages = spec.strip().partition(":")
    if name.strip() == _CASCADE:
        # Each stage has its own settings and options.
        return _cascade(stages) if colon else _cascade()
    parsed = PLANNERS.parse(spec)
    make = PLANNERS.find(parsed)
    args, kwargs = PLANNERS.arguments(parsed)
    if "c" in kwargs and "c_uct" not in kwargs and "c_uct" in inspect.signature(make).parameters:
        kwargs["c_uct"] = kwargs.pop("c")
    shipped = make in PLANNERS.shipped.values()
    rules = {name: kwargs.pop(name) for name in _WRAPPERS if shipped and name in kwargs}
    planner = PLANNERS.call(parsed, make, *args, **kwargs)
    try:
        for name, rule in rules.items():
            wrapper: type[PlannerWrapper] = resolve_name(_WRAPPERS[name])
            planner = planner if rule == wrapper.default else wrapper(planner, rule)  # type: ignore[call-arg]
        return as_planner(planner)
    except ConfigError as error:
        raise ConfigError(f"planner {spec!r}: {error}") from None


def takes_stop(planner: object) -> bool:
    """Return whether a planner has a setting ``stop``."""
    return is_dataclass(planner) and any(setting.name == "stop" for setting in fields(planner))


def planner_makers() -> dict[str, Callable[..., Any]]:
    """Return planner classes and functions by name, including those of installed packages."""
    return {name: PLANNERS.find(Spec(name)) for name in planner_names()}


def planner_spec(planner: Planner) -> str:
    """Return the short form of a planner, for reports; the class name for an unregistered planner.

    >>> planner_spec(planners.MCTS(10, 3, leaf="bootstrap"))
    'mcts:10,3,leaf=bootstrap'
    """
    if isinstance(planner, PlannerWrapper):
        spec = planner_spec(planner.planner)
        return f"{spec}{',' if ':' in spec else ':'}{planner.setting}={vars(planner)[planner.setting]}"
    if isinstance(planner, planners.Cascade):
        first, *more = map(planner_spec, planner.stages)
        return f"{_CASCADE}:{'>'.join([first, *(f'{s}@{rule}' for s, rule in zip(more, planner.rules, strict=True))])}"
    for name, make in PLANNERS.shipped.items():
        if type(planner) is make:
            return name + _settings(planner)
    return planner_name(planner)


def _settings(planner: Planner) -> str:
    """Return the leading integers by position and the other non-default settings by name."""
    args: list[object] = []
    kwargs: dict[str, object] = {}
    leading = True
    for parameter in inspect.signature(type(planner)).parameters.values():
        value = vars(planner)[parameter.name]
        leading = leading and isinstance(parameter.default, int)
        # The critic determines the kind of values, and tables show the critic next to the planner.
        if parameter.name == "values" or (not leading and value == parameter.default):
            continue
        if leading:
            args.append(value)
        else:
            kwargs[parameter.name.replace("c_uct", "c")] = value
    written = write_settings(args, kwargs)
    return f":{written}" if written else ""
