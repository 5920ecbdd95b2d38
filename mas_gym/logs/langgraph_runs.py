"""Runs of LangGraph: messages, states, snapshots and streamed updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from mas_gym.errors import shown
from mas_gym.internal.json_types import JSONMapping
from mas_gym.logs.chats import QUESTION, chat
from mas_gym.logs.messages import is_history, is_message
from mas_gym.logs.transcript import Transcript
from mas_gym.tasks.data_rows import BadRow, RawRow, first_of

_STATE = ("values", "channel_values")
_START = "__start__"
_TYPES = ("constructor", "human", "ai", "system", "tool", "HumanMessage", "AIMessage", "AIMessageChunk")
_UNNAMED = "name of a message's node, which a state does not contain (stream_mode='updates' does)"


def is_langgraph(row: object) -> bool:
    """Whether a row is a LangGraph history, state or streamed update."""
    if isinstance(row, Mapping):
        values = first_of(row, _STATE)
        if isinstance(values, Mapping):
            return isinstance(values.get("messages"), list)
        messages = row.get("messages")
        return _langchain(messages) if isinstance(messages, list) else _update(row) is not None or "updates" in row
    return isinstance(row, list) and (_langchain(row) or _update(row) is not None)


def _langchain(messages: list[object]) -> bool:
    first = messages[0] if messages else None
    return isinstance(first, Mapping) and first.get("type") in _TYPES and "role" not in first


def _update(row: object) -> JSONMapping | None:
    """Return the update in a row, without the mode and the namespace of the stream; None for another row."""
    if isinstance(row, list) and len(row) in (2, 3) and isinstance(row[-1], Mapping) and not is_message(row[0]):
        row = row[-1] if row[-2] == "updates" or isinstance(row[0], list) else None
    if not isinstance(row, Mapping) or not row or row.keys() & {"messages", *_STATE}:
        return None
    plain = all(change is None or isinstance(change, Mapping | list) for change in row.values())
    holds = any(isinstance(change, Mapping) and "messages" in change for change in row.values())
    return row if plain and holds else None


def langgraph_runs(rows: Iterable[RawRow]) -> Iterator[RawRow]:
    """Yield consecutive updates as one row, and the last of consecutive states of one run.

    An update with a user's message begins the next run. The states of a run begin with the messages of the earlier
    ones (``stream_mode="values"``).
    """
    run: list[RawRow] = []
    state: RawRow | None = None
    for one in rows:
        update = _update(one.value)
        if run and (update is None or _asks(update)):
            yield RawRow(run[0].place, {"updates": [part.value for part in run]})
            run = []
        if state is not None and not _continues(one.value, state.value):
            yield state
        state = one if update is None else None
        if update is not None:
            run.append(RawRow(one.place, update))
    if state is not None:
        yield state
    if run:
        yield RawRow(run[0].place, {"updates": [part.value for part in run]})


def _continues(row: object, earlier: object) -> bool:
    now, before = (one.get("messages") if isinstance(one, Mapping) else None for one in (row, earlier))
    return (
        isinstance(now, list) and isinstance(before, list) and len(now) > len(before) and now[: len(before)] == before
    )


def _asks(update: JSONMapping) -> bool:
    return any(_is_user(message) for _, message in _messages(update))


def langgraph(row: object) -> Transcript:
    """Read a LangGraph history: messages, a state or snapshot with ``messages``, or streamed updates.

    In updates of the form ``{"node": {"messages": [...]}}``, messages without a name belong to the node.

    Raises:
        BadRow: The row has another format, or updates contain no question.
    """
    if isinstance(row, list):
        row = {"messages": row} if is_history(row) else {"updates": row}
    if isinstance(row, Mapping) and isinstance(row.get("updates"), list):
        return _streamed(row, row["updates"])
    values = first_of(row, _STATE) if isinstance(row, Mapping) else None
    if isinstance(row, Mapping) and isinstance(values, Mapping):
        row = {**{key: row[key] for key in row if key not in _STATE}, **values}
    found = chat(row)
    unnamed = sum(message.agent and message.speaker == "Assistant" for message in found.messages)
    return replace(found, dropped={**found.dropped, _UNNAMED: unnamed}) if unnamed > 1 else found


def _streamed(row: JSONMapping, updates: list[object]) -> Transcript:
    messages: list[object] = []
    for update in updates:
        if not isinstance(update, Mapping):
            raise BadRow(f"expected an object that maps nodes to updates, got {shown(update)}")
        messages += [_named(node, message) for node, message in _messages(update)]
    if first_of(row, QUESTION) is None and not (messages and _is_user(messages[0])):
        raise BadRow(
            "expected updates that begin with a user's message; LangGraph does not stream its input, so write it as "
            f'the first update: {{"{_START}": {{"messages": [{{"type": "human", "content": "QUESTION"}}]}}}}'
        )
    return chat({**{key: row[key] for key in row if key != "updates"}, "messages": messages})


def _messages(update: JSONMapping) -> Iterator[tuple[str, object]]:
    for node, change in update.items():
        messages = change.get("messages") if isinstance(change, Mapping) else None
        for message in messages if isinstance(messages, list) else [messages] if is_message(messages) else []:
            yield str(node), message


def _is_user(message: object) -> bool:
    if not isinstance(message, Mapping):
        return False
    inner = message.get("kwargs") if isinstance(message.get("kwargs"), Mapping) else message
    path = message.get("id")
    kind = path[-1] if isinstance(path, list) and path else inner.get("type", inner.get("role"))  # type: ignore[union-attr]
    return kind in ("human", "user", "HumanMessage")


def _named(node: str, message: object) -> object:
    if not isinstance(message, Mapping) or _is_user(message):
        return message
    if isinstance(message.get("kwargs"), Mapping):
        named = message["kwargs"].get("name")
        return message if named else {**message, "kwargs": {**message["kwargs"], "name": node}}
    return message if message.get("name") else {**message, "name": node}
