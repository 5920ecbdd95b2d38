"""Fields of rows: access without checks of each level, and checked values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mas_gym.errors import shown
from mas_gym.tasks.data_rows import BadRow

AGENT = "Assistant"
"""The speaker of steps without a named speaker."""


def has_fields(*names: str) -> Callable[[object], bool]:
    """Return a function that checks whether a row has all the given fields."""
    return lambda row: isinstance(row, Mapping) and row.keys() >= set(names)


def inside(value: object, *names: str) -> Any:
    """Return the value at a path of fields; None if the path does not exist."""
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def list_of(value: object) -> list[Any]:
    """Return a list unchanged, and an empty list for any other value."""
    return value if isinstance(value, list) else []


def tokens_of(value: object) -> int:
    """Return a number of tokens; 0 for any other value."""
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    return whole if type(whole) is int and 0 <= whole < 1 << 31 else 0


def field_text(row: Mapping[str, object], name: str) -> str:
    """Return a field that is a non-empty string. Raises `BadRow` otherwise."""
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise BadRow(f"expected a non-empty string as {name}, got {shown(value)}")
    return value


def field_texts(value: object, name: str) -> Sequence[str]:
    """Return a value that is a non-empty list of strings. Raises `BadRow` otherwise."""
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        raise BadRow(f"expected a non-empty list of strings as {name}, got {shown(value)}")
    return value


def field_integer(value: object, name: str, least: int = 0) -> int:
    """Return a value that is an integer, also as text. Raises `BadRow` otherwise."""
    found = int(value) if isinstance(value, str) and value.strip().lstrip("-").isdecimal() and len(value) < 9 else value
    if type(found) is not int or found < least:
        raise BadRow(f"expected an integer of at least {least} as {name}, got {shown(value)}")
    return found
