"""Runs of LangGraph: messages, states, snapshots and streamed updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from mas_gym.internal.json_types import JSONMapping
from mas_gym.logs.chats import QUESTION, chat, made
from mas_gym.logs.fields import inside
from mas_gym.logs.messages import is_message
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
    """Return the state in a row, without the mode and the namespace of the stream; None for another row."""
    part = _streamed_part(row)
    if part is not None:
        row = part[1] if part[0] == "values" else None
    return row if isinstance(row, Mapping) and isinstance(row.get("messages"), list) else None


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
    place = ""
    state: JSONMapping | None = None
    updates: list[JSONMapping] = []

    def ended() -> Iterator[RawRow]:
        if updates or state is not None:
            yield RawRow(place, {"updates": updates} if updates else state)

    for one in rows:
        update, now = _update(one.value), _state(one.value)
        if update is not None:
            if updates and _asks(update):
                yield from ended()
                state, updates = None, []
            if not updates and state is not None:
                updates.append({_START: {"messages": state["messages"]}})
            place = place if updates else one.place
            updates.append(update)
        elif now is not None and state is not None and _continues(now, state, equal=bool(updates)):
            place, state = place if updates else one.place, now
        else:
            yield from ended()
            place, state, updates = one.place, now, []
            if now is None:
                yield one
    yield from ended()


def _continues(now: JSONMapping, before: JSONMapping, equal: bool) -> bool:
    """Whether a state begins with the messages of an earlier one, and, unless they may be equal, has more messages."""
    new, old = now["messages"], before["messages"]
    return new[: len(old)] == old and (equal or new != old)


def _asks(update: JSONMapping) -> bool:
    return any(_is_user(message) for _, message in _messages(update))


def langgraph(row: JSONMapping | list[object]) -> Transcript:
    """Read a LangGraph history: messages, a state or snapshot with ``messages``, or streamed updates.

    In updates of the form ``{"node": {"messages": [...]}}``, messages without a name belong to the node.

    Raises:
        BadRow: The row is of an unsuitable stream mode, or updates contain no question.
    """
    mode = _unreadable(row)
    if mode is not None:
        raise BadRow(f"expected states or updates, got a row of stream_mode={mode!r}; {_BOTH}")
    if isinstance(row, list):
        row = {"messages": row}
    if "updates" in row:
        return _streamed(row, row["updates"])
    values = first_of(row, _STATE)
    if values is not None:
        row = {**{key: row[key] for key in row if key not in _STATE}, **values}
    found = chat(row)
    unnamed = sum(message.agent and message.speaker == "Assistant" for message in found.messages)
    return made(found, dropped={_UNNAMED: unnamed}) if unnamed > 1 else found


def _streamed(row: JSONMapping, updates: list[JSONMapping]) -> Transcript:
    messages = [_named(node, message) for update in updates for node, message in _messages(update)]
    if first_of(row, QUESTION) is None and not (messages and _is_user(messages[0])):
        raise BadRow(
            f"expected updates that begin with a user's message, which LangGraph streams only in states; {_BOTH}, or "
            f'write the first update: {{"{_START}": {{"messages": [{{"type": "human", "content": "QUESTION"}}]}}}}'
        )
    return chat({**{key: row[key] for key in row if key != "updates"}, "messages": messages})


def _messages(update: JSONMapping) -> Iterator[tuple[str, JSONMapping]]:
    for node, change in update.items():
        messages = inside(change, "messages")
        for message in messages if isinstance(messages, list) else [messages] if is_message(messages) else []:
            yield str(node), message


def _is_user(message: object) -> bool:
    inner = inside(message, "kwargs") or message
    path = inside(message, "id")
    kind = path[-1] if isinstance(path, list) and path else inside(inner, "type") or inside(inner, "role")
    return kind in ("human", "user", "HumanMessage")


def _named(node: str, message: JSONMapping) -> object:
    if _is_user(message):
        return message
    if "kwargs" in message:
        return {**message, "kwargs": _named(node, message["kwargs"])}
    return message if message.get("name") else {**message, "name": node}
