"""Runs a message's code and then cases; `mas_gym.tasks.grading.sandbox` starts this file as a script, in the sandbox.

The job is read as JSON from stdin. The script writes one line when the limits are set, and then one line for each case.
The code is kept from the usual ways to forge a result (see `mas_gym.tasks.grading.sandbox`).
"""

from __future__ import annotations

import ast
import builtins
import json
import math
import numbers
import os
import resource
import site
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from types import ModuleType
from typing import Any

_SHOWN = 1000
_PLAIN_VALUE = 1 << 16
_RESULT = "__case_result__"
_SAME = "__same__"
_REPORT = "mas_gym.case_result"


def main() -> None:
    """Run the job and end the process."""
    job = json.load(sys.stdin)
    _add_reporter(os.dup(1), job.pop("token"))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    os.close(nowhere)
    sys.path += job["packages"]
    # Define only `exit` and `quit`; the full setup by `site` takes longer than most tests.
    site.setquit()
    _limit(job["limits"])
    report, end = sys.audit, os._exit
    # The parent's clock starts here.
    report(_REPORT, None, None, True)
    for value, reason in _results(job):
        report(_REPORT, value, reason, False)
    # Skip exit handlers, because the code may have registered some.
    end(0)


def _add_reporter(report: int, token: str) -> None:
    """Add an audit hook that writes the results of `main`; code cannot reach its variables, as it could in a frame."""
    allowed, frame_at, write, dumps = main.__code__, sys._getframe, os.write, json.dumps

    def hook(event: str, args: tuple[object, ...]) -> None:
        if event == _REPORT and frame_at(1).f_code is allowed:
            value, reason, ready = args
            line = "ready" if ready else dumps({"token": token, "value": value, "reason": reason})
            write(report, f"{line}\n".encode())
        elif event in ("gc.get_objects", "gc.get_referrers", "gc.get_referents"):
            raise RuntimeError("graded code cannot inspect the objects of its process")

    sys.addaudithook(hook)


def _results(job: dict[str, Any]) -> Iterator[tuple[str | None, str | None]]:
    """Run the code and then each case in one module ``__main__``; yield its value and the reason for a failure."""
    # Code could change a list that it finds in a frame.
    cases = tuple(job["cases"])
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    module.__file__ = os.path.abspath("solution.py")
    sys.argv = [module.__file__]
    suite = _Suite() if any("unittest" in case for case in cases) else None
    before = [(part, dict(vars(part))) for part in (builtins, math, *(() if suite is None else suite.parts))]

    def run(text: str, file: str) -> tuple[str | None, str | None]:
        try:
            return _run(module, text, file), None
        except SystemExit as error:
            return None, suite.verdict(error, file) if suite is not None else _described(error)
        except BaseException as error:
            return None, _described(error)

    _, broken = run(job["code"], "solution.py")
    module.__dict__.pop("load_tests", None)
    module.__dict__[_SAME] = _same
    _restore(before)
    for case in cases:
        yield (None, broken) if broken else run(case, "tests.py")


def _run(module: ModuleType, text: str, file: str) -> str | None:
    """Run code or a case; return the text of its value if it is an expression."""
    tree = ast.parse(text)
    body = tree.body
    is_expression = file == "tests.py" and len(body) == 1 and isinstance(body[0], ast.Expr)
    if file == "tests.py":
        text = ast.unparse(_Comparisons().visit(tree))
    program = f"{_RESULT} = (\n{text}\n)" if is_expression else text
    path = os.path.join(os.path.dirname(module.__file__ or ""), file)
    # `inspect` and tracebacks read the source.
    with open(path, "w", encoding="utf-8") as source:
        source.write(program)
    exec(compile(program, path, "exec", dont_inherit=True), module.__dict__)
    if not is_expression:
        return None
    return _plain_text(module.__dict__.pop(_RESULT))


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:_SHOWN]
    except BaseException:
        return type(error).__name__


# ------------------------------------------------------------------ values


class _Infinity(float):
    """An infinite number, written as a literal."""

    def __repr__(self) -> str:
        return "1e999" if self > 0 else "-1e999"


_EXACT: dict[type, Callable[[Any], Any]] = {
    bool: bool, int: int.__int__, float: float.__float__, complex: complex.__complex__, str: str.__str__,
    bytes: bytes.__bytes__,
}  # fmt: skip
_CONTAINERS: tuple[Any, ...] = (list, tuple, set, frozenset)


