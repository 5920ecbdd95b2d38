"""Runs a message's code against unit tests, in a process with limits, isolated by bubblewrap.

`Limits.sandbox` selects the isolation:

- ``"bubblewrap"`` (Linux on x86-64 and ARM64): the process can read only Python and its packages, and write only to an
  empty ``/tmp``. It has no access to other files, other processes, the network or environment variables. In addition,
  an allow-list of system calls (`mas_gym.tasks.grading.syscalls`) rejects sockets, new processes and rare calls.
- ``"none"``: an ordinary process with your permissions, for a dedicated container or virtual machine.

In both cases, CPU time, memory, file sizes, open files and the number of processes and threads (except those of
root) are limited, and the process group is killed at the end.

Code cannot forge a comparison of its result with a literal, such as ``assert f(2) == 4``: the sandboxed process returns
the value, which must consist of numbers, texts and containers of them, and this process compares it
(`mas_gym.tasks.grading.value_tests`). All other tests run in the code's process, where the known forgeries fail: an
object that is equal to everything, ``load_tests``, replaced parts of unittest and builtins, and access to the report.
At the end, two tests that must fail reveal code that passes everything.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import os
import secrets
import select
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, cast, get_args

from mas_gym.errors import ConfigError
from mas_gym.internal.process_groups import guard, kill
from mas_gym.internal.suggestions import choice
from mas_gym.internal.text import one_line
from mas_gym.tasks.base import Grade
from mas_gym.tasks.grading.syscalls import seccomp_program, supported
from mas_gym.tasks.grading.value_tests import Value, steps_of

MAX_CHARS = 65_536
"""Maximum length of the code, and of the tests."""

Sandbox = Literal["bubblewrap", "none"]
"""The isolation of code."""

_START_SECONDS = 120.0  # to start the interpreter, on a busy machine
_VALUE_BYTES = 1 << 18
_SHOWN = 200
_LATE, _NOT_REACHED = "timed out", "not reached"
_MUST_FAIL = ("assert 0 == 1", "__import__('unittest').TestCase().assertEqual(0, 1)")
_WRITABLE_BYTES = 1 << 26
_MORE_TASKS = 256
_RUNNER = Path(__file__).with_name("code_runner.py")
_ENVIRONMENT = {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/nix/store")
_FILES = ("/etc/ld.so.cache", "/usr/share/zoneinfo")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_ALTERNATIVE = (
    "or pass sandbox='none' or --sandbox none to run it with your permissions (it can then read your files "
    "and API keys, and use the network)"
)


@dataclass(frozen=True)
class Limits:
    """Resource limits of one run of code.

    Attributes:
        seconds: Wall-clock time; CPU time has the same limit, rounded up.
        memory_bytes: Address space of the process.
        file_bytes: Size of one file.
        sandbox: The isolation, ``"bubblewrap"`` or ``"none"``.
    """

    seconds: float = 10.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20
    sandbox: Sandbox = "bubblewrap"


def run_tests(code: str, tests: str, limits: Limits = Limits()) -> Grade:
    """Run code and then its tests; both are Python in one module ``__main__``, as in ``python file.py``.

    Args:
        code: The code of the message.
        tests: Statements that raise if the code is wrong, such as ``assert f(2) == 4``; or ``unittest`` classes and
            ``unittest.main()``.
        limits: Limits of the run.

    Returns:
        The grade. Its reason is ``"tests passed"``, ``"timed out"``, ``"too complex"``, or ``"tests failed: "`` and the
        error in one line of at most 200 characters.

    Raises:
        ConfigError: The sandbox cannot be set up.
    """
    if max(len(code), len(tests)) > MAX_CHARS:
        return Grade(False, code, "too complex")
    try:
        steps = steps_of(tests)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        return _failed(code, f"{type(error).__name__} in the tests: {error}")
    cases = [case for step in steps for case in step.cases]
    must_fail = _MUST_FAIL if any(step.holds is None for step in steps) else ()
    found, late = _run(code, [*cases, *must_fail], limits)
    if late:
        return Grade(False, code, _LATE)
    results = iter(found)
    for step in steps:
        values = []
        for _, (value, reason) in zip(step.cases, results, strict=False):
            if reason is not None:
                return _failed(code, "the process ended before its tests did" if reason == _NOT_REACHED else reason)
            values.append(value)
        if step.holds is not None and not _holds(step.holds, values):
            wrong = (f"{case} is {value}" for case, value in zip(step.cases, values, strict=True))
            return _failed(code, "; ".join(wrong))
    if not all((reason or "").startswith("AssertionError") for _, reason in results):
        return _failed(code, "the code passes tests that must fail")
    return Grade(True, code, "tests passed") if steps else _failed(code, "no test ran")


def _failed(code: str, reason: str) -> Grade:
    return Grade(False, code, f"tests failed: {one_line(reason[:_SHOWN])[:_SHOWN]}")


def _holds(holds: Value, values: list[str | None]) -> bool:
    try:
        return bool(holds([ast.literal_eval(value or "") for value in values]))
    except (ValueError, TypeError, SyntaxError, ArithmeticError, MemoryError, RecursionError):
        return False


Result = tuple[str | None, str | None]
"""The value of a case as text, and the reason why it failed."""


def _run(code: str, cases: Sequence[str], limits: Limits) -> tuple[list[Result], bool]:
    """Run code and cases in a separate process; return one result per case, and whether the process timed out."""
    if os.name != "posix":
        raise ConfigError("running code from messages needs an operating system with resource limits (Linux, macOS)")
    token = secrets.token_hex(16)
    limit = {"seconds": limits.seconds, "memory": limits.memory_bytes, "file": limits.file_bytes}
    limit["tasks"] = _tasks_of_user() + _MORE_TASKS
    work = {"code": code, "cases": cases, "token": token, "limits": limit, "packages": _packages()}
    with (
        tempfile.TemporaryDirectory(prefix="mas-gym-code-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as job,
        tempfile.TemporaryFile() as complaints,
    ):
        job.write(json.dumps(work).encode("ascii"))
        job.seek(0)
        with _started(limits.sandbox, folder, job, complaints) as process:
            assert process.stdout is not None
            said, late = _read(process.stdout.fileno(), limits.seconds, len(cases))
        started, _, rest = said.partition(b"\n")
        if started != b"ready":
            complaints.seek(0)
            written = complaints.read(1 << 16).decode(errors="replace").split("\n")
            silent = f"no start in {_START_SECONDS:g} seconds" if late else "it ended without a message"
            reason = next(filter(None, reversed(written)), silent)
            raise _cannot_isolate(limits.sandbox, reason)
    # bubblewrap adds 128 to the number of a signal.
    late = late or process.returncode in (-signal.SIGXCPU, 128 + signal.SIGXCPU)
    results = [result for line in rest.splitlines() if (result := _result(line, token)) is not None]
    return (results + [(None, _NOT_REACHED)] * len(cases))[: len(cases)], late


def _result(line: bytes, token: str) -> Result | None:
    try:
        report = json.loads(line)
        if report["token"] == token:
            value, reason = (
                report[name] if report[name] is None else str(report[name]) for name in ("value", "reason")
            )
            return value, reason
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    return None


def check_sandbox(sandbox: str) -> Sandbox:
    """Return the isolation if code can run in it on this machine.

    Raises:
        ConfigError: The isolation does not exist or cannot be set up; the message contains the fix.
    """
    checked = cast(Sandbox, choice("sandbox", sandbox, get_args(Sandbox)))
    _try(checked, shutil.which("bwrap"))
    return checked


@functools.cache
def _try(sandbox: Sandbox, bwrap: str | None) -> None:
    _run("", [], Limits(sandbox=sandbox))


@contextlib.contextmanager
def _started(sandbox: Sandbox, folder: str, job: IO[bytes], complaints: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Start the process; at the end, kill its process group."""
    python = [_interpreter(), "-I", "-S", "-B", str(_RUNNER)]
    with contextlib.ExitStack() as open_files:
        command, home, descriptors = python, folder, []
        if sandbox == "bubblewrap":
            program = open_files.enter_context(tempfile.TemporaryFile())
            program.write(seccomp_program())
            program.seek(0)
            home, descriptors = "/tmp", [program.fileno()]
            command = [*_bubblewrap(), "--seccomp", str(program.fileno()), "--", *python]
        try:
            process = subprocess.Popen(
                command,
                stdin=job,
                stdout=subprocess.PIPE,
                stderr=complaints,
                cwd=folder,
                env=_ENVIRONMENT | {"HOME": home},
                start_new_session=True,
                pass_fds=descriptors,
            )
        except OSError as error:
            raise _cannot_isolate(sandbox, str(error)) from error
    try:
        guard(process.pid)
        yield process
    finally:
        kill(process.pid)
        assert process.stdout is not None
        process.stdout.close()
        process.wait()


