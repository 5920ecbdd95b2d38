"""Runs of AutoGen AgentChat (version 0.4 and later): a saved ``TaskResult``, or its messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from mas_gym.errors import shown
from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.logs.chats import chat
from mas_gym.logs.messages import written
from mas_gym.logs.transcript import Transcript
from mas_gym.tasks.data_rows import BadRow

_LEFT_OUT = (
    *("ThoughtEvent", "ModelClientStreamingChunkEvent", "SelectSpeakerEvent", "SelectorEvent"),
    *("UserInputRequestedEvent", "MemoryQueryEvent"),
)


def is_autogen(row: object) -> bool:
    """Whether a row is a result of AgentChat or a list of its messages."""
    messages = row.get("messages") if isinstance(row, Mapping) else row
    first = messages[0] if isinstance(messages, list) and messages else None
    return isinstance(first, Mapping) and first.keys() >= {"source", "type"} and "role" not in first


def autogen(row: object) -> Transcript:
    """Read a ``TaskResult`` or its messages; the speaker is each message's ``source``.

    Raises:
        BadRow: The row has another format.
    """
    if not is_autogen(row):
        raise BadRow(f"expected messages with source and type (AutoGen), got {shown(row)}")
    fields: JSONObject = dict(row) if isinstance(row, Mapping) else {"messages": row}
    dropped: Counter[str] = Counter()
    messages = [message for entry in fields["messages"] for message in _read(entry, dropped)]
    found = chat({**fields, "messages": messages})
    return replace(found, dropped={**found.dropped, **dropped})


def _read(entry: object, dropped: Counter[str]) -> Iterator[JSONObject]:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("source"), str):
        raise BadRow(f"expected a message with source and type, got {shown(entry)}")
    kind, content = str(entry.get("type")), entry.get("content")
    if kind in _LEFT_OUT:
        dropped[kind] += 1
    elif kind == "ToolCallExecutionEvent" and isinstance(content, list):
        for result in content:
            if not isinstance(result, Mapping):
                raise BadRow(f"expected a tool result with content and call_id, got {shown(result)}")
            call = {"tool_call_id": result.get("call_id"), "name": result.get("name")}
            yield {"role": "tool", **call, "content": result.get("content")}
    else:
        calls = content if kind == "ToolCallRequestEvent" and isinstance(content, list) else None
        yield {**_speaker(entry), "content": None if calls is not None else _text(content), "tool_calls": calls}


def _speaker(entry: JSONMapping) -> JSONObject:
    if entry["source"] == "user":
        return {"role": "user"}
    usage = entry.get("models_usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, Mapping) else 0
    return {"role": "assistant", "name": entry["source"], "tokens": tokens, "recipient": entry.get("target")}


def _text(content: object) -> object:
    return content if isinstance(content, str | list) or content is None else written(content)
