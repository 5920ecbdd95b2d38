"""OpenTelemetry spans in the GenAI conventions, and in OpenInference's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.logs.fields import inside, list_of
from mas_gym.logs.openinference_spans import is_openinference, openinference
from mas_gym.logs.spans import AGENT, MODEL, OTHER, TOOL, Span, history_of, make_span, object_of, unpacked
from mas_gym.tasks.data_rows import first_of

_MODEL_OPERATIONS = ("chat", "text_completion", "generate_content")
_PLAIN = re.compile(r"^(system|user|assistant|tool): ", re.MULTILINE)


def is_otel(row: object) -> bool:
    """Whether a row contains OpenTelemetry spans."""
    if not isinstance(row, Mapping):
        return False
    names = row.keys()
    whole = "resourceSpans" in names or "resource_spans" in names
    return whole or names >= {"context", "attributes"} or names >= {"traceId", "spanId"}


def otel_spans(row: JSONMapping) -> Iterator[Span]:
    """Yield the spans of a row: OTLP JSON, a span of it, or a span in the SDK's ``to_json`` (as of ``--traces``)."""
    resources = first_of(row, ("resourceSpans", "resource_spans"))
    if resources is None:
        yield _span(row)
    for resource in list_of(resources):
        for scope in list_of(first_of(resource, ("scopeSpans", "scope_spans"))):
            yield from map(_span, list_of(scope.get("spans")))


def _span(row: JSONMapping) -> Span:
    ids = row.get("context") or row
    identity = first_of(ids, ("traceId", "trace_id")), first_of(ids, ("spanId", "span_id"))
    parent = first_of(row, ("parentSpanId", "parent_span_id", "parent_id"))
    start = first_of(row, ("startTimeUnixNano", "start_time_unix_nano", "start_time"))
    name, attributes = str(row.get("name", "")), _attributes(row.get("attributes"))
    events = [(str(event.get("name")), _attributes(event.get("attributes"))) for event in list_of(row.get("events"))]
    if is_openinference(attributes):
        return openinference(identity, parent, name, start, attributes)
    operation = attributes.get("gen_ai.operation.name")
    outputs = _messages(attributes, "gen_ai.output.messages") or _indexed(attributes, "gen_ai.completion")
    inputs = _messages(attributes, "gen_ai.input.messages") or _indexed(attributes, "gen_ai.prompt")
    for event, fields in events:
        content = fields.get("gen_ai.event.content")
        body = {**fields, **object_of(content)}
        if event == "gen_ai.choice":
            message = body.get("message")
            outputs.append({"role": "assistant", **(object_of(message) if message is not None else body)})
        elif event in ("gen_ai.user.message", "gen_ai.system.message", "gen_ai.assistant.message"):
            inputs.append({"role": event.split(".")[1], **body})
        elif event == "gen_ai.content.completion":
            outputs += history_of(unpacked(body.get("gen_ai.completion")))
        elif event == "gen_ai.content.prompt":
            inputs += _prompted(body.get("gen_ai.prompt"))
    facts = {key: attributes[key] for key in attributes if key.startswith("mas_gym.")}
    for event, fields in events:
        if event == "gen_ai.evaluation.result":
            about = str(fields.get("gen_ai.evaluation.name", "score"))
            facts[f"score.{about}"] = fields.get("gen_ai.evaluation.score.value")
    tool = attributes.get("gen_ai.tool.name")
    kind = OTHER
    output: object = outputs
    if operation == "execute_tool" or (tool and operation is None):
        kind, output = TOOL, first_of(attributes, ("gen_ai.tool.call.result", "gen_ai.tool.output"))
    elif operation == "invoke_agent":
        kind = AGENT
    elif operation in _MODEL_OPERATIONS or (operation is None and outputs):
        kind = MODEL
    system = attributes.get("gen_ai.system_instructions")
    if system is not None:
        inputs = [{"role": "system", "content": unpacked(system)}, *inputs]
    facts |= {"model": attributes["gen_ai.request.model"]} if "gen_ai.request.model" in attributes else {}
    tokens = attributes.get("gen_ai.usage.output_tokens", attributes.get("gen_ai.usage.completion_tokens"))
    agent = attributes.get("gen_ai.agent.name")
    return make_span(*identity, parent, kind, agent, str(tool or name), start, inputs, output, tokens, facts)


def _prompted(prompt: object) -> list[object]:
    """Return the messages of a prompt: JSON, or text in which ``role: `` begins each message (OpenLIT)."""
    prompt = unpacked(prompt)
    if not isinstance(prompt, str):
        return history_of(prompt)
    parts = _PLAIN.split(prompt)
    if len(parts) == 1 or parts[0].strip():
        return [{"role": "user", "content": prompt}]
    return [{"role": role, "content": text.strip()} for role, text in zip(parts[1::2], parts[2::2], strict=True)]


def _attributes(entries: object) -> JSONObject:
    if isinstance(entries, Mapping):
        return dict(entries)
    return {entry["key"]: _any_value(entry.get("value")) for entry in list_of(entries)}


def _any_value(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    for key in ("stringValue", "boolValue", "doubleValue", "bytesValue"):
        if key in value:
            return value[key]
    if "intValue" in value:
        found = value["intValue"]
        return int(found) if isinstance(found, str) and found.lstrip("-").isdecimal() and len(found) < 20 else found
    if "arrayValue" in value:
        return [_any_value(one) for one in list_of(inside(value, "arrayValue", "values"))]
    if "kvlistValue" in value:
        return _attributes(inside(value, "kvlistValue", "values"))
    return None


def _messages(attributes: Mapping[str, object], name: str) -> list[object]:
    return history_of(unpacked(attributes.get(name)))


def _indexed(attributes: Mapping[str, object], prefix: str) -> list[object]:
    """Return the messages in attributes such as ``gen_ai.prompt.0.role``, ordered by index."""
    found: dict[int, JSONObject] = {}
    for key, value in attributes.items():
        if key.startswith(prefix + "."):
            place, _, field = key[len(prefix) + 1 :].partition(".")
            if place.isdecimal() and len(place) < 6 and field in ("role", "content"):
                found.setdefault(int(place), {"role": "assistant"})[field] = value
    return [found[place] for place in sorted(found)]