def _bubblewrap() -> list[str]:
    """Return the command that isolates a process, without the system-call filter."""
    bwrap = shutil.which("bwrap")
    if not supported():
        raise ConfigError(
            "running code from messages: bubblewrap isolates it only on Linux on x86-64 and ARM64; grade on such a "
            f"machine, {_ALTERNATIVE}"
        )
    if bwrap is None:
        raise ConfigError(
            "running code from messages: expected the program bwrap, which isolates the code, but it was not found; "
            f"install it with 'apt install bubblewrap' (or your system's package bubblewrap), {_ALTERNATIVE}"
        )
    names = "--unshare-all --unshare-user --uid 65534 --gid 65534 --cap-drop ALL --die-with-parent --new-session"
    command = [bwrap, *names.split(), "--size", str(_WRITABLE_BYTES), "--tmpfs", "/tmp"]
    own = [os.path.join(sys.base_prefix, "lib"), os.path.join(sys.base_prefix, "lib64")]
    for path in dict.fromkeys([*_LIBRARIES, *_FILES, *own, *_packages(), _interpreter(), str(_RUNNER)]):
        command += ["--ro-bind-try", path, path]
    # Without /proc, programs that look for libraries relative to their own path do not find them.
    command += ["--setenv", "LD_LIBRARY_PATH", own[0]]
    for path in _DEVICES:
        command += ["--dev-bind", path, path]
    # The C library keeps semaphores in /dev/shm.
    return [*command, "--symlink", "/tmp", "/dev/shm", "--remount-ro", "/", "--chdir", "/tmp"]


