"""The two kinds of task: a fixed table of problems, and problems generated on demand."""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from types import MappingProxyType
from typing import Any, ClassVar, overload

from mas_gym.errors import ConfigError, DataError, UnknownNameError, unknown_name
from mas_gym.tasks.base import KINDS, SPLITS, Grade, GradingMode, Problem
from mas_gym.tasks.grading import check_mode, extract_answer, grade


class Table:
    """An immutable table of problems that many tasks share.

    Args:
        problems: The problems, in order, with unique ids.
        origin: A function of this library that loads the table, and its arguments. Tasks with an origin are pickled
            as a reference to it, without their data.
    """

    def __init__(
        self, problems: Iterable[Problem], origin: tuple[Callable[..., Table], tuple[Any, ...]] | None = None
    ) -> None:
        """Store the problems; everything else is computed on first use."""
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
        """Pickle the origin if there is one, else the problems."""
        if self.origin is None:
            return Table, (self.problems,)
        return _reload, (*self.origin, self.digest)


def _reload(make: Callable[..., Table], arguments: tuple[Any, ...], digest: str) -> Table:
    table = make(*arguments)
    if table.digest != digest:
        raise DataError(
            f"expected the data of {arguments} to be the same as when the task was pickled, got other problems; "
            "restore the data, or load the task again and pickle that"
        )
    return table


@dataclass(frozen=True, slots=True, weakref_slot=True, repr=False)
class ProblemTask(Sequence[Problem]):
    """A `Task` over a table of problems; slices and copies share the table.

    `ProblemTask.of` builds one from your own problems.
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
        """Build a task from problems.

        Args:
            problems: The problems, with unique ids.
            name: Name of the task.
            split: ``"train"``, ``"dev"`` or ``"test"``.
            grading: ``"strict"`` or ``"paper"``.

        Raises:
            ConfigError: Two problems have the same id, a problem's kind does not exist, or an argument is out of
                range.

        >>> task = ProblemTask.of([Problem("one", "1 + 1?", "2")])
        >>> task.grade(task[0], "It is 2.").correct
        True
        """
        table = Table(problems)
        if len(table.places) < len(table.problems):
            raise ConfigError("expected problems with unique ids, got the same id more than once")
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
        """Return the task itself, because it is immutable."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by fields, which a frozen class with slots must do explicitly."""
        return ProblemTask, (self.name, self.split, self.grading, self.table, self.rows)

    def problem(self, problem_id: str) -> Problem:
        """Return the problem with this id.

        Raises:
            UnknownNameError: This sequence has no such problem.
        """
        place = self.table.places.get(problem_id)
        if place is None or place not in self.rows:
            examples = [problem.id for problem in self[:3]]
            raise unknown_name(f"problem id of {self!r}", problem_id, [*examples, "..."])
        return self.table.problems[place]

    def identity(self) -> Any:
        """Return what determines grading: the mode alone, so every slice has the same identity."""
        return self.grading

    def extract(self, problem: Problem, text: str) -> str | None:
        """Read the normalised answer from a final message, without looking at the reference."""
        return extract_answer(problem, text, self.grading)

    def grade(self, problem: Problem, text: str) -> Grade:
        """Compare the answer read from a final message with the reference."""
        return grade(problem, text, self.grading)


# -------------------------------------------------------- procedural tasks


def split_of(question: str) -> str:
    """Assign a question to a split by a hash of its words: 80% train, 10% dev, 10% test."""
    words = " ".join(question.casefold().split())
    bucket = hashlib.sha256(words.encode()).digest()[0] % 10
    return "test" if bucket == 0 else "dev" if bucket == 1 else "train"


class ProceduralTask(ABC, Sequence[Problem]):
    """A sequence of problems, each generated from its index.

    Args:
        split: ``"train"``, ``"dev"`` or ``"test"``.
        seed: Seed of the problems.
        difficulty: The level; the subclass defines its meaning.
        size: Length of the sequence.
        grading: ``"strict"`` or ``"paper"``.
        indices: The part of the split that this sequence covers; all of it by default.
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
        """Generate one candidate; None if it belongs to another split or is ambiguous."""

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
            UnknownNameError: This sequence has no such problem.
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
        """Return what determines grading: the mode alone, so every slice has the same identity."""
        return self.grading

    def extract(self, problem: Problem, text: str) -> str | None:
        """Read the normalised answer from a final message, without looking at the reference."""
        return extract_answer(problem, text, self.grading)

    def grade(self, problem: Problem, text: str) -> Grade:
        """Compare the answer read from a final message with the reference."""
        return grade(problem, text, self.grading)
