"""Agent traces as transcripts: OpenTelemetry GenAI spans, and exports from Langfuse and LangSmith.

A message is the output of a model span, attributed to the nearest enclosing agent, or the result of a tool span.
The spans of a trace may be anywhere in the files, so they are stored in a temporary file until all are read.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any, NamedTuple

from mas_gym.errors import is_number, shown
from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.logs.chats import REFERENCE, reference_of, text_or_none
from mas_gym.logs.messages import is_message, message_content, read_message, written
from mas_gym.logs.openinference_spans import is_openinference, openinference
from mas_gym.logs.spans import AGENT, MODEL, OTHER, TOOL, Span, make_span
from mas_gym.logs.transcript import (
    BrokenLine,
    LoggedMessage,
    Transcript,
    small_facts,
    speaker_name,
    truth,
    validate_transcript,
)
from mas_gym.systems.tool_calls import ToolCall
from mas_gym.tasks.data_rows import BadRow, first_of
from mas_gym.tasks.json_rows import parsed

_MODEL_OPERATIONS = ("chat", "text_completion", "generate_content")
_PLAIN = re.compile(r"^(system|user|assistant|tool): ", re.MULTILINE)
_LANGFUSE_TRACE = {"id", "timestamp", "input", "output", "sessionId"}
_CORRECT = ("correct", "correctness", "is_correct")
_TEXT_KEYS = (
    "question",
    "input",
    "query",
    "task",
    "prompt",
    "text",
    "content",
    "output",
    "answer",
    "result",
    "response",
)


def is_otel(row: object) -> bool:
    """Whether a row contains spans."""
    return isinstance(row, Mapping) and _dialect(row) is not None


def _dialect(row: Mapping[str, object]) -> Callable[[Any], Iterable[Span]] | None:
    if "context.span_id" in row and "context.trace_id" in row:
        return _phoenix
    if "resourceSpans" in row or "resource_spans" in row:
        return _otlp
    if "context" in row and "attributes" in row:
        return _console
    if isinstance(row.get("observations"), list) or row.keys() >= _LANGFUSE_TRACE:
        return _langfuse_trace
    if "run_type" in row and "id" in row:
        return _langsmith
    if "traceId" in row and "type" in row:
        return _langfuse_observation
    if "traceId" in row and "spanId" in row:
        return _bare
    return None


def spans_of(row: object) -> list[Span]:
    """Return the spans of a row.

    Raises:
        BadRow: The row contains no spans.
    """
    read = _dialect(row) if isinstance(row, Mapping) else None
    if read is None:
        raise BadRow(f"expected OTLP resourceSpans, or a trace from Langfuse or LangSmith, got {shown(row)}")
    found = list(read(row))
    if not found:
        raise BadRow(f"expected at least one span, got {shown(row)}")
    for span in found:
        if not isinstance(span["trace"], str) or not span["trace"] or not isinstance(span["id"], str) or not span["id"]:
            raise BadRow(f"expected a span with a trace id and a span id, got {shown((span['trace'], span['id']))}")
    return found


# ----------------------------------------------------------------- OpenTelemetry


def _otlp(row: Mapping[str, object]) -> Iterator[Span]:
    for resource in _list(row.get("resourceSpans", row.get("resource_spans"))):
        for scope in _list(_get(resource, "scopeSpans", "scope_spans")):
            for span in _list(_get(scope, "spans")):
                yield from _bare(span)


def _bare(span: Mapping[str, object]) -> Iterator[Span]:
    attributes = _attributes(span.get("attributes"))
    events = [(str(_get(event, "name")), _attributes(_get(event, "attributes"))) for event in _list(span.get("events"))]
    identity = _get(span, "traceId", "trace_id"), _get(span, "spanId", "span_id")
    parent = _get(span, "parentSpanId", "parent_span_id")
    start = _get(span, "startTimeUnixNano", "start_time_unix_nano")
    yield _gen_ai(identity, parent, str(span.get("name", "")), start, attributes, events)


def _console(row: Mapping[str, object]) -> Iterator[Span]:
    """Read a span in the format of the SDK's ``to_json``, which ``mas-gym --traces`` also writes."""
    context = row["context"] if isinstance(row["context"], Mapping) else {}
    attributes = dict(row["attributes"]) if isinstance(row["attributes"], Mapping) else {}
    events = [(str(_get(event, "name")), dict(_get(event, "attributes") or {})) for event in _list(row.get("events"))]
    identity = context.get("trace_id"), context.get("span_id")
    yield _gen_ai(identity, row.get("parent_id"), str(row.get("name", "")), row.get("start_time"), attributes, events)


