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
_BOTH = 'stream with stream_mode=["updates", "values"]'


def is_langgraph(row: object) -> bool:
    """Whether a row is a LangGraph history, state or streamed update."""
    if isinstance(row, Mapping):
        values = first_of(row, _STATE)
        if isinstance(values, Mapping):
            return isinstance(values.get("messages"), list)
        messages = row.get("messages")
        if isinstance(messages, list):
            return _langchain(messages)
        return _update(row) is not None or "updates" in row or _unreadable(row) is not None
    return isinstance(row, list) and (_langchain(row) or _update(row) is not None or _state(row) is not None)


def _langchain(messages: list[object]) -> bool:
    first = messages[0] if messages else None
    return isinstance(first, Mapping) and first.get("type") in _TYPES and "role" not in first


def _unreadable(row: object) -> str | None:
    """Return the stream mode of a row that contains no whole messages; None for another row."""
    if isinstance(row, list) and len(row) == 2 and isinstance(row[1], Mapping) and "langgraph_node" in row[1]:
        return "messages"
    return "debug" if isinstance(row, Mapping) and row.keys() >= {"step", "timestamp", "type", "payload"} else None


def _streamed_part(row: object) -> tuple[object, JSONMapping] | None:
    """Return the mode and the content of a row of a stream with several modes or with namespaces."""
    if isinstance(row, list) and len(row) in (2, 3) and isinstance(row[-1], Mapping) and not is_message(row[0]):
        return (row[-2] if isinstance(row[-2], str) else "updates" if isinstance(row[0], list) else None), row[-1]
    return None


def _state(row: object) -> JSONMapping | None:
    """Return the state in a row of a stream with several modes; None for another row."""
    part = _streamed_part(row)
    return part[1] if part is not None and part[0] == "values" and isinstance(part[1].get("messages"), list) else None


def _update(row: object) -> JSONMapping | None:
    """Return the update in a row, without the mode and the namespace of the stream; None for another row."""
    part = _streamed_part(row)
    if part is not None:
        row = part[1] if part[0] == "updates" else None
    if not isinstance(row, Mapping) or not row or row.keys() & {"messages", *_STATE}:
        return None
    plain = all(change is None or isinstance(change, Mapping | list) for change in row.values())
    holds = any(isinstance(change, Mapping) and "messages" in change for change in row.values())
    return row if plain and holds else None


def langgraph_runs(rows: Iterable[RawRow]) -> Iterator[RawRow]:
    """Yield consecutive updates as one row, and the last of consecutive states of one run.

    An update with a user's message begins the next run. The states of a run begin with the messages of the earlier
    ones (``stream_mode="values"``). Of a stream of both, the updates are read, and the first state of a run, its input.
    """
    run: list[RawRow] = []
    state: RawRow | None = None
    for one in _with_inputs(rows):
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
    return _extends(now, before) and now != before


def _extends(now: object, before: object) -> bool:
    return isinstance(now, list) and isinstance(before, list) and now[: len(before)] == before


def _with_inputs(rows: Iterable[RawRow]) -> Iterator[RawRow]:
    """Yield the rows; of a stream of states and updates, only the input of each run, as an update, and the updates."""
    first: RawRow | None = None
    latest: JSONMapping | None = None
    updated = False
    for one in rows:
        state = _state(one.value)
        if state is not None and latest is not None and updated and _extends(state["messages"], latest["messages"]):
            latest = state
            continue
        if first is not None:
            assert latest is not None
            updated = _update(one.value) is not None
            yield RawRow(first.place, {_START: {"messages": latest["messages"]}} if updated else latest)
        first, latest = (None, latest if updated else None) if state is None else (one, state)
        updated = updated and state is None
        if state is None:
            yield one
    if first is not None:
        assert latest is not None
        yield RawRow(first.place, latest)


def _asks(update: JSONMapping) -> bool:
    return any(_is_user(message) for _, message in _messages(update))


def langgraph(row: object) -> Transcript:
    """Read a LangGraph history: messages, a state or snapshot with ``messages``, or streamed updates.

    In updates of the form ``{"node": {"messages": [...]}}``, messages without a name belong to the node.

    Raises:
        BadRow: The row has another format, or updates contain no question.
    """
    mode = _unreadable(row)
    if mode is not None:
        raise BadRow(f"expected states or updates, got a row of stream_mode={mode!r}; {_BOTH}")
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
            f"expected updates that begin with a user's message, which LangGraph streams only in states; {_BOTH}, or "
            f'write the first update: {{"{_START}": {{"messages": [{{"type": "human", "content": "QUESTION"}}]}}}}'
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
