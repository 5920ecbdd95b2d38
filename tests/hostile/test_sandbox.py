"""Code that a model wrote: graded as `python file.py` would run it, and kept from everything else on the machine."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from mas_gym.errors import ConfigError
from mas_gym.tasks import load_task
from mas_gym.tasks.grading.sandbox import Limits, Sandbox, check_sandbox, run_tests

ROOT = Path(__file__).parents[2]
HOLES = Path(__file__).with_name("holes.py")
PATIENT = 60.0
ANY = "assert 1"


def _missing() -> str:
    try:
        check_sandbox("bubblewrap")
    except ConfigError as error:
        return str(error).partition(";")[0]
    return ""


MISSING = _missing()
isolated = pytest.mark.skipif(bool(MISSING), reason=MISSING)
both = pytest.mark.parametrize("sandbox", [pytest.param("bubblewrap", marks=isolated), "none"])


# ------------------------------------------------------------------ as in `python file.py`

RIGHT = {
    "a class variable": (
        "from dataclasses import dataclass\nfrom typing import ClassVar\n"
        "@dataclass\nclass A:\n    shared: ClassVar[int] = 3\n    x: int = 1",
        "from dataclasses import fields\nassert [f.name for f in fields(A)] == ['x'] and A.__annotations__['x'] is int",
    ),
    "annotations as texts": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom typing import ClassVar\n"
        "@dataclass\nclass A:\n    shared: ClassVar[int] = 3\n    x: int = 1",
        "from dataclasses import fields\nassert [f.name for f in fields(A)] == ['x']\n"
        "def f(x: int): pass\nassert f.__annotations__ == {'x': int} and A.__annotations__['x'] == 'int'",
    ),
    "pickles": (
        "class A:\n    x = 1\n    def __eq__(self, other): return type(self) is type(other)",
        "import pickle, copy\nassert pickle.loads(pickle.dumps(A())) == copy.deepcopy(A()) == A()",
    ),
    "the main module": (
        "done = False\nif __name__ == '__main__':\n    done = True",
        "import __main__, inspect, sys\nassert done and __main__.done and sys.argv == [__file__]",
    ),
    "another working folder": ("import os\nos.chdir('/')\nopen = None", "assert os.getcwd() == '/'"),
    "its own source": ("def f():\n    return 3", "import inspect\nassert 'return 3' in inspect.getsource(f)"),
    "unit tests": (
        "def f(x):\n    return 2 * x",
        "import unittest\nclass T(unittest.TestCase):\n    def test_f(self): self.assertEqual(f(2), 4)\n"
        "if __name__ == '__main__':\n    unittest.main()",
    ),
    "threads": (
        "from concurrent.futures import ThreadPoolExecutor\nfrom multiprocessing.pool import ThreadPool",
        "with ThreadPoolExecutor(4) as pool: assert list(pool.map(abs, [-1, 2])) == [1, 2]\n"
        "with ThreadPool(2) as pool: assert pool.map(abs, [-1, 2]) == [1, 2]",
    ),
    "coroutines": (
        "import asyncio\nasync def f():\n    await asyncio.sleep(0.001)\n    return await asyncio.to_thread(abs, -4)",
        "assert asyncio.run(f()) == 4",
    ),
    "files": (
        "import pathlib, shutil, sqlite3, tempfile\ndef f():\n    with tempfile.TemporaryDirectory() as folder:\n"
        "        path = pathlib.Path(folder, 'x')\n        path.write_text('a')\n"
        "        path.rename(path.with_suffix('.y'))\n"
        "        shutil.copy2(path.with_suffix('.y'), path)\n        path.unlink()\n"
        "        sqlite3.connect(path).execute('create table t (a)')\n"
        "        return sorted(found.name for found in path.parent.iterdir())",
        "assert f() == ['x', 'x.y'] and pathlib.Path('here').write_text('b') == 1",
    ),
    "signals and time zones": (
        "import datetime, signal, zoneinfo\ncaught = []\nsignal.signal(signal.SIGALRM, lambda *_: caught.append(1))",
        "signal.raise_signal(signal.SIGALRM)\nassert caught\n"
        "assert datetime.datetime(2020, 7, 1, tzinfo=zoneinfo.ZoneInfo('Europe/Vienna')).utcoffset().seconds == 7200",
    ),
    "callbacks from C": (
        "import ctypes",
        "assert ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(lambda x: x + 1)(2) == 3",
    ),
    "packages": ("import numpy as np", "assert (np.eye(200) @ np.eye(200)).trace() == 200"),
    "prints and an empty input": (
        "print('x' * 100_000)\ntry:\n    input()\nexcept EOFError:\n    ended = True",
        "assert ended",
    ),
    "a thread that never ends": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()",
        ANY,
    ),
}


@both
@pytest.mark.parametrize("what", RIGHT)
def test_correct_code_passes(what: str, sandbox: Sandbox) -> None:
    code, tests = RIGHT[what]
    assert run_tests(code, tests, Limits(seconds=PATIENT, sandbox=sandbox)).reason == "tests passed"


WRONG = {
    "a wrong value": ("def f(x): return x", "assert f(2) == 4, f(2)", "f(2) is 2"),
    "wrong in unit tests": (
        "def f(x): return x",
        "import unittest\nclass T(unittest.TestCase):\n    def test_f(self): self.assertEqual(f(2), 4)\n"
        "unittest.main()",
        "unittest.main() ended tests.py with exit code 1",
    ),
    "unit tests of its own": (
        "import unittest\nclass T(unittest.TestCase):\n    def test_f(self): pass\nunittest.main()",
        "assert True",
        "SystemExit",
    ),
    "an early exit": ("raise SystemExit(0)", "assert False", "SystemExit: 0"),
    "an exit within a test": ("def f(x): exit(0)", "assert f(2) == 4", "SystemExit: 0"),
    "an exit at once": ("import os\nos._exit(0)", ANY, "ended before"),
    "a crash": ("import ctypes\nctypes.string_at(0)", ANY, "ended before"),
    "deep nesting": ("(" * 5000, ANY, "SyntaxError"),
    "endless recursion": ("def f(): f()\nf()", ANY, "RecursionError"),
    "too much memory": ("x = []\nwhile True: x.append('a' * (1 << 24))", ANY, "MemoryError"),
    "a large file": ("open('big', 'wb').write(b'x' * (1 << 21))", ANY, "File too large"),
    "a megabyte": ("x = 1\n" * 200_000, ANY, "too complex"),
    "a lone surrogate": ("x = '\ud800'", ANY, "UnicodeEncodeError"),
    "an error that cannot be shown": (
        "class E(Exception):\n    def __str__(self): raise E\nraise E",
        ANY,
        "tests failed: E",
    ),
    "a flooded report": (
        "import os\nfor n in range(3, 60):\n  try: os.write(n, b'x' * 100_000)\n  except OSError: pass",
        ANY,
        "ended before",
    ),
    "a forged report": (
        'import os\nfor n in range(3, 60):\n  try: os.write(n, b\'{"token": "guess", "error": 1}\\n\')\n'
        "  except OSError: pass\nos._exit(0)",
        ANY,
        "ended before",
    ),
}


@both
@pytest.mark.parametrize("what", WRONG)
def test_wrong_code_fails_with_a_reason(what: str, sandbox: Sandbox) -> None:
    code, tests, complaint = WRONG[what]
    limits = Limits(seconds=PATIENT, memory_bytes=1 << 28, sandbox=sandbox)
    verdict = run_tests(code, tests, limits)
    assert not verdict.correct and complaint in verdict.reason


# ------------------------------------------------------------------ forged results

UNIT = (
    "import unittest\nclass T(unittest.TestCase):\n"
    "    def test_f(self):\n        self.assertEqual(f(2), 4)\n        self.assertTrue(f(2) == 4)\nunittest.main()"
)
LOOP = "for x in (2, 3):\n    assert f(x) == 2 * x"
FORGED_TESTS = (
    *("assert f(2) == 4", "assert abs(f(2) - 4) < 1e-6", "def check(c):\n    assert c(2) == 4\ncheck(f)"),
    *(UNIT, UNIT.replace("assertEqual", "assertAlmostEqual"), LOOP, "assert all(f(x) == 2 * x for x in (2, 3))"),
)
EQUAL = "__eq__ = lambda *_: True\n    __ne__ = lambda *_: False\n    __hash__ = object.__hash__"
NUMBER = f"class E:\n    {EQUAL}\n    __abs__ = __sub__ = __rsub__ = __neg__ = lambda self, *_: self\n"
FRAME = (
    "import os, sys, json\nframe = sys._getframe()\nwhile frame:\n"
    "    for value in (*frame.f_locals.values(), *frame.f_globals.values()):\n"
    "        if isinstance(value, dict) and 'token' in value:\n"
    "            for n in range(3, 9):\n"
    "                try: os.write(n, json.dumps({'token': value['token']}).encode())\n"
    "                except OSError: pass\n"
    "    frame = frame.f_back\n"
)
FORGERIES = {
    "an object equal to everything": f"class E:\n    {EQUAL}\ndef f(x): return E()",
    "a number equal to everything": f"class E(int):\n    {EQUAL}\ndef f(x): return E()",
    "mock.ANY": "from unittest.mock import ANY\ndef f(x): return ANY",
    "an object close to everything": f"{NUMBER}    __lt__ = __le__ = __gt__ = lambda *_: True\ndef f(x): return E()",
    "a text that looks like a number": "class E(str):\n    __repr__ = lambda self: '4'\ndef f(x): return E()",
    "the token in a frame": f"{FRAME}def f(x): return 0",
    "the report called from a frame": (
        "import sys\ndef f(x):\n    sys.audit('mas_gym.case_result', '4', None, False)\n    return 0"
    ),
    "the token among all objects": "import gc\nif gc.get_objects(): pass\ndef f(x): return 0",
    "a replaced function of the runner": (
        "import sys\nframe = sys._getframe()\nwhile frame.f_back: frame = frame.f_back\n"
        "frame.f_globals['_run'] = lambda *_: None\nframe.f_globals['_described'] = lambda *_: None\n"
        "def f(x): return 0"
    ),
    "the tests in a frame": (
        "import sys\nframe = sys._getframe()\nwhile frame:\n    if 'job' in frame.f_locals:\n"
        "        cases = frame.f_locals['job']['cases']\n        cases[:-2] = ['pass'] * (len(cases) - 2)\n"
        "    frame = frame.f_back\ndef f(x): return 0"
    ),
    "a replaced verdict": (
        "import unittest\ndef f(x):\n    unittest.TextTestResult.wasSuccessful = lambda _: True\n    return 0"
    ),
    "a skipped test": "import unittest\ndef f(x): raise unittest.SkipTest('x')",
    "a replaced builtin": "import builtins\nbuiltins.all = lambda _: True\ndef f(x): return 0",
    "load_tests": "import unittest\ndef load_tests(*_): return unittest.TestSuite()\ndef f(x): return 0",
    "load_tests at the call": (
        "import unittest\ndef f(x):\n    unittest.TestCase.assertEqual = unittest.TestCase.assertTrue = lambda *_: 0\n"
        "    return 0"
    ),
    "a replaced assertEqual": (
        "import unittest\nunittest.TestCase.assertEqual = lambda *_: None\n"
        "unittest.TestCase.assertTrue = lambda *_: None\ndef f(x): return 0"
    ),
    "a replaced loader": (
        "import unittest\nunittest.TestLoader.loadTestsFromModule = lambda *_, **__: unittest.TestSuite()\n"
        "unittest.defaultTestLoader.loadTestsFromModule = lambda *_, **__: unittest.TestSuite()\ndef f(x): return 0"
    ),
    "a replaced run": "import unittest\nunittest.TestCase.run = lambda *_: None\ndef f(x): return 0",
    "a replaced main": "import unittest\nunittest.main = lambda: None\ndef f(x): return 0",
    "the name of unittest": "__name__ = 'unittest.main'\ndef f(x): raise SystemExit(0)",
    "an exit of the process": "import os\ndef f(x): os._exit(0)",
    "a replaced AssertionError": "import builtins\nbuiltins.AssertionError = SystemExit\ndef f(x): return 0",
    "a replaced comparison": "def f(x):\n    globals()['__same__'] = lambda *_: True\n    return 0",
    "a replaced not": "import builtins\nbuiltins.bool = builtins.abs = lambda *_: True\ndef f(x): return 0",
}


@pytest.mark.parametrize("what", FORGERIES)
def test_forged_result_fails(what: str) -> None:
    for tests in FORGED_TESTS:
        assert not run_tests(FORGERIES[what], tests, Limits(seconds=PATIENT, sandbox="none")).correct, tests


@pytest.mark.parametrize("tests", FORGED_TESTS)
def test_honest_result_passes_the_tests_that_forgeries_fail(tests: str) -> None:
    assert run_tests("def f(x): return 2 * x", tests, Limits(seconds=PATIENT, sandbox="none")).correct


@pytest.mark.parametrize(
    "tests",
    [
        "",
        "x = 1",
        "def test_f(): assert f(2) == 5",
        "import unittest\nclass T(unittest.TestCase): pass\nunittest.main()",
    ],
)
def test_tests_that_run_no_test_fail(tests: str) -> None:
    limits = Limits(seconds=PATIENT, sandbox="none")
    assert "no test ran" in run_tests("def f(x): return 2 * x", tests, limits).reason


def test_unit_test_that_its_decorator_skips_does_not_fail_the_others() -> None:
    tests = UNIT.replace("unittest.main()", "    @unittest.skip('')\n    def test_g(self): g()\nunittest.main()")
    assert run_tests("def f(x): return 2 * x", tests, Limits(seconds=PATIENT, sandbox="none")).correct


VALUES = [
    ("assert f(2) == 4 and not f(0)", "assert f(2) == 4 and f(0)"),
    ("assert f('a') == 'aa', 'twice'", "assert f('a') == 'ab'"),
    ("assert 1 < f(2) - 1 != 4", "assert 4 < f(2) - 1"),
    ("assert f(float('inf')) == 1e999 and f(1) in (1, 2)", "assert f(1) not in [2]"),
    ("import math\nassert math.isclose(f(0.1), 0.2, rel_tol=1e-9)", "import math\nassert math.isclose(f(0.1), 0.3)"),
    ("assert {f(1): (f(2), {3})} == {2: (4, {3})}", "assert [f(1)] == (2,)"),
    ("assert f(2) is not None and f([1]) == [1, 1]", "assert f(2) is None"),
    ("assert __import__('fractions').Fraction(f(1), 4) == 0.5", "assert __import__('fractions').Fraction(f(1)) == 3"),
    ("x = [1]\nx.append(f(1))\nassert x == [1, 2]", "x = [1]\nassert x == [f(1)]"),
    (
        "try:\n    f(None)\n    raise SystemExit\nexcept TypeError:\n    pass",
        "try: f(1) + 1\nfinally: assert 0",
    ),
]


@pytest.mark.parametrize(("right", "wrong"), VALUES)
def test_tests_of_values_pass_and_fail_as_in_python(right: str, wrong: str) -> None:
    limits = Limits(seconds=PATIENT, sandbox="none")
    assert run_tests("def f(x): return x + x", right, limits).reason == "tests passed"
    assert not run_tests("def f(x): return x + x", wrong, limits).correct


@both
@pytest.mark.parametrize(
    "code",
    [
        "import time\ntime.sleep(600)",
        "while True: pass",
        "import signal\nfor n in (2, 15, 24): signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "while True:\n  try: raise KeyError\n  except BaseException: pass",
    ],
)
def test_endless_code_times_out(code: str, sandbox: Sandbox) -> None:
    assert run_tests(code, ANY, Limits(seconds=0.5, sandbox=sandbox)).reason == "timed out"


@both
def test_forged_reports_are_ignored(sandbox: Sandbox) -> None:
    line = json.dumps({"token": "x", "value": "1", "reason": None}) + "\n"
    code = f"import os\nfor n in range(3, 9):\n  try: os.write(n, {line.encode()!r})\n  except OSError: pass"
    assert not run_tests(code, "assert 1 / 1 == 1\nassert 1 / 0 == 1", Limits(seconds=PATIENT, sandbox=sandbox)).correct


@both
def test_limits_are_enforced_and_excess_cpu_time_is_a_timeout(sandbox: Sandbox) -> None:
    limits = Limits(seconds=PATIENT, memory_bytes=1 << 29, file_bytes=1 << 16, sandbox=sandbox)
    code = (
        "import os, resource, signal\ndef limit(name): return resource.getrlimit(getattr(resource, 'RLIMIT_' + name))"
    )
    tests = (
        "assert [limit(name) for name in ('CPU', 'AS', 'FSIZE', 'CORE')] == "
        f"[(61, 62), ({1 << 29}, {1 << 29}), ({1 << 16}, {1 << 16}), (0, 0)]\nassert 256 <= limit('NPROC')[1] < 100_000"
    )
    assert run_tests(code, tests, limits).correct
    assert run_tests(code, "os.kill(os.getpid(), signal.SIGXCPU)", limits).reason == "timed out"


@both
def test_error_is_one_escaped_line_of_bounded_length(sandbox: Sandbox) -> None:
    limits = Limits(seconds=PATIENT, sandbox=sandbox)
    reason = run_tests("raise ValueError('é\\x1b[31m\\n\\u202e' + 'x' * 10**6)", ANY, limits).reason
    assert reason.startswith("tests failed: ValueError: é\\x1b[31m\\n\\u202e") and reason.isprintable()
    assert len(reason) <= len("tests failed: ") + 200


@both
def test_code_inherits_no_environment(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    limits = Limits(seconds=PATIENT, sandbox=sandbox)
    assert run_tests("import os", "assert 'OPENAI_API_KEY' not in os.environ", limits).correct


# ------------------------------------------------------------------ the walls


@isolated
@pytest.mark.parametrize(
    "code",
    ["import os\nwhile True: os.fork()", "import subprocess, sys\nsubprocess.run([sys.executable, '-V'])"],
)
def test_code_cannot_start_processes(code: str) -> None:
    assert "PermissionError" in run_tests(code, ANY, Limits(seconds=PATIENT)).reason


@isolated
@pytest.mark.parametrize(
    "code",
    ["socket.socketpair(socket.AF_INET)", "socket.socketpair(socket.AF_TIPC)", "socket.socket(socket.AF_UNIX)"],
)
def test_code_cannot_open_sockets_other_than_local_pairs(code: str) -> None:
    tests = "import socket\na, b = socket.socketpair()\na.send(b'x')\nassert b.recv(1) == b'x'"
    assert run_tests("", tests, Limits(seconds=PATIENT)).correct
    assert "PermissionError" in run_tests(f"import socket\n{code}", ANY, Limits(seconds=PATIENT)).reason


@isolated
def test_total_file_size_is_limited() -> None:
    code = "for n in range(1000): open(f'/tmp/{n}', 'wb').write(b'x' * (1 << 20))"
    assert "No space left on device" in run_tests(code, ANY, Limits(seconds=PATIENT)).reason


def _descendants(ancestor: int) -> set[int]:
    """Return the processes that an ancestor has started; those that have ended and wait for init do not count."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = status.read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                parents[int(status.parent.name)] = int(parent)
    found, last = {ancestor}, 0
    while len(found) > last:
        last = len(found)
        found |= {process for process, parent in parents.items() if parent in found}
    return found & set(parents) - {ancestor}


