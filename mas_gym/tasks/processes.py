"""A helper process that answers lines, and is killed when it does not answer in time."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import weakref

START_SECONDS = 120.0


class LineProcess:
    """A Python process that prints ``ready`` and then answers each line of JSON with one line.

    It starts at the first question, and again after it has ended. Thread-safe: one question at a
    time. A forked child forgets the process of its parent and starts its own.

    Args:
        entry: The function to run, as in ``"mas_gym.tasks.symbolic:serve"``.
        arguments: Its ``sys.argv[1:]``.
        quiet: Drop what it writes to stderr.
    """

    def __init__(self, entry: str, *arguments: str, quiet: bool = False) -> None:
        """Start nothing yet."""
        module, _, function = entry.partition(":")
        self._command = [sys.executable, "-c", f"from {module} import {function}; {function}()", *arguments]
        self._stderr = subprocess.DEVNULL if quiet else None
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        _open.add(self)

    def ask(self, request: object, seconds: float) -> str | None:
        """Return the answer to a JSON-able request; ``""`` if the process ended, None if it was out of time.

        Raises:
            ChildProcessError: The process does not start.
        """
        with self._lock:
            process = self._running()
            try:
                assert process.stdin is not None
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
                reply: str | None = self._lines.get(timeout=seconds).strip()
            except OSError:
                reply = ""
            except queue.Empty:
                reply = None
            if not reply:
                self.stop()
            return reply

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.stop()
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            encoding="ascii",
            # The same modules as here, also in a checkout that is not installed.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._lines = queue.SimpleQueue()
        threading.Thread(target=_pump, args=(self._process, self._lines), daemon=True).start()
        try:
            ready = self._lines.get(timeout=START_SECONDS)
        except queue.Empty:
            ready = ""
        if ready.strip() != "ready":
            self.stop()
            raise ChildProcessError(f"the process did not start: {' '.join(self._command[2:])}")
        return self._process

    def stop(self) -> None:
        """Kill the process; the next question starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                # The pipe may be broken already.
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()

    def forget(self) -> None:
        """In a forked child, forget the process of the parent without touching it."""
        if self._process is not None:
            # The parent reaps the process; a return code keeps Popen from warning here.
            self._process.returncode = 0
        self._lock = threading.Lock()
        self._process = None


def _pump(process: subprocess.Popen[str], lines: queue.SimpleQueue[str]) -> None:
    assert process.stdout is not None
    # Stopping the process closes the pipe while this thread reads.
    with contextlib.suppress(ValueError):
        for line in process.stdout:
            lines.put(line)
    lines.put("")


_open: weakref.WeakSet[LineProcess] = weakref.WeakSet()


def _each(method: str) -> None:
    for one in list(_open):
        getattr(one, method)()


atexit.register(_each, "stop")
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _each("forget"))
