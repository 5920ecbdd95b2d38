"""The event loop of engine clients, which runs on one background thread until the process ends."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

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
            thread = threading.Thread(target=loop.run_forever, name="mas-gym-engines", daemon=True)
            thread.start()
            _closers.clear()
            _running = (os.getpid(), loop, thread)
        return _running[1]


async def on_engine_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on the engine loop and await it; cancelling the caller cancels the work."""
    loop = engine_loop()
    if asyncio.get_running_loop() is loop:
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of concurrent coroutines, in order; if one raises, the others are cancelled and awaited."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
