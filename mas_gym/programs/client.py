"""OpenAI clients for programs in this process: their requests reach the gateway without a socket.

Making a client of `openai` takes longer than a replayed call, so each execution gets a copy of one client, with a key
and a header of its own. Plain chat requests go to the execution directly, all others through the transport.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import json
import marshal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from mas_gym.errors import MissingDependencyError
from mas_gym.programs.calls import AGENT_HEADER, Call, CallError, Reply, completion, reply_to
from mas_gym.programs.execution import Execution, Quiet, given
from mas_gym.programs.gateway import Gateway

_EXECUTION_HEADER = "x-mas-execution"
_PLAIN = {
    *("messages", "model", "temperature", "top_p", "max_tokens", "max_completion_tokens", "n", "metadata"),
    *("tools", "tool_choice", "parallel_tool_calls", "response_format", "stop"),
}
_AGENT = {AGENT_HEADER}


class _Template(NamedTuple):
    """A client without an execution, and the class of the copies' ``chat``."""

    client: Any
    chat: Any


class Clients:
    """Makes the clients of one gateway's executions."""

    def __init__(self, gateway: Gateway) -> None:
        """Make no client yet."""
        self.gateway = gateway
        self._templates: dict[bool, _Template] = {}

    def make(self, execution: Execution, asynchronous: bool) -> Any:
        """Return an `openai.AsyncOpenAI` or `openai.OpenAI` whose requests belong to an execution.

        Raises:
            MissingDependencyError: `openai` is not installed.
        """
        client = self.whole(execution, asynchronous)
        client.__dict__["chat"] = self._templates[asynchronous].chat(self, execution)
        return client

    def whole(self, execution: Execution, asynchronous: bool) -> Any:
        """Return a client whose requests all take the long way."""
        if asynchronous not in self._templates:
            self._templates[asynchronous] = _template(self.gateway, asynchronous)
        client = copy.copy(self._templates[asynchronous].client)
        client.api_key = execution.key or "none"
        client._custom_headers = {_EXECUTION_HEADER: execution.token}
        return client


def _template(gateway: Gateway, asynchronous: bool) -> _Template:
    try:
        import openai
    except ImportError as error:
        raise MissingDependencyError("a program with client= needs openai: pip install 'mas-gym[openai]'") from error
    base: Any = openai.DefaultAsyncHttpxClient if asynchronous else openai.DefaultHttpxClient
    # openai builds on httpx or on httpx2, depending on its version.
    http = importlib.import_module(base.__mro__[1].__module__.partition(".")[0])
    inner = (_async_http if asynchronous else _http)(http, gateway)
    make: Any = openai.AsyncOpenAI if asynchronous else openai.OpenAI
    client = make(base_url="http://mas-gym/v1", api_key="none", max_retries=0, http_client=inner)
    if hasattr(client, "_platform"):
        # Otherwise the first call asks a thread for it, and calls made at once come in any order.
        client._platform = "Unknown"
    return _Template(client, _async_chat() if asynchronous else _chat())


# ---- plain chat requests


def _async_chat() -> Any:
    from openai.resources.chat import AsyncChat, AsyncCompletions
    from openai.types.chat import ChatCompletion

    class Completions(AsyncCompletions):
        def __init__(self, clients: Clients, execution: Execution) -> None:
            self._clients, self._execution = clients, execution

        def __getattr__(self, name: str) -> Any:
            return _completed(self, AsyncCompletions, name, True)

        async def create(self, *args: Any, **named: Any) -> Any:
            execution = self._execution
            call = None if args else _plain(self._clients.gateway, execution, named)
            if call is None:
                return await super().create(*args, **named)
            texts = execution.ask(call, _quiet_on_loop(execution))
            if isinstance(texts, Future):
                texts = await wait_for(texts, execution)
            return ChatCompletion.model_validate(completion(call, texts))

    class Chat(AsyncChat):
        def __init__(self, clients: Clients, execution: Execution) -> None:
            self.__dict__["completions"] = Completions(clients, execution)

    return Chat


def _chat() -> Any:
    from openai.resources.chat import Chat as WholeChat
    from openai.resources.chat import Completions as WholeCompletions
    from openai.types.chat import ChatCompletion

    class Completions(WholeCompletions):
        def __init__(self, clients: Clients, execution: Execution) -> None:
            self._clients, self._execution = clients, execution

        def __getattr__(self, name: str) -> Any:
            return _completed(self, WholeCompletions, name, False)

        def create(self, *args: Any, **named: Any) -> Any:
            execution = self._execution
            call = None if args else _plain(self._clients.gateway, execution, named)
            if call is None:
                return super().create(*args, **named)
            texts = execution.ask(call, _quiet_in_thread(execution))
            return ChatCompletion.model_validate(completion(call, given(texts)))

    class Chat(WholeChat):
        def __init__(self, clients: Clients, execution: Execution) -> None:
            self.__dict__["completions"] = Completions(clients, execution)

    return Chat