def _phoenix(row: Mapping[str, object]) -> Iterator[Span]:
    """Read a span of Phoenix's table of spans, in which each attribute is a column."""
    named = {key.removeprefix("attributes."): row[key] for key in row if key.startswith("attributes.")}
    attributes = {"openinference.span.kind": row.get("span_kind"), **named}
    identity = row["context.trace_id"], row["context.span_id"]
    yield openinference(identity, row.get("parent_id"), str(row.get("name", "")), row.get("start_time"), attributes)


def _gen_ai(
    identity: tuple[object, object],
    parent: object,
    name: str,
    start: object,
    attributes: Mapping[str, object],
    events: list[tuple[str, JSONObject]],
) -> Span:
    if is_openinference(attributes):
        return openinference(identity, parent, name, start, attributes)
    operation = attributes.get("gen_ai.operation.name")
    outputs = _messages(attributes, "gen_ai.output.messages") or _indexed(attributes, "gen_ai.completion")
    inputs = _messages(attributes, "gen_ai.input.messages") or _indexed(attributes, "gen_ai.prompt")
    for event, fields in events:
        content = fields.get("gen_ai.event.content")
        body = {**fields, **_object(content)}
        if event == "gen_ai.choice":
            message = body.get("message")
            outputs.append({"role": "assistant", **(_object(message) if message is not None else body)})
        elif event in ("gen_ai.user.message", "gen_ai.system.message", "gen_ai.assistant.message"):
            inputs.append({"role": event.split(".")[1], **body})
        elif event == "gen_ai.content.completion":
            outputs += _history(_unpacked(body.get("gen_ai.completion")))
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
        inputs = [{"role": "system", "content": _unpacked(system)}, *inputs]
    facts |= {"model": attributes["gen_ai.request.model"]} if "gen_ai.request.model" in attributes else {}
    tokens = attributes.get("gen_ai.usage.output_tokens", attributes.get("gen_ai.usage.completion_tokens"))
    agent = attributes.get("gen_ai.agent.name")
    return make_span(*identity, parent, kind, agent, str(tool or name), start, inputs, output, tokens, facts)


def _prompted(prompt: object) -> list[object]:
    """Return the messages of a prompt: JSON, or text in which ``role: `` begins each message (OpenLIT)."""
    prompt = _unpacked(prompt)
    if not isinstance(prompt, str):
        return _history(prompt)
    parts = _PLAIN.split(prompt)
    if len(parts) == 1 or parts[0].strip():
        return [{"role": "user", "content": prompt}]
    return [{"role": role, "content": text.strip()} for role, text in zip(parts[1::2], parts[2::2], strict=True)]


def _attributes(entries: object) -> JSONObject:
    if isinstance(entries, Mapping):
        return dict(entries)
    pairs = [(_get(entry, "key"), _get(entry, "value")) for entry in _list(entries)]
    return {key: _any_value(value) for key, value in pairs if isinstance(key, str)}


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
        return [_any_value(one) for one in _list(_get(value["arrayValue"], "values"))]
    if "kvlistValue" in value:
        entries = _list(_get(value["kvlistValue"], "values"))
        return {str(_get(one, "key")): _any_value(_get(one, "value")) for one in entries}
    return None


def _messages(attributes: Mapping[str, object], name: str) -> list[object]:
    return _history(_unpacked(attributes.get(name)))


def _indexed(attributes: Mapping[str, object], prefix: str) -> list[object]:
    """Return the messages in attributes such as ``gen_ai.prompt.0.role``, ordered by index."""
    found: dict[int, JSONObject] = {}
    for key, value in attributes.items():
        if key.startswith(prefix + "."):
            place, _, field = key[len(prefix) + 1 :].partition(".")
            if place.isdecimal() and len(place) < 6 and field in ("role", "content"):
                found.setdefault(int(place), {"role": "assistant"})[field] = value
    return [found[place] for place in sorted(found)]


# ---------------------------------------------------------- Langfuse and LangSmith


