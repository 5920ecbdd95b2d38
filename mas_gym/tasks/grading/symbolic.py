r"""Symbolic equality, computed by math-verify in a process that can be killed.

math-verify (based on sympy) limits its time with signals, which only the main thread
receives, and no signal interrupts a big-integer power. Therefore one worker process,
started at the first comparison, serves all threads. It limits its CPU time and memory,
and the parent kills it if it does not reply in time. Expressions that are clearly too
large are not sent to the worker. No text is evaluated: math-verify parses LaTeX with a
grammar.

The worker (`_prepare`) replies to each pair ``[reference, answer]`` with the verdict.
"""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import sys
from cmath import isfinite
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal

from mas_gym.errors import MissingDependencyError
from mas_gym.internal.workers import LineProcess

SymbolicVerdict = Literal["equal", "different", "timed out", "too complex"]

CPU_SECONDS = 2.0  # CPU time of the worker, so that machine load changes no result
ANSWER_SECONDS = 30.0  # wall-clock time after which the worker is killed
MEMORY_BYTES = 4 << 30
TOLERANCE = 1e-3
EXACT = 1e-12

_MAX_CHARS = 300
_MAX_NESTING = 12
_MAX_POWER = 1000
_LONG_DIGITS = re.compile(r"\d{31}")
_FOUR_DIGITS = re.compile(r"\d{4}")
_DIGITS = re.compile(r"\d+")
_POWER_OF_GROUP = re.compile(r"[)}]\s*\^")
_BIG_FACTORIAL = re.compile(r"\d{4}\s*+!|!\s*!|[)}\]]\s*!")
_COUNT = re.compile(r"\\(?:binom|dbinom|tbinom|prod|sum)(?![A-Za-z])")
# Input that the library would drop or misread instead of rejecting: "5 5" as 10, "3:30am" as 1/10, "1 \\ldots 5" as 6.
_FOREIGN = re.compile(
    r"[:;?\"'@#]|\.\.|(?<![_\d])\d++\s++[\d.]|\\(?:[lc]?dots|text|mathrm|p?mod|pmod|bmod|prime)(?![A-Za-z])"
    r"|(?<![\\A-Za-z])(?!(?:sin|cos|tan|cot|sec|csc|log|exp|arcsin|arccos|arctan|sinh|cosh|tanh)(?![A-Za-z]))[A-Za-z]{3}"
)
COMMAND = re.compile(r"\\[A-Za-z]+")
ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[^{}]*+\}")
_POWER = re.compile(r"\^(?:\{(?P<group>[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+)\}|(?P<one>.))")


def require_math() -> None:
    """Check that the symbolic engine is installed. Raises `MissingDependencyError` otherwise."""
    if find_spec("math_verify") is None:
        raise MissingDependencyError(
            "comparing mathematical expressions needs the package math-verify, which is not installed; "
            "run: pip install 'mas-gym[math]'"
        )


def too_complex(text: str) -> bool:
    """Whether an expression is too large to compare, by its length, nesting, digits, powers or factorials."""
    if len(text) > _MAX_CHARS or _LONG_DIGITS.search(text) or _BIG_FACTORIAL.search(text):
        return True
    count = _COUNT.search(text)
    if count is not None and _FOUR_DIGITS.search(text, count.end()):
        return True
    depth = deepest = 0
    for sign in text:
        depth += (sign in "({[") - (sign in ")}]")
        deepest = max(deepest, depth)
    if deepest > _MAX_NESTING:
        return True
    total = 1
    for power in _POWER.finditer(text):
        inside = power["group"] or power["one"] or ""
        digits = [int(number) for number in _DIGITS.findall(inside)]
        if "^" in inside or max(digits, default=0) > _MAX_POWER:
            return True
        total *= max([1, *digits])
    # powers of powers multiply: (9^{99})^{99}
    return total > _MAX_POWER and _POWER_OF_GROUP.search(text) is not None


