"""Tasks: problems with reference answers, their splits, and the grading of a final message.

`load_task` loads a task by name or from your own file; `ProblemTask.of` builds one from
problems in memory. Importing this package reads no data and needs no optional package.
"""

from mas_gym.tasks.base import Grade, Grader, GradingMode, Kind, Problem, Task, as_task
from mas_gym.tasks.catalogue import TASK_NAMES, check_task_options, load_task
from mas_gym.tasks.grading.answers import extract_answer, grade
from mas_gym.tasks.grading.expressions import answers_equal
from mas_gym.tasks.sequences import ProblemTask

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
