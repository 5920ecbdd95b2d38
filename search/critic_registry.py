"""Critics by name: ``"policy-likelihood"``, ``"models/masprm"``, ``"ensemble:A,B"``, ``"my.py:Lookahead"``.

A package registers names with entry points in the group ``mas_gym.critics``. An entry point is one of these:

* a loader ``(argument, **options) -> critic``, such as a critic's class;
* the path of a folder written by training;
* a function that returns such a path; its keyword arguments are options.

A spec without a name gets one of these names: ``folder`` for the path of a folder, ``features`` or
``calibrated`` if the folder has a file ``features.json`` or ``calibrated.json``, and ``hub`` for ``org/name``.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

from mas_gym.errors import ConfigError, DataError, UnknownNameError, shown
from mas_gym.plugins import Registry, Spec
from search.calibrated_critics import Calibrated, read_model
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

Loader = Callable[..., Any]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_OWN_FILES = ("features", "calibrated")
CALIBRATED = "calibrated.json"
MEMBERS = "folders of critics and recorded:STORE inside the folder, and names of registered critics without arguments"
"""The members that a combination's file may name."""
_COMBINED: dict[str, type[Combination]] = {"ensemble": Ensemble, "vote": Vote}


def load_critic(spec: str, *, lazy: bool = False, **options: Any) -> Critic:
    """Load a critic.

    Args:
        spec: A folder saved by training, or one of

            * ``"tiny-masprm"`` or ``"tiny-orm"`` (shipped, for the bundled model's RPSV agents on Arithmetic);
            * ``"policy-likelihood"``, ``"constant:0.5"``, ``"random"``, ``"uncertainty:KIND"``, ``"agreement"``;
            * ``"judge:POLICY"``, ``"prm:MODEL"``, ``"rm:MODEL"``, ``"http://HOST:PORT/ENDPOINT"`` (see
              `rewardmodels.verifiers`);
            * ``"vllm:FOLDER"`` for a folder saved by training whose model runs on vLLM;
            * ``"ensemble:A,B"`` for the mean of several critics and ``"vote:A,B"`` for their vote, where A and B are
              specs;
            * ``"recorded:STORE"`` for the values of a store, or ``"recorded:STORE#judge=NAME"`` for the recorded
              verdicts of a judge (`search.store.RecordedCritic`);
            * ``"FILE.py:NAME:SETTINGS"`` for a custom critic (see `mas_gym.plugins`);
            * ``"org/name"`` for a critic on the Hugging Face hub (see `rewardmodels.push_to_hub`; option ``revision``);
            * ``"NAME:ARGUMENT"`` for a loader registered in the entry-point group ``mas_gym.critics``.

            Options may follow, as in ``"models/masprm#concurrent=true"`` or ``"prm:MODEL#aggregate=min"``.
        lazy: Load the weights of a trained critic when it first scores. Other critics are always loaded immediately.
        options: Options of the loader; for folders see `rewardmodels.LearnedCritic`.

    Raises:
        UnknownNameError: No folder or critic has this name; the message lists the known names and the closest match.
        DataError: The folder does not contain a complete critic.
        ConfigError: An option or argument is wrong.
        MissingDependencyError: A package is not installed.
    """
    parsed = _parsed(spec)
    if parsed.name in _COMBINED and not parsed.file:
        # The options apply to the members.
        members = map(str.strip, str(parsed).partition(":")[2].split(","))
        return _COMBINED[parsed.name]([load_critic(member, lazy=lazy, **options) for member in members if member])
    loader = CRITICS.find(parsed)
    args, written = CRITICS.arguments(parsed)
    options = {**written, **options}
    if not parsed.file:
        loader, args = _resolved(parsed, loader, args, options)
        maker = _maker(loader)
        if lazy and "lazy" in inspect.signature(maker).parameters:
            options["lazy"] = True
        CRITICS.check(parsed, maker, *args, **options)
    made = CRITICS.call(parsed, loader, *args, **options)
    try:
        return as_critic(made)
    except ConfigError as error:
        raise ConfigError(f"critic {spec!r}: {error}") from None


def _resolved(spec: Spec, loader: Loader | Path, args: list[Any], options: dict[str, Any]) -> tuple[Loader, list[Any]]:
    """Return a loader with its arguments; a path or a function that returns one resolves to the folder loader.

    The options of such a function are removed from ``options``.
    """
    if isinstance(loader, Path):
        if spec.argument:
            raise ConfigError(
                f"{spec.name} takes no argument, got {spec.argument!r}; to load your own folder, pass its path"
            )
        return CRITICS.find(_FOLDER), [str(loader)]
    if not inspect.isclass(loader) and get_type_hints(loader).get("return") is Path:
        own = {key: options.pop(key) for key in inspect.signature(loader).parameters if key in options}
        return CRITICS.find(_FOLDER), [str(CRITICS.call(spec, loader, *args, **own))]
    return loader, args


def known_critics() -> list[str]:
    """Return the names that `load_critic` accepts in addition to folders, including those of installed packages."""
    return CRITICS.names()


