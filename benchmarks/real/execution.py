"""Runs CodeGen's programs on the tests and calls that CodeGen wrote, in the sandbox, and keeps the results.

One process runs one program on all tests of its problem; distinct programs run once. Results are appended to a JSON
Lines file, so that an interrupted command resumes.
"""

from __future__ import annotations

import ast
import json
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mas_gym.tasks.grading.sandbox import Limits, Sandbox, run_cases

STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
"""Texts at which CodeT ends a program or a test."""

TESTS_PER_SAMPLE = 5
"""CodeT uses the first tests of a generated set."""

CASE_SECONDS = 0.1
"""Time limit of a generated test, as CodeT's; CPU time here."""

TRUTH_SECONDS = 3.0
"""CPU time limit of the problem's hidden tests."""

_LIMITS = Limits(seconds=90.0)
_SHOW_EVERY = 15.0


@dataclass(frozen=True)
class Problem:
    """One problem with the model's programs and tests.

    Attributes:
        id: Name of the problem.
        prompt: The beginning of the program, with signature and docstring.
        entry_point: Name of the function.
        test: The hidden tests, which define ``check``.
        programs: The completions, ended where CodeT ends them.
        tests: For each generated set, its first distinct tests.
        calls: For each generated set, the distinct calls of the function in its tests.
    """

    id: str
    prompt: str
    entry_point: str
    test: str
    programs: tuple[str, ...]
    tests: tuple[tuple[str, ...], ...]
    calls: tuple[tuple[str, ...], ...]

    @property
    def distinct_tests(self) -> list[str]:
        """The distinct tests of all sets, in order of appearance."""
        return list(dict.fromkeys(test for one in self.tests for test in one))

    @property
    def distinct_calls(self) -> list[str]:
        """The distinct calls of all sets, in order of appearance."""
        return list(dict.fromkeys(call for one in self.calls for call in one))


@dataclass(frozen=True)
class Result:
    """What one program did.

    Attributes:
        correct: Whether it passed the hidden tests.
        passed: Whether it passed each of `Problem.distinct_tests`.
        outputs: Its result for each of `Problem.distinct_calls`; None if it raised an error or timed out.
    """

    correct: bool
    passed: tuple[bool, ...]
    outputs: tuple[str | None, ...]


def read_problem(row: Mapping[str, Any]) -> Problem:
    """Return the problem of a row of ``humaneval_codegen.jsonl.gz``."""
    tests = tuple(tuple(assertions_of(text, row["entry_point"])[:TESTS_PER_SAMPLE]) for text in row["generated_tests"])
    calls = tuple(
        tuple(dict.fromkeys(call for test in one for call in calls_of(test, row["entry_point"]))) for one in tests
    )
    programs = tuple(map(ended, row["samples"]))
    return Problem(row["id"], row["prompt"], row["entry_point"], row["test"], programs, tests, calls)


def ended(text: str) -> str:
    """Return the text up to the first of CodeT's stop texts."""
    for stop in STOP:
        text = text.split(stop)[0]
    return text


def assertions_of(text: str, entry_point: str) -> list[str]:
    """Return the assertions on the function in a generated continuation of ``assert``, as CodeT reads them."""
    found = [
        ended(f"assert {part}".strip()).strip() for part in f"assert {text}".split("assert ") if entry_point in part
    ]
    return [test for test in found if _parsed(test) is not None]


def calls_of(test: str, entry_point: str) -> list[str]:
    """Return the outermost calls of the function in an assertion."""
    found, waiting = [], [_parsed(test)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == entry_point:
            found.append(ast.unparse(node))
        elif node is not None:
            waiting += reversed(list(ast.iter_child_nodes(node)))
    return found


def _parsed(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def execute(problems: list[Problem], cache: Path, *, sandbox: Sandbox, jobs: int) -> dict[str, list[Result]]:
    """Return, by problem, the result of each of its programs; those in the cache are not run again.

    Args:
        problems: The problems.
        cache: A JSON Lines file, which is created or extended.
        sandbox: The isolation of the programs.
        jobs: How many programs run at once.
    """
    known = {row["key"]: row for row in _rows(cache)}
    wanted = {_key(problem, program): (problem, program) for problem in problems for program in problem.programs}
    missing = [pair for key, pair in wanted.items() if key not in known]
    shown = time.monotonic()
    cache.parent.mkdir(parents=True, exist_ok=True)
    with cache.open("a", encoding="utf-8") as file, ThreadPoolExecutor(jobs) as pool:
        for done, row in enumerate(pool.map(partial(_run, sandbox=sandbox), missing), 1):
            known[row["key"]] = row
            file.write(json.dumps(row) + "\n")
            if time.monotonic() - shown > _SHOW_EVERY or done == len(missing):
                shown = time.monotonic()
                file.flush()
                print(f"{done:,} of {len(missing):,} programs run", file=sys.stderr)
    return {
        problem.id: [_result(known[_key(problem, program)]) for program in problem.programs] for problem in problems
    }


def _run(pair: tuple[Problem, str], sandbox: Sandbox) -> dict[str, Any]:
    problem, program = pair
    code = problem.prompt + program
    limits = Limits(seconds=_LIMITS.seconds, sandbox=sandbox)
    [truth] = run_cases(code, [f"{problem.test}\ncheck({problem.entry_point})\n"], limits, TRUTH_SECONDS)
    tests, calls = problem.distinct_tests, problem.distinct_calls
    found = run_cases(code, [*tests, *calls], limits, CASE_SECONDS)
    return {
        "schema": 1,
        "key": _key(problem, program),
        "problem": problem.id,
        "correct": truth.passed,
        "passed": "".join(str(int(one.passed)) for one in found[: len(tests)]),
        "outputs": [None if one.value is None else _digest(one.value) for one in found[len(tests) :]],
    }


def _result(row: Mapping[str, Any]) -> Result:
    return Result(row["correct"], tuple(one == "1" for one in row["passed"]), tuple(row["outputs"]))


def _rows(cache: Path) -> Iterator[dict[str, Any]]:
    if cache.exists():
        for line in cache.read_text(encoding="utf-8").splitlines():
            # The last line is cut short if the process was killed.
            if line.endswith("}"):
                yield json.loads(line)


def _key(problem: Problem, program: str) -> str:
    parts = [problem.prompt, program, problem.test, problem.distinct_tests, problem.distinct_calls]
    return _digest(json.dumps(parts), 16)


def _digest(text: str, size: int = 8) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).hexdigest()
