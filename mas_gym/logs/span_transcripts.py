"""Transcripts from the spans of traces, independent of the dialect.

A message is the output of a model span, attributed to the nearest enclosing agent, or the result of a tool span.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from mas_gym.errors import is_number
from mas_gym.internal.json_types import JSONObject
from mas_gym.logs.chats import REFERENCE, reference_of, text_or_none
from mas_gym.logs.fields import field_text
from mas_gym.logs.messages import message_content, read_message
from mas_gym.logs.spans import AGENT, MODEL, TOOL, Span, history_of, span_text
from mas_gym.logs.transcript import LoggedMessage, Transcript, small_facts, speaker_name, truth
from mas_gym.systems.tool_calls import ToolCall
from mas_gym.tasks.data_rows import BadRow, first_of

_CORRECT = ("correct", "correctness", "is_correct")
_VERDICTS = [f"{prefix}{name}" for prefix in ("mas_gym.", "score.", "") for name in _CORRECT]


def span_parts(spans: Iterable[Span]) -> Iterator[tuple[str, Span]]:
    """Yield the spans of a row with their traces.

    Raises:
        BadRow: There are no spans, or a span has no ids.
    """
    found = list(spans)
    if not found:
        raise BadRow("expected at least one span, got none")
    for span in found:
        yield field_text(span, "trace"), span | {"id": field_text(span, "id")}


def trace_transcripts(trace: str, rows: list[Span]) -> Iterator[Transcript]:
    """Yield the transcript of a trace.

    Raises:
        BadRow: The trace has no outputs of model calls.
    """
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
        message = _message(span, above, dropped)
        if message is None:
            dropped["span without text"] += 1
            continue
        messages.append(message)
        if (prompt := _system(span["input"])) is not None:
            prompts.setdefault(message.speaker, prompt)
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
    yield Transcript(
        question=asked or question or "",
        messages=tuple(messages),
        answer=answered if answered is not None and answered.strip() != last else None,
        reference=reference_of(first_of(facts, REFERENCE)),
        correct=next((truth(facts[key]) for key in _VERDICTS if facts.get(key) is not None), None),
        score=next((float(v) for k, v in facts.items() if k.startswith("score.") and is_number(v)), None),
        question_id=text_or_none(first_of(facts, ("question_id", "mas_gym.problem.id")), "question_id"),
        sample_id=trace,
        agents=prompts,
        facts=small_facts(facts, set(REFERENCE))["facts"],
        dropped=dict(+dropped),
    )


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
    for entry in history_of(output):
        try:
            raw = read_message(entry, {})
        except BadRow:
            found.append((span_text(entry, last=True) or "", ()))
        else:
            found.append((raw.message.text, raw.message.tool_calls))
    return found


def _system(value: object) -> str | None:
    history = history_of(value)
    first = history[0] if history else None
    if isinstance(first, Mapping) and str(first.get("role", first.get("type"))) == "system":
        return message_content(first.get("content", first.get("parts")))[0].strip() or None
    return None
