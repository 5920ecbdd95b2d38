"""The game of 24: make 24 from four numbers with + - * /, each number used once.

The agents of the system ``game24`` write one step each, in the format of Yao et al. 2023
("Tree of Thoughts", arXiv:2305.10601)::

    1 + 7 = 8 (left: 2 4 8)

The last agent writes one formula. `can_make` computes whether the remaining numbers can make
24, so the correctness of each step is known.

The puzzles are the 1,362 multisets of four whole numbers up to 13 that can make 24. The split of
a puzzle depends only on its question.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache
from itertools import combinations, combinations_with_replacement
from typing import NamedTuple

from mas_gym.errors import ConfigError
from mas_gym.tasks.base import Problem
from mas_gym.tasks.procedural.generated import DEFAULT_DIFFICULTY, ProceduralTask, split_of

TARGET = 24
LEVELS: Mapping[int, int] = {1: 6, 2: 9, 3: 13}
"""Largest number of each difficulty."""

Numbers = tuple[Fraction, ...]


class Move(NamedTuple):
    """One operation on two numbers, such as ``1 + 7 = 8``."""

    left: Fraction
    operator: str
    right: Fraction
    result: Fraction


def moves(numbers: Sequence[Fraction]) -> list[Move]:
    """Return the distinct moves from the given numbers; the order of the operands of + and * does not matter."""
    found: dict[Move, None] = {}
    for i, j in combinations(range(len(numbers)), 2):
        a, b = sorted((numbers[i], numbers[j]))
        found |= dict.fromkeys([Move(a, "+", b, a + b), Move(a, "*", b, a * b)])
        for left, right in ((a, b), (b, a)):
            found[Move(left, "-", right, left - right)] = None
            if right:
                found[Move(left, "/", right, left / right)] = None
    return list(found)


def after(numbers: Sequence[Fraction], move: Move) -> Numbers:
    """Return the numbers left after a move, in ascending order.

    Raises:
        ValueError: The move uses a number that is not available.
    """
    rest = list(numbers)
    rest.remove(move.left)
    rest.remove(move.right)
    return tuple(sorted([*rest, move.result]))


def can_make(numbers: Sequence[Fraction | int]) -> bool:
    """Return whether the given numbers can make 24.

    >>> can_make([3, 3, 8, 8]), can_make([1, 1, 1, 1])
    (True, False)
    """
    if len(numbers) == 1:
        return numbers[0] == TARGET
    return _can_make([(Fraction(number).numerator, Fraction(number).denominator) for number in numbers])


def _can_make(numbers: list[tuple[int, int]]) -> bool:
    # Numerators and denominators, common factors left in: ten times as fast as `Fraction`.
    for i, (a, b) in enumerate(numbers):
        for j, (c, d) in enumerate(numbers[:i]):
            x, y, z = a * d, c * b, b * d
            if len(numbers) == 2:
                goal = TARGET * z
                whole = goal in (x + y, x - y, y - x) or a * c == goal
                return whole or bool(y and x == TARGET * y) or bool(x and y == TARGET * x)
            rest = [number for k, number in enumerate(numbers) if k not in (i, j)]
            results = [(x + y, z), (a * c, z), (x - y, z), (y - x, z)]
            results += ([(x, y)] if y else []) + ([(y, x)] if x else [])
            if any(_can_make([*rest, result]) for result in results):
                return True
    return False


def write_number(number: Fraction) -> str:
    """Write a number as GPT-4 writes it, but exactly: whole, with up to two decimals, or as a fraction.

    >>> [write_number(Fraction(n, 4)) for n in (8, 6)] + [write_number(Fraction(4, 3))]
    ['2', '1.5', '4/3']
    """
    if number.denominator == 1:
        return str(number.numerator)
    return f"{float(number):.2f}".rstrip("0") if 100 % number.denominator == 0 else str(number)


def write_question(numbers: Sequence[Fraction | int]) -> str:
    """Return the question of a puzzle."""
    listed = " ".join(write_number(Fraction(number)) for number in sorted(numbers))
    return f"Make {TARGET} from these numbers with + - * /, using each exactly once: {listed}"


def solve(numbers: Sequence[Fraction]) -> str | None:
    """Return a formula for 24; None if no formula exists."""
    left: Numbers = tuple(numbers)
    held = [(number, write_number(number)) for number in left]
    while len(left) > 1:
        move = next((move for move in moves(left) if can_make(after(left, move))), None)
        if move is None:
            return None
        a, b = (held.pop([number for number, _ in held].index(used))[1] for used in (move.left, move.right))
        held.append((move.result, f"({a} {move.operator} {b})"))
        left = after(left, move)
    return held[0][1][1:-1]


# ----------------------------------------------------------------- problems


@cache
def _puzzles(split: str, most: int) -> tuple[tuple[int, ...], ...]:
    drawn = combinations_with_replacement(range(1, most + 1), 4)
    return tuple(n for n in drawn if split_of(write_question(n)) == split and can_make(n))


class Game24(ProceduralTask):
    """Puzzles with four numbers that can make 24; each puzzle of the split occurs once.

    Args:
        split: ``"train"``, ``"dev"`` or ``"test"``; no puzzle is in two splits.
        seed: Seed of the order.
        difficulty: 1 (numbers up to 6), 2 (up to 9) or 3 (up to 13).
        size: Number of problems; by default every puzzle.
        grading: Grading mode, ``"strict"`` or ``"paper"``; both grade formulas alike.

    Raises:
        ConfigError: An argument is out of range.
    """

    name, mas, levels = "game24", "game24", LEVELS

    def __init__(
        self,
        split: str = "test",
        *,
        seed: int = 0,
        difficulty: int = DEFAULT_DIFFICULTY,
        size: int | None = None,
        grading: str = "strict",
    ) -> None:
        super().__init__(split, seed=seed, difficulty=difficulty, size=1 if size is None else size, grading=grading)
        puzzles = list(_puzzles(split, LEVELS[difficulty]))
        if size is not None and size > len(puzzles):
            raise ConfigError(f"expected a size of at most {len(puzzles)} (every puzzle of the split), got {size}")
        random.Random(seed).shuffle(puzzles)
        self.size = len(puzzles) if size is None else size
        self.puzzles, self.rows = puzzles, range(self.size)

    def _at(self, row: int) -> Problem:
        return puzzle(f"{self._prefix}/{row}", self.puzzles[row])


def puzzle(problem_id: str, numbers: Sequence[int]) -> Problem:
    """Return the problem for the given numbers.

    Raises:
        ConfigError: The numbers cannot make 24.
    """
    formula = solve(sorted(map(Fraction, numbers)))
    if formula is None:
        raise ConfigError(f"expected numbers that can make {TARGET}, got {' '.join(map(str, numbers))}")
    metadata = {"numbers": sorted(numbers)}
    return Problem(problem_id, write_question(numbers), formula, "formula", metadata)