def critic_makers() -> dict[str, Callable[..., Any]]:
    """Return, by critic name, the class or loader whose parameters are the critic's settings."""
    found: dict[str, Callable[..., Any]] = {}
    for name in known_critics():
        loader = CRITICS.find(Spec(name))
        if isinstance(loader, Path) or _class_of(loader) is Path:
            loader = CRITICS.find(_FOLDER)
        has_options = any(p.kind is p.KEYWORD_ONLY for p in inspect.signature(loader).parameters.values())
        found[name] = loader if has_options else _class_of(loader)
    return found


def _parsed(text: str) -> Spec:
    """Parse a spec; a folder, or the name of a critic on the hub, becomes the argument of its loader."""
    # A folder's name may contain '#'.
    if os.path.isdir(os.path.expanduser(text)) and text not in CRITICS:
        return _of_folder(text)
    spec = CRITICS.parse(text)
    if spec.file or spec.name in CRITICS:
        return spec
    place = str(spec._replace(fragment=""))
    if os.path.isdir(os.path.expanduser(place)):
        return _of_folder(place)._replace(fragment=spec.fragment)
    if _HUB_NAME.fullmatch(place) and not Path(place).parent.exists() and "hub" in CRITICS:
        return Spec("hub", place, spec.fragment)
    if os.sep in place or place.startswith((".", "~")):
        raise UnknownNameError(f"no critic at {shown(place)}: expected a folder that training wrote")
    raise CRITICS.unknown(spec.name)


def _of_folder(text: str) -> Spec:
    folder = Path(text).expanduser()
    # Trained critics that are not language models are recognized by a file with the name of their kind.
    own = next((name for name in _OWN_FILES if (folder / f"{name}.json").is_file()), _FOLDER.name)
    return Spec(own, str(folder))


def _maker(loader: Loader) -> Callable[..., object]:
    """Return the critic's class if its loader passes all options to it, otherwise the loader."""
    kinds = {parameter.kind for parameter in inspect.signature(loader).parameters.values()}
    passes_on = inspect.Parameter.VAR_KEYWORD in kinds and inspect.Parameter.KEYWORD_ONLY not in kinds
    return _class_of(loader) if passes_on else loader


def _class_of(loader: Loader) -> Callable[..., Any]:
    """Return the class in a loader's return annotation; the loader itself if it is a class or has no annotation."""
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
        return ConstantCritic(float(argument or "0"))
    except ValueError as error:
        raise ConfigError(f'expected a finite number, as in "constant:0.5", got {argument!r}') from error


def _uncertainty(argument: str) -> Uncertainty:
    """The agent's certainty about its message."""
    return Uncertainty(argument or "entropy")


def _agreement(argument: str) -> Agreement:
    """The share of the search's leaves that agree with a state's answer."""
    if argument:
        raise ConfigError(f"agreement takes no argument, got {argument!r}")
    return Agreement()


def _calibrated(argument: str) -> Calibrated:
    """A combination of critics fitted by ``mas-gym train calibrated``."""
    folder = Path(argument).expanduser()
    path = folder / CALIBRATED
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read {path}: {error}; train it again with mas-gym train calibrated") from error
    model = read_model(data)
    try:
        return Calibrated([_member(folder.resolve(), member) for member in model.members], model)
    except RecursionError as error:
        raise DataError(f"cannot read {path}: its combinations are nested too deeply; train them again") from error


def _member(folder: Path, text: str) -> Critic:
    """Load a critic that a combination's file names. Raises `ConfigError` unless it is one of the allowed kinds.

    The file may come from an untrusted source. It may name only what is inside its folder, and registered critics.
    """
    if is_plain_critic(text):
        return load_critic(text)
    recorded = CRITICS.parse(text)
    is_store = recorded.name == "recorded" and not recorded.file
    path = folder / (recorded.argument if is_store else text)
    if is_store and os.path.isfile(path) and folder in path.resolve().parents:
        return as_critic(CRITICS.call(recorded, CRITICS.find(recorded), path.resolve(), **recorded.options()))
    if not is_store and os.path.isdir(path) and folder in path.resolve().parents:
        return load_critic(str(path.resolve()))
    raise ConfigError(
        f"{folder / CALIBRATED}: expected only {MEMBERS}, got {shown(text)}; train the combination again with such "
        "critics, or combine loaded critics in Python with search.calibrated_critics.Calibrated"
    )


def is_plain_critic(text: str) -> bool:
    """Return whether a text is the name of a registered critic that needs no argument, option, file or folder."""
    return text in CRITICS and text not in (_FOLDER.name, *_OWN_FILES, "recorded", "hub")


def _random(argument: str) -> RandomCritic:
    """A random value per state, from a seed."""
    try:
        return RandomCritic(int(argument or "0"))
    except ValueError as error:
        raise ConfigError(f'expected an integer, as in "random:7", got {argument!r}') from error


CRITICS = Registry(
    "critic",
    "mas_gym.critics",
    {
        "policy-likelihood": _likelihood,
        "constant": _constant,
        **_COMBINED,
        "recorded": "search.store.recorded_critic:RecordedCritic",
        "calibrated": _calibrated,
        "uncertainty": _uncertainty,
        "agreement": _agreement,
        "random": _random,
    },
    settings=False,
)
_FOLDER = Spec("folder")
