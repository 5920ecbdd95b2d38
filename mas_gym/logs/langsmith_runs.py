"""Runs exported from LangSmith."""

from __future__ import annotations

from collections.abc import Iterator

from mas_gym.internal.json_types import JSONMapping
from mas_gym.logs.fields import has_fields, inside, list_of
from mas_gym.logs.spans import MODEL, OTHER, TOOL, Span, make_span, metadata_of, span_text

is_langsmith = has_fields("run_type", "id")


def langsmith_spans(row: JSONMapping) -> Iterator[Span]:
    """Yield the spans of a run and of its children."""
    # Children may be nested to any depth.
    waiting: list[tuple[JSONMapping, object]] = [(row, row.get("parent_run_id"))]
    trace = row.get("trace_id") or row.get("id")
    while waiting:
        run, parent = waiting.pop()
        kind = {"llm": MODEL, "tool": TOOL, "retriever": TOOL}.get(str(run.get("run_type")), OTHER)
        facts = metadata_of(inside(run, "extra", "metadata"))
        facts |= {f"score.{key}": inside(one, "avg") for key, one in (run.get("feedback_stats") or {}).items()}
        if run.get("reference_outputs"):
            facts["reference"] = span_text(run["reference_outputs"], last=True)
        name = str(run.get("name") or "")
        agent = facts.get("agent") or facts.get("agent_name") or facts.get("langgraph_node")
        tokens = run.get("completion_tokens")
        yield make_span(
            trace, run.get("id"), parent, kind, agent, name, run.get("start_time"), run.get("inputs"),
            run.get("outputs"), tokens, facts,
        )  # fmt: skip
        waiting += [(child, run.get("id")) for child in list_of(run.get("child_runs"))]
