"""Convert chat messages of OpenAI, Anthropic, LangChain, AG2 and OpenTelemetry to messages of a transcript."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mas_gym.errors import shown
from mas_gym.internal.json_types import JSONMapping
from mas_gym.logs.fields import inside, list_of, tokens_of
from mas_gym.logs.transcript import LoggedMessage, Transcript, label_of, number, speaker_name, verdicts_of
from mas_gym.systems.tool_calls import ToolCall
from mas_gym.tasks.data_rows import BadRow

ASSISTANT, USER, TOOL, SYSTEM = "assistant", "user", "tool", "system"
_ROLES = {
    "assistant": ASSISTANT, "ai": ASSISTANT, "model": ASSISTANT, "aimessage": ASSISTANT, "aimessagechunk": ASSISTANT,
    "user": USER, "human": USER, "humanmessage": USER,
    "tool": TOOL, "function": TOOL, "toolmessage": TOOL, "functionmessage": TOOL,
    "system": SYSTEM, "developer": SYSTEM, "systemmessage": SYSTEM,
}  # fmt: skip
_DEFAULT_NAMES = {ASSISTANT: "Assistant", USER: "User", TOOL: "Tool"}
_SIDE = re.compile(r"(?P<name>.+?) \((?:-> (?P<to>[^()]+)|(?P<remark>[^()]{1,100}))\)")
"""``"Orchestrator (-> WebSurfer)"`` and ``"Orchestrator (thought)"``, the speaker formats of Magentic-One logs."""
_STOP = "TERMINATE"


def is_history(value: list[object]) -> bool:
    """Whether a list is one chat history rather than a list of rows."""
    return bool(value) and is_message(value[0])


def is_message(value: object) -> bool:
    """Whether a value looks like a chat message of any dialect."""
    if not isinstance(value, Mapping):
        return False
    if "__event__" in value:
        # An event of AG2.
        return True
    if "role" in value:
        return not value.keys().isdisjoint(("content", "parts", "tool_calls", "tool_responses"))
    kind = value.get("type")
    return (kind == "constructor" and "kwargs" in value) or (
        kind in ("human", "ai", "system", "tool") and ("content" in value or "data" in value)
    )


class RawMessage(NamedTuple):
    """A message before questions and system prompts are separated.

    Attributes:
        role: ``"assistant"``, ``"user"``, ``"tool"`` or ``"system"``.
        named: Whether the log names the speaker.
        message: The message.
        dropped: The parts of the message that are left out.
    """

    role: str
    named: bool
    message: LoggedMessage
    dropped: tuple[str, ...] = ()


def read_history(entries: object, question: str | None = None) -> Transcript:
    """Return the question, the messages and the prompts of a chat history as a transcript, without its other parts.

    With ``question``, leading user messages that contain the question are left out. Without it, the first message is
    the question if it is a user message or names its speaker. Messages without text, and ``TERMINATE`` at the end, are
    left out unless they have a label.

    Args:
        entries: The messages, as logged.
        question: The question, if the log stores it separately from the messages.

    Raises:
        BadRow: The entries are not a history, or there is no question.
    """
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise BadRow(f"expected a list of messages, got {shown(entries)}")
    names: dict[str, str] = {}
    dropped: Counter[str] = Counter()
    prompts: dict[str, str] = {}
    kept: list[RawMessage] = []
    for one in (read_message(part, names) for entry in entries for part in _parts_of(entry)):
        dropped.update(one.dropped)
        if one.role == SYSTEM:
            _keep_prompt(prompts, one, dropped)
        elif not one.message.said.strip() and one.message.label is None:
            dropped["empty message"] += 1
        else:
            kept.append(one)
    kept, found = _without_question(kept, question, dropped)
    while kept and kept[-1].message.said.strip() == _STOP and kept[-1].message.label is None:
        kept.pop()
        dropped[f"{_STOP} at the end"] += 1
    if not found.strip():
        raise BadRow("expected a question, or a history that begins with a user message, got neither")
    if not kept:
        raise BadRow("expected at least one message besides the question, got none")
    messages = [one.message for one in kept]
    speakers = {message.speaker for message in messages}
    alone = [message.speaker for message in messages if message.agent]
    if SYSTEM in prompts and len(set(alone)) == 1:
        prompts.setdefault(alone[0], prompts.pop(SYSTEM))
    dropped["system message without a single speaker"] += len(prompts.keys() - speakers)
    prompts = {name: text for name, text in prompts.items() if name in speakers}
    return Transcript(found, tuple(messages), agents=prompts, dropped=+dropped)


def _parts_of(entry: object) -> Sequence[object]:
    """Return the messages of an entry, which may have several tool responses."""
    return [{"role": TOOL, **one} for one in list_of(inside(entry, "tool_responses"))] or [entry]


def _keep_prompt(prompts: dict[str, str], one: RawMessage, dropped: Counter[str]) -> None:
    name = one.message.speaker if one.named else SYSTEM
    if prompts.setdefault(name, one.message.text) != one.message.text:
        dropped["later system message"] += 1


def _without_question(
    kept: list[RawMessage], question: str | None, dropped: Counter[str]
) -> tuple[list[RawMessage], str]:
    if question is None:
        if not kept:
            return kept, ""
        # In many frameworks the roles are relative to one agent, but the first message is the task.
        first = kept[0]
        return (kept[1:], first.message.text) if first.role == USER or (len(kept) > 1 and first.named) else (kept, "")
    start = 0
    wanted = " ".join(question.split())
    while start < len(kept) and kept[start].role == USER and kept[start].message.label is None:
        text = " ".join(kept[start].message.text.split())
        # An agent may repeat the question in a longer message.
        if wanted not in text or (kept[start].named and text != wanted):
            break
        dropped["user's message with the question" + ("" if text == wanted else " and more")] += 1
        start += 1
    return kept[start:], question


def read_message(entry: object, names: dict[str, str]) -> RawMessage:
    """Read one entry of a history.

    Args:
        entry: The entry.
        names: Names of called functions by call id; extended as calls are read.

    Raises:
        BadRow: The entry is not a message.
    """
    if not isinstance(entry, Mapping):
        raise BadRow(f"expected a message with role and content, got {shown(entry)}")
    fields, role = _fields(entry)
    text, calls, left_out = message_content(fields.get("content") if "content" in fields else fields.get("parts"))
    calls += _calls(fields)
    names.update({identity: call.name for identity, call in calls if identity})
    name, recipients = _speaker(fields, role, names)
    known = _ROLES.get(role.lower())
    if known is None and name is None:
        side = _SIDE.fullmatch(role)
        name = side["name"] if side else role
        recipients = (side["to"].strip(),) if side and side["to"] else ()
        left_out += (f"remark ({side['remark']})",) if side and side["remark"] else ()
    known = known or ASSISTANT
    message = LoggedMessage(
        speaker=speaker_name(name or _DEFAULT_NAMES.get(known, SYSTEM)),
        text=text,
        recipients=recipients,
        tool_calls=tuple(call for _, call in calls),
        label=label_of(fields.get("label")),
        value=number(fields.get("value"), "value"),
        tokens=tokens_of(fields.get("tokens", inside(fields, "usage_metadata", "output_tokens"))),
        logprob=number(fields.get("logprob"), "logprob"),
        agent=known == ASSISTANT or (known == USER and name is not None),
        verdicts=verdicts_of(fields.get("verdicts")),
    )
    return RawMessage(known, name is not None, message, left_out)


def _fields(entry: JSONMapping) -> tuple[JSONMapping, str]:
    """Return a message's fields and its role in its dialect."""
    fields = entry
    kind = entry.get("type")
    if kind == "constructor" and isinstance(entry.get("kwargs"), Mapping):
        path = entry.get("id")
        fields = entry["kwargs"]
        kind = fields.get("type") or (path[-1] if isinstance(path, list) and path else None)
    elif isinstance(entry.get("data"), Mapping) and "content" not in entry:
        fields = entry["data"]
    role = fields.get("role") or kind
    if not isinstance(role, str) or not role.strip():
        raise BadRow(f"expected a message with a role, got {shown(dict(entry))}")
    return fields, role.strip()