def _langfuse_trace(row: JSONMapping) -> Iterator[Span]:
    if isinstance(row.get("trace"), Mapping):
        # The download of a single trace.
        row = {**row["trace"], "observations": row["observations"]}
    observations = row.get("observations")
    if not isinstance(observations, list) or any(isinstance(one, str) for one in observations):
        raise BadRow(
            "expected a Langfuse trace with its observations, got a trace without them; download the trace on its "
            "page, or the table of observations"
        )
    trace = row.get("id")
    facts = _scores(row.get("scores")) | _metadata(row.get("metadata"))
    start = row.get("timestamp", row.get("createdAt"))
    root = f"trace {trace}"
    yield make_span(
        trace, root, None, OTHER, None, str(row.get("name", "")), start, row.get("input"), row.get("output"), 0, facts
    )
    for observation in observations:
        if not isinstance(observation, Mapping):
            raise BadRow(f"expected an observation, got {shown(observation)}")
        for span in _langfuse_observation({"traceId": trace, **observation}):
            yield span | {"parent": span["parent"] or root}


def _langfuse_observation(row: Mapping[str, object]) -> Iterator[Span]:
    sort = str(row.get("type", "")).upper()
    kind = {"GENERATION": MODEL, "TOOL": TOOL, "AGENT": AGENT}.get(sort, OTHER)
    name = str(row.get("name") or "")
    usage = row.get("usageDetails", row.get("usage"))
    tokens = _get(usage, "output", "completionTokens", "output_tokens", "completion_tokens")
    facts = _metadata(row.get("metadata")) | ({"model": row["model"]} if isinstance(row.get("model"), str) else {})
    agent = facts.get("agent") or facts.get("agent_name") or (name if kind == AGENT else None)
    parent = row.get("parentObservationId")
    yield make_span(
        row.get("traceId"), row.get("id"), parent, kind, agent, name, row.get("startTime"), row.get("input"),
        row.get("output"), tokens, facts,
    )  # fmt: skip


def _langsmith(row: Mapping[str, object]) -> Iterator[Span]:
    # Children may be nested to any depth.
    waiting: list[tuple[JSONMapping, object]] = [(row, row.get("parent_run_id"))]
    trace = row.get("trace_id") or row.get("id")
    while waiting:
        run, parent = waiting.pop()
        kind = {"llm": MODEL, "tool": TOOL, "retriever": TOOL}.get(str(run.get("run_type")), OTHER)
        extra = _get(run, "extra")
        facts = _metadata(_get(extra, "metadata")) | _feedback(run.get("feedback_stats"))
        facts |= _references(run.get("reference_outputs"))
        name = str(run.get("name") or "")
        agent = facts.get("agent") or facts.get("agent_name") or facts.get("langgraph_node")
        tokens = run.get("completion_tokens")
        yield make_span(
            trace, run.get("id"), parent, kind, agent, name, run.get("start_time"), run.get("inputs"),
            run.get("outputs"), tokens, facts,
        )  # fmt: skip
        waiting += [(child, run.get("id")) for child in _list(run.get("child_runs")) if isinstance(child, Mapping)]


def _scores(entries: object) -> JSONObject:
    return {f"score.{_get(one, 'name')}": _get(one, "value", "stringValue") for one in _list(entries)}


def _feedback(stats: object) -> JSONObject:
    return {f"score.{key}": _get(one, "avg") for key, one in stats.items()} if isinstance(stats, Mapping) else {}


def _references(outputs: object) -> JSONObject:
    return {"reference": span_text(outputs, last=True)} if outputs else {}


def _metadata(found: object) -> JSONObject:
    if isinstance(found, str):
        found = parsed(found)
    return {str(key): value for key, value in found.items()} if isinstance(found, Mapping) else {}


# ------------------------------------------------------------------- transcripts


