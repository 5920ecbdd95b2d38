"""Observation and interruption of programs in this process: jobs on threads, sleeps, connections, and their end.

This module patches `threading.Thread.start`, reads local variables of waiting frames, and raises exceptions in other
threads. A process that can be killed needs none of this, but it can only run a function that it can import: use
`isolate=True` for these. A function object with its closures, clients and graphs exists only in this process.

The order of concurrent calls must not depend on their speed, so a decision waits until no part of the program can make
another call. A thread cannot make a call while it waits for a reply or, as its innermost frame shows,
for another thread. Standard-library threads and thread pools that a program starts are tracked; others are not.

A decision waits only a few seconds for a thread that sleeps or waits for a connection, because some threads never end.
It always waits for a thread that is running or waiting for a processor or for the interpreter's lock, because this time
depends on the load of the machine, which must not change the order of calls.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar
from pathlib import Path
from time import monotonic
from types import BuiltinMethodType, CoroutineType, FrameType
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

from mas_gym.internal.text import name_of

P = ParamSpec("P")
T = TypeVar("T")


class ProgramStopped(BaseException):
    """Raised inside a program after the end of its execution; not an `Exception`, so that programs do not catch it."""


def raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise an exception in a thread, given by its identifier, when it next runs Python code; None cancels it."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error) if error else None)


class Interrupt:
    """Stops a program's thread by raising `ProgramStopped` in it, but only while it runs the program's code.

    A thread also runs the library's code: during a model call, it may report a decision that a search waits for. An
    exception there would lose the report.
    """

    def __init__(self) -> None:
        """Start outside of the program's code."""
        self._lock = threading.Lock()
        self._thread = 0
        self._due = False

    def request(self) -> None:
        """Stop the thread, now or when it next enters the program's code; safe to call on any thread."""
        with self._lock:
            self._due = True
            if self._thread:
                raise_in(self._thread, ProgramStopped)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Run the program's code on this thread. Raises `ProgramStopped` if a stop has already been requested."""
        self._enter(threading.get_ident())
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Run the library's code on this thread; a stop requested meanwhile is raised at the end."""
        thread = threading.get_ident()
        if thread != self._thread:
            yield
            return
        self._leave()
        try:
            yield
        finally:
            self._enter(thread)

    def _enter(self, thread: int) -> None:
        with self._lock:
            if self._due:
                raise ProgramStopped
            self._thread = thread

    def _leave(self) -> None:
        with self._lock:
            if self._thread and self._due:
                raise_in(self._thread, None)
            self._thread = 0


class Running(Protocol):
    """The part of `mas_gym.programs.execution.Execution` that is needed to observe it."""

    token: str
    activity: Activity
    over: bool

    def fail(self, reason: str) -> None:
        """End the execution with an error."""


CURRENT: ContextVar[Running | None] = ContextVar("mas_gym_program", default=None)
"""The execution that a function runs in; None outside of programs."""

BUSY_SECONDS = 3.0
"""Seconds that a decision waits for threads that sleep or wait for a connection."""

Frames = Mapping[int, FrameType]
_RUNS, _WAKES = 0.05, 0.5
"""Maximum share of time that a sleeping thread runs, and maximum wake-ups per switch interval."""

_JOINS = {
    vars(threading.Thread)[name].__code__
    for name in ("join", "_wait_for_tstate_lock")
    if name in vars(threading.Thread)
}
_START = inspect.unwrap(threading.Thread.start).__code__


class ThreadUsage(NamedTuple):
    """Processor use of a thread up to a point in time.

    Attributes:
        time: The time, in seconds on the clock of `time.monotonic`.
        ran: Seconds in which it ran or waited for a processor.
        slices: Number of times that it was scheduled on a processor.
    """

    time: float
    ran: float
    slices: int

    def asleep_since(self, before: ThreadUsage) -> bool:
        """Whether the thread has been asleep or waiting for a connection since an earlier time.

        A thread that waits for the interpreter's lock is not asleep: it wakes up once per switch interval.
        """
        passed = self.time - before.time
        wakes = _WAKES * passed / sys.getswitchinterval()
        return self.ran - before.ran <= _RUNS * passed and self.slices - before.slices <= wakes


def thread_usage(thread: int) -> ThreadUsage:
    """Return the processor use of a thread of this process; zeros if the system does not report it.

    Args:
        thread: The thread's native identifier.
    """
    now = monotonic()
    with suppress(OSError):
        ran, queued, slices = map(int, Path(f"/proc/self/task/{thread}/schedstat").read_text().split())
        return ThreadUsage(now, (ran + queued) / 1e9, slices)
    return ThreadUsage(now, 0.0, 0)


