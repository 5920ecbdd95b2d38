"""Parallel jobs on worker processes."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Generic, TypeAlias, TypeVar

from mas_gym.errors import ConfigError, MASGymError, SearchError

_PATIENCE = 30.0
JobT = TypeVar("JobT")
Message = TypeVar("Message")
JobRunner: TypeAlias = Callable[[JobT, Callable[[Message], None]], BaseException | None]
"""Runs a job and sends messages to the parent; returns the error that ended the job early, else None."""


def run_jobs(
    jobs: Sequence[JobT],
    prepare: Callable[[], JobRunner[JobT, Message]],
    count: int,
    take: Callable[[int, Message], None],
    imports: Sequence[str] = (),
) -> BaseException | None:
    """Run jobs in worker processes, in order, as processes become free.

    Jobs, messages and ``prepare`` are sent between processes, so they must be picklable. A module that is run as a
    script must start its work under ``if __name__ == "__main__"``.

    Args:
        jobs: The jobs.
        prepare: Called once in each process.
        count: Maximum number of processes.
        take: Called in this process with a job's index and each of its messages.
        imports: Modules that every process needs. If processes can be forked, the modules are imported once, in a
            dedicated process, and their memory is shared.

    Returns:
        The reason for an early end: Ctrl-C, an error in a job, or a process that died; None if all jobs are complete.
        After an early end, the other processes also end their jobs early, and their messages are still handled.

    Raises:
        ConfigError: ``prepare`` or a job cannot be pickled.
    """
    pool = _Pool(prepare, min(count, len(jobs)), take, deque(enumerate(jobs)), _context(imports))
    try:
        with pool.handling_interrupts():
            pool.run()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if "pickle" not in str(error).lower():
            raise
        raise ConfigError(
            f"workers: expected planners and problems that can be pickled, but pickling failed: {error}; use workers=1"
        ) from error
    finally:
        pool.kill()
    return pool.stop


def _context(imports: Sequence[str]) -> SpawnContext | ForkServerContext:
    """Return the start method: fork from a process that has imported the modules, or start each process separately."""
    if sys.platform != "linux":
        # On other platforms, imported libraries may not support forking.
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*imports, __name__])
    return context


@contextmanager
def _safe_path() -> Iterator[None]:
    """Context in which new Python processes import nothing from the current folder.

    Multiprocessing has no option for this.
    """
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


class _Pool(Generic[JobT, Message]):
    def __init__(
        self,
        prepare: Callable[[], JobRunner[JobT, Message]],
        count: int,
        take: Callable[[int, Message], None],
        todo: deque[tuple[int, JobT]],
        context: SpawnContext | ForkServerContext,
    ) -> None:
        self._prepare, self._count, self._take, self._todo, self._context = prepare, count, take, todo, context
        self._open: dict[Connection, BaseProcess] = {}
        self.stop: BaseException | None = None

    @contextmanager
    def handling_interrupts(self) -> Iterator[None]:
        """On Ctrl-C, end the jobs early; an exception here could truncate a message on a pipe."""
        if threading.current_thread() is not threading.main_thread():
            self._start()
            yield
            return
        # Child processes inherit this setting and ignore Ctrl-C, which a terminal sends to parent and children.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._start()
            signal.signal(signal.SIGINT, lambda number, frame: self._end(KeyboardInterrupt()))
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _start(self) -> None:
        environment = dict(os.environ)
        for _ in range(self._count):
            mine, theirs = self._context.Pipe()
            process = self._context.Process(target=_work, args=(theirs, self._prepare, environment), daemon=True)
            with _safe_path():
                process.start()
            theirs.close()
            self._open[mine] = process
            self._next(mine)

    def run(self) -> None:
        """Forward messages until every process has ended."""
        while self._open:
            stopped = self.stop is not None
            # Always with a limit, because Ctrl-C does not end a wait that has begun.
            ready = wait(list(self._open), _PATIENCE)
            if not ready and stopped:
                return
            for pipe in ready:
                self._receive(pipe)  # type: ignore[arg-type]

    def _receive(self, pipe: Connection) -> None:
        try:
            kind, index, content = pipe.recv()
        except (EOFError, OSError):
            process = self._open.pop(pipe)
            process.join(_PATIENCE)
            if process.exitcode != 0:
                self._end(_death(process.exitcode))
            return
        if kind == "ended":
            if content is not None:
                self._end(content)
            self._next(pipe)
            return
        try:
            self._take(index, content)
        except (KeyboardInterrupt, MASGymError) as error:
            self._end(error)

    def _next(self, pipe: Connection) -> None:
        with suppress(OSError):
            pipe.send(self._todo.popleft() if self._todo and self.stop is None else None)

    def _end(self, stop: BaseException) -> None:
        if self.stop is None:
            self.stop = stop
            for process in self._open.values():
                process.terminate()

    def kill(self) -> None:
        """Kill the remaining processes."""
        for pipe, process in self._open.items():
            process.kill()
            process.join()
            pipe.close()


def _death(code: int | None) -> SearchError:
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
    return SearchError(
        f"a worker process {how}; finished searches are kept if there is a store. Run the same command again to "
        "resume, with fewer workers if memory ran out"
    )


class _Parent:
    """A process's connection to its parent; a request to end early does not truncate a message."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._sending, self._asked = pipe, False, False
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._asked_to_end)

    def _asked_to_end(self, number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._asked = self._sending
        if not self._sending:
            raise KeyboardInterrupt

    def send(self, kind: str, index: int, content: object) -> None:
        self._sending = True
        self._pipe.send((kind, index, content))
        self._sending = False
        if self._asked:
            self._asked = False
            raise KeyboardInterrupt


def _work(pipe: Connection, prepare: Callable[[], JobRunner[JobT, Message]], environment: Mapping[str, str]) -> None:
    """Run jobs until the parent has none left; the main function of a process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # The process that this one was forked from may be older than the parent's environment.
    os.environ.clear()
    os.environ.update(environment)
    # A garbage collection writes to every object that it visits, and a write ends the sharing of memory.
    gc.freeze()
    parent, index = _Parent(pipe), -1
    # A parent that has exited needs no reply.
    with suppress(BrokenPipeError, EOFError):
        try:
            work = prepare()
            while (job := pipe.recv()) is not None:
                index, content = job
                stop = work(content, partial(parent.send, "message", index))
                parent.send("ended", index, _portable(stop))
        except (BrokenPipeError, EOFError):
            raise
        except (Exception, KeyboardInterrupt) as error:
            parent.send("ended", index, _portable(error))
        finally:
            # An interrupt after the last message would end the process with an error.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _portable(error: BaseException | None) -> BaseException | None:
    """Return an error that can be pickled; an unexpected error gets its traceback as a note."""
    if error is None or isinstance(error, KeyboardInterrupt):
        return error
    if isinstance(error, MASGymError):
        # A user's subclass may not pickle.
        with suppress(Exception):
            pickle.dumps(error)
            copy.copy(error)
            return error
    unexpected = SearchError(f"a worker process failed: {type(error).__name__}: {error}")
    unexpected.add_note("".join(traceback.format_exception(error)).rstrip())
    return unexpected
