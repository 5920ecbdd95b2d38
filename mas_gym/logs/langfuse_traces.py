"""Traces and observations downloaded from Langfuse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.logs.fields import list_of
from mas_gym.logs.spans import AGENT, MODEL, OTHER, TOOL, Span, make_span, metadata_of
from mas_gym.tasks.data_rows import BadRow, first_of

_TRACE = {"id", "timestamp", "input", "output", "sessionId"}


def is_langfuse(row: object) -> bool:
    """Whether a row is a trace or an observation of Langfuse."""
    if not isinstance(row, Mapping):
        return False
    return isinstance(row.get("observations"), list) or row.keys() >= _TRACE or row.keys() >= {"traceId", "type"}


def langfuse_spans(row: JSONMapping) -> Iterable[Span]:
    """Return the spans of a trace with its observations, or of an observation. Raises `BadRow`."""
    return _observation(row) if "traceId" in row else _trace(row)


def _trace(row: JSONMapping) -> Iterator[Span]:
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
    facts = _scores(row.get("scores")) | metadata_of(row.get("metadata"))
    start = row.get("timestamp", row.get("createdAt"))
    root = f"trace {trace}"
    yield make_span(
        trace, root, None, OTHER, None, str(row.get("name", "")), start, row.get("input"), row.get("output"), 0, facts
    )
    for observation in observations:
        for span in _observation({"traceId": trace, **observation}):
            yield span | {"parent": span["parent"] or root}


def _observation(row: JSONMapping) -> Iterator[Span]:
    sort = str(row.get("type", "")).upper()
    kind = {"GENERATION": MODEL, "TOOL": TOOL, "AGENT": AGENT}.get(sort, OTHER)
    name = str(row.get("name") or "")
    usage = row.get("usageDetails", row.get("usage"))
    tokens = first_of(usage or {}, ("output", "completionTokens", "output_tokens", "completion_tokens"))
    facts = metadata_of(row.get("metadata")) | ({"model": row["model"]} if isinstance(row.get("model"), str) else {})
    agent = facts.get("agent") or facts.get("agent_name") or (name if kind == AGENT else None)
    parent = row.get("parentObservationId")
    yield make_span(
        row.get("traceId"), row.get("id"), parent, kind, agent, name, row.get("startTime"), row.get("input"),
        row.get("output"), tokens, facts,
    )  # fmt: skip


def _scores(entries: object) -> JSONObject:
    return {f"score.{one['name']}": first_of(one, ("value", "stringValue")) for one in list_of(entries)}