def _wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@both
def test_code_is_killed_when_its_grading_process_ends(sandbox: Sandbox) -> None:
    limits = Limits(seconds=999, sandbox=sandbox)
    grading = f"from mas_gym.tasks.grading.sandbox import *; run_tests('while True: pass', 'assert 1', {limits})"
    parent = subprocess.Popen([sys.executable, "-c", grading], env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        # The guard; bubblewrap inside and outside of the namespace; Python.
        _wait_for(lambda: len(_descendants(parent.pid)) == (4 if sandbox == "bubblewrap" else 2))
        code = _descendants(parent.pid)
    finally:
        parent.kill()
        parent.wait()
    _wait_for(lambda: not code & _descendants(1))


def _attack(*start: str, walls: str) -> dict[str, str]:
    done = subprocess.run(
        [*start, sys.executable, str(HOLES), walls],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPENAI_API_KEY": "sk-secret", "TMPDIR": "/tmp"},
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert "sk-secret" not in done.stdout
    for name, reason in found["reasons"].items():
        # Rejected by the system; code that succeeded would have passed, or ended with its parent.
        assert reason.startswith("tests failed: ") and "Error: " in reason, name
        assert not any(word in reason for word in ("AssertionError", "SyntaxError", "NameError", "TypeError")), name
    return found  # type: ignore[no-any-return]


@isolated
@pytest.mark.parametrize("walls", ["filtered", "unfiltered"])
def test_attacks_as_root_are_blocked(walls: str) -> None:
    assert _attack(walls=walls)["user"] == os.getuid()


@pytest.fixture
def as_nobody(tmp_path: Path) -> list[str]:
    """A command that runs another as the user nobody, with access to this Python even in a private folder."""
    if os.getuid() != 0 or not all(map(shutil.which, ("unshare", "setpriv", "mount"))):
        pytest.skip("needs root, unshare, setpriv and mount")
    needed = {Path(sys.base_prefix), Path(sys.prefix), ROOT}
    private = {place for path in needed for place in path.parents if not place.stat().st_mode & 1}
    steps = []
    hidden = [path for path in needed if private.intersection(path.parents)]
    for number, path in enumerate(hidden):
        (tmp_path / str(number)).mkdir()
        steps.append(f"mount --bind '{path}' '{tmp_path}/{number}'")
    steps += [f"mount -t tmpfs -o mode=755 none '{place}'" for place in sorted(private)]
    steps += [f"mkdir -p '{path}' && mount --bind '{tmp_path}/{n}' '{path}'" for n, path in enumerate(hidden)]
    become = "exec setpriv --reuid 65534 --regid 65534 --clear-groups"
    command = ["unshare", "--mount", "bash", "-ec", "; ".join([*steps, f'{become} "$@"']), "as-nobody"]
    tried = subprocess.run(
        [
            *command,
            sys.executable,
            "-c",
            "import numpy; from mas_gym.tasks.grading.sandbox import *; check_sandbox('bubblewrap')",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode:
        pytest.skip(f"an ordinary user cannot run this here: {tried.stderr.strip()[-200:]}")
    return command


@isolated
@pytest.mark.parametrize("walls", ["filtered", "unfiltered"])
def test_attacks_as_ordinary_user_are_blocked(walls: str, as_nobody: list[str]) -> None:
    assert _attack(*as_nobody, walls=walls)["user"] == 65534


# ------------------------------------------------------------------ where code cannot be isolated


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which programs are found."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_code_grading_requires_bubblewrap_or_explicit_opt_out(programs: Path) -> None:
    (programs / "my.csv").write_text("question,answer\nWrite f.,assert f(2) == 4\n")
    with pytest.raises(ConfigError, match=r"apt install bubblewrap.*--sandbox none"):
        load_task(programs / "my.csv", allow_code=True)
    task = load_task(programs / "my.csv", allow_code=True, sandbox="none")
    assert task.grade(task[0], "```\ndef f(x): return 2 * x\n```").correct
    with pytest.raises(ConfigError, match="--allow-code"):
        load_task(programs / "my.csv", kind="text", sandbox="none")


@pytest.mark.skipif(sys.platform != "linux", reason="bubblewrap is for Linux")
@pytest.mark.parametrize(
    "script",
    ["echo 'bwrap: No permissions to create new namespace' >&2; exit 1", "kill -9 $$", "echo hello", "sleep 0"],
)
def test_missing_isolation_raises_instead_of_grading(script: str, programs: Path) -> None:
    (programs / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
    (programs / "bwrap").chmod(0o755)
    with pytest.raises(ConfigError, match=r"cannot isolate it here.*--sandbox none") as caught:
        run_tests("x = 1", "assert x == 1")
    assert "No permissions" in str(caught.value) or "No permissions" not in script
    with pytest.raises(ConfigError, match="cannot isolate"):
        check_sandbox("bubblewrap")


def test_unknown_sandboxes_are_rejected() -> None:
    with pytest.raises(ConfigError, match="sandbox: expected one of 'bubblewrap', 'none'"):
        check_sandbox("docker")
