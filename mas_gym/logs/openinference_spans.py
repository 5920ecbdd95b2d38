"""Spans in OpenInference's conventions, and Phoenix's table of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.logs.fields import has_fields, inside, list_of
from mas_gym.logs.spans import AGENT, MODEL, OTHER, TOOL, Span, make_span

_KIND = "openinference.span.kind"
_KINDS = {"LLM": MODEL, "TOOL": TOOL, "RETRIEVER": TOOL, "AGENT": AGENT}


def is_openinference(attributes: JSONMapping) -> bool:
    """Whether the attributes of a span follow OpenInference."""
    return _KIND in attributes or isinstance(attributes.get("openinference"), Mapping)


is_phoenix = has_fields("context.trace_id", "context.span_id")


def phoenix_spans(row: JSONMapping) -> Iterator[Span]:
    """Yield the span of a row of Phoenix's table, in which each attribute is a column."""
    named = {key.removeprefix("attributes."): row[key] for key in row if key.startswith("attributes.")}
    attributes = {_KIND: row.get("span_kind"), **named}
    identity = row["context.trace_id"], row["context.span_id"]
    yield openinference(identity, row.get("parent_id"), str(row.get("name", "")), row.get("start_time"), attributes)


def openinference(
    identity: tuple[object, object], parent: object, name: str, start: object, attributes: JSONMapping
) -> Span:
    """Return the span of a trace from its attributes; dotted attribute names may be flat or nested."""
    tree = _nested(attributes)
    kind = _KINDS.get(str(inside(tree, "openinference", "span", "kind")).upper(), OTHER)
    given, output = inside(tree, "input", "value"), inside(tree, "output", "value")
    if kind == MODEL:
        given = _messages(inside(tree, "llm", "input_messages")) or given
        output = _messages(inside(tree, "llm", "output_messages")) or output
    agent = inside(tree, "agent", "name") or inside(tree, "graph", "node", "id") or (name if kind == AGENT else None)
    title = inside(tree, "tool", "name") if kind == TOOL else None
    model, tokens = inside(tree, "llm", "model_name"), inside(tree, "llm", "token_count", "completion")
    facts = {"model": model} if isinstance(model, str) else {}
    return make_span(*identity, parent, kind, agent, str(title or name), start, given, output, tokens, facts)


def _messages(listed: object) -> list[JSONObject]:
    found = []
    for message in [inside(one, "message") for one in list_of(listed)]:
        parts = [inside(part, "message_content") for part in list_of(inside(message, "contents"))]
        content = inside(message, "content")
        found.append(
            {
                "role": inside(message, "role") or "assistant",
                "content": parts if content is None else content,
                "name": inside(message, "name"),
                "tool_call_id": inside(message, "tool_call_id"),
                "tool_calls": [inside(call, "tool_call") for call in list_of(inside(message, "tool_calls"))],
            }
        )
    return found


def _nested(value: object) -> object:
    """Return a value in which ``{"a.0.b": 1}`` is ``{"a": [{"b": 1}]}``."""
    if isinstance(value, list):
        return [_nested(one) for one in value]
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
        return [_nested(found[key]) for key in sorted(found, key=int)]
    return {key: _nested(one) for key, one in found.items()}
