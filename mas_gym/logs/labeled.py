"""What the readers of transcripts with labeled steps share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mas_gym.errors import shown
from mas_gym.tasks.data_rows import BadRow

AGENT = "Assistant"
"""The speaker of steps without a named speaker."""


def has_fields(*names: str) -> Callable[[object], bool]:
    """Return a function that checks whether a row has all the given fields."""
    return lambda row: isinstance(row, Mapping) and row.keys() >= set(names)


is_who_and_when = has_fields("history", "mistake_agent", "mistake_step")
is_processbench = has_fields("problem", "steps", "label")
is_agent_processbench = has_fields("messages", "step_labels")


def check_fields(row: object, fits: bool, expected: str) -> None:
    """Raise `BadRow` that names the expected and the actual fields unless the row fits."""
    if not fits:
        got = f"the fields {shown(sorted(map(str, row)))}" if isinstance(row, Mapping) else shown(row)
        raise BadRow(f"expected an object with {expected}, got {got}")


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
