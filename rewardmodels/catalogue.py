"""Load critics by name, ``"models/masprm"``, ``"policy-likelihood"``, ``"ensemble:A,B"``; publish them on a hub.

``HF_ENDPOINT`` names another hub, ``HF_TOKEN`` or ``hf auth login`` the account, and ``HF_HUB_OFFLINE=1`` uses
downloaded critics only, all as for any other use of the hub.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from mas_gym.errors import ConfigError, DataError, DataNotFoundError, MissingDependencyError, UnknownNameError, shown
from mas_gym.plugins import is_user_code, load_user_code, unknown
from rewardmodels.model.folder import META, check_folder, model_card, read_info
from rewardmodels.model.learned import LearnedCritic
from rewardmodels.verifiers.judge import Judge, judge
from rewardmodels.verifiers.published import ScalarRewardModel, StepRewardModel
from rewardmodels.verifiers.server import ServerCritic, http, https
from search.critics import (
    Agreement,
    ConstantCritic,
    Ensemble,
    PolicyLikelihood,
    RandomCritic,
    Uncertainty,
)
from search.protocol import Critic, as_critic

ENTRY_POINTS = "mas_gym.envs.scoring"
"""Entry-point group for third parties; each entry is a loader ``(argument, **options) -> critic``."""

Loader = Callable[..., Critic]


def load_critic(spec: str, *, lazy: bool = False, **options: Any) -> Critic:
    """Load a critic.

    Args:
        spec: A folder saved by training, or one of

            * ``"tiny-masprm"`` or ``"tiny-orm"`` (shipped, for the embedded model's RPSV agents on Arithmetic);
            * ``"policy-likelihood"``, ``"constant:0.5"``, ``"random"``, ``"uncertainty:KIND"``, ``"agreement"``;
            * ``"judge:POLICY"``, ``"prm:MODEL"``, ``"rm:MODEL"``, ``"http://HOST:PORT/ENDPOINT"`` (see
              `rewardmodels.verifiers`);
            * ``"vllm:FOLDER"`` to score a folder saved by training with vLLM;
            * ``"ensemble:A,B"`` with the spec of each member;
            * ``"FILE.py:NAME:SETTINGS"`` for your own (see `mas_gym.plugins`);
            * ``"org/name"`` of a critic on the Hugging Face hub (see `push_to_hub`; option ``revision``);
            * ``"NAME:ARGUMENT"`` of a loader that is registered in the entry-point group ``mas_gym.envs.scoring``.

            Options may follow, as in ``"models/masprm#concurrent=true"`` or ``"prm:MODEL#aggregate=min"``.
        lazy: Let a trained critic read its weights at its first score, not now; other critics are loaded now.
        options: Options of the loader; for folders see `LearnedCritic`.

    Raises:
        UnknownNameError: There is neither such a folder nor such a name, with the known names and the nearest.
        DataError: The folder holds no whole critic.
        ConfigError: An option or argument is wrong.
        MissingDependencyError: A package is not installed.
    """
    from mas_gym.policies.registry import written_options

    if is_user_code(spec) and not spec.startswith(_OF_PARTS):
        own = load_user_code("critic", spec)
        try:
            return as_critic(own)
        except ConfigError as error:
            raise ConfigError(f"critic {spec!r}: {error}") from None
    # A folder's name may contain '#', and the members of an ensemble have their own options.
    if "#" in spec and not spec.startswith("ensemble:") and not Path(spec).expanduser().exists():
        spec, written = written_options(spec)
        options = {**written, **options}
    path = Path(spec).expanduser()
    if (path / META).exists() or (path.is_dir() and spec not in _BUILTIN):
        return _build(spec, LearnedCritic, str(path), lazy=lazy, **options)
    name, _, argument = spec.partition(":")
    known = _known()
    if name not in known:
        if is_hub_name(spec):
            folder = download(spec, options.pop("revision", None))
            return _build(spec, LearnedCritic, str(folder), lazy=lazy, **options)
        if os.sep in spec or spec.startswith((".", "~")):
            raise UnknownNameError(f"no critic at {spec!r}: expected a folder that training wrote")
        raise unknown("critic", name, known, ENTRY_POINTS)
    loader = known[name]
    if isinstance(loader, EntryPoint):
        try:
            loader = loader.load()
        except ImportError as error:
            raise MissingDependencyError(f"critic {name!r} cannot be imported: {error}") from error
    if lazy and loader in (_masprm, _orm, _ensemble):
        options["lazy"] = True
    return _build(name, loader, argument, **options)


def _known() -> dict[str, Loader | EntryPoint]:
    found: dict[str, Loader | EntryPoint] = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    return {**found, **_BUILTIN}


def critic_makers() -> dict[str, Callable[..., Any]]:
    """Return by name the class or loader whose parameters are each critic's settings."""
    classes: dict[str, Callable[..., Any]] = {
        "tiny-masprm": LearnedCritic,
        "tiny-orm": LearnedCritic,
        "policy-likelihood": PolicyLikelihood,
        "constant": ConstantCritic,
        "ensemble": Ensemble,
        "uncertainty": Uncertainty,
        "agreement": Agreement,
        "random": RandomCritic,
        "judge": Judge,
        "prm": StepRewardModel,
        "rm": ScalarRewardModel,
        "http": ServerCritic,
        "https": ServerCritic,
    }
    loaders = {name: made.load() if isinstance(made, EntryPoint) else made for name, made in _known().items()}
    return {**loaders, **classes}


def known_critics() -> list[str]:
    """Return the names that `load_critic` accepts in addition to folders, including third parties'."""
    return sorted(_known())


def shipped(kind: Literal["masprm", "orm"]) -> Path:
    """Return the folder of a shipped critic for the embedded model."""
    return Path(__file__).parent / "shipped" / kind


def _build(name: str, make: Callable[..., Critic], argument: str, **options: Any) -> Critic:
    signature = inspect.signature(make)
    try:
        signature.bind(argument, **options)
    except TypeError as error:
        takes = [key for key, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY]
        raise ConfigError(f"critic {name!r}: {error}; it takes {', '.join(takes) or 'no options'}") from error
    if make in (LearnedCritic, StepRewardModel, ScalarRewardModel) and find_spec("torch") is None:
        raise MissingDependencyError("a local reward model needs torch; install it with: pip install 'mas-gym[local]'")
    return make(argument, **options)


def _likelihood(argument: str) -> Critic:
    if argument:
        raise ConfigError(f"policy-likelihood takes no argument, got {argument!r}")
    return PolicyLikelihood()


def _constant(argument: str) -> Critic:
    try:
        value = float(argument or "0")
    except ValueError as error:
        raise ConfigError(f'expected a number, as in "constant:0.5", got {argument!r}') from error
    if not math.isfinite(value):
        raise ConfigError(f"expected a finite number, got {argument!r}")
    return ConstantCritic(value)


def _uncertainty(argument: str) -> Critic:
    return Uncertainty(argument or "entropy")


def _agreement(argument: str) -> Critic:
    if argument:
        raise ConfigError(f"agreement takes no argument, got {argument!r}")
    return Agreement()


def _random(argument: str) -> Critic:
    try:
        return RandomCritic(int(argument or "0"))
    except ValueError as error:
        raise ConfigError(f'expected a whole number, as in "random:7", got {argument!r}') from error


def _ensemble(argument: str, **options: Any) -> Critic:
    return Ensemble([load_critic(member.strip(), **options) for member in argument.split(",") if member.strip()])


def _vllm(argument: str, **options: Any) -> Critic:
    """A folder saved by training, scored by vLLM's pooling runner."""
    from rewardmodels.model.learned import VLLMCritic

    return _build("vllm", VLLMCritic, argument, **options)


def _masprm(argument: str, **options: Any) -> Critic:
    return _shipped("masprm", argument, **options)


def _orm(argument: str, **options: Any) -> Critic:
    return _shipped("orm", argument, **options)


def _shipped(kind: Literal["masprm", "orm"], argument: str, **options: Any) -> Critic:
    if argument:
        raise ConfigError(f"tiny-{kind} takes no argument, got {argument!r}; a folder of your own is named by its path")
    return _build(f"tiny-{kind}", LearnedCritic, str(shipped(kind)), **options)


_BUILTIN: dict[str, Loader] = {
    "tiny-masprm": _masprm,
    "tiny-orm": _orm,
    "policy-likelihood": _likelihood,
    "constant": _constant,
    "ensemble": _ensemble,
    "vllm": _vllm,
    "uncertainty": _uncertainty,
    "agreement": _agreement,
    "random": _random,
    "judge": judge,
    "prm": StepRewardModel,
    "rm": ScalarRewardModel,
    "http": http,
    "https": https,
}
_OF_PARTS = ("ensemble:", "judge:")
"""Beginnings of specs that contain other specs, which may be user code."""


# ------------------------------------------------------------------ critics on a hub

NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_FILES = ("*.json", "*.safetensors", "*.jinja", "README.md")
_CARD = "README.md"
PLACEHOLDER = "PATH/TO/THIS/FOLDER"
"""What a model card loads the critic by until it has a name."""


def is_hub_name(spec: str) -> bool:
    """Return whether a text can only mean a critic on the hub: ``org/name``, and there is no local folder ``org``."""
    return NAME.fullmatch(spec) is not None and not Path(spec).parent.exists()


def push_to_hub(folder: str | Path, name: str, *, private: bool = False, message: str = "Upload critic") -> str:
    """Publish a critic on the hub; the same call again publishes a new version.

    The model card states what the critic was trained on, and loads it by its name. Checkpoints and curves of the
    training run stay here.

    Args:
        folder: A folder that training wrote.
        name: ``"org/name"``; created if it does not exist.
        private: Whether a new repository is visible to its owners only.
        message: The commit's message.

    Returns:
        The address of the repository.

    Raises:
        ConfigError: The name is not ``org/name``, or the folder's model is not safe to load.
        DataError: The folder holds no whole critic, or the hub refuses it.
        DataNotFoundError: There is no such folder, or the hub cannot be reached.
        MissingDependencyError: huggingface_hub is not installed.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(f"hub name: expected org/name, got {shown(name)}")
    folder = Path(folder).expanduser()
    info = read_info(folder)
    check_folder(folder)
    hub = _library()
    own = folder / _CARD
    card = own.read_text(encoding="utf-8") if own.is_file() else model_card(info)
    files = {path.name: path for pattern in _FILES for path in sorted(folder.glob(pattern)) if path.name != _CARD}
    # Training's own state has the suffix of a model file, and is no part of the model.
    operations = [hub.CommitOperationAdd(path, str(file)) for path, file in files.items() if path != "run.json"]
    operations.append(hub.CommitOperationAdd(_CARD, card.replace(PLACEHOLDER, name).encode()))
    api = hub.HfApi()
    try:
        url = api.create_repo(name, private=private, exist_ok=True)
        api.create_commit(name, operations, commit_message=message)
    except Exception as error:
        raise _refused(hub, error, f"cannot publish {name!r}") from error
    return str(url)


def download(name: str, revision: str | None = None) -> Path:
    """Return the local folder of a published critic, downloaded if necessary.

    Only safetensors, JSON, the chat template and the card are downloaded, never code.

    Args:
        name: ``"org/name"``.
        revision: Branch, tag or commit; the newest by default.

    Raises:
        DataError: The hub refuses it, or what it holds is no critic.
        DataNotFoundError: The hub does not have it or cannot be reached.
        MissingDependencyError: huggingface_hub is not installed.
    """
    hub = _library()
    try:
        folder = Path(hub.snapshot_download(name, revision=revision, allow_patterns=list(_FILES)))
    except Exception as error:
        raise _refused(hub, error, f"no critic {name!r}: there is no such folder here") from error
    if not (folder / META).is_file():
        raise DataError(f"{name!r} on the hub is no critic of MAS-Gym: expected {META}; publish one with push_to_hub")
    return folder


def _library() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingDependencyError("the hub needs huggingface_hub: pip install 'mas-gym[local]'") from error
    return huggingface_hub


def _refused(hub: Any, error: Exception, what: str) -> Exception:
    """Return the error to raise for one of the hub's library; the library names no common base."""
    errors = hub.errors
    if isinstance(error, errors.RepositoryNotFoundError | errors.RevisionNotFoundError):
        reason = "the hub does not have it, or not for this account; check the name, or log in with hf auth login"
        return DataNotFoundError(f"{what}, and {reason}")
    if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
        return DataError(f"{what}; the hub answers with status {status}: {shown(str(error))}")
    if isinstance(error, errors.LocalEntryNotFoundError | OSError):
        return DataNotFoundError(f"{what}, and the hub cannot be reached ({shown(str(error))}); check the network")
    if isinstance(error, ValueError):
        return DataError(f"{what}: {shown(str(error))}")
    return error
