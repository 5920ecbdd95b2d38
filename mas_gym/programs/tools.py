"""Tools whose results are recorded, so that a replay of the program does not repeat what they do.

A result belongs to the replies that were given before the tool ran: a branch that shares them gets the recorded
result, any other branch runs the tool. In Python::

    @mas_gym.recorded
    def search_web(query: str) -> str: ...

In other languages, over the program's base URL: ``POST {base_url}/recorded`` with ``{"tool": ..., "arguments": ...}``
replies ``{"recorded": true, "result": ...}``, or ``{"recorded": false}``; then the program runs its tool and sends
``PUT {base_url}/recorded`` with the same fields and ``"result"``.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

from mas_gym.programs.calls import CallError, Reply
from mas_gym.programs.execution import Execution, key_of
from mas_gym.programs.sources import CURRENT

F = TypeVar("F", bound=Callable[..., Any])


def recorded(tool: F) -> F:
    """Return a tool that runs once per branch of a program; outside of a search it is the tool itself.

    What is recorded is the result itself, so treat it as immutable. An exception is not recorded.

    Args:
        tool: A function, synchronous or asynchronous, whose arguments have a ``repr`` that determines them.
    """
    name = f"{tool.__module__}.{tool.__qualname__}"

    @functools.wraps(tool)
    def run(*args: Any, **named: Any) -> Any:
        execution = CURRENT.get()
        if execution is None:
            return tool(*args, **named)
        use = execution.use(key_of(name, (args, named)))
        if use.found:
            return use.result
        return use.keep(tool(*args, **named))

    @functools.wraps(tool)
    async def run_async(*args: Any, **named: Any) -> Any:
        execution = CURRENT.get()
        if execution is None:
            return await tool(*args, **named)
        use = execution.use(key_of(name, (args, named)))
        if use.found:
            return use.result
        return use.keep(await tool(*args, **named))

    return cast(F, run_async if inspect.iscoroutinefunction(tool) else run)


def answer_use(execution: Execution, method: str, body: bytes) -> Reply:
    """Answer a request for a recorded result, or record one. Raises `CallError`."""
    try:
        asked = json.loads(body)
        key = key_of(asked["tool"], asked.get("arguments"))
        result = asked["result"] if method == "PUT" else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise CallError('expected {"tool": ..., "arguments": ...}, and with PUT "result"') from None
    if method == "PUT":
        execution.pending_use(key).keep(result)
        content: dict[str, Any] = {"recorded": True}
    else:
        use = execution.use(key)
        content = {"recorded": use.found} | ({"result": use.result} if use.found else {})
    return Reply(200, "application/json", json.dumps(content).encode())
