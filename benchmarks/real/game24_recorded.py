"""The recorded trees of GPT-4 on the game of 24: their states, the truth about each, and a log to import."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.real.common import Source, read_rows
from benchmarks.real.game24_text import read_left
from mas_gym.tasks.base import Problem
from mas_gym.tasks.procedural.game24 import Numbers, can_make, puzzle

SOURCE = Source("game24.jsonl.gz", "princeton-nlp/tree-of-thought-llm (Yao et al. 2023), GPT-4", "MIT")
SURE, CALLS = 20.0, 3
"""Value of one vote "sure", and the number of votes behind a recorded value: each is a call of GPT-4."""


class State(NamedTuple):
    """A proposal of GPT-4, after the steps before it.

    Attributes:
        lines: The steps, the proposal last.
        value: GPT-4's value, from 0 to 60.
        left: The numbers that are left, as written; None if that cannot be read.
        winning: Whether they can make 24; None for a final answer.
    """

    lines: tuple[str, ...]
    value: float
    left: Numbers | None
    winning: bool | None


class Level(NamedTuple):
    """One step of the recorded search: all proposals, and the five states that it kept."""

    states: tuple[State, ...]
    selected: tuple[tuple[str, ...], ...]


class Recording(NamedTuple):
    """A recorded tree.

    Attributes:
        problem: The puzzle.
        levels: The four steps.
        solved: Whether one of the five answers was right, as recorded.
    """

    problem: Problem
    levels: tuple[Level, ...]
    solved: bool

    @property
    def numbers(self) -> tuple[int, ...]:
        """The four numbers, in ascending order."""
        return tuple(self.problem.metadata["numbers"])


def read_recordings(folder: Path) -> list[Recording]:
    found = []
    for row in read_rows(folder, SOURCE):
        problem = puzzle(row["id"], sorted(map(int, row["numbers"].split())))
        levels = tuple(_level(depth, level) for depth, level in enumerate(row["tree"]))
        found.append(Recording(problem, levels, any(row["solved"])))
    return found


def _level(depth: int, level: dict[str, Any]) -> Level:
    states = []
    for text, value in zip(level["proposals"], level["values"], strict=True):
        lines = _lines(text)
        left = read_left(lines[-1])
        # A line with an impossible number of remaining numbers is not a state of the game.
        winning = left is not None and len(left) == 3 - depth and can_make(left)
        states.append(State(lines, value, left, winning if depth < 3 else None))
    return Level(tuple(states), tuple(map(_lines, level["selected"])))


def _lines(text: str) -> tuple[str, ...]:
    return tuple(text.strip().split("\n"))


def scaled(value: float) -> float:
    """Return a value of GPT-4 in [-1, 1]."""
    return 2 * min(value / (CALLS * SURE), 1.0) - 1
