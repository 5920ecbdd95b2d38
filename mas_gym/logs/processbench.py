"""Solutions of ProcessBench (Zheng et al. 2024, arXiv:2412.06559)."""

from __future__ import annotations

from mas_gym.internal.json_types import JSONMapping
from mas_gym.logs.chats import reference_of, text_or_none
from mas_gym.logs.fields import AGENT, field_integer, field_text, field_texts, has_fields
from mas_gym.logs.transcript import RIGHT, WRONG, LoggedMessage, Transcript, small_facts, truth
from mas_gym.tasks.data_rows import BadRow, first_of

is_processbench = has_fields("problem", "steps", "label")


def processbench(row: JSONMapping) -> Transcript:
    """Read a solution from ProcessBench (Zheng et al. 2024, arXiv:2412.06559), with optional ``agents``, one per step.

    Raises:
        BadRow: The label is no step, or there is not one agent per step.
    """
    steps = field_texts(row["steps"], "steps")
    label = field_integer(row["label"], "label", least=-1)
    if label >= len(steps):
        raise BadRow(f"expected a label from -1 (no error) to {len(steps) - 1} (the last step), got {label}")
    agents = field_texts(row.get("agents") or [AGENT] * len(steps), "agents")
    if len(agents) != len(steps):
        raise BadRow(f"expected {len(steps)} agents, one per step, got {len(agents)}")
    labels = [_first_error_label(place, label) for place in range(len(steps))]
    return Transcript(
        question=field_text(row, "problem"),
        messages=tuple(
            LoggedMessage(name, text, label=label) for name, text, label in zip(agents, steps, labels, strict=True)
        ),
        correct=truth(row.get("final_answer_correct"), "final_answer_correct"),
        reference=reference_of(first_of(row, ("answer", "reference", "ground_truth"))),
        sample_id=text_or_none(row.get("id"), "id"),
        **small_facts(row, {"problem", "steps", "label", "agents", "final_answer_correct", "id"}),
    )


def _first_error_label(place: int, label: int) -> int | None:
    if label < 0 or place < label:
        return RIGHT
    return WRONG if place == label else None
