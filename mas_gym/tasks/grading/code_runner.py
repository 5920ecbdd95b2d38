"""Runs a message's code and its tests; `mas_gym.tasks.grading.sandbox` starts this file as a script, in the sandbox.

The job is read as JSON from stdin. The script writes one line when the limits are set, and then one line with the
result, or one line per case.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import resource
import signal
import site
import sys
import types
from types import CodeType, ModuleType
from typing import Any

_SHOWN = 1000
_VALUE = 200
_RESULT = "__case_result__"


def main() -> None:
    """Run the job and end the process."""
    job = json.load(sys.stdin)
    report = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    os.close(nowhere)
    sys.path += job["packages"]
    # Define only `exit` and `quit`; the full setup by `site` takes longer than most tests.
    site.setquit()
    _limit(job["limits"])
    # The parent's clock starts here.
    os.write(report, b"ready\n")
    if "cases" in job:
        _run_cases(job, report)
    else:
        error = _run({"solution.py": job["code"], "tests.py": job["tests"]})
        result = {"token": job["token"]} if error is None else {"error": error}
        os.write(report, json.dumps(result).encode() + b"\n")
    # Skip exit handlers, because the code may have registered some.
    os._exit(0)


def _run(programs: dict[str, str]) -> str | None:
    """Run programs as one module ``__main__``; return the error, or None if all programs ran to completion."""
    module = _main_module(next(iter(programs)))
    try:
        compiled = {name: _compiled(os.path.abspath(name), text) for name, text in programs.items()}
    except BaseException as error:
        return _described(error)
    for name, program in compiled.items():
        try:
            exec(program, module.__dict__)
        except SystemExit as error:
            if not _left_by_unittest(error):
                return _described(error)
            if error.code or name != "tests.py":
                return f"unittest.main() ended {name} with exit code {int(error.code or 0)}"
        except BaseException as error:
            return _described(error)
    return None


def _main_module(name: str) -> ModuleType:
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    module.__file__ = os.path.abspath(name)
    sys.argv = [module.__file__]
    return module


class _CaseTimeout(BaseException):
    """Raised in a case that has used up its CPU time."""


def _run_cases(job: dict[str, Any], report: int) -> None:
    """Run the code and then each case in one module, and report each case when it ends."""
    module = _main_module("solution.py")

    def expired(number: int, frame: types.FrameType | None) -> None:
        raise _CaseTimeout

    signal.signal(signal.SIGPROF, expired)
    _, broken = _run_case(module, job["code"], job["seconds"])
    for case in job["cases"]:
        value, reason = (None, broken) if broken else _run_case(module, case, job["seconds"])
        result = {"token": job["token"], "value": value, "reason": reason}
        os.write(report, json.dumps(result).encode() + b"\n")


def _run_case(module: ModuleType, text: str, seconds: float) -> tuple[str | None, str | None]:
    """Run code or a case; return the text of its value if it is an expression, and the reason for a failure."""
    value = None
    try:
        # Repeated, because code may swallow the exception.
        signal.setitimer(signal.ITIMER_PROF, seconds, seconds)
        try:
            body = ast.parse(text).body
            is_expression = len(body) == 1 and isinstance(body[0], ast.Expr)
            program = f"{_RESULT} = (\n{text}\n)" if is_expression else text
            exec(_compiled(os.path.abspath("solution.py"), program), module.__dict__)
            if is_expression:
                value = _shortened(repr(module.__dict__.pop(_RESULT)))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _CaseTimeout:
        return None, "timed out"
    except BaseException as error:
        return None, f"failed: {type(error).__name__}"
    return value, None


def _shortened(text: str) -> str:
    if len(text) <= _VALUE:
        return text
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return text[: _VALUE - len(digest)] + digest


def _compiled(path: str, text: str) -> CodeType:
    # `inspect` and tracebacks read the source.
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return compile(text, path, "exec", dont_inherit=True)


def _left_by_unittest(error: SystemExit) -> bool:
    """Return whether ``unittest.main()`` ended the program, rather than the code that it tests."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and place.tb_frame.f_globals.get("__name__") == "unittest.main"


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:_SHOWN]
    except BaseException:
        return type(error).__name__


def _limit(limits: dict[str, Any]) -> None:
    seconds = int(limits["seconds"]) + 1
    wanted = {
        # At the first limit, a signal reports the cause; code can ignore this signal but not the second limit.
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_AS: (limits["memory"], limits["memory"]),
        resource.RLIMIT_FSIZE: (limits["file"], limits["file"]),
        resource.RLIMIT_NOFILE: (64, 64),
        resource.RLIMIT_CORE: (0, 0),
    }
    for which, pair in wanted.items():
        most = resource.getrlimit(which)[1]
        soft, hard = (value if most == resource.RLIM_INFINITY else min(value, most) for value in pair)
        try:
            resource.setrlimit(which, (soft, hard))
        except (ValueError, OSError):
            # macOS rejects some of the limits.
            if sys.platform == "linux":
                raise


if __name__ == "__main__":
    main()
