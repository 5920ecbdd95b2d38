"""The event loop that programs share. Programs cannot end it, and it tracks the activity of each program."""

from __future__ import annotations

import asyncio
import contextvars
import selectors
import socket
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from mas_gym.programs.background import CURRENT, JOBS, ProgramStopped, Running, raise_in

_BUSY_SECONDS = 0.3
_MAX_THREADS = 4096
_CLOSE_SECONDS = 10.0
T = TypeVar("T")


class _IdleSelector(selectors.DefaultSelector):
    """Calls ``idle`` before its loop looks for events; if ``idle`` returns true, the loop does not wait for events."""

    idle: Callable[[], bool] = staticmethod(lambda: False)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.idle():
            timeout = 0
        return super().select(timeout)


class _Transport(asyncio.selector_events._SelectorSocketTransport):  # type: ignore[name-defined,misc]
    def __del__(self, *args: object) -> None:
        # An unclosed openai client closes its connections after the garbage collector has closed their sockets. By then
        # another connection may have the same descriptor, and would not be read any more.
        self._closing, self._conn_lost = True, 1
        super().__del__(*args)


class _Task(asyncio.Task[Any]):
    token = ""
    """The token of the execution that started the task; empty if none did."""

    @property
    def owner(self) -> str:
        """The token of the task's execution, which is the name of the execution's first task."""
        return self.token or self.get_name()

    def cancel(self, msg: object = None) -> bool:
        """Cancel the task, unless another program makes the request."""
        execution = CURRENT.get()
        if execution is not None and execution.token != self.owner:
            execution.fail("the program cancelled a task that it did not start: the event loop is shared by programs")
            return False
        return super().cancel(msg)


class _SelectorLoop(asyncio.SelectorEventLoop):
    """An event loop that programs share: no program can end it, and the activity of each program is tracked."""

    def _make_socket_transport(self, sock: socket.socket, *args: object, **named: object) -> asyncio.Transport:
        return self._observed(_Transport(self, sock, *args, **named), sock)

    def _make_ssl_transport(self, sock: socket.socket, *args: object, **named: object) -> asyncio.Transport:
        made = super()._make_ssl_transport(sock, *args, **named)  # type: ignore[misc]
        return self._observed(made, sock)

    def _observed(self, transport: asyncio.Transport, sock: socket.socket) -> asyncio.Transport:
        execution = CURRENT.get()
        if execution is not None:
            with suppress(OSError):
                execution.activity.connected(transport, sock.getpeername())
        return transport

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        execution = CURRENT.get()
        if execution is None:
            return await super().sock_connect(sock, address)
        connected = self.create_future()
        execution.activity.awaits(connected)
        try:
            return await super().sock_connect(sock, address)
        finally:
            connected.cancel()

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        execution = CURRENT.get()
        if execution is not None and callback is _WAKE:
            execution.activity.sleeps(args[0], when - self.time())
        return super().call_at(when, callback, *args, context=context)

    def run_in_executor(
        self, executor: Executor | None, function: Callable[..., T], *args: object
    ) -> asyncio.Future[T]:
        execution = CURRENT.get()
        if execution is None:
            return super().run_in_executor(executor, function, *args)
        pool = executor or execution.activity.executor or self._default_executor  # type: ignore[attr-defined]
        future = pool.submit(function, *args)
        result = asyncio.wrap_future(future, loop=self)
        execution.activity.awaits(result, JOBS.get(future))
        return result

    def set_default_executor(self, executor: ThreadPoolExecutor) -> None:  # type: ignore[override]
        execution = CURRENT.get()
        if execution is None:
            super().set_default_executor(executor)
        else:
            execution.activity.executor = executor

    def set_exception_handler(self, handler: Any) -> None:
        # Frameworks set an exception handler, which would receive the errors of other programs.
        if CURRENT.get() is None:
            super().set_exception_handler(handler)


_WAKE = asyncio.futures._set_result_unless_cancelled  # type: ignore[attr-defined]
"""The function that ends `asyncio.sleep`."""


def _owner(error: BaseException) -> Running | None:
    """Return the program that ended the event loop with an error in one of the program's callbacks."""
    trace, found = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code is asyncio.Handle._run.__code__:
            found = trace.tb_frame.f_locals["self"]._context.get(CURRENT)
        trace = trace.tb_next
    return found


