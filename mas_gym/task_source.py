"""Where an environment's problems come from: a task's name, checked at once and loaded late, or a task."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mas_gym.errors import ConfigError, choice, refuse_unknown
from mas_gym.tasks import check_task_options, load_task
from mas_gym.tasks.base import SPLITS, Task


class TaskSource:
    """How to get a task.

    Attributes:
        by_name: Whether the task can be loaded again, in another process say, from its name and options.
    """

    def __init__(
        self, task: str | Task, split: str, data: str | os.PathLike[str] | None, options: Mapping[str, Any]
    ) -> None:
        """Check everything that can be checked without touching the data."""
        self._task = task
        self._split = choice("split", split, SPLITS)
        self._data = None if data is None else _path(data)
        self._options = dict(options)
        self.by_name = isinstance(task, str)
        if isinstance(task, str):
            check_task_options(task, self._options)
        elif not isinstance(task, Task):
            raise ConfigError(f"task: expected a task's name or an object with the methods of Task, got {task!r}")
        else:
            refuse_unknown("option", self._options, ())

    def load(self) -> Task:
        """Return the task; tasks of one name and place share their problems.

        Raises:
            DataNotFoundError: The data cannot be found or reached.
            DataError: The data cannot be read.
        """
        if not isinstance(self._task, str):
            return self._task
        return load_task(self._task, split=self._split, data=self._data, **self._options)


def _path(value: Any) -> str:
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"data: expected the path of a file or folder, got {value!r}")
    return os.fsdecode(value)
