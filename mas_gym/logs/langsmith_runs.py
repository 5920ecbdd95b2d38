"""Runs exported from LangSmith."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mas_gym.errors import shown
from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.logs.spans import MODEL, OTHER, TOOL, Span, first_value, list_of, make_span, metadata_of, span_text
from mas_gym.tasks.data_rows import BadRow


def is_langsmith(row: object) -> bool:
    """Whether a row is a run of LangSmith."""
    return isinstance(row, Mapping) and row.keys() >= {"run_type", "id"}


def langsmith_spans(row: object) -> Iterator[Span]:
    """Yield the spans of a run and of its children.

    Raises:
        BadRow: The row has another format.
    """
    if not isinstance(row, Mapping) or not is_langsmith(row):
        raise BadRow(f"expected a run with id and run_type (LangSmith), got {shown(row)}")
    # Children may be nested to any depth.
    waiting: list[tuple[JSONMapping, object]] = [(row, row.get("parent_run_id"))]
    trace = row.get("trace_id") or row.get("id")
    while waiting:
        run, parent = waiting.pop()
        kind = {"llm": MODEL, "tool": TOOL, "retriever": TOOL}.get(str(run.get("run_type")), OTHER)
        extra = first_value(run, "extra")
        facts = metadata_of(first_value(extra, "metadata")) | _feedback(run.get("feedback_stats"))
        facts |= _references(run.get("reference_outputs"))
        name = str(run.get("name") or "")
        agent = facts.get("agent") or facts.get("agent_name") or facts.get("langgraph_node")
        tokens = run.get("completion_tokens")
        yield make_span(
            trace, run.get("id"), parent, kind, agent, name, run.get("start_time"), run.get("inputs"),
            run.get("outputs"), tokens, facts,
        )  # fmt: skip
        waiting += [(child, run.get("id")) for child in list_of(run.get("child_runs")) if isinstance(child, Mapping)]


def _feedback(stats: object) -> JSONObject:
    return {f"score.{key}": first_value(one, "avg") for key, one in stats.items()} if isinstance(stats, Mapping) else {}


def _references(outputs: object) -> JSONObject:
    return {"reference": span_text(outputs, last=True)} if outputs else {}
