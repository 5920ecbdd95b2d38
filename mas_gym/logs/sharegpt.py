"""Conversations in the ShareGPT format."""

from __future__ import annotations

from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.logs.chats import chat
from mas_gym.logs.fields import field_text, inside, list_of
from mas_gym.logs.transcript import Transcript
from mas_gym.tasks.json_rows import parsed

_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}


def is_sharegpt(row: object) -> bool:
    """Whether a row has ``conversations`` with ``from`` and ``value``."""
    turns = list_of(inside(row, "conversations"))
    return bool(turns) and inside(turns[0], "from") is not None


def sharegpt(row: JSONMapping) -> Transcript:
    """Read a conversation; an unknown value of ``from`` is the name of an agent."""
    fields = {key: value for key, value in row.items() if key not in ("conversations", "system")}
    prompt = row.get("system")
    messages = [{"role": "system", "content": prompt}] if isinstance(prompt, str) and prompt.strip() else []
    return chat({**fields, "messages": [*messages, *map(_message, row["conversations"])]})


def _message(turn: JSONMapping) -> JSONObject:
    speaker, text = field_text(turn, "from"), turn["value"]
    if speaker == "function_call":
        return {"role": "assistant", "content": None, "tool_calls": [parsed(text)]}
    role = _ROLES.get(speaker.lower())
    return {"role": role, "content": text} if role else {"role": "assistant", "name": speaker, "content": text}
