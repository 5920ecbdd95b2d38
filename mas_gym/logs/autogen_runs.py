"""Runs of AutoGen AgentChat (version 0.4 and later): a saved ``TaskResult``, or its messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.logs.chats import chat, made
from mas_gym.logs.fields import field_text, inside
from mas_gym.logs.messages import written
from mas_gym.logs.transcript import Transcript

_LEFT_OUT = (
    *("ThoughtEvent", "ModelClientStreamingChunkEvent", "SelectSpeakerEvent", "SelectorEvent"),
    *("UserInputRequestedEvent", "MemoryQueryEvent"),
)


def is_autogen(row: object) -> bool:
    """Whether a row is a result of AgentChat or a list of its messages."""
    messages = row.get("messages") if isinstance(row, Mapping) else row
    first = messages[0] if isinstance(messages, list) and messages else None
    return isinstance(first, Mapping) and first.keys() >= {"source", "type"} and "role" not in first


def autogen(row: JSONMapping | list[JSONMapping]) -> Transcript:
    """Read a ``TaskResult`` or its messages; the speaker is each message's ``source``."""
    fields = {"messages": row} if isinstance(row, list) else row
    dropped: Counter[str] = Counter()
    messages = [message for entry in fields["messages"] for message in _read(entry, dropped)]
    return made(chat({**fields, "messages": messages}), dropped=dropped)


def _read(entry: JSONMapping, dropped: Counter[str]) -> Iterator[JSONObject]:
    kind, content = entry.get("type"), entry.get("content")
    if kind in _LEFT_OUT:
        dropped[str(kind)] += 1
    elif kind == "ToolCallExecutionEvent" and isinstance(content, list):
        for result in content:
            call = {"tool_call_id": result.get("call_id"), "name": result.get("name")}
            yield {"role": "tool", **call, "content": result.get("content")}
    else:
        calls = content if kind == "ToolCallRequestEvent" and isinstance(content, list) else None
        yield {**_speaker(entry), "content": None if calls is not None else _text(content), "tool_calls": calls}


def _speaker(entry: JSONMapping) -> JSONObject:
    if field_text(entry, "source") == "user":
        return {"role": "user"}
    tokens = inside(entry, "models_usage", "completion_tokens")
    return {"role": "assistant", "name": entry["source"], "tokens": tokens, "recipient": entry.get("target")}


def _text(content: object) -> object:
    return content if isinstance(content, str | list) or content is None else written(content)
