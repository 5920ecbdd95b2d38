"""The text format in which LogiQA is published."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mas_gym.errors import shown
from mas_gym.internal.json_types import JSONMapping
from mas_gym.tasks.data_rows import BadRow

# ------------------------------------------------- the text blocks of LogiQA

_MARKED = re.compile(r"\s*([A-Da-d])\s*[.\uff0e、:\uff1a)?\uff1f]\s*")
_SPACED = re.compile(r"\A\s*([A-D])\s+")
_INSIDE = re.compile(r"(?<![A-Za-z])([A-D])[.\uff0e]")


def logiqa_block(lines: Sequence[str]) -> JSONMapping:
    """Read one block of LogiQA's release: the correct option's letter, the passage, the question and four options.

    The letter names an option by its label. Some blocks list their options out
    of order (A, C, B, D), and in others the translation moved a label into its
    sentence ("Most spirits on the C.S City market"). Both are corrected.
    """
    if len(lines) != 7:
        raise BadRow(
            f"expected 7 lines (letter, passage, question, four options), got {len(lines)}: {shown(' '.join(lines))}"
        )
    letter = lines[0].strip().upper()
    if letter not in ("A", "B", "C", "D"):
        raise BadRow(f"expected the right option's letter, a to d, got {shown(lines[0])}")
    options = _by_label(lines[3:])
    return {"context": lines[1], "query": lines[2], "options": options, "correct_option": "ABCD".index(letter)}


def _by_label(lines: Sequence[str]) -> list[str]:
    found: dict[str, str] = {}
    rest: dict[int, str] = {}
    for place, line in enumerate(lines):
        marked = _MARKED.match(line)
        if marked is not None and marked[1].upper() not in found:
            found[marked[1].upper()] = line[marked.end() :]
        else:
            rest[place] = line
    for pattern in (_SPACED, _INSIDE):
        for place, line in list(rest.items()):
            labels = {label[1]: label for label in reversed(list(pattern.finditer(line)))}
            # Before a space, only the label of the line's place is one.
            names = "ABCD" if pattern is _INSIDE else "ABCD"[place]
            name = next((name for name in names if name in labels and name not in found), None)
            if name is not None:
                found[name] = line[: labels[name].start()] + line[labels[name].end() :]
                del rest[place]
    missing = [name for name in "ABCD" if name not in found]
    found.update(zip(missing, rest.values(), strict=True))
    return [found[name] for name in "ABCD"]