def _cannot_isolate(sandbox: Sandbox, reason: str) -> ConfigError:
    said = one_line(reason)
    if sandbox == "none":
        return ConfigError(f"running code from messages: its process did not start: {said}")
    return ConfigError(
        f"running code from messages: bubblewrap 0.7 or newer cannot isolate it here: {said}; allow user namespaces "
        "(on Ubuntu, an AppArmor profile for bwrap; in a container, docker run --security-opt seccomp=unconfined "
        f"--security-opt apparmor=unconfined), {_ALTERNATIVE}"
    )


def _tasks_of_user() -> int:
    """Return the number of processes and threads of this user, to which the operating system's limit applies."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            count += len(os.listdir(process / "task")) if process.stat().st_uid == os.getuid() else 0
    return count


def _interpreter() -> str:
    """Return the base Python executable, to which the executable of a virtual environment links."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def _packages() -> list[str]:
    return [path for path in site.getsitepackages() if os.path.isdir(path)]


def _read(pipe: int, seconds: float, lines: int) -> tuple[bytes, bool]:
    """Return the process's report, and whether it is incomplete because the process or its code took too long."""
    poll, said, deadline = select.poll(), b"", time.monotonic() + _START_SECONDS
    poll.register(pipe, select.POLLIN | select.POLLHUP)
    while said.count(b"\n") <= lines and len(said) <= _VALUE_BYTES * (lines + 1):
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            return said, True
        chunk = os.read(pipe, 1 << 16)
        if not chunk:
            break
        deadline = deadline if said else time.monotonic() + seconds
        said += chunk
    return said, False
