"""Extracting and grading the answers of searches; the only place that sees reference answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

from mas_gym.state import MASState
from mas_gym.tasks.base import Grade, Problem
from search.plan import AnytimePoint, Plan


def final_text(state: MASState) -> str:
    """Return the text of a terminal state that is graded: its last message; none if that reached nobody.

    A message that names no legal recipient ends the episode without an answer (`mas_gym.Dynamics.failure`).
    """
    return state.text if state.recipients else ""


class Grader:
    """Grades the final messages of one problem, each distinct text once.

    Args:
        problems: The task, whose own grading is used if it has one, or any iterable of problems.
        problem: The problem.
        read: Returns the part of a terminal state's text that is graded (`mas_gym.MAS.final_text`).
    """

    def __init__(
        self, problems: Iterable[Problem], problem: Problem, read: Callable[[str], str] = lambda text: text
    ) -> None:
        """Use the task's own grading if it has one, otherwise strict grading."""
        task: Any = problems
        if not (hasattr(task, "grade") and hasattr(task, "extract")):
            from mas_gym.tasks import grading

            task = SimpleNamespace(extract=grading.extract_answer, grade=grading.grade)
        self._problem = problem
        self._extract: Callable[[str], str | None] = cache(lambda text: task.extract(problem, read(text)))
        self._grade: Callable[[str], Grade] = cache(lambda text: task.grade(problem, read(text)))

    def extract(self, text: str) -> str | None:
        """Return the normalised answer in a message, without looking at the reference."""
        return self._extract(text)

    def grade(self, text: str) -> Grade:
        """Compare the answer in a message with the reference."""
        return self._grade(text)

    def reward(self, text: str) -> float:
        """Return R of a terminal state with this final message, +1.0 or -1.0."""
        return 1.0 if self.grade(text).correct else -1.0

    def graded(self, plan: Plan, calls: int, tokens: int) -> Plan:
        """Return the plan with the answers of its candidates and its anytime curve extracted and graded.

        A plan without a curve gets one point, at its agent calls and tokens.
        """
        grades = [self.grade(final_text(candidate.state)) for candidate in plan.candidates]
        candidates = tuple(
            replace(candidate, answer=grade.extracted, correct=grade.correct)
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
            correct=bool(best.correct) if best else False,
        )

    def _graded(self, point: AnytimePoint) -> AnytimePoint:
        if point.state is None:
            return point
        grade = self.grade(final_text(point.state))
        return point._replace(answer=grade.extracted, correct=grade.correct)
