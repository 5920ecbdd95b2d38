"""Runs of AgentProcessBench."""

from __future__ import annotations

from mas_gym.internal.json_types import JSONMapping
from mas_gym.logs.chats import made, reference_of, text_or_none
from mas_gym.logs.fields import field_integer, field_text, has_fields
from mas_gym.logs.messages import read_history
from mas_gym.logs.transcript import RIGHT, Transcript, label_of, small_facts
from mas_gym.tasks.data_rows import BadRow

is_agent_processbench = has_fields("messages", "step_labels")


def agent_processbench(row: JSONMapping) -> Transcript:
    """Read a run from AgentProcessBench: the steps of a tool-using agent, labeled 1, 0 or -1."""
    judged = {judge: _labels(verdict["step_labels"]) for judge, verdict in (row.get("verdicts") or {}).items()}
    labels, messages = _labels(row["step_labels"]), []
    for place, message in enumerate(row["messages"]):
        verdicts = {judge: found[place] for judge, found in judged.items() if place in found}
        messages.append({**message, "label": labels.pop(place, None), "verdicts": verdicts})
    if labels:
        raise BadRow(f"expected labels only for messages of the transcript, got a label for entry {min(labels)}")
    history = read_history(messages, field_text(row, "question"))
    final = label_of(row.get("final_label"))
    known = {"messages", "question", "step_labels", "final_label", "ground_truth", "answer_text", "query_index"}
    source, query, sample = (row.get(name) for name in ("data_source", "query_index", "sample_index"))
    return made(
        history,
        answer=text_or_none(row.get("answer_text"), "answer_text"),
        reference=reference_of(row.get("ground_truth")),
        correct=None if final in (None, 0) else final == RIGHT,
        question_id=None if query is None else f"{source or 'question'}/{query}",
        sample_id=text_or_none(row.get("record_id", sample), "sample_index"),
        **small_facts(row, {*known, "verdicts", "record_id", "sample_index"}),
    )


def _labels(labels: JSONMapping) -> dict[int, int]:
    """Return the labels by message; judges' verdicts have the same format as human labels."""
    found = {field_integer(place, "step_labels"): label_of(label) for place, label in labels.items()}
    return {place: label for place, label in found.items() if label is not None}
