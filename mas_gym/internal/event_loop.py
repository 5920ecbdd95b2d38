"""The event loop of engine clients, on one background thread until the process ends, and threads for blocking work."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

BATCH_TURNS = 16
"""Turns of the event loop between the replies of a policy and its next batch.

The requests that follow from a reply arrive within 5 turns, or within 16 if a critic first scores what the reply adds
(the critic waits 5 turns, too: `search.engine.scheduler`).
"""

_SHUTDOWN_SECONDS = 20.0
_lock = threading.Lock()
_running: tuple[int, asyncio.AbstractEventLoop, threading.Thread] | None = None
_closers: list[Callable[[], Awaitable[None]]] = []
_before: list[Callable[[], None]] = []


def engine_loop() -> asyncio.AbstractEventLoop:
    """Return the process's engine loop; the first call (and the first after a fork) starts its thread."""
    global _running
    with _lock:
        if _running is None or _running[0] != os.getpid():
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=run_on, args=(loop,), name="mas-gym-engines", daemon=True)
            thread.start()
            _closers.clear()
            _running = (os.getpid(), loop, thread)
        return _running[1]


def run_on(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped; an exception that would end it, such as `sys.exit`, ends only the call."""
    while True:
        with suppress(SystemExit, KeyboardInterrupt):
            return loop.run_forever()


def on_engine_thread() -> bool:
    """Return whether the caller runs on the engine loop."""
    return _running is not None and asyncio.get_running_loop() is _running[1]


async def on_engine_loop(work: Coroutine[object, object, T]) -> T:
    """Run ``work`` on the engine loop and await it; cancelling the caller cancels the work."""
    loop = engine_loop()
    if asyncio.get_running_loop() is loop:
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


def from_thread(work: Coroutine[object, object, T]) -> T:
    """Run ``work`` on the engine loop and wait for its result, on any other thread."""
    running = asyncio.run_coroutine_threadsafe(work, engine_loop())
    try:
        return running.result()
    finally:
        # If Ctrl-C ended the wait, the work must stop too; a finished future ignores this.
        running.cancel()


async def together(work: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """Return the results of concurrent coroutines, in order; if one raises, the others are cancelled and awaited."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def settle(future: asyncio.Future[T], outcome: T | BaseException) -> None:
    """Set a future's result or exception unless its search has ended."""
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def outside_loop(work: Callable[[], T]) -> T:
    """Return the result of blocking user code that is called on an event loop's thread, but may start a loop itself.

    `asyncio.run` refuses to start while the thread has a running loop.
    """
    loop = asyncio.get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return work()
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise as_error(error) from error
    finally:
        asyncio._set_running_loop(loop)


def as_error(error: BaseException) -> Exception:
    """Convert any other `BaseException` to a `RuntimeError`, because asyncio does not pass it on through futures."""
    if isinstance(error, Exception):
        return error
    passed = RuntimeError(f"{type(error).__name__}: {error}")
    passed.__cause__ = error
    return passed


async def without_requests() -> None:
    """Return after the turns in which batch queues find no request and close their engines' sessions."""
    for _ in range(BATCH_TURNS + 2):
        await asyncio.sleep(0)


class Threads:
    """Daemon threads that run functions for the event loop; they start on demand."""

    def __init__(self, name: str, most: int = 1) -> None:
        self._name, self._most, self._started = name, most, 0
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of ``work``, which is skipped if the caller is cancelled before it starts."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self.start(work, lambda outcome: loop.call_soon_threadsafe(settle, future, outcome), future.cancelled)
        return await future

    def start(
        self,
        work: Callable[[], T],
        done: Callable[[T | Exception], object],
        skipped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Call ``work``, then ``done`` with its outcome, on a thread, unless ``skipped`` returns True by then."""

        def job() -> None:
            if skipped():
                return
            outcome: T | Exception
            try:
                outcome = work()
            except BaseException as error:
                outcome = as_error(error)
            # The event loop may be closed by now.
            with suppress(RuntimeError):
                done(outcome)

        self._jobs.put(job)
        if self._started < self._most:
            self._started += 1
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def close(self) -> None:
        """End the threads after their current work."""
        for _ in range(self._started):
            self._jobs.put(None)


def close_at_exit(closer: Callable[[], Awaitable[None]]) -> None:
    """Register ``closer`` to be awaited on the engine loop when the interpreter exits."""
    engine_loop()
    _closers.append(closer)
    # Exit handlers run in reverse order: re-registering makes this one run before those of the engines' libraries.
    atexit.unregister(_stop)
    atexit.register(_stop)


def before_engines_close(call: Callable[[], None]) -> None:
    """Register a function to be called when the interpreter exits, before the engine loop ends."""
    _before.append(call)


def _stop() -> None:
    for call in _before:
        call()
    if _running is None or _running[0] != os.getpid():
        return
    _, loop, thread = _running

    async def close_all() -> None:
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await asyncio.gather(*(closer() for closer in _closers), return_exceptions=True)

    try:
        asyncio.run_coroutine_threadsafe(close_all(), loop).result(_SHUTDOWN_SECONDS)
    except TimeoutError:
        return
    loop.call_soon_threadsafe(loop.stop)
    thread.join(_SHUTDOWN_SECONDS)
    if not thread.is_alive():
        loop.close()


atexit.register(_stop)
