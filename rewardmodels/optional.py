"""Optional packages."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mas_gym.errors import MissingDependencyError


def need(package: str, purpose: str) -> Any:
    """Import an optional package.

    Args:
        package: Its name.
        purpose: What it is for, as in ``"exporting data"``.

    Raises:
        MissingDependencyError: It is not installed, with the remedy.
    """
    try:
        return import_module(package)
    except ImportError as error:
        raise MissingDependencyError(
            f"{purpose} needs {package}; install it with: pip install mas-gym[train]"
        ) from error
