"""Encoding of tool calls in the text of a message.

A message of a program may call tools. Its text consists of the content, a blank line, and one last line::

    [tool calls] [{"name": "add", "arguments": {"a": 1, "b": 2}}]

``arguments`` is an object, or a string if the model wrote no JSON object. Stored runs contain such texts, so every
version must parse this form; further fields of an entry are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

_CALLS = "[tool calls] "


class ToolCall(NamedTuple):
    """One function call of a message: the function, and its arguments as the JSON that the model wrote."""

    name: str
    arguments: str


def with_calls(content: str, calls: Sequence[ToolCall]) -> str:
    r"""Return the text of a message with tool calls.

    Without calls, return the content, changed if it would otherwise be parsed as calls.

    >>> with_calls("I add.", [ToolCall("add", '{"a":1}')])
    'I add.\n\n[tool calls] [{"name": "add", "arguments": {"a": 1}}]'
    """
    content = content.strip()
    if not calls:
        last = content.rpartition("\n")[2]
        return content if not last.startswith(_CALLS) else f"{content[: len(content) - len(last)]}[ {last[1:]}"
    entries = [{"name": call.name, "arguments": _object(call.arguments)} for call in calls]
    line = _CALLS + json.dumps(entries, ensure_ascii=False)
    return f"{content}\n\n{line}" if content else line


def split_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the content and the tool calls of a text; there are none if the last line does not have the form above."""
    content, _, last = text.rpartition("\n")
    if not last.startswith(_CALLS):
        return text, ()
    try:
        entries = json.loads(last[len(_CALLS) :])
        calls = tuple(ToolCall(entry["name"], arguments_text(entry["arguments"])) for entry in entries)
    except (ValueError, TypeError, KeyError, RecursionError):
        return text, ()
    if not calls or not all(isinstance(call.name, str) for call in calls):
        return text, ()
    return content.rstrip("\n"), calls


def _object(arguments: str) -> object:
    """Return the JSON object in a text if it can be serialized again, otherwise the text."""
    try:
        found = json.loads(arguments)
        return found if isinstance(found, dict) and json.dumps(found, allow_nan=False) else arguments
    except (ValueError, RecursionError):
        return arguments


def arguments_text(arguments: object) -> str:
    """Return the arguments of a call, which may be an object, as a text. Raises `TypeError` for other types."""
    if isinstance(arguments, str):
        return arguments
    if not isinstance(arguments, dict):
        raise TypeError
    return json.dumps(arguments, ensure_ascii=False)
