"""Spans of a trace, independent of the dialect of the log."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from mas_gym.internal.json_types import JSONObject
from mas_gym.logs.fields import tokens_of
from mas_gym.logs.messages import is_message, read_message, written
from mas_gym.tasks.data_rows import BadRow
from mas_gym.tasks.json_rows import parsed

_TEXT_KEYS = (
    *("question", "input", "query", "task", "prompt", "text", "content"),
    *("output", "answer", "result", "response"),
)
MODEL, TOOL, AGENT, OTHER = "model", "tool", "agent", "other"
"""Kinds of spans."""

Span = JSONObject
"""Keys: trace, id, parent, kind, agent, name, start, input, output, tokens and facts."""


def make_span(
    trace: object, name: object, parent: object, kind: str, agent: object, title: str, start: object, given: object,
    output: object, tokens: object, facts: Mapping[str, object],
) -> Span:  # fmt: skip
    """Return a span; a value of the wrong type counts as missing."""
    return {
        "trace": trace,
        "id": name,
        "parent": parent if isinstance(parent, str) and parent else None,
        "kind": kind,
        "agent": agent if isinstance(agent, str) and agent.strip() else None,
        "name": title,
        "start": _time(start),
        "input": given,
        "output": output,
        "tokens": tokens_of(tokens),
        "facts": dict(facts),
    }


def _time(value: Any) -> float:
    """Return a time in seconds; 0 if it cannot be read."""
    try:
        if isinstance(value, str) and not value.isdecimal():
            return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
        return float(value) / 1e9
    except (TypeError, ValueError, OverflowError):
        return 0.0


def span_text(value: object, *, last: bool) -> str | None:
    """Return the text of a span's input (its first user message) or output (its last message)."""
    value = unpacked(value)
    for _ in range(8):
        if isinstance(value, str):
            return value if value.strip() else None
        if isinstance(value, Mapping) and not is_message(value):
            history = history_of(value)
            if history and all(map(is_message, history)):
                value = history
                continue
            key = next((key for key in _TEXT_KEYS if value.get(key) not in (None, "")), None)
            if key is None:
                return written(value) if value else None
            value = value[key]
        elif isinstance(value, list) and value and all(map(is_message, value)):
            texts = [(raw.role, raw.message.said) for raw in (read_message(entry, {}) for entry in value)]
            mine = [text for role, text in texts if text.strip() and (last or role == "user")]
            return (mine[-1] if last else mine[0]) if mine else None
        elif isinstance(value, Mapping):
            value = [value]
        elif isinstance(value, list) and len(value) == 1:
            [value] = value
        else:
            break
    return None if value in (None, [], {}) else written(value)


def history_of(value: object) -> list[object]:
    """Return the messages in the input or the output of a span, without the structures that enclose them."""
    value = unpacked(value)
    for _ in range(8):
        if isinstance(value, Mapping) and not is_message(value):
            key = next((k for k in ("messages", "generations", "choices", "message", "output") if value.get(k)), None)
            if key is None:
                break
            value = value[key]
        elif isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
            [value] = value
        else:
            break
    entries = value if isinstance(value, list) else [] if value in (None, "", {}) else [value]
    inner = [entry["message"] if isinstance(entry, Mapping) and "message" in entry else entry for entry in entries]
    return [{"role": "assistant", "content": entry} if isinstance(entry, str) else entry for entry in inner]


def unpacked(value: object) -> object:
    """Parse a string that contains a JSON object or array; return any other value unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        found = parsed(value)
        return value if isinstance(found, BadRow) else found
    return value


def object_of(value: object) -> JSONObject:
    """Return an object, also from its JSON text; any other value becomes the content of one."""
    found = unpacked(value)
    return dict(found) if isinstance(found, Mapping) else {} if found is None else {"content": found}


def metadata_of(found: object) -> JSONObject:
    """Return metadata, also from its JSON text; empty if it is no object."""
    if isinstance(found, str):
        found = parsed(found)
    return {str(key): value for key, value in found.items()} if isinstance(found, Mapping) else {}