def _speaker(fields: Mapping[str, object], role: str, names: Mapping[str, str]) -> tuple[str | None, tuple[str, ...]]:
    name = fields.get("name") or fields.get("speaker") or fields.get("agent")
    if not isinstance(name, str) or not name.strip():
        name = names.get(str(fields.get("tool_call_id"))) if _ROLES.get(role.lower()) == TOOL else None
    to = fields.get("recipients", fields.get("recipient", fields.get("to")))
    recipients = [to] if isinstance(to, str) else to if isinstance(to, list) else []
    return name, tuple(one for one in recipients if isinstance(one, str))


def _calls(fields: Mapping[str, object]) -> list[tuple[str, ToolCall]]:
    entries = list_of(fields.get("tool_calls") or inside(fields, "additional_kwargs", "tool_calls"))
    one = fields.get("function_call")
    return [_call(entry) for entry in (entries if one is None else [*entries, one])]


def _call(entry: object) -> tuple[str, ToolCall]:
    if not isinstance(entry, Mapping):
        raise BadRow(f"expected a tool call with a name and arguments, got {shown(entry)}")
    function = entry.get("function") if isinstance(entry.get("function"), Mapping) else entry
    assert isinstance(function, Mapping)
    # In Inspect's logs, the function is the name.
    name = function.get("name", function.get("function"))
    arguments = next((function[key] for key in ("arguments", "args", "input") if function.get(key) is not None), "{}")
    if not isinstance(name, str) or not name.strip():
        raise BadRow(f"expected a tool call with a name, got {shown(dict(entry))}")
    identity = entry.get("id")
    return identity if isinstance(identity, str) else "", ToolCall(name.strip(), written(arguments))


def message_content(content: object) -> tuple[str, list[tuple[str, ToolCall]], tuple[str, ...]]:
    """Return the text and the tool calls of a message's content, and the kinds of content left out, such as images."""
    if content is None:
        return "", [], ()
    if not isinstance(content, list):
        return written(content), [], ()
    texts: list[str] = []
    calls: list[tuple[str, ToolCall]] = []
    left_out: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, str):
            texts.append(part)
        elif kind in ("tool_use", "tool_call"):
            calls.append(_call(part))
        elif kind in ("reasoning", "thinking", "redacted_thinking"):
            # Other agents do not receive it.
            left_out.append(f"part of type {kind}")
        elif kind in ("tool_result", "tool_call_response"):
            key = next((key for key in ("content", "response", "result") if key in part), "")
            texts.append(message_content(part.get(key))[0])
        elif isinstance(part, Mapping) and isinstance(part.get("text", part.get("content")), str):
            texts.append(part.get("text", part.get("content")))
        else:
            left_out.append(f"part of type {kind if isinstance(kind, str) else type(part).__name__}"[:100])
    return "\n".join(texts), calls, tuple(left_out)


def written(value: object) -> str:
    """Return a value as text: a string unchanged, any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
