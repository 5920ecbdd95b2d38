"""A critic that knows the reference answers, for tests of planners and of what guides them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mas_gym.errors import CriticError
from mas_gym.graph import MAS
from mas_gym.state import MASState
from mas_gym.tasks.base import Problem, Task


class ScoredState(Protocol):
    """The part of `search.ScoringContext` that is read here."""

    @property
    def state(self) -> MASState:
        """The state to score."""
        ...

    @property
    def mas(self) -> MAS:
        """The MAS that it belongs to."""
        ...


class OracleCritic:
    """The true reward of terminal states; every other state is refused.

    `rewardmodels.load_critic` does not know it, so no spec, command or config can reach it: a
    test constructs it, with the answers that it may use.

    Args:
        task: Grades the final messages.
        answers: The reference answer of each problem that may be asked about, by problem id.

    Raises:
        CriticError: An answer is not the task's.
    """

    name = "oracle"
    terminal_only = True
    free = True

    def __init__(self, task: Task, answers: Mapping[str, str]) -> None:
        """Index the problems by question."""
        self._task, self._answers = task, dict(answers)
        self._problems: dict[str, Problem] = {}
        for name, answer in answers.items():
            problem = task.problem(name)
            if answer != problem.answer:
                raise CriticError(f"expected the reference answer of {name!r}, got {answer!r}; pass problem.answer")
            self._problems[problem.question] = problem

    def identity(self) -> Any:
        """Return the answers and the task that grades."""
        return {"answers": self._answers, "task": self._task}

    def score(self, contexts: Sequence[ScoredState]) -> list[float]:
        """Return +1.0 or -1.0 per terminal state.

        Raises:
            CriticError: A state is not terminal, or its question is none of the problems'.
        """
        return [self._reward(context) for context in contexts]

    def _reward(self, context: ScoredState) -> float:
        problem = self._problems.get(context.state.question)
        if problem is None:
            raise CriticError(f"the oracle was given no answer to the question {context.state.question[:60]!r}")
        if context.state.acting != context.mas.sink:
            raise CriticError("the oracle scores terminal states only; use a learned critic for others")
        return 1.0 if self._task.grade(problem, context.state.text).correct else -1.0
