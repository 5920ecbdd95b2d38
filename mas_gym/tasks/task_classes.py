"""The two kinds of task: a fixed table of problems, and problems generated on demand."""

from __future__ import annotations

import hashlib
import random
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, ClassVar, Self, overload

from mas_gym.errors import ConfigError, shown, whole_number
from mas_gym.internal.suggestions import choice
from mas_gym.tasks.base import SPLITS, Grade, Grader, GradingMode, Problem, Task, unknown_problem
from mas_gym.tasks.grading.answers import KindGrader, check_mode
from mas_gym.tasks.grading.graders import CustomGrader, make_grader

DEFAULT_DIFFICULTY = 3


class Table:
    """An immutable table of problems that several tasks can share.

    Args:
        problems: The problems, in order, with unique ids.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)

    @cached_property
    def places(self) -> Mapping[str, int]:
        """Row of each problem id."""
        return {problem.id: place for place, problem in enumerate(self.problems)}


class ProblemSequence(Task):
    """The base class of this library's tasks, with a grader; slices differ only in their rows.

    Attributes:
        rows: The part of the split that this sequence covers.
        grader: Reads and grades answers.
    """

    rows: range
    grader: Grader

    @abstractmethod
    def _at(self, row: int) -> Problem:
        """Return the problem of a row."""

    @abstractmethod
    def _row(self, problem_id: str) -> int | None:
        """Return the row of a problem id; None if the whole split has no such problem."""

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Problem | Self:
        if isinstance(index, slice):
            return self._with(rows=self.rows[index])
        return self._at(self.rows[index])

    def _with(self, **changes: object) -> Self:
        """Return a copy with other rows or another grader."""
        part = object.__new__(type(self))
        # One of the two classes is frozen.
        vars(part).update(vars(self) | changes)
        return part

    def graded_by(self, grader: Grader) -> Self:
        """Return the same task with another grader."""
        return self._with(grader=grader)

    def only(self, problem_id: str) -> Self:
        """Return a task that contains only the given problem.

        Raises:
            UnknownNameError: This sequence has no such problem.
        """
        row = self._row(problem_id)
        if row is None or row not in self.rows:
            raise unknown_problem(self, problem_id)
        return self._with(rows=range(row, row + 1))

    @property
    def grading(self) -> GradingMode:  # type: ignore[override]
        """The mode in which answers are read, ``"strict"`` or ``"paper"``."""
        return self.grader.mode if isinstance(self.grader, KindGrader | CustomGrader) else "strict"

    def identity(self) -> object:
        """Return the grader's identity, which fully determines grading, so every slice has the same identity."""
        return self.grader.identity() if isinstance(self.grader, KindGrader) else self.grader

    def extract(self, problem: Problem, text: str) -> str | None:
        """Read the normalized answer from a final message, without looking at the reference."""
        return self.grader.extract(problem, text)

    def grade(self, problem: Problem, text: str) -> Grade:
        """Compare the answer read from a final message with the reference."""
        return self.grader.grade(problem, text)


@dataclass(frozen=True, repr=False)
class ProblemTask(ProblemSequence):
    """A `Task` over a table of problems; slices and copies share the table.

    `ProblemTask.of` builds a task from problems in memory.

    Attributes:
        name: Name of the task.
        split: ``"train"``, ``"dev"`` or ``"test"``.
        table: The problems.
        rows: The rows that belong to this sequence.
        grader: Reads and grades answers.
        mas: The MAS that commands use by default.
    """

    # Without field(), the fields would inherit the defaults of Task.
    name: str = field()
    split: str = field()
    table: Table
    rows: range
    grader: Grader = field(default_factory=KindGrader)
    mas: str = "rpsv"

    @classmethod
    def of(
        cls,
        problems: Iterable[Problem],
        *,
        name: str = "custom",
        split: str = "test",
        grading: GradingMode = "strict",
        grader: Any = None,
        mas: str = "rpsv",
    ) -> ProblemTask:
        """Build a task from problems.

        Args:
            problems: The problems, with unique ids.
            name: Name of the task.
            split: ``"train"``, ``"dev"`` or ``"test"``.
            grading: ``"strict"`` or ``"paper"``.
            grader: A function ``(problem, text) -> bool | Grade``, ``FILE.py:NAME`` or a `Grader`; by default each
                problem is graded by its kind.
            mas: The MAS that commands use by default.

        Raises:
            ConfigError: Two problems have the same id, or an argument is out of range.

        >>> task = ProblemTask.of([Problem("one", "1 + 1?", "2")])
        >>> task.grade(task[0], "It is 2.").correct
        True
        """
        table = Table(problems)
        if len(table.places) < len(table.problems):
            repeated = next(p.id for row, p in enumerate(table.problems) if table.places[p.id] != row)
            raise ConfigError(f"expected problems with unique ids, got {shown(repeated)} more than once")
        choice("split", split, SPLITS)
        made = make_grader(grader, KindGrader(check_mode(grading)))
        return cls(name, split, table, range(len(table.problems)), made, mas)

    def __repr__(self) -> str:
        """Return name, split, size and grading mode."""
        return f"<task {self.name}/{self.split}: {len(self)} problems, grading {self.grading}>"

    def __deepcopy__(self, memo: dict[int, object]) -> ProblemTask:
        """Return the task itself, because it is immutable."""
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle only the problems of this sequence."""
        return ProblemTask, (self.name, self.split, Table(self), range(len(self)), self.grader, self.mas)

    def _at(self, row: int) -> Problem:
        return self.table.problems[row]

    def _row(self, problem_id: str) -> int | None:
        return self.table.places.get(problem_id)


# -------------------------------------------------------- procedural tasks


def split_of(question: str) -> str:
    """Assign a question to a split by a hash of its words: 80% train, 10% dev, 10% test."""
    words = " ".join(question.casefold().split())
    bucket = hashlib.sha256(words.encode()).digest()[0] % 10
    return "test" if bucket == 0 else "dev" if bucket == 1 else "train"


class ProceduralTask(ProblemSequence):
    """A sequence of generated problems.

    Args:
        split: ``"train"``, ``"dev"`` or ``"test"``.
        seed: Seed of the problems.
        difficulty: One of `levels`; the subclass defines its meaning.
        size: Number of problems; each is generated on demand.
        grading: ``"strict"`` or ``"paper"``.

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
        """Check the arguments; problems are generated later."""
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

    def _row(self, problem_id: str) -> int | None:
        prefix, _, number = problem_id.rpartition("/")
        known = prefix == self._prefix and number.isascii() and number.isdigit() and len(number) < 20
        return int(number) if known and str(int(number)) == number else None


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
