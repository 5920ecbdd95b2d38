"""Solutions of PRM800K (Lightman et al. 2023, arXiv:2305.20050), and other rows with a label per step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mas_gym.errors import shown
from mas_gym.internal.json_types import JSONMapping
from mas_gym.logs.chats import QUESTION, reference_of, text_or_none
from mas_gym.logs.labeled import AGENT, check_fields, field_text, field_texts
from mas_gym.logs.transcript import RIGHT, LoggedMessage, Transcript, label_of, number, small_facts, truth
from mas_gym.tasks.data_rows import BadRow, first_of


def is_prm800k(row: object) -> bool:
    """Whether a row has step labels."""
    if not isinstance(row, Mapping):
        return False
    if isinstance(row.get("label"), Mapping):
        return "steps" in row["label"] and "question" in row
    return isinstance(first_of(row, ("steps", "completions")), list) and isinstance(
        first_of(row, ("labels", "ratings")), list
    )


def prm800k(row: Any) -> Transcript:
    """Read a solution with a label for each step.

    The row is either from PRM800K (Lightman et al. 2023, arXiv:2305.20050), or it has a question, a list ``steps`` or
    ``completions``, and a list ``labels`` or ``ratings`` of the same length (1, 0, -1, true or false).

    Raises:
        BadRow: The row has neither format.
    """
    check_fields(row, is_prm800k(row), "question and label.steps, or steps and labels")
    if isinstance(row.get("label"), Mapping):
        return _published_prm800k(row)
    steps = field_texts(first_of(row, ("steps", "completions")), "steps")
    labels = first_of(row, ("labels", "ratings"))
    if not isinstance(labels, list) or len(labels) != len(steps):
        raise BadRow(f"expected {len(steps)} labels, one per step, got {shown(labels)}")
    known = {"steps", "completions", "labels", "ratings", "answer", "correct", "score", "id", *QUESTION}
    facts, dropped = small_facts(row, known)
    return Transcript(
        question=str(text_or_none(first_of(row, QUESTION), "question") or ""),
        messages=tuple(_step(AGENT, text, label_of(label)) for text, label in zip(steps, labels, strict=True)),
        reference=reference_of(row.get("answer")),
        correct=truth(row.get("correct")),
        score=number(row.get("score"), "score"),
        sample_id=text_or_none(row.get("id"), "id"),
        facts=facts,
        dropped=dropped,
    )


def _published_prm800k(row: JSONMapping) -> Transcript:
    question, label = row["question"], row["label"]
    if not isinstance(question, Mapping) or not isinstance(label.get("steps"), list):
        raise BadRow(f"expected question to be an object and label.steps a list (PRM800K), got {shown(row)}")
    messages: list[LoggedMessage] = []
    others = 0
    for step in label["steps"]:
        if not isinstance(step, Mapping):
            raise BadRow(f"expected a step with completions, got {shown(step)}")
        listed = step.get("completions")
        options = [one for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []
        written = step.get("human_completion")
        chosen = step.get("chosen_completion")
        if isinstance(written, Mapping):
            pick, others = {"rating": RIGHT, **written}, others + len(options)
        elif options:
            place = chosen if type(chosen) is int and 0 <= chosen < len(options) else 0
            pick, others = dict(options[place]), others + len(options) - 1
        else:
            raise BadRow("expected a step with at least one completion, got none")
        messages.append(_step(AGENT, field_text(pick, "text"), label_of(pick.get("rating"))))
    facts, dropped = small_facts({**row, "finish_reason": label.get("finish_reason")}, {"question", "label"})
    ends = {"solution": True, "found_error": False}
    return Transcript(
        question=field_text(question, "problem"),
        messages=tuple(messages),
        reference=reference_of(question.get("ground_truth_answer")),
        # False if the labeler found an error; otherwise the answer is graded.
        correct=None if ends.get(str(label.get("finish_reason"))) is not False else False,
        facts=facts,
        dropped=dropped | ({"alternative step": others} if others else {}),
    )


def _step(agent: str, text: str, label: int | None) -> LoggedMessage:
    return LoggedMessage(agent, text, label=label)