def _completed(resource: Any, kind: Any, name: str, asynchronous: bool) -> Any:
    """Return an attribute that a resource of openai has once it knows its client, which few programs need."""
    own = resource.__dict__
    if not name.startswith("__") and "_client" not in own:
        kind.__init__(resource, own["_clients"].whole(own["_execution"], asynchronous))
        if name in own:
            return own[name]
    raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")


def _plain(gateway: Gateway, execution: Execution, named: dict[str, Any]) -> Call | None:
    """Return the call that a plain request asks for; None if it is not plain, or must be refused."""
    headers: dict[str, str] = {}
    if "extra_headers" in named:
        named = dict(named)
        headers = {str(key).lower(): str(value) for key, value in (named.pop("extra_headers") or {}).items()}
    if not named.keys() <= _PLAIN or not headers.keys() <= _AGENT or execution.over:
        return None
    # Omitted values of openai, and messages that are objects; a refusal becomes an exception of openai.
    with suppress(TypeError, ValueError, CallError):
        return gateway.read(marshal.dumps(named, 0), headers, lambda: json.dumps(named).encode())
    return None


def _quiet_on_loop(execution: Execution) -> Quiet:
    return Quiet.IDLE if execution.place is not None and execution.place.here else Quiet.SETTLED


def _quiet_in_thread(execution: Execution) -> Quiet:
    return Quiet.NOW if threading.get_ident() == execution.thread else Quiet.SETTLED


def _wake(soon: Callable[..., Any], here: asyncio.Future[None], reply: Future[list[str]]) -> None:
    soon(_done, here)


def _done(here: asyncio.Future[None]) -> None:
    if not here.done():
        here.set_result(None)


async def wait_for(reply: Future[list[str]], execution: Execution) -> list[str]:
    """Wait for a reply; a call whose client leaves is withdrawn."""
    loop = asyncio.get_running_loop()
    here: asyncio.Future[None] = loop.create_future()
    place = execution.place
    soon = place.soon if place is not None and place.here else loop.call_soon_threadsafe

    reply.add_done_callback(partial(_wake, soon, here))
    try:
        await here
    except asyncio.CancelledError:
        execution.withdraw(reply)
        raise
    return given(reply)


# ---- every other request


def _async_http(http: Any, gateway: Gateway) -> Any:
    """Return an asynchronous client of httpx, or httpx2, that asks the gateway."""

    class Transport(http.AsyncBaseTransport):  # type: ignore[misc]
        async def handle_async_request(self, request: Any) -> Any:
            token = request.headers.get(_EXECUTION_HEADER, "")
            execution = gateway.at(token)
            quiet = Quiet.SETTLED if execution is None else _quiet_on_loop(execution)
            path = f"/{token}{request.url.path}"
            got = gateway.receive(request.method, path, request.headers, await request.aread(), quiet)
            if isinstance(got, Reply):
                return _response(http, got)
            call, texts, execution = got
            if isinstance(texts, Future):
                texts = await wait_for(texts, execution)
            return _response(http, reply_to(call, texts))

    class Client(http.AsyncClient):  # type: ignore[misc]
        async def aclose(self) -> None:
            """Stay open: other executions share it, and there is nothing to close."""

    return Client(transport=Transport(), trust_env=False, timeout=None)


def _http(http: Any, gateway: Gateway) -> Any:
    """Return a synchronous client of httpx, or httpx2, that asks the gateway."""

    class Transport(http.BaseTransport):  # type: ignore[misc]
        def handle_request(self, request: Any) -> Any:
            token = request.headers.get(_EXECUTION_HEADER, "")
            execution = gateway.at(token)
            quiet = Quiet.SETTLED if execution is None else _quiet_in_thread(execution)
            got = gateway.receive(request.method, f"/{token}{request.url.path}", request.headers, request.read(), quiet)
            if isinstance(got, Reply):
                return _response(http, got)
            call, texts, _ = got
            return _response(http, reply_to(call, given(texts)))

    class Client(http.Client):  # type: ignore[misc]
        def close(self) -> None:
            """Stay open: other executions share it, and there is nothing to close."""

    return Client(transport=Transport(), trust_env=False, timeout=None)


def _response(http: Any, reply: Reply) -> Any:
    return http.Response(reply.status, headers={"content-type": reply.kind}, content=reply.body)
