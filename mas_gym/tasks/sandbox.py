"""Runs a message's code against unit tests, in a process of its own with limits.

The process is killed with its whole group after `Limits.seconds`. Before the code runs, the
process limits its own CPU time, memory, file sizes and open files, drops its environment (so
that no API key is in reach), and sends everything that is printed nowhere. On Linux (x86-64 and
ARM64) it also installs a seccomp filter, as any user may: from then on no process can be started
or signalled, no socket opened, and no file created, changed or removed anywhere.

What stays open: code can read files that the user can read (it has no way to send them
anywhere), and since tests and code share a process, code that sets out to deceive its tests can
do so. On other systems there is no filter: the network is reachable and files can be written,
each up to `Limits.file_bytes`. `isolation` states which case this machine is.

The process is this file, run as a script, so its top-level imports are from the standard library
only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

MAX_CHARS = 65_536
"""Maximum length of the code, and of the tests."""

_START_SECONDS = 60.0  # to start the interpreter, on a busy machine
_RESULT_BYTES = 4096
_SHOWN = 200


@dataclass(frozen=True)
class Limits:
    """What one run of code may use.

    Attributes:
        seconds: Wall-clock time; CPU time has the same limit, rounded up.
        memory_bytes: Address space of the process.
        file_bytes: Size of one file, where files can be written at all.
    """

    seconds: float = 10.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20


class Verdict(NamedTuple):
    """The result of running code against its tests.

    Attributes:
        passed: Whether the code and all tests ran to their end.
        reason: ``"tests passed"``, ``"timed out"``, ``"too complex"``, or ``"tests failed: "`` and the error.
    """

    passed: bool
    reason: str


def run_tests(code: str, tests: str, limits: Limits = Limits()) -> Verdict:
    """Run code and then its tests; both are Python, and share one namespace.

    Args:
        code: What the message wrote.
        tests: Statements that raise if the code is wrong, such as ``assert f(2) == 4``.
        limits: What the run may use.

    Raises:
        ConfigError: The operating system cannot limit a process.
    """
    if not _can_limit():
        from mas_gym.errors import ConfigError

        raise ConfigError("grading code needs an operating system with resource limits (Linux or macOS)")
    if max(len(code), len(tests)) > MAX_CHARS:
        return Verdict(False, "too complex")
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="mas-gym-code-", ignore_cleanup_errors=True) as folder:
        job = Path(folder) / "job.json"
        limit = {"seconds": limits.seconds, "memory": limits.memory_bytes, "file": limits.file_bytes}
        job.write_text(json.dumps({"code": code, "tests": tests, "token": token, "limits": limit}), encoding="ascii")
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(Path(__file__)), str(job)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            said = _read(process.stdout.fileno(), limits.seconds)
        finally:
            # The leader is not reaped yet, so its number cannot belong to another group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.stdout.close()
            process.wait()
    return _verdict(said, token, process.returncode)


def isolation() -> str:
    """Return in one sentence what code is kept from on this machine."""
    if not _can_limit():
        return "this system cannot limit a process, so code is not run"
    limited = "limits on time, memory and file size"
    if _architecture() is not None:
        return f"{limited}; no network, no processes of its own, no file written; it can read the user's files"
    return f"{limited} only: code can reach the network, and can read and write the user's files"


def _read(pipe: int, seconds: float) -> bytes | None:
    """Return what the process reports; None if it is not done ``seconds`` after it began with the code."""
    poll, said, deadline = select.poll(), b"", time.monotonic() + _START_SECONDS
    poll.register(pipe, select.POLLIN | select.POLLHUP)
    while len(said) <= _RESULT_BYTES:
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        if poll.poll(left * 1000):
            chunk = os.read(pipe, _RESULT_BYTES)
            if not chunk:
                break
            deadline = deadline if said else time.monotonic() + seconds
            said += chunk
    return said


def _verdict(said: bytes | None, token: str, code: int) -> Verdict:
    if said is None or code == -getattr(signal, "SIGXCPU", 0):
        return Verdict(False, "timed out")
    try:
        report = json.loads(said)
        if report["token"] == token:
            return Verdict(True, "tests passed")
        return Verdict(False, f"tests failed: {str(report['error'])[:_SHOWN]}")
    except (ValueError, LookupError, TypeError, RecursionError):
        return Verdict(False, "tests failed: the process ended before its tests did")


def _can_limit() -> bool:
    return os.name == "posix" and hasattr(select, "poll")


# ------------------------------------------------------------- inside the process


def _main(job: str) -> None:
    work = json.loads(Path(job).read_text(encoding="ascii"))
    token = work.pop("token")
    report = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.remove(job)
    compiled = []
    failure = ""
    try:
        _limit(work["limits"])
        _filter()
        for name in ("code", "tests"):
            compiled.append(compile(work[name], f"<{name}>", "exec"))
        # The clock of the parent starts here.
        os.write(report.fileno(), b"\n")
        space: dict[str, Any] = {"__name__": "__main__"}
        for program in compiled:
            exec(program, space)
    except BaseException as error:
        failure = _described(error)
    result = {"token": "", "error": failure} if failure else {"token": token}
    report.write(json.dumps(result))
    report.flush()
    # Without exit handlers: the code may have registered some.
    os._exit(0)


def _described(error: BaseException) -> str:
    try:
        return ascii(f"{type(error).__name__}: {error}"[:_SHOWN])[1:-1]
    except BaseException:
        return type(error).__name__


def _limit(limits: dict[str, Any]) -> None:
    import resource

    seconds = int(limits["seconds"]) + 1
    pairs = {
        "RLIMIT_CPU": (seconds, seconds + 1),
        "RLIMIT_AS": (limits["memory"], limits["memory"]),
        "RLIMIT_FSIZE": (limits["file"], limits["file"]),
        "RLIMIT_NOFILE": (64, 64),
        "RLIMIT_CORE": (0, 0),
    }
    if _architecture() is None:
        # The filter forbids processes and leaves threads alone; this limit forbids both, for all but root.
        pairs["RLIMIT_NPROC"] = (0, 0)
    for name, (soft, hard) in pairs.items():
        # macOS refuses some of them.
        with contextlib.suppress(ValueError, OSError, AttributeError):
            resource.setrlimit(getattr(resource, name), (soft, hard))


# System calls that the filter refuses, by their numbers on x86-64 and ARM64 (None: no such call).
_PROCESSES = "fork 57 -, vfork 58 -, execve 59 221, execveat 322 281, setsid 112 157, setpgid 109 154, unshare 272 97"
_SIGNALS = (
    "kill 62 129, tkill 200 130, tgkill 234 131, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, ptrace 101 117, "
    "pidfd_send_signal 424 424, pidfd_open 434 434, process_vm_readv 310 270, process_vm_writev 311 271, "
    "prlimit64 302 261, setns 308 268, bpf 321 280, perf_event_open 298 241"
)
_NETWORK = "socket 41 198, connect 42 203, bind 49 200, io_uring_setup 425 425, io_uring_enter 426 426"
_FILES = (
    "creat 85 -, mkdir 83 -, mkdirat 258 34, mknod 133 -, mknodat 259 33, unlink 87 -, unlinkat 263 35, rmdir 84 -, "
    "rename 82 -, renameat 264 38, renameat2 316 276, link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36, "
    "truncate 76 45, ftruncate 77 46, fallocate 285 47, chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, "
    "chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54, utime 132 -, utimes 235 -, futimesat 261 -, "
    "utimensat 280 88, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15, "
    "fremovexattr 199 16, mount 165 40, umount2 166 39, move_mount 429 429, fsopen 430 430, memfd_create 319 279, "
    "shmget 29 194, semget 64 190, msgget 68 186, mq_open 240 180, add_key 248 217, keyctl 250 219"
)
# The caller falls back to clone and openat, whose arguments the filter can read.
_ABSENT = "clone3 435 435, openat2 437 437"
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CLONE_THREAD = 0x10000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000


class _Architecture(NamedTuple):
    audit: int
    column: int
    clone: int
    opening: tuple[tuple[int, int], ...]


def _architecture() -> _Architecture | None:
    """Return what the filter needs to know of this machine; None if it cannot be installed here."""
    if not sys.platform.startswith("linux") or sys.maxsize < 1 << 32:
        return None
    # Each call that opens files comes with the position of its flags.
    machines = {
        "x86_64": _Architecture(0xC000003E, 1, 56, ((2, 1), (257, 2))),
        "aarch64": _Architecture(0xC00000B7, 2, 220, ((56, 2),)),
    }
    return machines.get(os.uname().machine)


def _program(machine: _Architecture) -> list[tuple[int, int, int, int]]:
    """Return the filter, in the instructions of the Berkeley packet filter: code, jump if true, if false, value."""

    def numbers(calls: str) -> list[int]:
        columns = [call.split()[machine.column] for call in calls.split(", ")]
        return [int(number) for number in columns if number != "-"]

    def argument(place: int) -> int:
        # The lower half; both machines are little-endian.
        return 16 + 8 * place

    steps = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, machine.audit), (_RETURN, 0, 0, _REFUSE | errno.EPERM), (_LOAD, 0, 0, 0)]
    # Numbers from here on belong to another calling convention of the same machine.
    steps += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _REFUSE | errno.EPERM)]
    refused = {number: errno.EPERM for number in numbers(", ".join((_PROCESSES, _SIGNALS, _NETWORK, _FILES)))}
    for number, reason in {**refused, **dict.fromkeys(numbers(_ABSENT), errno.ENOSYS)}.items():
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE | reason)]
    allow, refuse = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE | errno.EPERM)
    steps += [(_EQUAL, 0, 4, machine.clone), (_LOAD, 0, 0, argument(0)), (_ANY_BIT, 0, 1, _CLONE_THREAD), allow, refuse]
    for number, place in machine.opening:
        steps += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, argument(place)), (_ANY_BIT, 0, 1, _WRITING), refuse, allow]
    return [*steps, allow]


def _filter() -> None:
    """Install the filter for this process and all its threads, for good."""
    machine = _architecture()
    if machine is None:
        return
    program = _program(machine)

    class Instruction(ctypes.Structure):
        _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.POINTER(Instruction)))

    steps = (Instruction * len(program))(*(Instruction(*step) for step in program))
    library = ctypes.CDLL(None, use_errno=True)
    die_with_parent, no_new_privileges, seccomp = 1, 38, 22
    library.prctl(die_with_parent, signal.SIGKILL, 0, 0, 0)
    whole = Program(len(program), steps)
    if library.prctl(no_new_privileges, 1, 0, 0, 0) or library.prctl(seccomp, 2, ctypes.byref(whole), 0, 0):
        raise OSError(ctypes.get_errno(), "the filter of system calls cannot be installed")


if __name__ == "__main__":
    _main(sys.argv[1])
