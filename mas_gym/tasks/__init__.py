"""Tasks: problems with reference answers, their splits, and the grading of final messages.

`load_task` loads a task by name or from your own file; `ProblemTask.of` builds one from
problems in memory. Importing this package reads no data and needs no optional package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mas_gym.internal.lazy import lazy_names

if TYPE_CHECKING:
    from mas_gym.tasks.base import Grade, Grader, GradingMode, Kind, Problem, Task, as_task
    from mas_gym.tasks.catalog import TASK_NAMES, check_task_options, load_task
    from mas_gym.tasks.grading.answers import extract_answer, grade
    from mas_gym.tasks.grading.expressions import answers_equal
    from mas_gym.tasks.task_classes import ProblemTask

_HOMES = {
    "mas_gym.tasks.base": "Grade Grader GradingMode Kind Problem Task as_task",
    "mas_gym.tasks.catalog": "TASK_NAMES check_task_options load_task",
    "mas_gym.tasks.grading.answers": "extract_answer grade",
    "mas_gym.tasks.grading.expressions": "answers_equal",
    "mas_gym.tasks.task_classes": "ProblemTask",
}

__all__ = [
    "TASK_NAMES",
    "Grade",
    "Grader",
    "GradingMode",
    "Kind",
    "Problem",
    "ProblemTask",
    "Task",
    "answers_equal",
    "as_task",
    "check_task_options",
    "extract_answer",
    "grade",
    "load_task",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
