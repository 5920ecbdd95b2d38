"""Critics by name: ``"policy-likelihood"``, ``"models/masprm"``, ``"ensemble:A,B"``, ``"my.py:Lookahead"``.

A package adds names with entry points in the group ``mas_gym.critics``. An entry loads to one of

* a loader ``(argument, **options) -> critic``, such as a critic's class;
* the path of a folder that training wrote;
* a function that returns such a path, whose keyword arguments are options.

Three names have a meaning beyond their own: ``folder`` loads what is named by a path alone, ``features`` does so if the
folder has a file ``features.json``, and ``hub`` finds the folder of what is named ``org/name`` alone.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, get_type_hints

from mas_gym.errors import ConfigError, MissingDependencyError, UnknownNameError
from mas_gym.plugins import is_user_code, load_user_code, unknown, written_options
from search.critics import (
    Agreement,
    Combination,
    ConstantCritic,
    Ensemble,
    PolicyLikelihood,
    RandomCritic,
    Uncertainty,
    Vote,
)
from search.protocol import Critic, as_critic
from search.store.verdicts import RecordedCritic

ENTRY_POINTS = "mas_gym.critics"

Loader = Callable[..., Any]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_FEATURES = "features"
_COMBINED: dict[str, type[Combination]] = {"ensemble": Ensemble, "vote": Vote}
_OF_PARTS = ("ensemble:", "vote:", "judge:")
"""Beginnings of specs that contain other specs, which may be user code."""


def load_critic(spec: str, *, lazy: bool = False, **options: Any) -> Critic:
    """Load a critic.

    Args:
        spec: A folder saved by training, or one of

            * ``"tiny-masprm"`` or ``"tiny-orm"`` (shipped, for the embedded model's RPSV agents on Arithmetic);
            * ``"policy-likelihood"``, ``"constant:0.5"``, ``"random"``, ``"uncertainty:KIND"``, ``"agreement"``;
            * ``"judge:POLICY"``, ``"prm:MODEL"``, ``"rm:MODEL"``, ``"http://HOST:PORT/ENDPOINT"`` (see
              `rewardmodels.verifiers`);
            * ``"vllm:FOLDER"`` to score a folder saved by training with vLLM;
            * ``"ensemble:A,B"`` for the mean of several critics, ``"vote:A,B"`` for their vote, with the spec of each;
            * ``"recorded:STORE"`` for the values of a store, or ``"recorded:STORE#judge=NAME"`` for the recorded
              verdicts of a judge (`search.store.RecordedCritic`);
            * ``"FILE.py:NAME:SETTINGS"`` for your own (see `mas_gym.plugins`);
            * ``"org/name"`` of a critic on the Hugging Face hub (see `rewardmodels.push_to_hub`; option ``revision``);
            * ``"NAME:ARGUMENT"`` of a loader that is registered in the entry-point group ``mas_gym.critics``.

            Options may follow, as in ``"models/masprm#concurrent=true"`` or ``"prm:MODEL#aggregate=min"``.
        lazy: Let a trained critic read its weights at its first score, not now; other critics are loaded now.
        options: Options of the loader; for folders see `rewardmodels.LearnedCritic`.

    Raises:
        UnknownNameError: There is neither such a folder nor such a name, with the known names and the nearest.
        DataError: The folder holds no whole critic.
        ConfigError: An option or argument is wrong.
        MissingDependencyError: A package is not installed.
    """
    if is_user_code(spec) and not spec.startswith(_OF_PARTS):
        own = load_user_code("critic", spec)
        try:
            return as_critic(own)
        except ConfigError as error:
            raise ConfigError(f"critic {spec!r}: {error}") from None
    # A folder's name may contain '#', and the members of an ensemble have their own options.
    if (
        "#" in spec
        and not spec.startswith(tuple(f"{name}:" for name in _COMBINED))
        and not Path(spec).expanduser().exists()
    ):
        spec, written = written_options(spec)
        options = {**written, **options}
    known = _known()
    name, argument = _named(spec, known)
    if name in _COMBINED:
        members = [
            load_critic(member.strip(), lazy=lazy, **options) for member in argument.split(",") if member.strip()
        ]
        return _COMBINED[name](members)
    loader = _loaded(name, known)
    if isinstance(loader, Path):
        if argument:
            raise ConfigError(f"{name} takes no argument, got {argument!r}; a folder of your own is named by its path")
        loader, argument = _loaded("folder", known), str(loader)
    elif not inspect.isclass(loader) and get_type_hints(loader).get("return") is Path:
        of_loader = {key: options.pop(key) for key in inspect.signature(loader).parameters if key in options}
        loader, argument = _loaded("folder", known), str(loader(argument, **of_loader))
    signature = inspect.signature(_maker(loader))
    if lazy and "lazy" in signature.parameters:
        options["lazy"] = True
    try:
        signature.bind(argument, **options)
    except TypeError as error:
        takes = [key for key, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY]
        raise ConfigError(f"critic {spec!r}: {error}; it takes {', '.join(takes) or 'no options'}") from error
    return as_critic(loader(argument, **options))


def known_critics() -> list[str]:
    """Return the names that `load_critic` accepts in addition to folders, those of installed packages included."""
    return sorted(_known())


def critic_makers() -> dict[str, Callable[..., Any]]:
    """Return by name the class or loader whose parameters are each critic's settings."""
    known = _known()
    found: dict[str, Callable[..., Any]] = {}
    for name in known:
        loader = _loaded(name, known)
        if isinstance(loader, Path) or _class_of(loader) is Path:
            loader = _loaded("folder", known)
        has_options = any(p.kind is p.KEYWORD_ONLY for p in inspect.signature(loader).parameters.values())
        found[name] = loader if has_options else _class_of(loader)
    return found


def _known() -> dict[str, Loader | EntryPoint]:
    found: dict[str, Loader | EntryPoint] = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    return {**found, **_BUILTIN}


def _named(spec: str, known: dict[str, Loader | EntryPoint]) -> tuple[str, str]:
    """Return the name and the argument that a spec means."""
    name, _, argument = spec.partition(":")
    folder = Path(spec).expanduser()
    if spec not in known and folder.is_dir():
        # The one kind of trained critic that is no language model.
        return _FEATURES if (folder / f"{_FEATURES}.json").is_file() else "folder", str(folder)
    if name in known:
        return name, argument
    if _HUB_NAME.fullmatch(spec) and not Path(spec).parent.exists() and "hub" in known:
        return "hub", spec
    if os.sep in spec or spec.startswith((".", "~")):
        raise UnknownNameError(f"no critic at {spec!r}: expected a folder that training wrote")
    raise unknown("critic", name, known, ENTRY_POINTS)


def _loaded(name: str, known: dict[str, Loader | EntryPoint]) -> Any:
    loader = known[name]
    if isinstance(loader, EntryPoint):
        try:
            return loader.load()
        except ImportError as error:
            raise MissingDependencyError(f"critic {name!r} cannot be imported: {error}") from error
    return loader


def _maker(loader: Loader) -> Callable[..., Any]:
    """Return the class of the critic if its loader passes all options on to it, otherwise the loader."""
    kinds = {parameter.kind for parameter in inspect.signature(loader).parameters.values()}
    passes_on = inspect.Parameter.VAR_KEYWORD in kinds and inspect.Parameter.KEYWORD_ONLY not in kinds
    return _class_of(loader) if passes_on else loader


def _class_of(loader: Loader) -> Callable[..., Any]:
    """Return the class that a loader states as its result; the loader itself if it is a class or states none."""
    made = None if inspect.isclass(loader) else get_type_hints(loader).get("return")
    return made if inspect.isclass(made) else loader


def _likelihood(argument: str) -> PolicyLikelihood:
    """The sigmoid of a message's mean token log-probability."""
    if argument:
        raise ConfigError(f"policy-likelihood takes no argument, got {argument!r}")
    return PolicyLikelihood()


def _constant(argument: str) -> ConstantCritic:
    """The same value for every state."""
    try:
        value = float(argument or "0")
    except ValueError as error:
        raise ConfigError(f'expected a number, as in "constant:0.5", got {argument!r}') from error
    if not math.isfinite(value):
        raise ConfigError(f"expected a finite number, got {argument!r}")
    return ConstantCritic(value)


def _uncertainty(argument: str) -> Uncertainty:
    """How sure the agent was of its message."""
    return Uncertainty(argument or "entropy")


def _agreement(argument: str) -> Agreement:
    """How many leaves of the search agree with a state's answer."""
    if argument:
        raise ConfigError(f"agreement takes no argument, got {argument!r}")
    return Agreement()


def _random(argument: str) -> RandomCritic:
    """A random value per state, from a seed."""
    try:
        return RandomCritic(int(argument or "0"))
    except ValueError as error:
        raise ConfigError(f'expected a whole number, as in "random:7", got {argument!r}') from error


_BUILTIN: dict[str, Loader] = {
    "policy-likelihood": _likelihood,
    "constant": _constant,
    **_COMBINED,
    "recorded": RecordedCritic,
    "uncertainty": _uncertainty,
    "agreement": _agreement,
    "random": _random,
}
