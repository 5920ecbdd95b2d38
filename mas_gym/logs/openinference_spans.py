"""Spans in OpenInference's conventions, and Phoenix's table of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mas_gym.errors import shown
from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.logs.spans import AGENT, MODEL, OTHER, TOOL, Span, make_span
from mas_gym.tasks.data_rows import BadRow

_KIND = "openinference.span.kind"
_KINDS = {"LLM": MODEL, "TOOL": TOOL, "RETRIEVER": TOOL, "AGENT": AGENT}
_DEPTH = 20


def is_openinference(attributes: JSONMapping) -> bool:
    """Whether the attributes of a span follow OpenInference."""
    return _KIND in attributes or isinstance(attributes.get("openinference"), Mapping)


def is_phoenix(row: object) -> bool:
    """Whether a row is from Phoenix's table of spans."""
    return isinstance(row, Mapping) and row.keys() >= {"context.trace_id", "context.span_id"}


def phoenix_spans(row: object) -> Iterator[Span]:
    """Yield the span of a row of Phoenix's table, in which each attribute is a column.

    Raises:
        BadRow: The row has another format.
    """
    if not isinstance(row, Mapping) or not is_phoenix(row):
        raise BadRow(f"expected the columns context.trace_id and context.span_id (Phoenix), got {shown(row)}")
    named = {key.removeprefix("attributes."): row[key] for key in row if key.startswith("attributes.")}
    attributes = {_KIND: row.get("span_kind"), **named}
    identity = row["context.trace_id"], row["context.span_id"]
    yield openinference(identity, row.get("parent_id"), str(row.get("name", "")), row.get("start_time"), attributes)


def openinference(
    identity: tuple[object, object], parent: object, name: str, start: object, attributes: JSONMapping
) -> Span:
    """Return the span of a trace from its attributes; dotted attribute names may be flat or nested."""
    tree = _nested(attributes)
    kind = _KINDS.get(str(_at(tree, "openinference", "span", "kind")).upper(), OTHER)
    given, output = _at(tree, "input", "value"), _at(tree, "output", "value")
    if kind == MODEL:
        given = _messages(_at(tree, "llm", "input_messages")) or given
        output = _messages(_at(tree, "llm", "output_messages")) or output
    agent = _at(tree, "agent", "name") or _at(tree, "graph", "node", "id") or (name if kind == AGENT else None)
    title = _at(tree, "tool", "name") if kind == TOOL else None
    model, tokens = _at(tree, "llm", "model_name"), _at(tree, "llm", "token_count", "completion")
    facts = {"model": model} if isinstance(model, str) else {}
    if isinstance(tokens, float) and tokens.is_integer():
        tokens = int(tokens)
    return make_span(*identity, parent, kind, agent, str(title or name), start, given, output, tokens, facts)


def _messages(listed: object) -> list[JSONObject]:
    found = []
    for one in listed if isinstance(listed, list) else []:
        message = _at(one, "message")
        if not isinstance(message, Mapping):
            continue
        contents = message.get("contents")
        parts = [_at(part, "message_content") for part in contents] if isinstance(contents, list) else None
        calls = message.get("tool_calls")
        found.append(
            {
                "role": message.get("role") or "assistant",
                "content": message["content"] if message.get("content") is not None else parts,
                "name": message.get("name"),
                "tool_call_id": message.get("tool_call_id"),
                "tool_calls": [_at(call, "tool_call") for call in calls] if isinstance(calls, list) else None,
            }
        )
    return found


def _at(tree: object, *names: str) -> object:
    for name in names:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def _nested(value: object, depth: int = 0) -> object:
    """Return a value in which ``{"a.0.b": 1}`` is ``{"a": [{"b": 1}]}``."""
    if depth > _DEPTH:
        return value
    if isinstance(value, list):
        return [_nested(one, depth + 1) for one in value]
    if not isinstance(value, Mapping):
        return value
    found: JSONObject = {}
    for key, one in value.items():
        head, _, rest = str(key).partition(".")
        if rest:
            inner = found.get(head)
            found[head] = {**(inner if isinstance(inner, Mapping) else {}), rest: one}
        else:
            found.setdefault(head, one)
    if found and all(key.isdecimal() and len(key) < 6 for key in found):
        return [_nested(found[key], depth + 1) for key in sorted(found, key=int)]
    return {key: _nested(one, depth + 1) for key, one in found.items()}
