"""Rows of data files, and reports of invalid rows."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import NamedTuple


class Row(NamedTuple):
    """One raw row and its location for error messages."""

    place: str
    value: object


SHOWN = 60
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = SHOWN + 3
_BRIEF.maxlist = _BRIEF.maxdict = _BRIEF.maxtuple = 20


class BadRow(Exception):
    """A row is malformed; the message contains the expected and the actual content."""


def shown(value: object) -> str:
    """Show a value of any kind and size in one short line of ASCII; reads only the part that is shown."""
    text = ascii(value[: SHOWN + 1]) if isinstance(value, str | bytes) else _BRIEF.repr(value)
    text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


_MOST_FAULTS = 20


def report(name: str, size: int, faults: Sequence[str]) -> str:
    """Return a message about rows that are not valid problems of a task, with the first 20 of them."""
    more = f"\n  and {len(faults) - _MOST_FAULTS} more" if len(faults) > _MOST_FAULTS else ""
    lines = "\n  ".join(faults[:_MOST_FAULTS])
    return f"{len(faults)} of {size} rows are not problems of task {name!r}; correct or remove them:\n  {lines}{more}"
