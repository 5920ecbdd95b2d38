"""Errors for unknown names, which suggest the nearest known name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice
from typing import TypeVar

from mas_gym.errors import ConfigError, UnknownNameError, shown

T = TypeVar("T")
_LONGEST, _MOST_NAMES = 60, 1000


def unknown_name(what: str, name: object, known: Iterable[str], remedy: str = "") -> UnknownNameError:
    """Return the error for an unknown name; ``remedy`` says how to add one.

    >>> print(unknown_name("task", "gsm", ["gsm8k", "math"]))
    unknown task 'gsm'; expected one of: gsm8k, math; did you mean 'gsm8k'?
    """
    names = sorted(known)
    expected = f"expected one of: {', '.join(names)}" if names else "there are none"
    remedy = f"; {remedy}" if remedy else ""
    return UnknownNameError(f"unknown {what} {shown(name)}; {expected}{remedy}{did_you_mean(name, names)}")


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` with the closest known name, or an empty string if no name is close.

    The time is bounded: only the first 60 characters of a word and the first 1,000 names are compared.
    """
    if not isinstance(word, str):
        return ""
    folded = {name[:_LONGEST].casefold(): name for name in islice(known, _MOST_NAMES)}
    near = get_close_matches(word[:_LONGEST].casefold(), folded, n=1, cutoff=0.5)
    return f"; did you mean {folded[near[0]]!r}?" if near else ""


def choice(name: str, value: T, allowed: Sequence[T]) -> T:
    """Return an argument that must be one of a few values. Raises `ConfigError` otherwise."""
    if value not in allowed:
        hint = did_you_mean(value, [a for a in allowed if isinstance(a, str)])
        raise ConfigError(f"{name}: expected one of {', '.join(map(repr, allowed))}, got {shown(value)}{hint}")
    return value


def refuse_unknown(what: str, given: Mapping[str, object], known: Sequence[str]) -> None:
    """Check that an argument is a mapping with only known keys. Raises `ConfigError` otherwise."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{what}s: expected a dict with keys from {', '.join(known)}, got {shown(given)}")
    for key in given:
        if key not in known:
            expected = f"expected one of: {', '.join(known)}" if known else "there are none"
            raise ConfigError(f"unknown {what} {shown(key)}; {expected}{did_you_mean(key, known)}")
