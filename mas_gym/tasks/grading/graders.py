"""Custom graders: functions of the user that compare answers with the reference.

A custom grader is a function ``(problem, text) -> bool | Grade``, where ``text`` is the
whole final message::

    # my.py
    def grade(problem, text):
        return problem.answer.lower() in text.lower()

    load_task("my.csv", grader="my.py:grade")       # or grader=grade, or --grader my.py:grade

``FILE.py:NAME`` may also name a class whose instances have this signature; settings follow
a second colon. Such a grader runs in a separate process, which is killed if it takes longer
than `GRADER_SECONDS`. A function object has no time limit. In both cases an error in the
grader fails only that search, and the error shows where it was raised.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, Self

from mas_gym.errors import ConfigError, MASGymError, UserCodeError, shown
from mas_gym.internal.identity import digest_of, identity_of
from mas_gym.internal.json_types import JSONObject
from mas_gym.internal.user_files import error_with_line
from mas_gym.internal.workers import LineProcess
from mas_gym.plugins import Registry
from mas_gym.tasks.base import Grade, Grader, GradingMode, Problem
from mas_gym.tasks.grading.answers import KindGrader

GRADERS = Registry("grader", "mas_gym.graders", {})
"""Names of graders: those of packages. Each is a function ``(problem, text)``, or a class with such instances."""

GRADER_SECONDS = 60.0
"""Time limit of a grader in a file for one message."""

Function = Callable[[Problem, str], "bool | Grade"]


class CustomGrader:
    """Reads answers by the problem's kind; its subclasses grade with the user's code."""

    base: KindGrader

    @property
    def mode(self) -> GradingMode:
        """The mode in which answers are read."""
        return self.base.mode

    @property
    def judge(self) -> Grader | None:
        """The judge of the base grader."""
        return self.base.judge

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return the grader itself, because it does not change."""
        return self

    def extract(self, problem: Problem, text: str) -> str | None:
        """Read the normalized answer from a final message."""
        return self.base.extract(problem, text)


class FunctionGrader(CustomGrader):
    """Grades with a function; answers are read by the problem's kind."""

    def __init__(self, function: Function, base: KindGrader) -> None:
        """Store the function and the base grader."""
        self.function, self.base = function, base
        self._lock = threading.Lock()

    def identity(self) -> object:
        """Return the identities of the function (its source) and of the base grader."""
        return {"code": identity_of(self.function), "answers": self.base.identity()}

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.function, self.base)

    def grade(self, problem: Problem, text: str) -> Grade:
        """Call the function, one call at a time.

        Raises:
            UserCodeError: The function raised an error, or returned neither a bool nor a `Grade`.
        """
        try:
            with self._lock:
                return call(self.function, problem, text, self.extract(problem, text))
        except MASGymError:
            raise
        except (Exception, SystemExit) as error:
            file = self.function.__code__.co_filename if isinstance(self.function, FunctionType) else "grader"
            raise UserCodeError(f"grader {_name(self.function)}: {error_with_line(error, Path(file))}") from error