def _name(function: Any, args: tuple[object, ...]) -> str:
    """Return the name of the function that a job calls, directly, through a partial function or in a context."""
    while True:
        if isinstance(function, functools.partial):
            function, args = function.func, (*function.args, *args)
        elif isinstance(function, BuiltinMethodType) and isinstance(function.__self__, Context) and args:
            function, args = args[0], args[1:]
        else:
            return f"{function.__module__}.{name_of(function)}"


class Busy(NamedTuple):
    """A part of a program that may make another call.

    Attributes:
        name: The name of its function.
        thread: The native identifier of the thread that runs it; None if it has not begun.
    """

    name: str
    thread: int | None


class ProgramThread:
    """A program's function that runs on a thread.

    Attributes:
        name: The function's name.
        pool: The thread pool that runs it, if any.
        handle: The thread, if it was started for this job.
        thread: The identifier of the thread; None until the job runs.
        native: The thread's native identifier; None until the job runs.
    """

    __slots__ = ("__weakref__", "execution", "handle", "name", "native", "pool", "thread")

    def __init__(
        self,
        execution: Running,
        function: Callable[..., object],
        args: tuple[object, ...] = (),
        pool: ThreadPoolExecutor | None = None,
    ) -> None:
        """Describe a job that has not begun."""
        self.name = _name(function, args)
        self.execution, self.pool = execution, pool
        self.handle: threading.Thread | None = None
        self.thread: int | None = None
        self.native: int | None = None

    def here(self) -> None:
        """Record that the job runs on the calling thread."""
        self.native, self.thread = threading.get_native_id(), threading.get_ident()

    def run(self, function: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> T:
        """Call the function as a part of the program."""
        # In this order, because a job that takes a place without a thread seems to wait for one.
        self.here()
        if self.pool is not None:
            _RUNNING.setdefault(self.pool, WeakSet()).add(self)
        token = CURRENT.set(self.execution)
        try:
            return function(*args, **named)
        finally:
            CURRENT.reset(token)

    def active(self, frames: Frames) -> bool:
        """Whether the job is running, or will run before any reply; False if it is waiting for another thread."""
        if self.handle is not None and self.thread is not None and not self.handle.is_alive():
            self.execution.activity.end(self)
            # If it ended after the frames were taken, they do not show its last action.
            return self.thread in frames
        if self.thread is None:
            # A job that waits for a place in a full pool depends on the jobs that run there.
            full = self.pool is not None and len(_RUNNING.get(self.pool, ())) >= self.pool._max_workers
            return not full
        # A job without a frame began after the frames were taken.
        frame = frames.get(self.thread)
        return frame is None or not _waits(frame)


_RUNNING: WeakKeyDictionary[ThreadPoolExecutor, WeakSet[ProgramThread]] = WeakKeyDictionary()
JOBS: WeakKeyDictionary[Future[Any], ProgramThread] = WeakKeyDictionary()
"""The tracked jobs of thread pools, by future."""


def _waits(frame: FrameType) -> bool:
    """Whether a thread waits for another thread; a short wait with a timeout counts as a sleep."""
    if frame.f_code is threading.Condition.wait.__code__:
        waiter, timeout = (frame.f_locals.get(name) for name in ("waiter", "timeout"))
        if timeout is not None and timeout <= BUSY_SECONDS:
            return False
        if (event := frame.f_back) is not None and event.f_back is not None and event.f_back.f_code is _START:
            # The operating system will start the other thread, possibly after a long time.
            return False
        # A wake-up removes the thread's lock from the list. The woken thread acquires the lock again and may then wait
        # for the interpreter.
        return waiter in frame.f_locals["self"]._waiters
    return frame.f_code in _JOINS and frame.f_locals["self"].is_alive()


class Activity:
    """The jobs, sleeps and connections of one execution; thread-safe because of the GIL.

    Attributes:
        alone: Whether the program has started at most one thread or task.
        linked: Whether its event loop has had a connection to the program's gateway.
        port: The port of the program's gateway; None if the program has no address.
        executor: The default executor that the program has set on its loop.
        loop_thread: The native identifier of its event loop's thread; None if it has no event loop.
        jobs: The jobs that run or will run on threads.
    """

    def __init__(self) -> None:
        self.alone = True
        self.linked = False
        self.port: int | None = None
        self.executor: Executor | None = None
        self.loop_thread: int | None = None
        self.jobs: set[ProgramThread] = set()
        self._results: dict[asyncio.Future[object], ProgramThread | None] = {}
        self._sleeps: dict[asyncio.Future[object], str] = {}
        self._connections: list[ref[asyncio.BaseTransport]] = []

    def begin(self, job: ProgramThread) -> None:
        """Add a job; all jobs except the program itself run concurrently with the program."""
        self.alone = self.alone and job.thread is not None
        self.jobs.add(job)

    def end(self, job: ProgramThread) -> None:
        """Record that the threads waiting for a job have been woken."""
        # In this order, because no job may seem to wait for the place of a job that is not listed any more.
        if job.pool is not None:
            _RUNNING.get(job.pool, WeakSet[ProgramThread]()).discard(job)
        self.jobs.discard(job)

    def awaits(self, result: asyncio.Future[Any], job: ProgramThread | None = None) -> None:
        """Record a result that arrives on the program's event loop."""
        self._results[result] = job
        result.add_done_callback(lambda done: self._results.pop(done, None))

    def sleeps(self, timer: asyncio.Future[object], seconds: float) -> None:
        """Record a sleeping task."""
        task = asyncio.current_task()
        coroutine = None if task is None else task.get_coro()
        named = isinstance(coroutine, CoroutineType) and seconds <= BUSY_SECONDS
        self._sleeps[timer] = name_of(coroutine) if named else ""
        timer.add_done_callback(lambda done: self._sleeps.pop(done, None))

    def connected(self, transport: asyncio.BaseTransport, address: object) -> None:
        """Record a connection; connections to the gateway do not count as activity."""
        if isinstance(address, tuple) and address[1] == self.port:
            self.linked = True
        else:
            self._connections.append(ref(transport))

    def state(self, frames: Frames, blocked: int, perhaps: int, loop: int | None = None) -> tuple[bool, set[Busy]]:
        """Return whether further parts of the program may make a call, which cannot be observed, and its busy parts.

        Args:
            frames: The innermost frame of each thread.
            blocked: Number of threads that wait for a reply over HTTP.
            perhaps: Number of other open calls over HTTP, which threads may wait for.
            loop: The identifier of its event loop's thread, if the program's code is running there.
        """
        active = [Busy(job.name, job.native) for job in list(self.jobs) if job.active(frames)]
        waits = loop is not None and (frame := frames.get(loop)) is not None and _waits(frame)
        if loop is not None and not waits:
            active.append(Busy("its event loop", self.loop_thread))
        busy = set(active) if len(active) > blocked + perhaps else set()
        late = list[str]()
        if not waits:
            # Otherwise nothing arrives, because the event loop itself waits for a reply.
            results = list(self._results.items())
            late += self._sleeps.values()
            late += [_RESULT for result, job in results if not result.done() and job not in self.jobs]
        busy.update(Busy(name, self.loop_thread) for name in late if name)
        transports = [connection() for connection in list(self._connections)]
        connected = any(transport is not None and not transport.is_closing() for transport in transports)
        return len(active) != blocked or bool(late) or connected, busy


_RESULT = "a result on the event loop"


def _end_after_callbacks(future: Future[object], job: ProgramThread) -> None:
    """End a job after the callbacks of its future, because LangGraph waits for the callbacks, not for the futures."""
    invoke = future._invoke_callbacks  # type: ignore[attr-defined]

    def invoke_tracked() -> None:
        token = CURRENT.set(job.execution)
        try:
            invoke()
        finally:
            CURRENT.reset(token)
            job.execution.activity.end(job)

    future._invoke_callbacks = invoke_tracked  # type: ignore[attr-defined]
    if future.done():
        # The future has not been returned yet, so it has no callbacks.
        job.execution.activity.end(job)


@functools.cache
def track() -> None:
    """Track the threads and thread pools that programs start; safe to call twice."""
    submit: Callable[..., Future[object]] = ThreadPoolExecutor.submit
    start = threading.Thread.start

    @functools.wraps(submit)
    def submit_job(
        pool: ThreadPoolExecutor, function: Callable[..., object], /, *args: object, **named: object
    ) -> Future[object]:
        execution = CURRENT.get()
        if execution is None:
            return submit(pool, function, *args, **named)
        job = ProgramThread(execution, function, args, pool)
        execution.activity.begin(job)
        # The pool's threads outlive the job.
        token = CURRENT.set(None)
        try:
            future: Future[Any] = submit(pool, job.run, function, *args, **named)
        except BaseException:
            execution.activity.end(job)
            raise
        finally:
            CURRENT.reset(token)
        _end_after_callbacks(future, job)
        JOBS[future] = job
        return future

    @functools.wraps(start)
    def start_job(thread: threading.Thread) -> None:
        execution = CURRENT.get()
        if execution is not None and not thread.ident:
            job = ProgramThread(execution, thread._target or thread.run)  # type: ignore[attr-defined]
            job.handle = thread
            thread.run = functools.partial(job.run, thread.run)  # type: ignore[method-assign]
            execution.activity.begin(job)
            try:
                start(thread)
            except RuntimeError:
                execution.activity.end(job)
                raise
        else:
            start(thread)

    ThreadPoolExecutor.submit = submit_job  # type: ignore[method-assign,assignment]
    threading.Thread.start = start_job  # type: ignore[method-assign,assignment]
