"""Options of policies, as written in a policy string and as passed to a loader."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import yaml

from mas_gym.errors import ConfigError
from mas_gym.policies.base import shortened


def build(policy: str, make: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
    """Call ``make``, turning options that it does not take into a `ConfigError` that lists those it does."""
    signature = inspect.signature(make)
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        takes = [name for name, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY]
        raise ConfigError(f"policy {policy!r}: {error}; it takes {', '.join(takes) or 'no options'}") from error
    return make(*arguments, **options)


def written_options(argument: str) -> tuple[str, dict[str, Any]]:
    """Split ``"ARGUMENT#option=value&option=value"``; values are read as YAML scalars.

    Raises:
        ConfigError: A piece has no ``=``, or a value is not one.
    """
    head, _, fragment = argument.partition("#")
    options: dict[str, Any] = {}
    for piece in filter(None, fragment.split("&")):
        key, equals, value = piece.partition("=")
        if not equals:
            raise ConfigError(f"expected option=value after '#', got {piece!r} in {argument!r}")
        options[key] = written_value(value, f"option {key}: expected a plain value")
    return head, options


def written_value(text: str, expected: str) -> Any:
    """Read a YAML value from a policy string. Raises `ConfigError` with what was ``expected``."""
    try:
        return yaml.safe_load(text)
    except Exception as error:
        # Beside its own errors, the parser raises KeyError, ValueError, AttributeError and RecursionError.
        raise ConfigError(f"{expected}, got {shortened(text, 200)}") from error
