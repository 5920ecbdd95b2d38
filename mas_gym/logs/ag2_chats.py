"""Chat histories of AG2 (AutoGen before version 0.4)."""

from __future__ import annotations

from collections.abc import Mapping

from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.logs.chats import chat
from mas_gym.logs.fields import inside, list_of
from mas_gym.logs.messages import is_history, written
from mas_gym.logs.transcript import Transcript


def is_ag2(row: object) -> bool:
    """Whether a row is an AG2 chat history."""
    return is_history(row) if isinstance(row, list) else isinstance(inside(row, "chat_history"), list)


def ag2(row: JSONMapping | list[JSONMapping]) -> Transcript:
    """Read a chat history of AG2 (AutoGen): the list of messages, a saved ``ChatResult``, or a stream's events.

    Since version 1, AG2 saves events; the class of a serialized event is in ``__event__``.
    """
    if isinstance(row, list):
        return chat({"messages": _from_events(row) if "__event__" in row[0] else row})
    others = {key: row[key] for key in row if key not in ("chat_history", "chat_id", "summary")}
    return chat({"sample_id": row.get("chat_id"), **others, "messages": row["chat_history"]})


def _from_events(events: list[JSONMapping]) -> list[JSONObject]:
    """Return the requests, replies and tool results among AG2's events as chat messages."""
    found: list[JSONObject] = []
    answered: set[object] = set()
    for event in events:
        kind = _event(event)
        if kind in ("ModelRequest", "DrainedModelRequest"):
            found.append({"role": "user", "content": _parts(event.get("parts"))})
        elif kind == "ModelResponse":
            tokens = inside(event, "usage", "data", "completion_tokens")
            found.append(
                {"role": "assistant", "content": inside(event, "message", "content"),
                 "tool_calls": inside(event, "tool_calls", "calls"), "tokens": tokens}
            )  # fmt: skip
        for result in event.get("results", []) if kind == "ToolResultsEvent" else [event]:
            # A result occurs separately and among the results of its turn.
            if _event(result) in ("ToolResultEvent", "ToolErrorEvent") and result.get("parent_id") not in answered:
                answered.add(result.get("parent_id"))
                call = {"tool_call_id": result.get("parent_id"), "name": result.get("name")}
                found.append({"role": "tool", "content": _parts(inside(result, "result", "data", "parts")), **call})
    return found


def _event(event: object) -> str:
    return str(inside(event, "__event__")).rpartition(".")[2]


def _parts(parts: object) -> str:
    texts = [part.get("content", part.get("data")) for part in list_of(parts) if isinstance(part, Mapping)]
    return "\n".join(written(text) for text in texts if text is not None)
