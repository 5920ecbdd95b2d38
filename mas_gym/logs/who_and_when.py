"""Failed runs of Who&When (Zhang et al. 2025, arXiv:2505.00212)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mas_gym.internal.json_types import JSONMapping
from mas_gym.logs.chats import made, reference_of, text_or_none
from mas_gym.logs.fields import field_integer, field_text, has_fields, list_of
from mas_gym.logs.messages import read_history
from mas_gym.logs.transcript import WRONG, Transcript, small_facts, truth
from mas_gym.tasks.data_rows import BadRow, first_of

is_who_and_when = has_fields("history", "mistake_agent", "mistake_step")


def who_and_when(row: JSONMapping) -> Transcript:
    """Read a failed run from Who&When (Zhang et al. 2025, arXiv:2505.00212): its decisive error step is labeled."""
    place = field_integer(row["mistake_step"], "mistake_step")
    messages = list_of(row["history"])
    if place >= len(messages):
        raise BadRow(f"expected mistake_step to be one of the {len(messages)} messages, from 0, got {place}")
    messages = [*messages[:place], {**messages[place], "label": WRONG}, *messages[place + 1 :]]
    history = read_history(messages, field_text(row, "question"))
    known = {"history", "question", "ground_truth", "groundtruth", "is_correct", "is_corrected", "id", "question_ID"}
    prompts = row.get("system_prompt")
    if isinstance(prompts, Mapping):
        speakers = {message.speaker for message in history.messages}
        told = {name: text for name, text in prompts.items() if name in speakers and isinstance(text, str)}
        history = replace(history, agents={**history.agents, **told})
    return made(
        history,
        reference=reference_of(first_of(row, ("ground_truth", "groundtruth"))),
        correct=truth(first_of(row, ("is_correct", "is_corrected"))) or False,
        question_id=text_or_none(row.get("question_ID"), "question_ID"),
        sample_id=text_or_none(row.get("id"), "id"),
        **small_facts(row, {*known, "system_prompt", "mistake_step"}),
    )
