"""The `Task` protocol: an indexed sequence of problems that can grade a text.

The environment and the search engine take their questions from a `Task`. Only the
task holds the reference answers; planners, policies and critics never receive one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, get_args, overload, runtime_checkable

from mas_gym.errors import choice, shown

Kind = Literal["number", "expression", "choice", "text", "regex", "code", "judge"]
GradingMode = Literal["strict", "paper"]

KINDS: tuple[Kind, ...] = get_args(Kind)
SPLITS = ("train", "dev", "test")
GRADING_MODES = ("strict", "paper")


@dataclass(frozen=True, slots=True)
class Problem:
    """One instance ``(x, y*)`` of a task (paper, Sec. "Preliminaries").

    Attributes:
        id: Unique within the task and split, stable across versions, for example ``"gsm8k/test/17"``.
        question: The text ``x`` that the question node holds. Options of a choice problem are part of it.
        answer: The reference answer ``y*``: a number, a LaTeX expression, an option label such as ``"A"``, a text or
            a JSON list of accepted texts, a regular expression, or unit tests.
        kind: How to grade: ``"number"``, ``"expression"`` (LaTeX, symbolic equality), ``"choice"``, ``"text"``
            (normalised exact match), ``"regex"``, ``"code"`` (the answer holds unit tests) or ``"judge"`` (a policy
            decides).
        metadata: Additional JSON-able data, such as the subject or the reference solution; read-only. A choice
            problem lists the texts of its options under ``"options"``, in the order of their labels.

    Raises:
        ConfigError: There is no such kind.
    """

    id: str
    question: str
    answer: str
    kind: Kind = "number"
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False)

    def __post_init__(self) -> None:
        """Check the kind and make the metadata read-only."""
        choice(f"kind of problem {shown(self.id)}", self.kind, KINDS)
        object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with plain metadata: a mapping proxy cannot be pickled."""
        return Problem, (self.id, self.question, self.answer, self.kind, dict(self.metadata))

    def __deepcopy__(self, memo: dict[int, Any]) -> Problem:
        """Return the problem itself, because it is immutable."""
        return self


class Grade(NamedTuple):
    """The outcome of grading one final message.

    Attributes:
        correct: Whether the extracted answer equals the reference.
        extracted: The answer read from the text, normalised so that equal answers group in a vote; None if there is
            none.
        reason: One of ``"equal"``, ``"different"``, ``"no answer found"``, ``"timed out"``, ``"too complex"``, or for
            code the result of its tests.
    """

    correct: bool
    extracted: str | None = None
    reason: str = ""


@runtime_checkable
class Grader(Protocol):
    """Reads and grades answers; every task has one.

    A run with a store needs its identity, which is part of the run's (see `mas_gym.identity`).
    """

    def extract(self, problem: Problem, text: str) -> str | None:
        """Read the normalised answer from a final message, without looking at the reference."""
        ...

    def grade(self, problem: Problem, text: str) -> Grade:
        """Compare the answer in a final message with the reference."""
        ...


@runtime_checkable
class Task(Protocol):
    """A sequence of problems of one split; slices are tasks too."""

    @property
    def name(self) -> str:
        """Registered name, such as ``"gsm8k"``."""

    @property
    def split(self) -> str:
        """One of ``"train"``, ``"dev"`` and ``"test"``."""

    @property
    def grading(self) -> GradingMode:
        """The grading mode of `grade`."""

    def __len__(self) -> int:
        """Number of problems."""

    def __iter__(self) -> Iterator[Problem]:
        """Iterate over the problems in order."""

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> Task: ...

    def problem(self, problem_id: str) -> Problem:
        """Return the problem with this id; raises `UnknownNameError`."""

    def extract(self, problem: Problem, text: str) -> str | None:
        """Read the normalised answer from a final message, without looking at the reference."""

    def grade(self, problem: Problem, text: str) -> Grade:
        """Compare the answer read from a final message with the reference."""