def _is_foreign(reference: str, answer: str) -> bool:
    """Whether math-verify would misread one of the expressions or, as with ``R`` and ``r``, mix up two variables."""
    letters = set(COMMAND.sub(" ", ENVIRONMENT.sub(" ", reference + answer)))
    mixed = any(letter.islower() and letter.upper() in letters for letter in letters)
    return mixed or any(_FOREIGN.search(ENVIRONMENT.sub(" ", text)) for text in (reference, answer))


@lru_cache(maxsize=65536)
def equal_by_meaning(reference: str, answer: str) -> SymbolicVerdict:
    """Compare two normalized LaTeX expressions by meaning.

    Thread-safe. A comparison that runs out of time or memory is ``"timed out"``,
    which grading counts as wrong.

    Raises:
        MissingDependencyError: math-verify is not installed or cannot be started.
    """
    if too_complex(reference) or too_complex(answer):
        return "too complex"
    if _is_foreign(reference, answer):
        return "different"
    require_math()
    try:
        verdict: SymbolicVerdict = _worker.ask([reference, answer], ANSWER_SECONDS)
    except (EOFError, TimeoutError):
        return "timed out"
    except ChildProcessError as error:
        raise MissingDependencyError(
            "the symbolic engine did not start; check that this works: python -c 'import math_verify', "
            "or run: pip install --force-reinstall 'mas-gym[math]'"
        ) from error
    return verdict


_worker = LineProcess("mas_gym.tasks.grading.symbolic:_prepare", quiet=True)


# ------------------------------------------------------------------ the worker process


class _OutOfTimeError(BaseException):
    """Raised by the CPU timer; not an `Exception`, so that no library handler swallows it."""


def _out_of_time(number: int, frame: object) -> None:
    raise _OutOfTimeError


def _prepare() -> Callable[[list[str]], SymbolicVerdict]:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    logging.disable(logging.CRITICAL)
    compare = _comparer()
    timed = sys.platform != "win32"
    if timed:
        signal.signal(signal.SIGVTALRM, _out_of_time)

    def answer(pair: list[str]) -> SymbolicVerdict:
        try:
            if timed:
                # the timer repeats, in case one exception is lost inside a finaliser
                signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS, 0.1)
            return "equal" if compare(*pair) else "different"
        except (_OutOfTimeError, MemoryError, RecursionError):
            return "timed out"
        except Exception:
            return "different"
        finally:
            if timed:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    return answer


def _comparer() -> Callable[[str, str], bool]:
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import Basic, Expr, MatrixBase, N, S

    config = [LatexExtractionConfig(boxed_match_priority=-1)]

    def read(text: str) -> list[Basic | MatrixBase]:
        found = parse(f"${text}$", config, fallback_mode="no_fallback", parsing_timeout=None)
        return [expression for expression in found if isinstance(expression, Basic | MatrixBase)]

    def constant(found: list[Basic | MatrixBase]) -> complex | None:
        if len(found) == 1 and isinstance(found[0], Expr) and not found[0].free_symbols:
            with contextlib.suppress(TypeError, ValueError):
                return complex(N(found[0], 30))
        return None

    def compare(reference: str, answer: str) -> bool:
        right, given = read(reference), read(answer)
        if not right or not given:
            return False
        # math-verify finds every true relation equal to the empty set
        if S.EmptySet in right or S.EmptySet in given:
            return S.EmptySet in right and S.EmptySet in given
        x, y = constant(right), constant(given)
        if x is None or y is None or not (isfinite(x) and isfinite(y)):
            return bool(verify(right, given, allow_set_relation_comp=True, timeout_seconds=None))
        # math-verify rounds to six places, so that all tiny numbers would be equal
        rounded = "." in reference or "." in answer
        size = max(abs(x), abs(y))
        return abs(x - y) <= (TOLERANCE * min(1.0, size) if rounded else EXACT * size)

    return compare
