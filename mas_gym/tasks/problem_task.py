"""Tasks that are tables of problems, and the base class that they share with generated tasks."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, overload

from mas_gym.errors import ConfigError, shown
from mas_gym.internal.suggestions import choice
from mas_gym.tasks.base import SPLITS, Grade, Grader, GradingMode, Problem, Task
from mas_gym.tasks.grading.answers import KindGrader, check_mode
from mas_gym.tasks.grading.graders import CustomGrader, make_grader


class ProblemSequence(Task):
    """The base class of this library's tasks, with a grader; slices differ only in their rows.

    Attributes:
        rows: The problems of this sequence, or the numbers from which they are generated.
        grader: Reads and grades answers.
    """

    rows: Sequence[Any]
    grader: Grader

    @abstractmethod
    def _at(self, row: Any) -> Problem:
        """Return the problem of a row."""

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Problem | Self:
        return self._with(rows=self.rows[index]) if isinstance(index, slice) else self._at(self.rows[index])

    def _with(self, **changes: object) -> Self:
        """Return a copy with other rows or another grader."""
        part = object.__new__(type(self))
        # One of the two classes is frozen.
        vars(part).update(vars(self) | changes)
        return part

    def graded_by(self, grader: Grader) -> Self:
        """Return the same task with another grader."""
        return self._with(grader=grader)

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
    """A `Task` over problems in memory, built with `ProblemTask.of`."""

    # Without field(), the fields would inherit the defaults of Task.
    name: str = field()
    split: str = field()
    rows: tuple[Problem, ...]
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
        rows = tuple(problems)
        repeated = [name for name, number in Counter(problem.id for problem in rows).items() if number > 1]
        if repeated:
            raise ConfigError(f"expected problems with unique ids, got {shown(repeated[0])} more than once")
        choice("split", split, SPLITS)
        made = make_grader(grader, KindGrader(check_mode(grading)))
        return cls(name, split, rows, made, mas)

    def __repr__(self) -> str:
        return f"<task {self.name}/{self.split}: {len(self)} problems, grading {self.grading}>"

    def __deepcopy__(self, memo: dict[int, object]) -> ProblemTask:
        """Return the task itself, because it is immutable."""
        return self

    def _at(self, row: Problem) -> Problem:
        return row
