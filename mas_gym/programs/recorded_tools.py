"""Recorded tools: branches with the same earlier replies reuse the results.

A branch with the same replies before the tool call receives the recorded result; any other branch runs the tool. In
Python::

    @mas_gym.recorded
    def search_web(query: str) -> str: ...

In other languages, use the program's base URL: ``POST {base_url}/recorded`` with ``{"tool": ..., "arguments": ...}``
returns ``{"recorded": true, "result": ...}``, or ``{"recorded": false}``. In the second case the program runs its tool
and sends ``PUT {base_url}/recorded`` with the same fields and ``"result"``.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from typing import Any, TypeVar, cast
from urllib.request import Request, urlopen

from mas_gym.internal.json_types import JSONObject
from mas_gym.programs.background import CURRENT
from mas_gym.programs.chat_completions import CallError, Reply
from mas_gym.programs.execution import Execution, Use, key_of


class _RemoteUse:
    """One use of a recorded tool in a separate process, which requests the result from the gateway."""

    def __init__(self, base_url: str, api_key: str, key: str) -> None:
        self._url, self._sent = f"{base_url}/recorded", {"tool": key, "arguments": None}
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        reply = self._send("POST", self._sent)
        self.found = bool(reply["recorded"])
        self.result = reply.get("result")

    def keep(self, result: object) -> object:
        """Record the result, which must be JSON-serializable, and return its JSON form, which later uses receive."""
        self._send("PUT", {**self._sent, "result": result})
        return json.loads(json.dumps(result))

    def _send(self, method: str, body: JSONObject) -> JSONObject:
        request = Request(self._url, json.dumps(body).encode(), self._headers, method=method)
        with urlopen(request) as reply:
            found: JSONObject = json.load(reply)
        return found


_gateway: tuple[str, str] | None = None


def use_gateway(base_url: str, api_key: str) -> None:
    """Make this process's `recorded` tools use a gateway; for a process that was started to run a single program."""
    global _gateway
    _gateway = base_url, api_key


def _use(tool: str, arguments: object) -> Use | _RemoteUse | None:
    """Return the next use of a recorded tool; None outside of programs."""
    execution = CURRENT.get()
    if isinstance(execution, Execution):
        return execution.use(key_of(tool, arguments))
    return None if _gateway is None else _RemoteUse(*_gateway, key_of(tool, arguments))


F = TypeVar("F", bound=Callable[..., Any])


def recorded(tool: F) -> F:
    """Return a tool that runs once per branch of a program; outside of a search it behaves as usual.

    The result object itself is recorded, not a copy, so treat it as immutable. Exceptions are not recorded.

    Args:
        tool: A synchronous or asynchronous function; the ``repr`` of each argument must determine its value.
    """
    name = f"{tool.__module__}.{tool.__qualname__}"

    @functools.wraps(tool)
    def run(*args: object, **named: object) -> Any:
        use = _use(name, (args, named))
        if use is None:
            return tool(*args, **named)
        if use.found:
            return use.result
        return use.keep(tool(*args, **named))

    @functools.wraps(tool)
    async def run_async(*args: object, **named: object) -> object:
        use = _use(name, (args, named))
        if use is None:
            return await tool(*args, **named)
        if use.found:
            return use.result
        return use.keep(await tool(*args, **named))

    return cast(F, run_async if inspect.iscoroutinefunction(tool) else run)


def answer_use(execution: Execution, method: str, body: bytes) -> Reply:
    """Record the result in a PUT request, or look one up for any other request. Raises `CallError`."""
    try:
        asked = json.loads(body)
        key = key_of(asked["tool"], asked.get("arguments"))
        result = asked["result"] if method == "PUT" else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise CallError('expected {"tool": ..., "arguments": ...}, and in a PUT request also "result"') from None
    if method == "PUT":
        execution.record(key, result)
        content: JSONObject = {"recorded": True}
    else:
        use = execution.look_up(key)
        content = {"recorded": use.found} | ({"result": use.result} if use.found else {})
    return Reply(200, "application/json", json.dumps(content).encode())
