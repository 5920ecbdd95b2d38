"""Grading of a plan's answers; the only part of a search with access to reference answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache

from mas_gym.errors import ConfigError, shown
from mas_gym.systems.state import MASState
from mas_gym.tasks.base import Grade, Grader, Problem, Task
from mas_gym.tasks.grading.answers import NO_REFERENCE, KindGrader
from mas_gym.tasks.grading.judge import Judge
from search.costs import Usage
from search.plan import AnytimePoint, Plan

_QUICK = ("number", "choice", "text", "regex")
"""Answer kinds that are graded in microseconds."""

_TOGETHER = 8


class ProblemGrader:
    """Grades the final messages of one problem, each distinct text once.

    Args:
        problems: The task (its custom grading is used, if any), or any iterable of problems.
        problem: The problem.
        read: Returns the graded part of a terminal state's text (of a program: `mas_gym.MAS.final_text`).
        recorded: Known grades of terminal states, by the digest of the state.

    Attributes:
        threads: Maximum number of grading threads; 0 if grading is fast and needs none.
    """

    def __init__(
        self,
        problems: Iterable[Problem],
        problem: Problem,
        read: Callable[[str], str] = str,
        recorded: Mapping[bytes, Grade] | None = None,
    ) -> None:
        """Use the task's custom grading if it has one, otherwise strict grading."""
        task: Grader = problems if isinstance(problems, Task) else KindGrader()
        self._problem = problem
        self._extract: Callable[[str], str | None] = cache(lambda text: task.extract(problem, read(text)))
        self._ask: Callable[[str], Grade] = lambda text: task.grade(problem, read(text))
        # Episodes with the same last message may have different recorded outcomes, so recorded grades use the state.
        self._grades: dict[str, Grade] = {key.hex(): grade for key, grade in (recorded or {}).items()}
        self._recorded = frozenset(self._grades)
        self.threads = grading_threads(problems, problem.kind)

    def key(self, state: MASState) -> str:
        """Return a terminal state's key for the other methods: its last message, or the key of its recorded grade.

        A message that names no legal recipient ends the episode without an answer (`mas_gym.Dynamics.failure`); its key
        is ``""``.
        """
        key = state.digest.hex() if self._recorded else ""
        if key in self._recorded:
            return key
        return state.text if state.recipients else ""

    def extract(self, key: str) -> str | None:
        """Return the normalized answer in the message with this key, without using the reference."""
        return self._grades[key].extracted if key in self._recorded else self._extract(key)

    def grade(self, key: str) -> Grade:
        """Compare the answer in the message with this key with the reference.

        Raises:
            ConfigError: The task's grader did not return a `Grade`.
        """
        if key not in self._grades:
            grade = self._ask(key)
            if not isinstance(grade, Grade):
                raise ConfigError(f"grader: expected a mas_gym.tasks.Grade, got {shown(grade)}; return Grade(correct)")
            self._grades[key] = grade
        return self._grades[key]

    def ungraded(self, keys: Iterable[str]) -> list[str]:
        """Return the distinct keys of messages without a grade."""
        return [key for key in dict.fromkeys(keys) if key not in self._grades]

    @property
    def cost(self) -> Usage:
        """The cost of a judge's grades so far; each distinct answer counts once."""
        billed = {grade.extracted or key: grade for key, grade in list(self._grades.items()) if grade.tokens}
        return Usage(
            grader_tokens=sum(grade.tokens for grade in billed.values()),
            grader_prompt_tokens=sum(grade.prompt_tokens for grade in billed.values()),
        )

    def reward(self, key: str) -> float:
        """Return the reward R of a terminal state with this key, +1.0 or -1.0."""
        return 1.0 if self.grade(key).correct else -1.0

    def keys(self, plan: Plan) -> list[str]:
        """Return the keys of the messages that `graded` grades."""
        points = [point.state for point in plan.anytime if point.state is not None]
        return [self.key(state) for state in (*(candidate.state for candidate in plan.candidates), *points)]

    def graded(self, plan: Plan, calls: int, tokens: int) -> Plan:
        """Extract and grade the answers of a plan's candidates and anytime curve; return the plan.

        A plan without a curve gets one point, at its agent calls and tokens.
        """
        grades = [self.grade(self.key(candidate.state)) for candidate in plan.candidates]
        candidates = tuple(
            replace(candidate, answer=grade.extracted, correct=known(grade))
            for candidate, grade in zip(plan.candidates, grades, strict=True)
        )
        anytime = tuple(self._graded(point) for point in plan.anytime)
        best = candidates[0] if candidates else None
        if best is not None and not anytime:
            anytime = (AnytimePoint(calls, tokens, best.state, best.node, best.answer, best.correct),)
        return replace(
            plan,
            problem_id=self._problem.id,
            candidates=candidates,
            anytime=anytime,
            answer=best.answer if best else None,
            correct=best.correct if best else False,
        )

    def _graded(self, point: AnytimePoint) -> AnytimePoint:
        if point.state is None:
            return point
        grade = self.grade(self.key(point.state))
        return point._replace(answer=grade.extracted, correct=known(grade))


def known(grade: Grade) -> bool | None:
    """Return whether an answer is correct; None if that is not known, because there is no reference."""
    return None if grade.reason == NO_REFERENCE else grade.correct


def grading_threads(task: object, kind: str) -> int:
    """Return the maximum number of grading threads for a kind of answer; 0 if grading takes microseconds.

    Slow grading (a judge, code, symbolic equality, a user's function) must not block the scheduler's loop.
    """
    grader = task.grader if isinstance(task, Task) else KindGrader()
    if isinstance(grader, KindGrader):
        if kind in _QUICK:
            return 0
        # Other judges may not be thread-safe.
        return _TOGETHER if kind != "judge" or isinstance(grader.judge, Judge) else 1
    return 1
