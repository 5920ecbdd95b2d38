"""Solutions of PRM800K (Lightman et al. 2023, arXiv:2305.20050), and other rows with a label per step."""

from __future__ import annotations

from collections.abc import Mapping

from mas_gym.errors import shown
from mas_gym.internal.json_types import JSONMapping
from mas_gym.logs.chats import QUESTION, reference_of, text_or_none
from mas_gym.logs.fields import AGENT, field_text, field_texts
from mas_gym.logs.transcript import RIGHT, LoggedMessage, Transcript, label_of, number, small_facts, truth
from mas_gym.tasks.data_rows import BadRow, first_of

_STEPS, _LABELS = ("steps", "completions"), ("labels", "ratings")


def is_prm800k(row: object) -> bool:
    """Whether a row has step labels."""
    if not isinstance(row, Mapping):
        return False
    if isinstance(row.get("label"), Mapping):
        return "steps" in row["label"] and "question" in row
    return all(isinstance(first_of(row, names), list) for names in (_STEPS, _LABELS))


def prm800k(row: JSONMapping) -> Transcript:
    """Read a solution with a label for each step.

    The row is either from PRM800K (Lightman et al. 2023, arXiv:2305.20050), or it has a question, a list ``steps`` or
    ``completions``, and a list ``labels`` or ``ratings`` of the same length (1, 0, -1, true or false).

    Raises:
        BadRow: There is not one label for each step.
    """
    if isinstance(row.get("label"), Mapping):
        return _published_prm800k(row)
    steps = field_texts(first_of(row, _STEPS), "steps")
    labels = first_of(row, _LABELS)
    if len(labels) != len(steps):
        raise BadRow(f"expected {len(steps)} labels, one per step, got {shown(labels)}")
    return Transcript(
        question=str(text_or_none(first_of(row, QUESTION), "question") or ""),
        messages=tuple(LoggedMessage(AGENT, t, label=label_of(label)) for t, label in zip(steps, labels, strict=True)),
        reference=reference_of(row.get("answer")),
        correct=truth(row.get("correct")),
        score=number(row.get("score"), "score"),
        sample_id=text_or_none(row.get("id"), "id"),
        **small_facts(row, {*_STEPS, *_LABELS, "answer", "correct", "score", "id", *QUESTION}),
    )


def _published_prm800k(row: JSONMapping) -> Transcript:
    question, label = row["question"], row["label"]
    messages: list[LoggedMessage] = []
    others = 0
    for step in label["steps"]:
        options = step["completions"] or []
        written = step.get("human_completion")
        if written:
            pick, others = {"rating": RIGHT, **written}, others + len(options)
        else:
            pick, others = options[step.get("chosen_completion") or 0], others + len(options) - 1
        messages.append(LoggedMessage(AGENT, field_text(pick, "text"), label=label_of(pick.get("rating"))))
    found = small_facts({**row, "finish_reason": label.get("finish_reason")}, {"question", "label"})
    if others:
        found["dropped"]["alternative step"] = others
    return Transcript(
        question=field_text(question, "problem"),
        messages=tuple(messages),
        reference=reference_of(question.get("ground_truth_answer")),
        # False if the labeler found an error; otherwise the answer is graded.
        correct=False if label.get("finish_reason") == "found_error" else None,
        **found,
    )