class FileGrader(CustomGrader):
    """Grades with a named function, in a separate process; answers are read by the problem's kind.

    Attributes:
        spec: ``FILE.py:NAME``, or a name in the entry-point group ``mas_gym.graders``; settings may follow.
        base: Reads the answers.
    """

    def __init__(self, spec: str, base: KindGrader, digest: str | None = None) -> None:
        """Import the file in this process too, so that its errors are raised before grading.

        Raises:
            MASGymError: As for `mas_gym.plugins.Registry.load`, or the code has changed since the grader was pickled.
        """
        parsed = GRADERS.parse(spec)
        if parsed.file:
            parsed = parsed._replace(file=str(Path(parsed.file).expanduser().absolute()))
        self.spec, self.base = str(parsed), base
        self._identity = identity_of(_function(self.spec))
        if digest not in (None, digest_of(self._identity)):
            raise ConfigError(f"grader {spec!r}: its code has changed since the task was pickled; load the task again")
        self._worker = LineProcess("mas_gym.tasks.grading.graders:_prepare", self.spec)

    def identity(self) -> object:
        """Return the identities of the code (its source) and of the base grader."""
        return {"code": self._identity, "answers": self.base.identity()}

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the spec; unpickling checks that the code has not changed."""
        return FileGrader, (self.spec, self.base, digest_of(self._identity))

    def grade(self, problem: Problem, text: str) -> Grade:
        """Call the function in the separate process.

        Raises:
            UserCodeError: The function raised an error, took too long, ended its process, or returned neither a bool
                nor a `Grade`.
        """
        stated = problem.id, problem.question, problem.answer, problem.kind
        question = {"text": text, "answer": self.extract(problem, text), "problem": [*stated, dict(problem.metadata)]}
        try:
            reply = self._worker.ask(question, GRADER_SECONDS)
        except ChildProcessError as error:
            raise UserCodeError(f"grader {self.spec!r}: {error}") from error
        except TimeoutError:
            raise UserCodeError(
                f"grader {self.spec!r}: expected a grade within {GRADER_SECONDS:g} seconds, got none; check for an "
                "infinite loop"
            ) from None
        except EOFError:
            raise UserCodeError(
                f"grader {self.spec!r}: its process ended before it returned a grade; check for sys.exit()"
            ) from None
        if "error" in reply:
            failure = UserCodeError(f"grader {self.spec!r}: {reply['error']}")
            failure.add_note(reply["traceback"])
            raise failure
        return Grade(*reply["grade"])


def make_grader(grader: str | Function | Grader | None, base: KindGrader) -> Grader:
    """Return a grader.

    Args:
        grader: ``FILE.py:NAME`` or a registered name, a function ``(problem, text) -> bool | Grade``, a `Grader`, or
            None to grade by kind.
        base: Grades by kind, and reads the answers for other graders.

    Raises:
        ConfigError: The grader is none of these.
        MASGymError: The file cannot be imported, or has no such name.
    """
    if grader is None:
        return base
    if isinstance(grader, str):
        return FileGrader(grader, base)
    if isinstance(grader, Grader):
        return grader
    if not callable(grader):
        raise ConfigError(f"grader: expected FILE.py:NAME or a function (problem, text), got {shown(grader)}")
    return FunctionGrader(grader, base)


def call(function: Function, problem: Problem, text: str, answer: str | None) -> Grade:
    """Call a grader's function and check its result.

    Args:
        function: The function.
        problem: The problem.
        text: The final message.
        answer: The answer in the message, read by the problem's kind; used if the result contains no answer.

    Raises:
        UserCodeError: The result is neither a bool nor a `Grade`.
    """
    result: Any = function(problem, text)
    if isinstance(result, Grade):
        return result if result.extracted is not None else result._replace(extracted=answer)
    if isinstance(result, bool) or type(result).__name__ == "bool_":
        return Grade(bool(result), answer, "equal" if result else "different")
    hint = "; for a score, compare it with a threshold" if isinstance(result, int | float) else ""
    raise UserCodeError(f"grader {_name(function)}: expected True, False or a Grade, got {shown(result)}{hint}")


def _function(spec: str) -> Function:
    """Return the function that a spec names, or the object that it creates if it names a class or has settings."""
    parsed = GRADERS.parse(spec)
    value = GRADERS.find(parsed)
    args, kwargs = GRADERS.arguments(parsed)
    if isinstance(value, type) or args or kwargs:
        value = GRADERS.call(parsed, value, *args, **kwargs)
    if not callable(value):
        raise ConfigError(f"grader {spec!r}: expected a function (problem, text), got {shown(value)}")
    function: Function = value
    return function


def _name(function: Function) -> str:
    return function.__qualname__ if isinstance(function, FunctionType) else type(function).__name__


def _prepare() -> Callable[[JSONObject], JSONObject]:
    """Return the function that grades in the worker process of a `FileGrader`."""
    spec = sys.argv[1]
    function = _function(spec)

    def answer(asked: JSONObject) -> JSONObject:
        try:
            return {"grade": call(function, Problem(*asked["problem"]), asked["text"], asked["answer"])}
        except BaseException as error:
            place = str(error) if isinstance(error, UserCodeError) else GRADERS.parse(spec).blame(error)
            return {"error": place, "traceback": "".join(traceback.format_exception(error))}

    return answer