class SpanCollector:
    """Collects spans and returns their traces as transcripts; the spans are kept on disk."""

    def __init__(self) -> None:
        """Open a temporary file, which is deleted when it is closed."""
        self._connection = sqlite3.connect("")
        self._connection.execute("CREATE TABLE spans (trace TEXT, place TEXT, span TEXT)")

    def add(self, place: str, row: object) -> None:
        """Store the spans of a row.

        Raises:
            BadRow: The row contains no spans.
        """
        lines = [(span["trace"], place, json.dumps(span, default=str)) for span in spans_of(row)]
        self._connection.executemany("INSERT INTO spans VALUES (?, ?, ?)", lines)

    def transcripts(self) -> Iterator[Transcript | BrokenLine]:
        """Yield the traces as transcripts, in order of appearance, and close the file."""
        with closing(self._connection) as connection:
            connection.execute("CREATE INDEX of_trace ON spans (trace)")
            traces = connection.execute("SELECT trace, min(rowid) AS first FROM spans GROUP BY trace ORDER BY first")
            for trace, first in traces:
                [place] = connection.execute("SELECT place FROM spans WHERE rowid = ?", (first,)).fetchone()
                rows = connection.execute("SELECT span FROM spans WHERE trace = ? ORDER BY rowid", (trace,)).fetchall()
                try:
                    yield validate_transcript(_transcript(trace, [json.loads(text) for (text,) in rows], place))
                except BadRow as fault:
                    yield BrokenLine(place, f"trace {shown(trace)}: {fault}")
                except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
                    yield BrokenLine(place, f"trace {shown(trace)}: {type(error).__name__}: {shown(error)}")


def _transcript(trace: str, rows: list[Span], place: str) -> Transcript:
    dropped: Counter[str] = Counter()
    spans: dict[str, Span] = {}
    for row in rows:
        if row["id"] in spans:
            dropped["span with a duplicate id"] += 1
        spans.setdefault(row["id"], row)
    places = _places(spans, dropped)
    ordered = sorted(spans.values(), key=lambda span: span["start"])
    kinds = {span["kind"] for span in ordered if span["output"]}
    wanted = (MODEL, TOOL) if MODEL in kinds else (AGENT, TOOL)
    messages: list[LoggedMessage] = []
    prompts: dict[str, str] = {}
    question: str | None = None
    facts: JSONObject = {}
    for span in ordered:
        above = places[span["id"]]
        if above.root:
            facts = span["facts"] | facts
        # A model span inside another model span is the same call, recorded by two libraries.
        if span["kind"] not in wanted or (span["kind"] == MODEL and above.model):
            dropped["output recorded in another span"] += bool(span["output"]) and not above.root
            continue
        if span["kind"] != TOOL:
            question = question or span_text(span["input"], last=False)
        found = _message(span, above, dropped)
        if found is None:
            dropped["span without text"] += 1
            continue
        messages.append(found)
        if (prompt := _system(span["input"])) is not None:
            prompts.setdefault(found.speaker, prompt)
        if "model" in span["facts"]:
            facts.setdefault("model", span["facts"]["model"])
    roots = [span for span in ordered if places[span["id"]].root]
    asked = next((text for span in roots if (text := span_text(span["input"], last=False))), None)
    answered = next((text for span in roots if (text := span_text(span["output"], last=True))), None)
    if not messages:
        raise BadRow(
            "expected a span of a model call with its output messages, found none; enable recording of message "
            "contents in the program that writes the trace"
        )
    last = messages[-1].text.strip()
    return Transcript(
        question=asked or question or "",
        messages=tuple(messages),
        answer=answered if answered is not None and answered.strip() != last else None,
        reference=reference_of(first_of(facts, REFERENCE)),
        correct=next((truth(facts[key]) for key in _verdicts() if facts.get(key) is not None), None),
        score=next((float(v) for k, v in facts.items() if k.startswith("score.") and is_number(v)), None),
        question_id=text_or_none(first_of(facts, ("question_id", "mas_gym.problem.id")), "question_id"),
        sample_id=trace,
        agents=prompts,
        facts=small_facts(facts, set(REFERENCE))[0],
        dropped=dict(+dropped),
        place=place,
    )


def _verdicts() -> list[str]:
    return [f"{prefix}{name}" for prefix in ("mas_gym.", "score.", "") for name in _CORRECT]


class _Place(NamedTuple):
    """The ancestors of a span.

    Attributes:
        root: Whether there are no ancestors.
        agent: Name of the nearest agent.
        model: Whether an ancestor is a model span.
    """

    root: bool = True
    agent: str | None = None
    model: bool = False


