"""Process groups that are killed when this process ends, even by SIGKILL.

One small process has the read end of a pipe; only this process has the write end. When the pipe is closed, the small
process kills the groups that are still registered. ``PR_SET_PDEATHSIG`` is not suitable: it exists only on Linux, and
it kills the child when the thread that started it ends.

This file is also the program that the small process runs, so it imports only the standard library.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading


class _Guard:
    """The parent's side: starts the small process at first use, and restarts it if it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def add(self, group: int) -> None:
        with self._lock:
            self._groups.add(group)
            if not self._send(group):
                self._start()

    def remove(self, group: int) -> None:
        with self._lock:
            self._groups.discard(group)
            self._send(-group)

    def _start(self) -> None:
        self._stop()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=os.sep,
            # Signals to the group of this process, as from a terminal, must not reach it.
            start_new_session=True,
        )
        for group in self._groups:
            self._send(group)

    def _send(self, number: int) -> bool:
        """Write one line; a write this short is atomic. Return False if the pipe has no reader."""
        if self._process is None:
            return False
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"%d\n" % number)
        except BrokenPipeError:
            return False
        return True

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()

    def close(self) -> None:
        """Kill the remaining groups when the interpreter exits."""
        with self._lock:
            self._stop()

    def forget(self) -> None:
        """In a forked child, close its copy of the pipe; the groups and the guard belong to the parent."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            # The parent reaps it; a return code keeps Popen from warning here.
            self._process.returncode = 0
        self._lock, self._groups, self._process = threading.Lock(), set(), None


_guard = _Guard()
if sys.platform != "win32":
    os.register_at_fork(after_in_child=_guard.forget)
atexit.register(_guard.close)


def guard(group: int) -> None:
    """Register a process group that is killed when this process ends.

    A group keeps running if this process is killed in the instant between the start of the child and this call.

    Args:
        group: Process id of a child that leads its group, as with ``start_new_session=True``.
    """
    _guard.add(group)


def kill(group: int) -> None:
    """Kill a guarded process group. Call this before its leader is reaped, because reaping frees its process id."""
    _kill(group)
    _guard.remove(group)


def _kill(group: int) -> None:
    with contextlib.suppress(OSError):
        if sys.platform != "win32":
            os.killpg(group, signal.SIGKILL)
        else:
            # Windows has no process groups; there, this ends only the child, immediately.
            os.kill(group, signal.SIGTERM)


def _main() -> None:
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        # Windows has no SIGHUP.
        if name in signal.Signals.__members__:
            signal.signal(signal.Signals[name], signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        number = int(line)
        if number > 0:
            groups.add(number)
        else:
            groups.discard(-number)
    for group in groups:
        _kill(group)


if __name__ == "__main__":
    _main()
