"""Planners by name: ``"mcts:10,3,leaf=bootstrap"`` and back.

Another package adds names with an entry point in the group ``mas_gym.planners``,
which loads to a planner class (or a function that returns a planner).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from mas_gym.errors import ConfigError, unknown_name
from search.planners import (
    DVTS,
    MCTS,
    PUCT,
    REBASE,
    AdaptiveBranching,
    BestOfN,
    SelfConsistency,
    SequentialHalving,
    SinglePass,
    StepBeamSearch,
)
from search.protocol import Planner

GROUP = "mas_gym.planners"
_SHIPPED: dict[str, Callable[..., Any]] = {
    "single": SinglePass,
    "sc": SelfConsistency,
    "bon": BestOfN,
    "sbs": StepBeamSearch,
    "mcts": MCTS,
    "puct": PUCT,
    "halving": SequentialHalving,
    "dvts": DVTS,
    "rebase": REBASE,
    "adaptive": AdaptiveBranching,
}
_SHORT = {"c": "c_uct"}
_WORDS = {"true": True, "false": False, "none": None}


def planner_names() -> list[str]:
    """Return the names that `load_planner` knows, those of installed packages included."""
    return sorted(_SHIPPED | _plugins())


def load_planner(spec: str) -> Planner:
    """Make a planner from its short form.

    Args:
        spec: A name, then after a colon its settings in order or by name: ``"single"``, ``"sc:5"``,
            ``"sc:5,weights=critic"``, ``"bon:5"``, ``"sbs:5,3"`` (B2, B1), ``"mcts:10,3"``,
            ``"mcts:10,3,leaf=bootstrap,c=2"``.

    Returns:
        The planner.

    Raises:
        UnknownNameError: No planner has that name; the message lists the known ones.
        ConfigError: A setting is unknown, missing its value, or out of range.

    >>> load_planner("sbs:5,3")
    StepBeamSearch(b2=5, b1=3)
    """
    name, _, settings = spec.strip().partition(":")
    make = _find(name.strip())
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in settings.split(","))):
        key, equals, value = item.partition("=")
        if equals:
            kwargs[_full(make, key.strip())] = _read(value.strip())
        elif kwargs:
            raise ConfigError(f"planner {spec!r}: {item!r} comes after a named setting; put it first or name it")
        else:
            args.append(_read(item))
    try:
        inspect.signature(make).bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(f"planner {spec!r}: {error}; expected {name}:{_usage(make)}") from None
    planner = make(*args, **kwargs)
    if not isinstance(planner, Planner):
        raise ConfigError(f"planner {name!r}: expected an object with a plan method, got {type(planner).__name__}")
    return planner


def planner_spec(planner: Planner) -> str:
    """Return the short form of a planner, for reports; the class name for one that is not registered.

    >>> planner_spec(MCTS(10, 3, leaf="bootstrap"))
    'mcts:10,3,leaf=bootstrap'
    """
    for name, make in _SHIPPED.items():
        if type(planner) is make:
            return name + _settings(planner)
    return type(planner).__name__


def _settings(planner: Planner) -> str:
    """Return the leading whole numbers by position, and by name whatever else is not the default."""
    shown: list[str] = []
    leading = True
    for parameter in inspect.signature(type(planner)).parameters.values():
        value = getattr(planner, parameter.name)
        leading = leading and isinstance(parameter.default, int)
        # What the values mean is settled by the run and its critic, whose name stands beside the planner's.
        if parameter.name == "values" or (not leading and value == parameter.default):
            continue
        text = f"{value:g}" if isinstance(value, float) else str(value).lower()
        shown.append(text if leading else f"{parameter.name.replace('c_uct', 'c')}={text}")
    return ":" + ",".join(shown) if shown else ""


def _find(name: str) -> Callable[..., Any]:
    if name in _SHIPPED:
        return _SHIPPED[name]
    plugins = _plugins()
    if name not in plugins:
        raise unknown_name("planner", name, _SHIPPED | plugins)
    loaded: Callable[..., Any] = plugins[name].load()
    return loaded


def _plugins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in _SHIPPED}


def _full(make: Callable[..., Any], key: str) -> str:
    parameters = inspect.signature(make).parameters
    return key if key in parameters else _SHORT.get(key, key)


def _read(text: str) -> Any:
    if text.casefold() in _WORDS:
        return _WORDS[text.casefold()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _usage(make: Callable[..., Any]) -> str:
    return ",".join(f"{p.name}={p.default}" for p in inspect.signature(make).parameters.values())