def _places(spans: Mapping[str, Span], dropped: Counter[str]) -> dict[str, _Place]:
    """Return the ancestors of each span; links to a missing parent, or to a descendant, are dropped."""
    found: dict[str, _Place] = {}
    for name in spans:
        chain: dict[str, None] = {}
        link: str | None = name
        while link is not None and link not in found:
            chain[link] = None
            link = spans[link]["parent"]
            if link is not None and (link not in spans or link in chain):
                dropped["cycle of parent spans" if link in spans else "link to a missing parent span"] += 1
                link = None
        above = _Place() if link is None else _below(spans[link], found[link])
        for one in reversed(chain):
            found[one] = above
            above = _below(spans[one], above)
    return found


def _below(span: Span, place: _Place) -> _Place:
    named = span["agent"] or (span["name"] if span["kind"] == AGENT else None)
    return _Place(False, named or place.agent, place.model or span["kind"] == MODEL)


def _message(span: Span, above: _Place, dropped: Counter[str]) -> LoggedMessage | None:
    if span["kind"] == TOOL:
        text = span_text(span["output"], last=True)
        return None if text is None else LoggedMessage(_name(span["name"] or "Tool"), text, agent=False)
    outputs = _outputs(span["output"])
    if len(outputs) > 1:
        dropped["additional choice of a model"] += len(outputs) - 1
    if not outputs:
        return None
    text, calls = outputs[0]
    if not text.strip() and not calls:
        return None
    name = _below(span, above).agent or "Assistant"
    return LoggedMessage(_name(name), text, tool_calls=calls, tokens=span["tokens"])


def _name(name: str) -> str:
    return speaker_name(name[:200])


def _outputs(output: object) -> list[tuple[str, tuple[ToolCall, ...]]]:
    """Return the text and the tool calls of each output of a model."""
    found: list[tuple[str, tuple[ToolCall, ...]]] = []
    for entry in _history(output):
        try:
            [raw] = read_message(entry, {})
        except (BadRow, ValueError):
            found.append((span_text(entry, last=True) or "", ()))
        else:
            found.append((raw.message.text, raw.message.tool_calls))
    return found


def _history(value: object) -> list[object]:
    """Return the messages in the input or the output of a span, without the structures that enclose them."""
    value = _unpacked(value)
    for _ in range(8):
        if isinstance(value, Mapping) and not is_message(value):
            key = next((k for k in ("messages", "generations", "choices", "message", "output") if value.get(k)), None)
            if key is None:
                break
            value = value[key]
        elif isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
            [value] = value
        else:
            break
    entries = value if isinstance(value, list) else [] if value in (None, "", {}) else [value]
    inner = [entry["message"] if isinstance(entry, Mapping) and "message" in entry else entry for entry in entries]
    return [{"role": "assistant", "content": entry} if isinstance(entry, str) else entry for entry in inner]


def span_text(value: object, *, last: bool) -> str | None:
    """Return the text of a span's input (its first user message) or output (its last message)."""
    value = _unpacked(value)
    for _ in range(8):
        if isinstance(value, str):
            return value if value.strip() else None
        if isinstance(value, Mapping) and not is_message(value):
            history = _history(value)
            if history and all(map(is_message, history)):
                value = history
                continue
            key = next((key for key in _TEXT_KEYS if value.get(key) not in (None, "")), None)
            if key is None:
                return written(value) if value else None
            value = value[key]
        elif isinstance(value, list) and value and all(map(is_message, value)):
            texts = [(raw.role, raw.message.said) for entry in value for raw in read_message(entry, {})]
            mine = [text for role, text in texts if text.strip() and (last or role == "user")]
            return (mine[-1] if last else mine[0]) if mine else None
        elif isinstance(value, Mapping):
            value = [value]
        elif isinstance(value, list) and len(value) == 1:
            [value] = value
        else:
            break
    return None if value in (None, [], {}) else written(value)


def _system(value: object) -> str | None:
    history = _history(value)
    first = history[0] if history else None
    if isinstance(first, Mapping) and str(first.get("role", first.get("type"))) == "system":
        return message_content(first.get("content", first.get("parts")))[0].strip() or None
    return None


def _unpacked(value: object) -> object:
    """Parse a string that contains a JSON object or array; return any other value unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        found = parsed(value)
        return value if isinstance(found, BadRow) else found
    return value


def _object(value: object) -> JSONObject:
    found = _unpacked(value)
    return dict(found) if isinstance(found, Mapping) else {} if found is None else {"content": found}


def _get(value: object, *names: str) -> Any:
    if not isinstance(value, Mapping):
        return None
    return next((value[name] for name in names if value.get(name) is not None), None)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
