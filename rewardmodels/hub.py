"""Publish critics on the Hugging Face hub, and download them.

As with any other use of the hub, ``HF_ENDPOINT`` sets the address of a different hub, ``HF_TOKEN`` or ``hf auth login``
sets the account, and with ``HF_HUB_OFFLINE=1`` only downloaded critics are used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from mas_gym.errors import ConfigError, DataError, DataNotFoundError, need, shown
from mas_gym.internal.text import one_line
from rewardmodels.data.cards import PLACEHOLDER
from rewardmodels.model.critic_folder import META, check_folder, model_card, read_info

NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_FILES = ("*.json", "*.safetensors", "*.jinja", "README.md")
_CARD = "README.md"


def push_to_hub(folder: str | Path, name: str, *, private: bool = False) -> str:
    """Publish a critic on the hub; repeating the call publishes a new version.

    The model card describes the training data, and its example loads the critic by name. Checkpoints and curves of
    the training run are not uploaded.

    Args:
        folder: A folder written by training.
        name: ``"org/name"``; created if it does not exist.
        private: Whether a new repository is visible to its owners only.

    Returns:
        The address of the repository.

    Raises:
        ConfigError: The name is not ``org/name``, or the folder's model is not safe to load.
        DataError: The folder contains no complete critic, or the hub rejects it or cannot be reached.
        DataNotFoundError: There is no such folder.
        MissingDependencyError: huggingface_hub is not installed.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(f"hub name: expected org/name, got {shown(name)}")
    folder = Path(folder).expanduser()
    info = read_info(folder)
    check_folder(folder)
    hub = need("huggingface_hub", "the hub", "local")
    own = folder / _CARD
    card = own.read_text(encoding="utf-8") if own.is_file() else model_card(info)
    files = {path.name: path for pattern in _FILES for path in sorted(folder.glob(pattern)) if path.name != _CARD}
    # The training state has the suffix of a model file, but is not part of the model.
    operations = [hub.CommitOperationAdd(path, str(file)) for path, file in files.items() if path != "run.json"]
    operations.append(hub.CommitOperationAdd(_CARD, card.replace(PLACEHOLDER, name).encode()))
    api = hub.HfApi()
    try:
        url = api.create_repo(name, private=private, exist_ok=True)
        api.create_commit(name, operations, commit_message="Upload critic")
    # The errors of the hub's library have no common base class.
    except Exception as error:
        raise DataError(f"cannot publish {name!r}: {one_line(error)}") from error
    return str(url)


def download_files(name: str, patterns: Sequence[str], revision: str | None = None) -> Path:
    """Return the local folder of a model on the hub, downloaded if necessary.

    Args:
        name: ``"org/name"``.
        patterns: The files to download.
        revision: Branch, tag or commit; the newest by default.

    Raises:
        DataNotFoundError: The hub does not have the model, rejects the request or cannot be reached.
        MissingDependencyError: huggingface_hub is not installed.
    """
    hub = need("huggingface_hub", "the hub", "local")
    try:
        return Path(hub.snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:
        raise DataNotFoundError(
            f"no model {name!r}: expected a folder, or a name on the hub; {one_line(error)}"
        ) from error


def download(name: str, revision: str | None = None) -> Path:
    """Return the local folder of a published critic, downloaded if necessary.

    Only safetensors, JSON, the chat template and the card are downloaded, never code.

    Args:
        name: ``"org/name"``.
        revision: Branch, tag or commit; the newest by default.

    Raises:
        DataError: The repository contains no critic.
        DataNotFoundError: The hub does not have the repository, rejects the request or cannot be reached.
        MissingDependencyError: huggingface_hub is not installed.
    """
    folder = download_files(name, _FILES, revision)
    if not (folder / META).is_file():
        raise DataError(
            f"{name!r} on the hub is not a MAS-Gym critic: expected {META}, found none; publish "
            "critics with push_to_hub"
        )
    return folder
