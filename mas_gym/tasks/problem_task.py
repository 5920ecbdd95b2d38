"""A task over a fixed table of problems."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, overload

from mas_gym.errors import ConfigError, DataError, unknown_name
from mas_gym.tasks.base import KINDS, SPLITS, Grade, GradingMode, Problem
from mas_gym.tasks.grading import check_mode, extract_answer, grade


class Table:
    """An immutable table of problems that many tasks share.

    Args:
        problems: The problems, in order, with ids that differ.
        origin: A function of this library that loads the table, and its arguments; with it, tasks are pickled as a
            reference, without their data.
    """

    def __init__(
        self, problems: Iterable[Problem], origin: tuple[Callable[..., Table], tuple[Any, ...]] | None = None
    ) -> None:
        """Keep the problems; everything else is computed on first use."""
        self.problems = tuple(problems)
        self.origin = origin

    @cached_property
    def places(self) -> Mapping[str, int]:
        """Row of each problem id."""
        return MappingProxyType({problem.id: place for place, problem in enumerate(self.problems)})

    @cached_property
    def digest(self) -> str:
        """A digest of everything that grading depends on."""
        state = hashlib.blake2b(digest_size=16)
        for problem in self.problems:
            state.update(repr((problem.id, problem.question, problem.answer, problem.kind)).encode())
        return state.hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle how to load the table if that is known, else the problems."""
        if self.origin is None:
            return Table, (self.problems,)
        return _reload, (*self.origin, self.digest)


def _reload(make: Callable[..., Table], arguments: tuple[Any, ...], digest: str) -> Table:
    table = make(*arguments)
    if table.digest != digest:
        raise DataError(
            f"expected the data of {arguments} to be the same as when the task was pickled, got other problems"
        )
    return table


@dataclass(frozen=True, slots=True, weakref_slot=True, repr=False)
class ProblemTask(Sequence[Problem]):
    """A `Task` over a table of problems; slices and copies share the table.

    `ProblemTask.of` makes one from your own problems.
    """

    name: str
    split: str
    grading: GradingMode
    table: Table
    rows: range

    @classmethod
    def of(
        cls, problems: Iterable[Problem], *, name: str = "custom", split: str = "test", grading: GradingMode = "strict"
    ) -> ProblemTask:
        """Make a task from problems.

        Args:
            problems: The problems, with ids that differ.
            name: Name of the task.
            split: ``"train"``, ``"dev"`` or ``"test"``.
            grading: ``"strict"`` or ``"paper"``.

        Raises:
            ConfigError: Two problems have the same id, a problem's kind does not exist, or an argument is out of
                its range.

        >>> task = ProblemTask.of([Problem("one", "1 + 1?", "2")])
        >>> task.grade(task[0], "It is 2.").correct
        True
        """
        table = Table(problems)
        if len(table.places) < len(table.problems):
            raise ConfigError("expected problems with ids that differ, got the same id more than once")
        for problem in table.problems:
            if problem.kind not in KINDS:
                raise ConfigError(
                    f"problem {problem.id!r}: expected a kind of {', '.join(KINDS)}, got {problem.kind!r}"
                )
        if split not in SPLITS:
            raise ConfigError(f"expected a split of {', '.join(SPLITS)}, got {split!r}")
        return cls(name, split, check_mode(grading), table, range(len(table.problems)))

    def __len__(self) -> int:
        """Number of problems."""
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> ProblemTask: ...
    def __getitem__(self, index: int | slice) -> Problem | ProblemTask:
        """Return a problem, or the task of a slice."""
        if isinstance(index, slice):
            return ProblemTask(self.name, self.split, self.grading, self.table, self.rows[index])
        return self.table.problems[self.rows[index]]

    def __repr__(self) -> str:
        """Return name, split, size and grading mode."""
        return f"<task {self.name}/{self.split}: {len(self)} problems, grading {self.grading}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> ProblemTask:
        """Return the task itself: it cannot change."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by fields: a frozen class with slots needs to say so."""
        return ProblemTask, (self.name, self.split, self.grading, self.table, self.rows)

    def problem(self, problem_id: str) -> Problem:
        """Return the problem with this id.

        Raises:
            UnknownNameError: No problem of this sequence has it.
        """
        place = self.table.places.get(problem_id)
        if place is None or place not in self.rows:
            examples = [problem.id for problem in self[:3]]
            raise unknown_name(f"problem id of {self!r}", problem_id, [*examples, "..."])
        return self.table.problems[place]

    def identity(self) -> Any:
        """Return what determines grading, whatever the problems: the mode; equal for every slice."""
        return self.grading

    def extract(self, problem: Problem, text: str) -> str | None:
        """Read the normalised answer from a final message, without looking at the reference."""
        return extract_answer(problem, text, self.grading)

    def grade(self, problem: Problem, text: str) -> Grade:
        """Compare the answer read from a final message with the reference."""
        return grade(problem, text, self.grading)
