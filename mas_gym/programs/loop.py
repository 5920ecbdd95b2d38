"""An event loop on a thread of its own, which knows when it is idle and when a task blocks it."""

from __future__ import annotations

import asyncio
import contextvars
import selectors
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary

from mas_gym.programs.sources import CURRENT, interrupt

_BUSY_SECONDS = 0.3
_CLOSE_SECONDS = 10.0


class _IdleSelector(selectors.DefaultSelector):
    """Calls ``idle`` before its loop would wait, that is, when no task can run."""

    idle: Callable[[], bool] = staticmethod(lambda: False)

    def select(self, timeout: float | None = None) -> Any:
        if (timeout is None or timeout > 0) and self.idle():
            timeout = 0
        return super().select(timeout)


class _Started:
    """A task of a loop, or one that is about to be."""

    __slots__ = ("cancelled", "name", "task", "work")

    def __init__(self, work: Callable[[], Any], name: str | None) -> None:
        self.work, self.name = work, name
        self.task: asyncio.Task[None] | None = None
        self.cancelled = False

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self.cancelled:
            self.task = loop.create_task(self.work(), name=self.name)

    def cancel(self) -> None:
        self.cancelled = True
        if self.task is not None:
            self.task.cancel()


def _handled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report what a task of nobody raised, but for clients of earlier runs whose garbage is collected in this one."""
    error = context.get("exception")
    if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
        loop.default_exception_handler(context)


class Loop:
    """An event loop on a thread of its own."""

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self.selector = _IdleSelector()
        self.loop = asyncio.SelectorEventLoop(self.selector)
        self.loop.set_exception_handler(_handled)
        self.loop.set_task_factory(self._task)
        self._owners: WeakKeyDictionary[asyncio.Task[Any], str] = WeakKeyDictionary()
        self._asked: float | None = None
        self._running, self._since = "", 0.0
        self._inbox: deque[tuple[contextvars.Context, Callable[..., Any], tuple[Any, ...]]] = deque()
        self._awake = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    def _task(self, loop: asyncio.AbstractEventLoop, work: Any, **named: Any) -> asyncio.Task[Any]:
        """Make a task, and remember the execution that it belongs to."""
        task = asyncio.Task(work, loop=loop, **named)
        execution = CURRENT.get()
        if execution is not None:
            self._owners[task] = execution.token
        return task

    def look(self) -> tuple[bool, float]:
        """Return whether the loop is busy, and for how many seconds it has run nothing but one task.

        Both are seen in repeated calls of this: a loop is busy that has not called a function for `_BUSY_SECONDS`.
        """

        def here() -> None:
            self._asked = None

        now, running = monotonic(), self.running
        if self._asked is None:
            self._asked, self._running, self._since = now, running, now
            self.soon(here)
        elif running != self._running:
            self._running, self._since = running, now
        return now - (self._asked or now) > _BUSY_SECONDS, now - self._since

    @property
    def running(self) -> str:
        """The token of the execution that runs now, or the name of a task that belongs to none."""
        task = asyncio.current_task(self.loop)
        return "" if task is None else self._owners.get(task) or task.get_name()

    @property
    def here(self) -> bool:
        """Whether the caller is on the loop's thread."""
        return threading.current_thread() is self._thread

    def soon(self, work: Callable[..., Any], *args: Any) -> None:
        """Call a function on the loop; nothing happens if the loop is closed."""
        self._inbox.append((contextvars.copy_context(), work, args))
        if not self._awake:
            # One wake-up for many functions: each writes to a socket, and gives other threads the interpreter.
            self._awake = True
            with suppress(RuntimeError):
                (self.loop.call_soon if self.here else self.loop.call_soon_threadsafe)(self._read)

    def _read(self) -> None:
        self._awake = False
        while self._inbox:
            context, work, args = self._inbox.popleft()
            self.loop.call_soon(work, *args, context=context)

    def task(self, work: Callable[[], Any], name: str | None = None) -> Callable[[], None]:
        """Run the coroutine that ``work`` returns; return a function that cancels it."""
        started = _Started(work, name)
        self.soon(started.begin, self.loop)
        return partial(self.soon, started.cancel)

    def close(self, last: Callable[[], Any] | None = None, wait: bool = True) -> None:
        """Cancel every task, await ``last``, and end the thread as soon as it is not blocked."""

        async def finish() -> None:
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            if last is not None:
                await last()
            # Connections of clients that nobody closed.
            for transport in list(getattr(self.loop, "_transports", {}).values()):
                transport.abort()
            await asyncio.sleep(0)
            await self.loop.shutdown_default_executor()

        def begin() -> None:
            self.loop.create_task(finish()).add_done_callback(lambda done: self.loop.stop())

        self.soon(begin)
        if not wait:
            interrupt(self._thread)
        else:
            self._thread.join(_CLOSE_SECONDS)
