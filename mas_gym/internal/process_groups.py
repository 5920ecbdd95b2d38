"""Process groups that are killed, and folders that are removed, when this process ends, even by SIGKILL.

One small process has the read end of a pipe; only this process has the write end. When the pipe is closed, the small
process kills the groups and removes the folders that are still registered. ``PR_SET_PDEATHSIG`` is not suitable: it
exists only on Linux, and it kills the child when the thread that started it ends.

This file is also the program that the small process runs, so it imports only the standard library.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

_PASSES = 50
_PAUSE_SECONDS = 0.2


class _Guard:
    """The parent's side: starts the small process at first use, and restarts it if it was killed."""

    def __init__(self) -> None:
        # The garbage collector may remove a folder within the other methods.
        self._lock = threading.RLock()
        self._entries: set[int | str] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def add(self, entry: int | str) -> None:
        with self._lock:
            self._entries.add(entry)
            if not self._send(True, entry):
                self._start()

    def remove(self, entry: int | str) -> bool:
        """Return whether this process registered the entry; a forked child did not."""
        with self._lock:
            known = entry in self._entries
            self._entries.discard(entry)
            self._send(False, entry)
            return known

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
        for entry in list(self._entries):
            self._send(True, entry)

    def _send(self, adds: bool, entry: int | str) -> bool:
        """Write one line; a write this short is atomic. Return False if the pipe has no reader."""
        if self._process is None:
            return False
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([adds, entry]).encode() + b"\n")
        except BrokenPipeError:
            return False
        return True

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                # Threads that still write to a folder end with this process. A return code keeps Popen from warning.
                process.returncode = 0

    def close(self) -> None:
        """Kill the remaining groups and remove the remaining folders when the interpreter exits."""
        with self._lock:
            self._stop()

    def forget(self) -> None:
        """In a forked child, close its copy of the pipe; the entries and the guard belong to the parent."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            # The parent reaps it; a return code keeps Popen from warning here.
            self._process.returncode = 0
        self._lock, self._entries, self._process = threading.RLock(), set(), None


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


def guard_folder(path: str) -> None:
    """Register a folder that is removed when this process ends, after the process groups have been killed."""
    _guard.add(path)


def remove_guarded(path: str) -> None:
    """Remove a folder that this process has registered."""
    if _guard.remove(path):
        remove_tree(path)


def remove_tree(path: str) -> None:
    """Remove a folder, including read-only subfolders; what cannot be removed remains."""
    make_writable(path)
    shutil.rmtree(path, ignore_errors=True)


def make_writable(path: str) -> None:
    """Make every subfolder writable by the owner, so that it can be removed."""
    for at, folders, _ in os.walk(path):
        for folder in (os.path.join(at, name) for name in folders):
            if not os.path.islink(folder):
                with contextlib.suppress(OSError):
                    os.chmod(folder, 0o700)


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
    entries: set[int | str] = set()
    for line in sys.stdin.buffer:
        adds, entry = json.loads(line)
        (entries.add if adds else entries.discard)(entry)
    for group in entries:
        if isinstance(group, int):
            _kill(group)
    left = [folder for folder in entries if isinstance(folder, str)]
    # Threads of a process that ends may still write to its folders.
    for _ in range(_PASSES):
        for folder in left:
            remove_tree(folder)
        left = [folder for folder in left if os.path.exists(folder)]
        if not left:
            break
        time.sleep(_PAUSE_SECONDS)


if __name__ == "__main__":
    _main()
