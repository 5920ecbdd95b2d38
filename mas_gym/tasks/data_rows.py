"""Rows of data files, and reports of invalid rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from mas_gym.errors import DataError, shown
from mas_gym.internal.json_types import JSONMapping

T = TypeVar("T")

_MOST_FAULTS = 20


class RawRow(NamedTuple):
    """One raw row and its location for error messages."""

    place: str
    value: object


class BadRow(Exception):
    """A row is malformed; the message contains the expected and the actual content."""


def read_rows(what: str, rows: Sequence[RawRow], read: Callable[[int, JSONMapping], T]) -> list[T]:
    """Read every row with a function that gets its index and fields, and raises `BadRow` for an invalid row.

    Raises:
        DataError: Rows are invalid; the message lists the first 20 of them, as rows that are not valid ``what``.
    """
    found: list[T] = []
    faults: list[str] = []
    for number, row in enumerate(rows):
        try:
            if isinstance(row.value, BadRow):
                raise row.value
            if not isinstance(row.value, Mapping):
                raise BadRow(f"expected an object with named fields, got {shown(row.value)}")
            found.append(read(number, row.value))
        except BadRow as error:
            faults.append(f"{row.place}: {error}")
    if faults:
        more = [f"and {len(faults) - _MOST_FAULTS} more"] if len(faults) > _MOST_FAULTS else []
        lines = "\n  ".join([*faults[:_MOST_FAULTS], *more])
        raise DataError(f"{len(faults)} of {len(rows)} rows are not valid {what}; correct or remove them:\n  {lines}")
    return found


def first_of(row: Mapping[str, object], names: Sequence[str]) -> Any:
    """Return the value of the first of the given fields that the row has; None if it has none of them."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def storable(text: str) -> str:
    """Return the text if it has no lone surrogates. Raises `BadRow` otherwise."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(
            f"expected valid Unicode text, got a lone surrogate at character {error.start} of {shown(text)}"
        ) from None
    return text
