"""The messages of the game of 24, as the agents of the system ``game24`` write and read them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from mas_gym.tasks.procedural.game24 import Move, Numbers, after, write_number

_NUMBER = r"-?\d+(?:\.\d+|/\d+)?"
_STEP = re.compile(rf"\(?({_NUMBER})\)? ([-+*/]) \(?({_NUMBER})\)? = ({_NUMBER})")
_LEFT = re.compile(rf"left: ((?:{_NUMBER} ?)+)\)")


def read_numbers(text: str) -> Numbers | None:
    """Read numbers separated by spaces; None if the text contains anything else."""
    words = text.split()
    if not words or not all(re.fullmatch(_NUMBER, word) for word in words):
        return None
    try:
        return tuple(Fraction(word) for word in words)
    except (ValueError, ZeroDivisionError):
        return None


def write_move(numbers: Sequence[Fraction], move: Move) -> str:
    """Return the message of a step, such as ``"1 + 7 = 8 (left: 2 4 8)"``."""
    left, right, result = map(write_number, (move.left, move.right, move.result))
    return f"{left} {move.operator} {right} = {result} (left: {' '.join(map(write_number, after(numbers, move)))})"


def read_left(message: str) -> Numbers | None:
    """Return the remaining numbers that a step lists; None if it lists none."""
    found = _LEFT.findall(message)
    return read_numbers(found[-1]) if found else None


def read_question(question: str) -> Numbers | None:
    """Return the numbers of a question, which follow its last colon."""
    return read_numbers(question.rpartition(":")[2])


def combine(numbers: Sequence[Fraction], steps: Sequence[str]) -> str | None:
    """Combine the messages of the steps into one formula; None if the steps do not fit together.

    >>> combine((Fraction(2), Fraction(3), Fraction(4)), ["2 * 3 = 6 (left: 4 6)", "4 * 6 = 24 (left: 24)"])
    '4 * (2 * 3)'
    """
    held = [(number, write_number(number)) for number in numbers]
    for step in steps:
        found = _STEP.match(step)
        texts = []
        for operand in (found[1], found[3]) if found is not None else ():
            value = read_numbers(operand)
            place = next((i for i, (number, _) in enumerate(held) if value == (number,)), None)
            if place is not None:
                texts.append(held.pop(place)[1])
        if found is None or len(texts) < 2 or (result := read_numbers(found[4])) is None:
            return None
        held.append((result[0], f"({texts[0]} {found[2]} {texts[1]})"))
    return held[0][1][1:-1] if len(held) == 1 else None