def _plain(value: Any) -> Any:
    """Return the value as numbers, texts and containers of the language, without the methods of its classes.

    Raises:
        TypeError: It is another object.
    """
    if value is None:
        return None
    for base, exact in _EXACT.items():
        if isinstance(value, base):
            value = exact(value)
            return _Infinity(value) if base is float and math.isinf(value) else value
    for kind in _CONTAINERS:
        if isinstance(value, kind):
            return (set if kind is frozenset else kind)(map(_plain, kind.__iter__(value)))
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in dict.items(value)}
    if isinstance(value, numbers.Integral):
        return int.__int__(int(value))
    if isinstance(value, numbers.Real | Decimal):
        return _plain(float(value))
    if type(value).__module__ == "numpy":
        return _plain(value.tolist())
    raise TypeError(f"expected numbers, texts or containers of these, got an object of type {type(value).__name__}")


def _plain_text(value: object) -> str:
    text = repr(_plain(value))
    if len(text) > _PLAIN_VALUE:
        raise ValueError(f"expected a value of at most {_PLAIN_VALUE:,} characters, got {len(text):,}")
    return text


# ------------------------------------------------------------------ tests that run beside the code


def _same(a: object, b: object) -> object:
    """Return ``a == b``; an object that is not a value differs from every value, whatever its class says."""
    (a_is_value, left), (b_is_value, right) = _as_value(a), _as_value(b)
    return left == right if a_is_value == b_is_value else False


def _as_value(side: object) -> tuple[bool, object]:
    try:
        return True, _plain(side)
    except BaseException:
        return False, side


class _Comparisons(ast.NodeTransformer):
    """Replaces ``a == b`` by `_same`, except where an array of comparisons may be meant, as in ``(a == b).all()``."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return node if isinstance(node.value, ast.Compare) else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return node if any(isinstance(one, ast.Compare) for one in node.args) else self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Compare(left, [ast.Eq()], [right]):
                return ast.Call(ast.Name(_SAME, ast.Load()), [left, right], [])
        return node


class _Suite:
    """The parts of unittest that code could replace."""

    def __init__(self) -> None:
        import unittest
        from unittest import TestCase, TestLoader, TestProgram, TestResult, TestSuite, case, loader, runner, suite

        for name in ("Equal", "AlmostEqual", "ListEqual", "TupleEqual", "DictEqual", "SetEqual"):
            setattr(TestCase, f"assert{name}", _strict(getattr(TestCase, f"assert{name}")))
        self.end = TestProgram.runTests.__code__
        parts = unittest, case, loader, runner, suite, *(sys.modules[f"unittest.{name}"] for name in ("main", "result"))
        classes = (
            TestCase,
            TestLoader,
            TestProgram,
            TestResult,
            TestSuite,
            runner.TextTestRunner,
            unittest.TextTestResult,
        )
        self.parts = (*parts, *classes)

    def verdict(self, error: SystemExit, file: str) -> str | None:
        """Return None if ``unittest.main()`` has ended the tests and they passed, and otherwise the reason."""
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        if place is None or place.tb_frame.f_code is not self.end:
            return _described(error)
        if file != "tests.py" or error.code:
            return f"unittest.main() ended {file} with exit code {int(error.code or 0)}"
        result = place.tb_frame.f_locals["self"].result
        if result.failures or result.errors or result.unexpectedSuccesses:
            return "a unit test failed"
        if not all(map(_declared, result.skipped)):
            return "the code skipped a unit test"
        return None if result.testsRun > len(result.skipped) else "no test ran"


def _declared(skipped: tuple[Any, str]) -> bool:
    """Return whether a decorator in the tests, not an exception of the code, skipped a test."""
    test, _ = skipped
    methods = (vars(kind).get(vars(test).get("_testMethodName")) for kind in type(test).__mro__)
    return any("__unittest_skip__" in dir(part) for part in (type(test), *methods))


def _restore(before: list[tuple[Any, dict[str, object]]]) -> None:
    """Undo the changes that the code has made to modules and classes that tests use."""
    for part, members in before:
        if isinstance(part, type):
            for name in vars(part).keys() - members.keys():
                delattr(part, name)
        for name, value in members.items():
            if name not in vars(part) or vars(part)[name] is not value:
                setattr(part, name, value)


def _strict(method: Callable[..., None]) -> Callable[..., None]:
    def compare(self: Any, first: object, second: object, *args: object, **kwargs: object) -> None:
        (first_is_value, first), (second_is_value, second) = _as_value(first), _as_value(second)
        if first_is_value != second_is_value:
            self.fail("only one of the two is a value")
        method(self, first, second, *args, **kwargs)

    return compare


def _limit(limits: dict[str, Any]) -> None:
    seconds = int(limits["seconds"]) + 1
    wanted = {
        # At the first limit, a signal reports the cause; code can ignore this signal but not the second limit.
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_AS: (limits["memory"], limits["memory"]),
        resource.RLIMIT_FSIZE: (limits["file"], limits["file"]),
        resource.RLIMIT_NOFILE: (64, 64),
        resource.RLIMIT_NPROC: (limits["tasks"], limits["tasks"]),
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
