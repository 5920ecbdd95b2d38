"""Tasks with generated problems, and the assignment of generated questions to splits."""

from __future__ import annotations

import hashlib
import random
from abc import abstractmethod
from collections.abc import Mapping
from itertools import count
from typing import ClassVar, Self

from mas_gym.errors import ConfigError, whole_number
from mas_gym.internal.suggestions import choice
from mas_gym.tasks.base import SPLITS, Problem, unknown_problem
from mas_gym.tasks.grading.answers import KindGrader, check_mode
from mas_gym.tasks.problem_task import ProblemSequence

DEFAULT_DIFFICULTY = 3


def split_of(question: str) -> str:
    """Assign a question to a split by a hash of its words: 80% train, 10% dev, 10% test."""
    words = " ".join(question.casefold().split())
    bucket = hashlib.sha256(words.encode()).digest()[0] % 10
    return "test" if bucket == 0 else "dev" if bucket == 1 else "train"


class ProceduralTask(ProblemSequence):
    """A sequence of problems that are generated on demand; the subclass defines the meaning of the `levels`.

    Raises:
        ConfigError: An argument is out of range.
    """

    levels: ClassVar[Mapping[int, object]]

    def __init__(
        self,
        split: str = "test",
        *,
        seed: int = 0,
        difficulty: int = DEFAULT_DIFFICULTY,
        size: int = 10**6,
        grading: str = "strict",
    ) -> None:
        if difficulty not in self.levels:
            raise ConfigError(
                f"expected a difficulty from {min(self.levels)} to {max(self.levels)}, got {difficulty!r}"
            )
        choice("split", split, SPLITS)
        whole_number("size", size, at_least=1)
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise ConfigError(f"expected an integer as the seed, got {seed!r}")
        self.split, self.seed, self.difficulty, self.size = split, seed, difficulty, size
        self.rows, self.grader = range(size), KindGrader(check_mode(grading))

    @property
    def _prefix(self) -> str:
        # seed and difficulty are part of the id, so that a stored id always names the same problem
        return f"{self.name}/{self.split}/{self.seed}/{self.difficulty}"

    def only(self, problem_id: str) -> Self:
        """Return a task that contains only the given problem. Raises `UnknownNameError`."""
        prefix, _, number = problem_id.rpartition("/")
        row = int(number) if number.isascii() and number.isdigit() and len(number) < 20 else -1
        if prefix != self._prefix or str(row) != number or row not in self.rows:
            raise unknown_problem(self, problem_id)
        return self._with(rows=range(row, row + 1))


class SampledTask(ProceduralTask):
    """A sequence of problems, each sampled with a seed derived from its id."""

    @abstractmethod
    def _draw(self, rng: random.Random, problem_id: str) -> Problem | None:
        """Generate one candidate; None if it belongs to another split or is ambiguous."""

    def _at(self, row: int) -> Problem:
        problem_id = f"{self._prefix}/{row}"
        for attempt in count():
            problem = self._draw(random.Random(f"{problem_id}/{attempt}"), problem_id)
            if problem is not None:
                return problem
        raise AssertionError("unreachable")
