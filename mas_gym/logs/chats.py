"""Transcripts from chat histories: rows in the format ``chat``, and files saved by AG2 and LangGraph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from mas_gym.errors import shown
from mas_gym.internal.json_types import JSONObject
from mas_gym.logs.messages import History, is_history, is_message, read_history, written
from mas_gym.logs.transcript import Transcript, number, small_facts, truth
from mas_gym.tasks.data_rows import BadRow, first_of

QUESTION = ("question", "problem", "query", "input", "prompt")
REFERENCE = ("reference", "ground_truth", "gold", "target", "expected", "expected_answer", "reference_answer")
ANSWERED = ("prediction", "final_answer", "output", "response")
QUESTION_ID = ("question_id", "problem_id", "task_id")
SAMPLE_ID = ("sample_id", "id", "sample", "run_id", "trace_id")


def text_or_none(value: object, what: str) -> str | None:
    """Return a string or None unchanged, and a number as text.

    Raises:
        BadRow: The value has another type.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or number(value, what) is None:
        raise BadRow(f"expected a string or a number as {what}, got {shown(value)}")
    return str(value)


def reference_of(value: object) -> str | None:
    """Return a reference answer as text; a list of accepted texts becomes JSON."""
    if isinstance(value, Mapping) and len(value) == 1:
        [value] = value.values()
    if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        return value[0] if len(value) == 1 else written(value)
    return text_or_none(value, "reference")


def chat(row: object) -> Transcript:
    """Read a row with ``messages`` and, optionally, ``question``, ``answer``, ``correct`` and ``score``.

    ``answer`` is the right answer, as in every data file of this project. In a row with ``reference``, ``answer`` is
    the system's answer.

    Raises:
        BadRow: The row has another format.
    """
    if not isinstance(row, Mapping):
        raise BadRow(f"expected an object with messages, got {shown(row)}")
    asked = first_of(row, QUESTION)
    history = read_history(row.get("messages"), asked if isinstance(asked, str) else None)
    reference = first_of(row, REFERENCE)
    answer = first_of(row, ANSWERED)
    if reference is None:
        reference = row.get("answer")
    elif answer is None:
        answer = row.get("answer")
    known = {"messages", "answer", "correct", "score", "kind", *QUESTION, *REFERENCE, *ANSWERED, *QUESTION_ID}
    facts, dropped = small_facts(row, {*known, *SAMPLE_ID})
    return made(
        history,
        answer=text_or_none(answer, "answer"),
        reference=reference_of(reference),
        correct=truth(row.get("correct")),
        score=number(row.get("score"), "score"),
        question_id=text_or_none(first_of(row, QUESTION_ID), "question_id"),
        sample_id=text_or_none(first_of(row, SAMPLE_ID), "sample_id"),
        kind=row.get("kind"),
        facts=facts,
        dropped=dropped,
    )


def made(history: History, *, dropped: Mapping[str, int] | None = None, **parts: Any) -> Transcript:
    """Return the transcript of a history; ``parts`` are the other fields of `Transcript`."""
    left_out = dict(history.dropped + Counter(dropped or {}))
    return Transcript(history.question, tuple(history.messages), agents=history.prompts, dropped=left_out, **parts)


def is_chat(row: object) -> bool:
    """Whether a row has the format ``chat``."""
    messages = row.get("messages") if isinstance(row, Mapping) else None
    return isinstance(messages, list) and (not messages or is_history(messages))


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
    return isinstance(row, list) and is_history(row) and not _langchain(row)


def langgraph(row: object) -> Transcript:
    """Read a LangGraph history: the messages, a state or snapshot with ``messages``, or streamed updates.

    In updates of the form ``{"node": {"messages": [...]}}``, messages without a name belong to the node.

    Raises:
        BadRow: The row has another format.
    """
    if isinstance(row, list) and not is_history(row):
        row = {"messages": [message for update in row for message in _updated(update)]}
    elif isinstance(row, list):
        row = {"messages": row}
    if isinstance(row, Mapping):
        values = row.get("values", row.get("channel_values"))
        if isinstance(values, Mapping):
            row = {**{key: row[key] for key in row if key not in ("values", "channel_values")}, **values}
    return chat(row)


def _updated(update: object) -> list[object]:
    if not isinstance(update, Mapping):
        raise BadRow(f"expected an object that maps nodes to updates, got {shown(update)}")
    found = []
    for node, change in update.items():
        messages = change.get("messages") if isinstance(change, Mapping) else None
        for message in messages if isinstance(messages, list) else [messages] if is_message(messages) else []:
            user = isinstance(message, Mapping) and message.get("type", message.get("role")) in ("human", "user")
            named = isinstance(message, Mapping) and (user or message.get("name") or "kwargs" in message)
            found.append(message if named or not isinstance(message, Mapping) else {**message, "name": node})
    return found


def is_langgraph(row: object) -> bool:
    """Whether a row is a LangGraph history."""
    if isinstance(row, Mapping):
        values = row.get("values", row.get("channel_values"))
        if isinstance(values, Mapping):
            return isinstance(values.get("messages"), list)
        return isinstance(row.get("messages"), list) and _langchain(row["messages"])
    return isinstance(row, list) and is_history(row) and _langchain(row)


def _langchain(messages: list[object]) -> bool:
    first = messages[0] if messages else None
    return isinstance(first, Mapping) and "type" in first and "role" not in first
