"""Transcripts from rows with ``messages``: the format ``chat``, and what its dialects share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mas_gym.errors import shown
from mas_gym.logs.fields import inside
from mas_gym.logs.messages import is_history, read_history, written
from mas_gym.logs.transcript import Transcript, number, small_facts, truth
from mas_gym.tasks.data_rows import BadRow, first_of

QUESTION = ("question", "problem", "query", "input", "prompt")
REFERENCE = ("reference", "ground_truth", "gold", "target", "expected", "expected_answer", "reference_answer")
ANSWERED = ("prediction", "final_answer", "output", "response")
QUESTION_ID = ("question_id", "problem_id", "task_id")
SAMPLE_ID = ("sample_id", "id", "sample", "run_id", "trace_id")


def text_or_none(value: object, what: str) -> str | None:
    """Return a string or None unchanged, and a number as text. Raises `BadRow` otherwise."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or number(value, what) is None:
        raise BadRow(f"expected a string or a number as {what}, got {shown(value)}")
    return str(value)


def reference_of(value: object) -> str | None:
    """Return a reference answer as text; a list of accepted texts becomes JSON."""
    if isinstance(value, Mapping) and len(value) == 1:
        [value] = value.values()
    if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        return value[0] if len(value) == 1 else written(value)
    return text_or_none(value, "reference")


def chat(row: object) -> Transcript:
    """Read a row with ``messages`` and, optionally, ``question``, ``answer``, ``correct`` and ``score``.

    ``answer`` is the right answer, as in every data file of this project. In a row with ``reference``, ``answer`` is
    the system's answer.

    Raises:
        BadRow: The row has another format.
    """
    if not isinstance(row, Mapping):
        raise BadRow(f"expected an object with messages, got {shown(row)}")
    asked = first_of(row, QUESTION)
    history = read_history(row.get("messages"), asked if isinstance(asked, str) else None)
    reference = first_of(row, REFERENCE)
    answer = first_of(row, ANSWERED)
    if reference is None:
        reference = row.get("answer")
    elif answer is None:
        answer = row.get("answer")
    known = {"messages", "answer", "correct", "score", "kind", *QUESTION, *REFERENCE, *ANSWERED, *QUESTION_ID}
    return made(
        history,
        answer=text_or_none(answer, "answer"),
        reference=reference_of(reference),
        correct=truth(row.get("correct")),
        score=number(row.get("score"), "score"),
        question_id=text_or_none(first_of(row, QUESTION_ID), "question_id"),
        sample_id=text_or_none(first_of(row, SAMPLE_ID), "sample_id"),
        kind=row.get("kind"),
        **small_facts(row, {*known, *SAMPLE_ID}),
    )


def made(history: Transcript, *, dropped: Mapping[str, int] | None = None, **parts: Any) -> Transcript:
    """Return the transcript of a history with its other parts; what was dropped is added up."""
    return replace(history, dropped=dict(Counter(history.dropped) + Counter(dropped or {})), **parts)


def is_chat(row: object) -> bool:
    """Whether a row has the format ``chat``."""
    messages = inside(row, "messages")
    return isinstance(messages, list) and (not messages or is_history(messages))
