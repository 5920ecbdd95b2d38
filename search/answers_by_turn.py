"""Answers of an episode after a number of turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mas_gym.errors import whole_number
from mas_gym.systems.recipient_names import current_answer
from mas_gym.tasks.base import Grade, Task
from search.grading import ProblemGrader
from search.plan import Plan


class TurnAnswer(NamedTuple):
    """The answer of an episode cut off after a number of turns.

    Attributes:
        turns: Number of turns, at least 1.
        answer: The normalized answer; None if no answer was stated.
        correct: Whether it equals the reference.
    """

    turns: int
    answer: str | None
    correct: bool


def turn_answers(plan: Plan, task: Task, turns: Sequence[int] = (4, 8, 12)) -> tuple[TurnAnswer, ...]:
    """Return the answers of a plan's chosen episode after each given number of turns.

    The answer after a turn is the last stated answer, read from the field ``CURRENT ANSWER:`` of a message if
    present, otherwise from anywhere in the message. From the end of the episode on, it is the plan's answer.

    Args:
        plan: A graded plan, from `search.run` or a store.
        task: The task with the plan's problem.
        turns: Numbers of turns.

    Raises:
        ConfigError: A number is not a positive integer.
    """
    for count in turns:
        whole_number("turns", count, at_least=1)
    if plan.best is None:
        return tuple(TurnAnswer(count, None, False) for count in turns)
    grader = ProblemGrader(task, task.problem(plan.problem_id))
    grades = [Grade(False)]
    for state in plan.best.state.path()[1:]:
        stated = current_answer(state.text)
        grade = grader.grade(state.text if stated is None else f"Final Answer: {stated}")
        grades.append(grades[-1] if grade.extracted is None else grade)
    grades[-1] = Grade(bool(plan.correct), plan.answer)
    reached = [grades[min(count, len(grades) - 1)] for count in turns]
    return tuple(TurnAnswer(count, g.extracted, g.correct) for count, g in zip(turns, reached, strict=True))
