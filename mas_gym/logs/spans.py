"""Spans of a trace, independent of the dialect of the log."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from mas_gym.internal.json_types import JSONObject

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
        "tokens": tokens if type(tokens) is int and 0 <= tokens < 1 << 31 else 0,
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
