"""A critic that uses the reference answers, for tests of search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mas_gym.critics import Critic, ScoringContext
from mas_gym.errors import CriticError
from mas_gym.tasks.base import Problem, Task


class OracleCritic(Critic):
    """Scores terminal states by the true reward and rejects other states; for tests of planners.

    `rewardmodels.load_critic` cannot load it, so no spec, command or config can use it. A test
    constructs it with the answers that the critic may use.

    Args:
        task: Grades the final messages.
        answers: The reference answer of each problem that the critic may score, by problem id.

    Raises:
        CriticError: An answer differs from the task's reference.
    """

    name = "oracle"
    terminal_only = True
    free = True

    def __init__(self, task: Task, answers: Mapping[str, str]) -> None:
        self._task, self._answers = task, dict(answers)
        self._problems: dict[str, Problem] = {}
        for name, answer in answers.items():
            problem = task.problem(name)
            if answer != problem.answer:
                raise CriticError(
                    f"expected the reference answer of problem {name!r}, got {answer!r}; pass problem.answer"
                )
            self._problems[problem.question] = problem

    def identity(self) -> object:
        """Return the answers and the grading task."""
        return {"answers": self._answers, "task": self._task}

    def score(self, contexts: Sequence[ScoringContext]) -> list[float]:
        """Return +1.0 or -1.0 per terminal state.

        Raises:
            CriticError: A state is not terminal, or its question belongs to no problem in ``answers``.
        """
        return [self._reward(context) for context in contexts]

    def _reward(self, context: ScoringContext) -> float:
        problem = self._problems.get(context.state.question)
        if problem is None:
            raise CriticError(
                f"the oracle has no answer to the question {context.state.question[:60]!r}; add its problem to answers"
            )
        if context.state.acting != context.mas.sink:
            raise CriticError(
                "the oracle critic: expected a terminal state, got a non-terminal state; use a learned critic for "
                "such states"
            )
        return 1.0 if self._task.grade(problem, context.state.text).correct else -1.0
