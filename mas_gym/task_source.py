"""Where an environment's problems come from: loaded late, once, and shared."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

from mas_gym.env_options import choice, refuse_unknown
from mas_gym.errors import ConfigError
from mas_gym.tasks.base import SPLITS, Task

# Weak, so that a data set lives as long as some environment uses it.
_LOADED: WeakValueDictionary[str, Task] = WeakValueDictionary()


class TaskSource:
    """How to get a task: a name with its options, checked at once and loaded later, or the task itself.

    Attributes:
        by_name: Whether the task can be loaded again, in another process say, from its name and options.
    """

    def __init__(
        self, task: str | Task, split: str, data: str | os.PathLike[str] | None, options: Mapping[str, Any]
    ) -> None:
        """Check everything that can be checked without touching the data."""
        self._task = task
        self._split = choice("split", split, SPLITS)
        self._data = None if data is None else _path("data", data)
        self._options = dict(options)
        self.by_name = isinstance(task, str)
        if isinstance(task, str):
            from mas_gym.tasks import check_task_options

            check_task_options(task, self._options)
        elif not isinstance(task, Task):
            raise ConfigError(f"task: expected a task's name or an object with the methods of Task, got {task!r}")
        else:
            refuse_unknown("option", self._options, ())

    def load(self) -> Task:
        """Return the task; environments that ask for the same one get the same object.

        Raises:
            DataNotFoundError: The data cannot be found or reached.
            DataError: The data cannot be read.
        """
        if not isinstance(self._task, str):
            return self._task
        key = self._key(self._task)
        task = _LOADED.get(key)
        if task is None:
            from mas_gym.tasks import load_task

            task = load_task(self._task, split=self._split, data=self._data, **self._options)
            _LOADED[key] = task
        return task

    def _key(self, name: str) -> str:
        stamp = None
        if self._data is not None and os.path.isfile(self._data):
            status = os.stat(self._data)
            # A file that was rewritten under the same name is another data set.
            stamp = [os.path.abspath(self._data), status.st_mtime_ns, status.st_size]
        return json.dumps([name, self._split, self._data, stamp, self._options], sort_keys=True, default=repr)


def _path(name: str, value: Any) -> str:
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{name}: expected the path of a file or folder, got {value!r}")
    path = os.fspath(value)
    return path if isinstance(path, str) else os.fsdecode(path)
