"""The base of procedural tasks: problems generated on demand, and splits that are disjoint by content."""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import count
from typing import Any, ClassVar, overload

from mas_gym.errors import ConfigError, UnknownNameError
from mas_gym.tasks.base import Grade, Problem

SPLITS = ("train", "dev", "test")


def split_of(question: str) -> str:
    """Return the split of a question by a hash of its words: 80% train, 10% dev, 10% test."""
    words = " ".join(question.casefold().split())
    bucket = hashlib.sha256(words.encode()).digest()[0] % 10
    return "test" if bucket == 0 else "dev" if bucket == 1 else "train"


class ProceduralTask(ABC, Sequence[Problem]):
    """A sequence of problems, each generated from its index.

    Args:
        split: ``"train"``, ``"dev"`` or ``"test"``.
        seed: Another seed gives other problems.
        difficulty: The level; the subclass defines its meaning.
        size: Length of the sequence.
        grading: ``"strict"`` or ``"paper"``.
        indices: The part of the split that this sequence shows; all of it by default.
    """

    name: ClassVar[str]

    def __init__(
        self, split: str, *, seed: int, difficulty: int, size: int, grading: Any, indices: range | None = None
    ) -> None:
        """Check the arguments."""
        if split not in SPLITS:
            raise ConfigError(f"expected a split of {', '.join(SPLITS)}, got {split!r}")
        if grading not in ("strict", "paper"):
            raise ConfigError(f"expected grading 'strict' or 'paper', got {grading!r}")
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"expected a size of 1 or more, got {size!r}")
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise ConfigError(f"expected a whole number as seed, got {seed!r}")
        self.split, self.seed, self.difficulty, self.grading = split, seed, difficulty, grading
        self.size = size
        self._indices = range(size) if indices is None else indices

    @abstractmethod
    def _draw(self, rng: random.Random, problem_id: str) -> Problem | None:
        """Generate one candidate; None if it belongs to another split or is not sound."""

    def __len__(self) -> int:
        """Return the number of problems."""
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> ProceduralTask: ...
    def __getitem__(self, index: int | slice) -> Problem | ProceduralTask:
        """Generate one problem, or return the task of a slice."""
        if isinstance(index, slice):
            part = object.__new__(type(self))
            part.__dict__.update(self.__dict__, _indices=self._indices[index])
            return part
        return self._make(self._indices[index])

    def _make(self, index: int) -> Problem:
        # seed and difficulty are part of the id, so that a stored id always names the same problem
        problem_id = f"{self.name}/{self.split}/{self.seed}/{self.difficulty}/{index}"
        for attempt in count():
            problem = self._draw(random.Random(f"{problem_id}/{attempt}"), problem_id)
            if problem is not None:
                return problem
        raise AssertionError("unreachable")

    def problem(self, problem_id: str) -> Problem:
        """Return the problem with this id.

        Raises:
            UnknownNameError: The id is not one of this sequence.
        """
        parts = problem_id.rsplit("/", 1)
        prefix = f"{self.name}/{self.split}/{self.seed}/{self.difficulty}"
        if len(parts) == 2 and parts[0] == prefix and parts[1].isascii() and parts[1].isdigit():
            index = int(parts[1])
            if index in self._indices and str(index) == parts[1]:
                return self._make(index)
        raise UnknownNameError(
            f"expected a problem id such as {prefix}/{self._indices[0] if self._indices else 0} "
            f"({len(self)} problems), got {problem_id!r}"
        )

    def identity(self) -> Any:
        """Return what determines grading, whatever the problems: the mode; equal for every slice."""
        return self.grading

    def extract(self, problem: Problem, text: str) -> str | None:
        """Read the normalised answer from a final message, without looking at the reference."""
        from mas_gym.tasks.grading import extract_answer

        return extract_answer(problem, text, self.grading)

    def grade(self, problem: Problem, text: str) -> Grade:
        """Compare the answer read from a final message with the reference."""
        from mas_gym.tasks.grading import grade

        return grade(problem, text, self.grading)
