r"""Symbolic equality, by a maintained library in a process that can be stopped.

The library (math-verify, on sympy) bounds its own work with signals, which only
a main thread can take, and a big-integer power inside it answers to no signal
at all. So one worker process, started when the first comparison needs it, does
the comparing: it limits its own CPU time and memory, and is killed if it is not
back in time, from whatever thread asked. What is plainly too large is refused
before the library sees it. No text is ever evaluated: the library parses LaTeX
by a grammar.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import threading
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from mas_gym.errors import MissingDependencyError

SymbolicVerdict = Literal["equal", "different", "timed out", "too complex"]

START_SECONDS = 120.0
ANSWER_SECONDS = 30.0  # wall clock; the worker's own limit is 2 s of CPU time, so load does not change results

_MAX_CHARS = 300
_MAX_NESTING = 12
_MAX_POWER = 1000
_LONG_DIGITS = re.compile(r"\d{31}")
_FOUR_DIGITS = re.compile(r"\d{4}")
_DIGITS = re.compile(r"\d+")
_POWER_OF_GROUP = re.compile(r"[)}]\s*\^")
_BIG_FACTORIAL = re.compile(r"\d{4}\s*+!|!\s*!|[)}\]]\s*!")
_COUNT = re.compile(r"\\(?:binom|dbinom|tbinom|prod|sum)(?![A-Za-z])")
# What the library would drop or misread rather than refuse: "5 5" as 10, "3:30am" as 1/10, "1 \\ldots 5" as 6.
_FOREIGN = re.compile(
    r"[:;?\"'@#]|\.\.|(?<![_\d])\d++\s++[\d.]|\\(?:[lc]?dots|text|mathrm|p?mod|pmod|bmod|prime)(?![A-Za-z])"
    r"|(?<![\\A-Za-z])(?!(?:sin|cos|tan|cot|sec|csc|log|exp|arcsin|arccos|arctan|sinh|cosh|tanh)(?![A-Za-z]))[A-Za-z]{3}"
)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_POWER = re.compile(r"\^(?:\{(?P<group>[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+)\}|(?P<one>.))")


def require_math() -> None:
    """Check that the symbolic engine is installed.

    Raises:
        MissingDependencyError: It is not.
    """
    if find_spec("math_verify") is None:
        raise MissingDependencyError(
            "comparing mathematical expressions needs the package math-verify, which is not installed; "
            "run: pip install 'mas-gym[math]'"
        )


def too_complex(text: str) -> bool:
    """Whether an expression is refused unseen, for its length, nesting, digits, powers or factorials."""
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
    """Whether the library would misread one of the two; it also takes ``R`` and ``r`` for one variable."""
    letters = set(_COMMAND.sub(" ", reference + answer))
    mixed = any(letter.islower() and letter.upper() in letters for letter in letters)
    return mixed or any(_FOREIGN.search(text) is not None for text in (reference, answer))


@lru_cache(maxsize=65536)
def ask(reference: str, answer: str) -> SymbolicVerdict:
    """Compare two normalised LaTeX expressions by meaning.

    Safe to call from any thread. A comparison that runs out of time or memory
    is ``"timed out"``, which grading counts as wrong.

    Raises:
        MissingDependencyError: The symbolic engine is not installed.
    """
    if too_complex(reference) or too_complex(answer):
        return "too complex"
    if _is_foreign(reference, answer):
        return "different"
    require_math()
    return _worker.compare(reference, answer)


class _Worker:
    """The one comparing process of this process, started on demand and after every failure."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def compare(self, reference: str, answer: str) -> SymbolicVerdict:
        with self._lock:
            process = self._running()
            request = json.dumps([reference, answer])
            try:
                assert process.stdin is not None
                process.stdin.write(request + "\n")
                process.stdin.flush()
                reply = self._lines.get(timeout=ANSWER_SECONDS)
            except (OSError, queue.Empty):
                reply = ""
            if reply.strip() in ("equal", "different", "timed out"):
                return reply.strip()  # type: ignore[return-value]
            self._stop()
            return "timed out"

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        script = Path(__file__).with_name("symbolic_worker.py")
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="ascii",
        )
        self._lines = queue.SimpleQueue()
        threading.Thread(target=_pump, args=(self._process, self._lines), daemon=True).start()
        try:
            ready = self._lines.get(timeout=START_SECONDS)
        except queue.Empty:
            ready = ""
        if ready.strip() != "ready":
            self._stop()
            raise MissingDependencyError(
                "the symbolic engine did not start; check that this works: python -c 'import math_verify', "
                "or run: pip install --force-reinstall 'mas-gym[math]'"
            )
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                # the pipe may be broken already
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()

    def forget(self) -> None:
        """Drop a worker that belongs to the parent of a fork, without touching it."""
        if self._process is not None:
            # only the parent may wait for it, and must not be warned about it here
            self._process.returncode = 0
        self._lock = threading.Lock()
        self._process = None


def _pump(process: subprocess.Popen[str], lines: queue.SimpleQueue[str]) -> None:
    assert process.stdout is not None
    # closed under the reader's hands when the worker is stopped
    with contextlib.suppress(ValueError):
        for line in process.stdout:
            lines.put(line)
    lines.put("")


_worker = _Worker()
atexit.register(lambda: _worker._stop())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_worker.forget)
