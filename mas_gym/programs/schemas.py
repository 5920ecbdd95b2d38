"""Small instances of JSON schemas, used as dry-run replies to calls that request structured output."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.programs.chat_completions import Call
from mas_gym.systems.tool_calls import ToolCall, with_calls

_DEEP = 8
"""Depth from which lists stay empty and nullable values are null, so that recursive schemas end."""
_FORMATS = {
    "date": "2000-01-01",
    "date-time": "2000-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "email": "a@example.org",
    "uri": "https://example.org",
    "uuid": "00000000-0000-4000-8000-000000000000",
}


def structured_reply(call: Call, words: str) -> str | None:
    """Return a reply with the structure that a call requires by its response format or by a forced tool.

    Args:
        call: The call.
        words: The value to use for strings.

    Returns:
        The reply; None if the call requires no structure.
    """
    asked = json.loads(call.extra_body) if call.extra_body else {}
    choice, tools = asked.get("tool_choice"), [tool["function"] for tool in asked.get("tools", ())]
    forced = choice.get("function", {}).get("name") if isinstance(choice, dict) else None
    for tool in tools:
        if tool["name"] == forced or (choice == "required" and len(tools) == 1):
            arguments = instance(tool.get("parameters") or {"type": "object"}, words)
            return with_calls("", [ToolCall(tool["name"], json.dumps(arguments))])
    form = asked.get("response_format") or {}
    if form.get("type") == "json_schema":
        return json.dumps(instance((form.get("json_schema") or {}).get("schema") or {}, words))
    return "{}" if form.get("type") == "json_object" else None


def instance(schema: object, words: str = "text") -> object:
    """Return a small value that a JSON schema allows: only required properties, short lists and the first choices.

    >>> instance({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]})
    {'ok': True}
    """
    return _Builder(schema if isinstance(schema, dict) else {}, words).value(schema, 0)


class _Builder:
    def __init__(self, root: JSONObject, words: str) -> None:
        self._root, self._words = root, words

    def value(self, schema: object, depth: int) -> object:
        schema = self._plain(schema, depth)
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return schema["enum"][0]
        kind = schema.get("type") or (
            "object" if "properties" in schema else "array" if "items" in schema else "string"
        )
        if isinstance(kind, list):
            kind = "null" if "null" in kind and depth >= _DEEP else next((k for k in kind if k != "null"), "null")
        match kind:
            case "object":
                return self._object(schema, depth + 1)
            case "array":
                return self._array(schema, depth + 1)
            case "string":
                return self._string(schema)
            case "number":
                return self._number(schema)
            case "integer":
                return math.ceil(self._number(schema, 1))
            case "boolean":
                return True
        return None

    def _plain(self, schema: object, depth: int) -> JSONMapping:
        """Resolve references and choose one of the alternatives."""
        for _ in range(100):
            if not isinstance(schema, dict):
                break
            others = {key: part for key, part in schema.items() if key not in ("$ref", "allOf", "anyOf", "oneOf")}
            choices = schema.get("anyOf") or schema.get("oneOf")
            if "$ref" in schema:
                schema = _joined(self._referred(schema["$ref"]), others)
            elif schema.get("allOf"):
                for part in schema["allOf"]:
                    others = _joined(others, self._plain(part, depth))
                schema = others
            elif choices:
                null = {"type": "null"}
                rest = [choice for choice in choices if choice != null] or choices
                schema = null if null in choices and depth >= _DEEP else _joined(others, rest[0])
            else:
                return schema
        return {}

    def _referred(self, address: str) -> object:
        found: Any = self._root
        for part in address.lstrip("#/").split("/") if address != "#" else ():
            key = part.replace("~1", "/").replace("~0", "~")
            found = found.get(key, {}) if isinstance(found, dict) else {}
        return found

    def _object(self, schema: JSONMapping, depth: int) -> JSONObject:
        parts = schema.get("properties", {})
        return {name: self.value(parts.get(name, {}), depth) for name in schema.get("required", ())}

    def _array(self, schema: JSONMapping, depth: int) -> list[object]:
        first = list(schema.get("prefixItems", ()))
        wanted = 0 if depth >= _DEEP else min(1, schema.get("maxItems", 1))
        count = max(len(first), schema.get("minItems", 0), wanted)
        items = schema.get("items", {})
        return [self.value(first[i] if i < len(first) else items, depth) for i in range(count)]

    def _string(self, schema: JSONMapping) -> str:
        text = _FORMATS.get(schema.get("format", ""), self._words)
        return text.ljust(schema.get("minLength", 0), ".")[: schema.get("maxLength")]

    def _number(self, schema: JSONMapping, step: float = 0.5) -> float:
        low = max(schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf) + step)
        high = min(schema.get("maximum", math.inf), schema.get("exclusiveMaximum", math.inf) - step)
        value: float = min(max(0, low), high)
        unit = schema.get("multipleOf")
        return math.ceil(value / unit) * unit if unit else value


def _joined(one: object, other: object) -> JSONObject:
    """Return a schema that combines the constraints of two schemas."""
    one, other = (part if isinstance(part, Mapping) else {} for part in (one, other))
    both = {**one, **other}
    if "properties" in one and "properties" in other:
        both["properties"] = {**one["properties"], **other["properties"]}
    if "required" in one and "required" in other:
        both["required"] = [*one["required"], *other["required"]]
    return both
