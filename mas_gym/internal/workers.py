"""Child processes that reply with one line to each line of input, for graders and programs."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mas_gym.internal.process_groups import guard, kill

START_SECONDS = 120.0

_START = """
import importlib.util, sys
sys.path += [folder for folder in {folders!r} if folder not in sys.path]
spec = importlib.util.spec_from_file_location("mas_gym", {package!r})
sys.modules["mas_gym"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
from mas_gym.internal.workers import serve_lines
from {module} import {function}
serve_lines({function})
"""


class LineProcess:
    """A Python process that replies to each line of JSON with a line of JSON, one at a time.

    It starts at the first request, and restarts at the next request after a stop. Thread-safe. A forked child discards
    its parent's process and starts a separate one.

    It runs in a separate process group, which is killed when this object or this process ends. It imports the same
    `mas_gym`. Other modules are looked up first in the Python installation, then on this process's path, but not in the
    current folder.

    Args:
        entry: A function that is called once in the process and returns the function that computes the reply to a
            request, as in ``"mas_gym.tasks.grading.symbolic:_prepare"``.
        arguments: Its ``sys.argv[1:]``.
        quiet: Discard its output to stderr.
    """

    def __init__(self, entry: str, *arguments: str, quiet: bool = False) -> None:
        self._lock = threading.Lock()
        self._replies: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        _workers.add(self)
        self._entry, self._arguments = entry, arguments
        self._stderr = subprocess.DEVNULL if quiet else None
        self._process: subprocess.Popen[str] | None = None
        self._end: weakref.finalize[[subprocess.Popen[str]], LineProcess] | None = None

    def ask(self, request: object, seconds: float) -> Any:
        """Return the reply to a request.

        If the wait is interrupted, for example by Ctrl-C, the process is stopped; otherwise its late reply could be
        read as the reply to the next request.

        Raises:
            ChildProcessError: The process does not start.
            EOFError: The process ended before it replied.
            TimeoutError: The process did not reply in time.
        """
        with self._lock:
            try:
                self._start()
                self._send(request)
                return self._reply(seconds)
            except BaseException:
                self.stop()
                raise

    def _reply(self, seconds: float) -> object:
        try:
            reply = self._replies.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"no reply after {seconds:g} seconds") from None
        if not reply:
            raise EOFError("the worker ended before it replied")
        return reply[0]

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.stop()
        module, _, function = self._entry.partition(":")
        folders = [folder for folder in sys.path if isinstance(folder, str) and folder]
        package = str(Path(__file__).parents[1] / "__init__.py")
        code = _START.format(folders=folders, package=package, module=module, function=function)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            encoding="ascii",
            start_new_session=True,
        )
        guard(self._process.pid)
        self._end = weakref.finalize(self, _end, self._process)
        self._replies = queue.SimpleQueue()
        threading.Thread(target=_pump, args=(self._process, self._replies), daemon=True).start()
        try:
            self._reply(START_SECONDS)
        except (EOFError, TimeoutError) as error:
            raise ChildProcessError(f"the process did not start: {self._entry}") from error

    def _send(self, request: object) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise EOFError("the worker ended before the request") from error

    def stop(self) -> None:
        """Kill the process and its group; the next request starts a new process."""
        process, self._process = self._process, None
        if self._end is not None:
            self._end.detach()
        if process is not None:
            _end(process)

    def forget(self) -> None:
        """In a forked child, discard the parent's process without stopping it."""
        self._lock = threading.Lock()
        if self._process is not None:
            # The parent reaps the process; a return code keeps Popen from warning here.
            self._process.returncode = 0
        if self._end is not None:
            self._end.detach()
        self._process = self._end = None


def _end(process: subprocess.Popen[str]) -> None:
    kill(process.pid)
    process.wait()
    # The pipe may be broken already.
    with suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()


def _pump(process: subprocess.Popen[str], replies: queue.SimpleQueue[list[Any]]) -> None:
    assert process.stdout is not None
    # A line truncated by the end of the process is not a reply.
    with process.stdout, suppress(ValueError):
        for line in process.stdout:
            replies.put([json.loads(line)])
    replies.put([])


def serve_lines(prepare: Callable[[], Callable[[Any], Any]]) -> None:
    """Serve requests as the process of a `LineProcess` until the input ends."""
    requests, replies = os.fdopen(os.dup(0), encoding="ascii"), os.fdopen(os.dup(1), "w", encoding="ascii")
    # Code that reads or prints, and processes that it starts, must not read requests or write into the replies.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def send(reply: object) -> None:
        with suppress(BrokenPipeError):
            print(json.dumps(reply), file=replies, flush=True)

    answer, process = prepare(), os.getpid()
    send("ready")
    for line in requests:
        reply = answer(json.loads(line))
        if os.getpid() != process:
            # The code has forked, and this is the child; the parent replies.
            os._exit(0)
        send(reply)


_workers: weakref.WeakSet[LineProcess] = weakref.WeakSet()


def _forget() -> None:
    for worker in list(_workers):
        worker.forget()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget)
