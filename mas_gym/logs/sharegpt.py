"""Conversations in the ShareGPT format."""

from __future__ import annotations

from collections.abc import Mapping

from mas_gym.errors import shown
from mas_gym.internal.json_types import JSONObject
from mas_gym.logs.chats import chat
from mas_gym.logs.transcript import Transcript
from mas_gym.tasks.data_rows import BadRow
from mas_gym.tasks.json_rows import parsed

_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}


def is_sharegpt(row: object) -> bool:
    """Whether a row has ``conversations`` with ``from`` and ``value``."""
    turns = row.get("conversations") if isinstance(row, Mapping) else None
    return isinstance(turns, list) and bool(turns) and isinstance(turns[0], Mapping) and "from" in turns[0]


def sharegpt(row: object) -> Transcript:
    """Read a conversation; an unknown value of ``from`` is the name of an agent.

    Raises:
        BadRow: The row has another format.
    """
    if not isinstance(row, Mapping) or not is_sharegpt(row):
        raise BadRow(f"expected conversations with from and value (ShareGPT), got {shown(row)}")
    fields = {key: value for key, value in row.items() if key not in ("conversations", "system")}
    prompt = row.get("system")
    messages = [{"role": "system", "content": prompt}] if isinstance(prompt, str) and prompt.strip() else []
    return chat({**fields, "messages": [*messages, *map(_message, row["conversations"])]})


def _message(turn: object) -> JSONObject:
    if not isinstance(turn, Mapping) or not isinstance(turn.get("from"), str) or not isinstance(turn.get("value"), str):
        raise BadRow(f"expected a turn with from and value, got {shown(turn)}")
    speaker, text = turn["from"], turn["value"]
    if speaker == "function_call":
        call = parsed(text)
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    role = _ROLES.get(speaker.lower())
    return {"role": role, "content": text} if role else {"role": "assistant", "name": speaker, "content": text}
