"""Solutions of Math-Shepherd (Wang et al. 2023, arXiv:2312.08935), whose steps are labeled by rollouts."""

from __future__ import annotations

import re

from mas_gym.errors import shown
from mas_gym.internal.json_types import JSONMapping
from mas_gym.logs.fields import AGENT, inside
from mas_gym.logs.transcript import RIGHT, WRONG, LoggedMessage, Transcript, small_facts
from mas_gym.tasks.data_rows import BadRow

_MARK = "\N{CYRILLIC SMALL LETTER KA}\N{CYRILLIC SMALL LETTER I}"
"""The end of a step in ``input``; ``label`` has ``+`` or ``-`` in its place."""
_SIGNS = {"+": RIGHT, "-": WRONG}
_FIRST = re.compile(r"\bStep 1\s*:")


def is_math_shepherd(row: object) -> bool:
    """Whether a row is a solution of Math-Shepherd."""
    text, label = inside(row, "input"), inside(row, "label")
    return isinstance(text, str) and isinstance(label, str) and _MARK in text


def math_shepherd(row: JSONMapping) -> Transcript:
    """Read a solution; the label of the last step is the outcome.

    Raises:
        BadRow: ``label`` has other steps than ``input``.
    """
    *steps, _ = row["input"].split(_MARK)
    first = _FIRST.search(steps[0])
    if first is None:
        raise BadRow(f"expected a question and 'Step 1:', got {shown(steps[0])}")
    labels: list[int] = []
    place = 0
    for step in steps:
        sign = row["label"][place + len(step) : place + len(step) + 1]
        if not row["label"].startswith(step, place) or sign not in _SIGNS:
            raise BadRow(
                f"expected label to repeat each step with + or - at its end, got {shown(row['label'][place:])}"
            )
        labels.append(_SIGNS[sign])
        place += len(step) + 1
    texts = [steps[0][first.start() :], *steps[1:]]
    return Transcript(
        question=steps[0][: first.start()].strip(),
        messages=tuple(LoggedMessage(AGENT, t.strip(), label=label) for t, label in zip(texts, labels, strict=True)),
        correct=labels[-1] == RIGHT,
        **small_facts(row, {"input", "label"}),
    )
