"""Transcripts with human labels for their steps: Who&When, ProcessBench, AgentProcessBench and PRM800K."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mas_gym.errors import shown
from mas_gym.internal.json_types import JSONMapping
from mas_gym.logs.chats import QUESTION, made, reference_of, text_or_none
from mas_gym.logs.messages import read_history
from mas_gym.logs.transcript import (
    RIGHT,
    WRONG,
    LoggedMessage,
    Transcript,
    label_of,
    number,
    small_facts,
    speaker_name,
    truth,
)
from mas_gym.tasks.data_rows import BadRow, first_of

AGENT = "Assistant"
"""The speaker of steps without a named speaker."""


def _has(*names: str) -> Callable[[object], bool]:
    """Return a function that checks whether a row has all the given fields."""
    return lambda row: isinstance(row, Mapping) and row.keys() >= set(names)


is_who_and_when = _has("history", "mistake_agent", "mistake_step")
is_processbench = _has("problem", "steps", "label")
is_agent_processbench = _has("messages", "step_labels")


def who_and_when(row: Any) -> Transcript:
    """Read a failed run from Who&When (Zhang et al. 2025, arXiv:2505.00212): its decisive error step is labeled.

    Raises:
        BadRow: The row has another format.
    """
    _check(row, is_who_and_when(row), "history, mistake_agent and mistake_step")
    place = _whole(row["mistake_step"], "mistake_step")
    history = read_history(row["history"], _text(row, "question"), {place: WRONG})
    known = {"history", "question", "ground_truth", "groundtruth", "is_correct", "is_corrected", "id", "question_ID"}
    facts, dropped = small_facts(row, {*known, "system_prompt", "mistake_step"})
    prompts = row.get("system_prompt")
    if isinstance(prompts, Mapping):
        speakers = {message.speaker for message in history.messages}
        told = {name: text for name, text in prompts.items() if name in speakers and isinstance(text, str)}
        history = history._replace(prompts=history.prompts | told)
    return made(
        history,
        reference=reference_of(first_of(row, ("ground_truth", "groundtruth"))),
        correct=truth(first_of(row, ("is_correct", "is_corrected"))) or False,
        question_id=text_or_none(row.get("question_ID"), "question_ID"),
        sample_id=text_or_none(row.get("id"), "id"),
        facts=facts,
        dropped=dropped,
    )


def processbench(row: Any) -> Transcript:
    """Read a solution from ProcessBench (Zheng et al. 2024, arXiv:2412.06559), with optional ``agents``, one per step.

    Raises:
        BadRow: The row has another format.
    """
    _check(row, is_processbench(row), "problem, steps and label")
    steps = _texts(row["steps"], "steps")
    label = _whole(row["label"], "label", least=-1)
    if label >= len(steps):
        raise BadRow(f"expected a label from -1 (no error) to {len(steps) - 1} (the last step), got {label}")
    agents = _texts(row.get("agents") or [AGENT] * len(steps), "agents")
    if len(agents) != len(steps):
        raise BadRow(f"expected {len(steps)} agents, one per step, got {len(agents)}")
    labels = [_first_error_label(place, label) for place in range(len(steps))]
    facts, dropped = small_facts(row, {"problem", "steps", "label", "agents", "final_answer_correct", "id"})
    return Transcript(
        question=_text(row, "problem"),
        messages=tuple(map(_step, agents, steps, labels)),
        correct=truth(row.get("final_answer_correct"), "final_answer_correct"),
        reference=reference_of(first_of(row, ("answer", "reference", "ground_truth"))),
        sample_id=text_or_none(row.get("id"), "id"),
        facts=facts,
        dropped=dropped,
    )


def _first_error_label(place: int, label: int) -> int | None:
    if label < 0 or place < label:
        return RIGHT
    return WRONG if place == label else None


def agent_processbench(row: Any) -> Transcript:
    """Read a run from AgentProcessBench, of a tool-using agent whose steps are labeled 1, 0 or -1.

    Raises:
        BadRow: The row has another format.
    """
    _check(row, is_agent_processbench(row), "messages and step_labels")
    labels = row["step_labels"]
    if not isinstance(labels, Mapping):
        raise BadRow(f"expected step_labels to map message indices to labels, got {shown(labels)}")
    by_place = {_whole(place, "step_labels"): label_of(label) for place, label in labels.items()}
    history = read_history(
        row["messages"],
        _text(row, "question"),
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
                found.setdefault(_whole(place, "verdicts"), {})[speaker_name(judge)] = value
    return found


def prm800k(row: Any) -> Transcript:
    """Read a solution with a label for each step.

    The row is either from PRM800K (Lightman et al. 2023, arXiv:2305.20050), or it has a question, a list ``steps`` or
    ``completions``, and a list ``labels`` or ``ratings`` of the same length (1, 0, -1, true or false).

    Raises:
        BadRow: The row has neither format.
    """
    _check(row, is_prm800k(row), "question and label.steps, or steps and labels")
    if isinstance(row.get("label"), Mapping):
        return _published_prm800k(row)
    steps = _texts(first_of(row, ("steps", "completions")), "steps")
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
        messages.append(_step(AGENT, _text(pick, "text"), label_of(pick.get("rating"))))
    facts, dropped = small_facts({**row, "finish_reason": label.get("finish_reason")}, {"question", "label"})
    ends = {"solution": True, "found_error": False}
    return Transcript(
        question=_text(question, "problem"),
        messages=tuple(messages),
        reference=reference_of(question.get("ground_truth_answer")),
        # False if the labeler found an error; otherwise the answer is graded.
        correct=None if ends.get(str(label.get("finish_reason"))) is not False else False,
        facts=facts,
        dropped=dropped | ({"alternative step": others} if others else {}),
    )


def is_prm800k(row: object) -> bool:
    """Whether a row has step labels."""
    if not isinstance(row, Mapping):
        return False
    if isinstance(row.get("label"), Mapping):
        return "steps" in row["label"] and "question" in row
    return isinstance(first_of(row, ("steps", "completions")), list) and isinstance(
        first_of(row, ("labels", "ratings")), list
    )


def _check(row: object, fits: bool, expected: str) -> None:
    if not fits:
        got = f"the fields {shown(sorted(map(str, row)))}" if isinstance(row, Mapping) else shown(row)
        raise BadRow(f"expected an object with {expected}, got {got}")


def _step(agent: str, text: str, label: int | None) -> LoggedMessage:
    return LoggedMessage(agent, text, label=label)


def _text(row: Mapping[str, object], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise BadRow(f"expected a non-empty string as {name}, got {shown(value)}")
    return value


def _texts(value: object, name: str) -> Sequence[str]:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        raise BadRow(f"expected a non-empty list of strings as {name}, got {shown(value)}")
    return value


def _whole(value: object, name: str, least: int = 0) -> int:
    found = int(value) if isinstance(value, str) and value.strip().lstrip("-").isdecimal() and len(value) < 9 else value
    if type(found) is not int or found < least:
        raise BadRow(f"expected an integer of at least {least} as {name}, got {shown(value)}")
    return found
