"""Checks of arguments that say what was expected and what is near."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from mas_gym.errors import ConfigError

T = TypeVar("T")


def choice(name: str, value: T, allowed: Sequence[T]) -> T:
    """Return a value that is one of a few, or raise `ConfigError`."""
    if value not in allowed:
        near = get_close_matches(str(value), [str(a) for a in allowed], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}{hint}")
    return value


def whole_number(name: str, value: Any, *, at_least: int) -> int:
    """Return an int within bounds, or raise `ConfigError`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ConfigError(f"{name}: expected a whole number of at least {at_least}, got {value!r}")
    return value


def refuse_unknown(what: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise `ConfigError` if a mapping has a key that is not known."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{what}s: expected a dict with {', '.join(known)}, got {given!r}")
    for key in given:
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            expected = f"expected {', '.join(known)}" if known else "there are none"
            raise ConfigError(f"unknown {what} {key!r}: {expected}{hint}")