def _handled(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """Report unhandled task errors, except those that end a program and those of earlier runs' clients."""
    error = context.get("exception")
    stopped = isinstance(error, ProgramStopped | SystemExit | KeyboardInterrupt)
    if not stopped and not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
        loop.default_exception_handler(context)


class Loop:
    """An event loop on a dedicated thread, ``thread``."""

    def __init__(self, name: str) -> None:
        self.selector = _IdleSelector()
        self.loop = _SelectorLoop(self.selector)
        # An execution that waits in `asyncio.to_thread` occupies a thread, and the default pool has only a few.
        self.loop.set_default_executor(ThreadPoolExecutor(_MAX_THREADS, "mas-gym-program"))
        self.loop.set_exception_handler(_handled)
        self.loop.set_task_factory(self._task)
        self._asked: float | None = None
        self._running, self._since, self._waited = "", 0.0, 0.0
        self._inbox: deque[tuple[contextvars.Context, Callable[..., object], tuple[object, ...]]] = deque()
        self._awake = self._ends = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._ends:
            # These exceptions propagate from a task or callback out of the loop.
            try:
                self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:
                execution = _owner(error)
                if execution is not None:
                    execution.fail(f"{type(error).__name__}: {error}"[:2000].removesuffix(": "))
        self.loop.close()

    def _task(self, loop: asyncio.AbstractEventLoop, work: Any, **named: Any) -> _Task:
        """Create a task, and store its execution."""
        task = _Task(work, loop=loop, **named)
        execution = CURRENT.get()
        if execution is not None:
            execution.activity.alone, task.token = False, execution.token
        return task

    def look(self) -> tuple[bool, float, str]:
        """Return whether the loop is busy, for how many seconds it has run only one task, and which (see `running`).

        Both are measured from one call of this method to the next. A loop is busy if it has not called a function for
        `_BUSY_SECONDS`. The time that the loop's thread spent waiting for a processor is not counted.
        """

        def here() -> None:
            self._asked = None

        now, running = monotonic(), self.running
        self._waited = self._queued()
        own = now - self._waited
        if self._asked is None:
            self._asked, self._running, self._since = now, running, own
            self.soon(here)
        elif running != self._running:
            self._running, self._since = running, own
        return now - (self._asked or now) > _BUSY_SECONDS, own - self._since, running

    def _queued(self) -> float:
        """Return the seconds that the thread has waited for a processor; 0 if the system does not report it."""
        with suppress(OSError):
            _, queued, _ = Path(f"/proc/self/task/{self.thread.native_id}/schedstat").read_text().split()
            return int(queued) / 1e9
        return 0.0

    def wait_longer(self, seconds: float) -> None:
        """Exclude some seconds from the result of `look`."""
        # The time in which the thread waited for a processor is already excluded.
        self._since += max(0.0, seconds - (self._queued() - self._waited))
        if self._asked is not None:
            self._asked += seconds

    def pending(self) -> set[Running | None]:
        """Return the programs with pending callbacks. Call it only on the loop's thread."""
        contexts = [handle._context for handle in list(self.loop._ready)]  # type: ignore[attr-defined]
        contexts += [context for context, *_ in list(self._inbox)]
        return {context.get(CURRENT) for context in contexts}

    def poll(self) -> None:
        """Run one iteration, which calls the selector."""

    @property
    def running(self) -> str:
        """The token of the running execution, or the name of a task without an execution."""
        task = asyncio.current_task(self.loop)
        return task.owner if isinstance(task, _Task) else ""

    @property
    def here(self) -> bool:
        """Whether the caller is on the loop's thread."""
        return threading.get_ident() == self.thread.ident

    def soon(self, work: Callable[..., object], *args: object, context: contextvars.Context | None = None) -> None:
        """Call a function on the loop, by default in no program's context; nothing happens if the loop is closed."""
        # The caller may be a program, which cannot cancel the tasks of others, and which this work is no part of.
        self._inbox.append((contextvars.Context() if context is None else context, work, args))
        if not self._awake:
            # One wake-up serves many functions: each wake-up writes to a socket and releases the interpreter lock.
            self._awake = True
            with suppress(RuntimeError):
                wake = self.loop.call_soon if self.here else self.loop.call_soon_threadsafe
                wake(self._read, context=contextvars.Context())

    def _read(self) -> None:
        self._awake = False
        while self._inbox:
            context, work, args = self._inbox.popleft()
            self.loop.call_soon(work, *args, context=context)

    def task(self, work: Callable[[], Coroutine[Any, Any, None]], name: str | None = None) -> Callable[[], None]:
        """Run the coroutine that ``work`` returns, in the caller's context; return a function that cancels it."""
        task: asyncio.Task[None] | None = None
        cancelled = False

        def begin() -> None:
            nonlocal task
            if not cancelled:
                task = self.loop.create_task(work(), name=name)

        def cancel() -> None:
            nonlocal cancelled
            cancelled = True
            if task is not None:
                task.cancel()

        self.soon(begin, context=contextvars.copy_context())
        return partial(self.soon, cancel)

    def close(self, first: Callable[[], Awaitable[object]] | None = None, wait: bool = True) -> None:
        """Await ``first``, cancel every task, and end the thread as soon as it is not blocked."""

        async def finish() -> None:
            if first is not None:
                await first()
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            # Connections of unclosed clients.
            for transport in list(self.loop._transports.values()):  # type: ignore[attr-defined]
                transport.abort()
            await asyncio.sleep(0)
            await self.loop.shutdown_default_executor()

        def begin() -> None:
            self.loop.create_task(finish()).add_done_callback(end)

        def end(done: asyncio.Task[None]) -> None:
            self._ends = True
            self.loop.stop()

        self.soon(begin)
        if not wait:
            if self.thread.ident is not None:
                raise_in(self.thread.ident, ProgramStopped)
        else:
            self.thread.join(_CLOSE_SECONDS)
