"""Runs of AgentProcessBench."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mas_gym.errors import shown
from mas_gym.logs.chats import made, reference_of, text_or_none
from mas_gym.logs.labeled import check_fields, field_integer, field_text, has_fields
from mas_gym.logs.messages import read_history
from mas_gym.logs.transcript import RIGHT, Transcript, label_of, small_facts, speaker_name
from mas_gym.tasks.data_rows import BadRow

is_agent_processbench = has_fields("messages", "step_labels")


def agent_processbench(row: Any) -> Transcript:
    """Read a run from AgentProcessBench: the steps of a tool-using agent, labeled 1, 0 or -1.

    Raises:
        BadRow: The row has another format.
    """
    check_fields(row, is_agent_processbench(row), "messages and step_labels")
    labels = row["step_labels"]
    if not isinstance(labels, Mapping):
        raise BadRow(f"expected step_labels to map message indices to labels, got {shown(labels)}")
    by_place = {field_integer(place, "step_labels"): label_of(label) for place, label in labels.items()}
    history = read_history(
        row["messages"],
        field_text(row, "question"),
        {place: label for place, label in by_place.items() if label is not None},
        _verdicts(row.get("verdicts")),
    )
    final = label_of(row.get("final_label"))
    known = {"messages", "question", "step_labels", "final_label", "ground_truth", "answer_text", "query_index"}
    known |= {"verdicts"}
    facts, dropped = small_facts(row, {*known, "record_id", "sample_index"})
    source, query, sample = (row.get(name) for name in ("data_source", "query_index", "sample_index"))
    return made(
        history,
        answer=text_or_none(row.get("answer_text"), "answer_text"),
        reference=reference_of(row.get("ground_truth")),
        correct=None if final in (None, 0) else final == RIGHT,
        question_id=None if query is None else f"{source or 'question'}/{query}",
        sample_id=text_or_none(row.get("record_id", sample), "sample_index"),
        facts=facts,
        dropped=dropped,
    )


def _verdicts(judges: object) -> dict[int, dict[str, float]]:
    """Return the judges' verdicts by message and judge; verdicts have the same format as human labels."""
    found: dict[int, dict[str, float]] = {}
    for judge, verdict in judges.items() if isinstance(judges, Mapping) else ():
        labels = verdict.get("step_labels") if isinstance(verdict, Mapping) else None
        for place, label in labels.items() if isinstance(labels, Mapping) else ():
            value = label_of(label)
            if value is not None:
                found.setdefault(field_integer(place, "verdicts"), {})[speaker_name(judge)] = value
    return found
