"""Tasks: problems with reference answers, their splits, and the grading of final messages.

`load_task` loads a task by name or from your own file; `ProblemTask.of` builds one from
problems in memory. Importing this package reads no data and needs no optional package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mas_gym.internal.lazy import lazy_names

if TYPE_CHECKING:
    from mas_gym.tasks.base import Grade as Grade
    from mas_gym.tasks.base import Grader as Grader
    from mas_gym.tasks.base import GradingMode as GradingMode
    from mas_gym.tasks.base import Kind as Kind
    from mas_gym.tasks.base import Problem as Problem
    from mas_gym.tasks.base import Task as Task
    from mas_gym.tasks.base import as_task as as_task
    from mas_gym.tasks.catalog import TASK_NAMES as TASK_NAMES
    from mas_gym.tasks.catalog import check_task_options as check_task_options
    from mas_gym.tasks.catalog import load_task as load_task
    from mas_gym.tasks.grading.answers import extract_answer as extract_answer
    from mas_gym.tasks.grading.answers import grade as grade
    from mas_gym.tasks.problem_task import ProblemTask as ProblemTask

__getattr__, __dir__, __all__ = lazy_names(__name__)
