"""Chat histories of AG2 (AutoGen before version 0.4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mas_gym.internal.json_types import JSONObject
from mas_gym.logs.chats import chat
from mas_gym.logs.messages import is_history, written
from mas_gym.logs.transcript import Transcript


def ag2(row: object) -> Transcript:
    """Read a chat history of AG2 (AutoGen): the list of messages, a saved ``ChatResult``, or a stream's events.

    Since version 1, AG2 saves events; the class of a serialized event is in ``__event__``.

    Raises:
        BadRow: The row has another format.
    """
    if isinstance(row, list):
        row = {"messages": _from_events(row) if row and "__event__" in row[0] else row}
    if isinstance(row, Mapping) and "chat_history" in row:
        row = {("messages" if key == "chat_history" else key): value for key, value in row.items()}
        row.setdefault("sample_id", row.pop("chat_id", None))
        row.pop("summary", None)
    return chat(row)


def _from_events(events: list[Any]) -> list[JSONObject]:
    """Return the requests, replies and tool results among AG2's events as chat messages."""
    found: list[JSONObject] = []
    answered: set[object] = set()
    for event in events:
        kind = _event(event)
        if kind in ("ModelRequest", "DrainedModelRequest"):
            found.append({"role": "user", "content": _parts(event.get("parts"))})
        elif kind == "ModelResponse":
            message, calls = event.get("message") or {}, event.get("tool_calls") or {}
            usage = event.get("usage") or {}
            tokens = usage.get("data", {}).get("completion_tokens")
            found.append(
                {"role": "assistant", "content": message.get("content"), "tool_calls": calls.get("calls"),
                 "tokens": int(tokens) if isinstance(tokens, int | float) else 0}
            )  # fmt: skip
        for result in event.get("results", []) if kind == "ToolResultsEvent" else [event]:
            # A result occurs separately and among the results of its turn.
            if _event(result) in ("ToolResultEvent", "ToolErrorEvent") and result.get("parent_id") not in answered:
                answered.add(result.get("parent_id"))
                data = (result.get("result") or {}).get("data", {})
                call = {"tool_call_id": result.get("parent_id"), "name": result.get("name")}
                found.append({"role": "tool", "content": _parts(data.get("parts")), **call})
    return found


def _event(event: object) -> str:
    return str(event.get("__event__")).rpartition(".")[2] if isinstance(event, Mapping) else ""


def _parts(parts: Any) -> str:
    texts = [part.get("content", part.get("data")) for part in parts or [] if isinstance(part, Mapping)]
    return "\n".join(written(text) for text in texts if text is not None)


def is_ag2(row: object) -> bool:
    """Whether a row is an AG2 chat history."""
    if isinstance(row, Mapping) and isinstance(row.get("chat_history"), list):
        return True
    return isinstance(row, list) and is_history(row)
