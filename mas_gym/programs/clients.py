"""OpenAI clients of programs in this process, which send their requests to the gateway without a socket.

Creating a client or sending a request takes longer than replaying a call. Therefore each execution receives a copy of
one client with a separate address and key. Plain chat requests go directly to the execution, all others through httpx.
"""

from __future__ import annotations

import asyncio
import importlib
from contextlib import suppress
from contextvars import copy_context
from functools import cached_property
from typing import Any

import openai
from openai.resources.chat import AsyncChat, AsyncCompletions, Chat, Completions
from openai.types.chat import ChatCompletion

from mas_gym.internal.json_types import JSONObject
from mas_gym.programs.execution import Execution, Origin, given, in_thread
from mas_gym.programs.frameworks import node_headers
from mas_gym.programs.gateway import Gateway
from mas_gym.programs.model_calls import AGENT_HEADER, Call, CallError, Reply, parsed_call, reply_to, unstreamed_reply

_PLAIN = {
    *("messages", "model", "temperature", "top_p", "max_tokens", "max_completion_tokens", "n", "metadata"),
    *("tools", "tool_choice", "parallel_tool_calls", "response_format", "stop"),
}
_AGENT = {AGENT_HEADER}


def client_of(execution: Execution, template: Any) -> Any:
    """Return a copy of a client from `async_client` or `sync_client` that sends requests for an execution."""
    return template.with_options(base_url=f"{_URL}/{execution.token}/v1", api_key=execution.key or "none")


_URL = "http://mas-gym"


def async_client(gateway: Gateway) -> openai.AsyncOpenAI:
    """Return an asynchronous client that is not bound to an execution."""

    class GatewayCompletions(AsyncCompletions):
        async def create(self, *args: Any, **named: Any) -> Any:
            if args or (plain := _plain(gateway, self._client, named)) is None:
                return await super().create(*args, **named)
            return ChatCompletion.model_validate(unstreamed_reply(plain[0], await _awaited(*plain)))

    class Client(openai.AsyncOpenAI):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            # Otherwise it is computed on a thread at the first call, which reorders concurrent calls.
            self._platform = "Unknown"

        @cached_property
        def chat(self) -> AsyncChat:
            chat = AsyncChat(self)
            chat.completions = GatewayCompletions(self)  # type: ignore[misc]
            return chat

        async def close(self) -> None:
            """Do nothing, because other executions share the HTTP client."""

    async def answer(request: Any) -> Any:
        got = _received(gateway, request)
        return _response(got if isinstance(got, Reply) else reply_to(got[0], await _awaited(*got)))

    http = _HTTP.AsyncClient(transport=_HTTP.MockTransport(answer), trust_env=False, timeout=None)
    return Client(base_url=_URL, api_key="none", max_retries=0, http_client=http)


def sync_client(gateway: Gateway) -> openai.OpenAI:
    """Return a synchronous client that is not bound to an execution."""

    class GatewayCompletions(Completions):
        def create(self, *args: Any, **named: Any) -> Any:
            if args or (plain := _plain(gateway, self._client, named)) is None:
                return super().create(*args, **named)
            return ChatCompletion.model_validate(unstreamed_reply(plain[0], _waited(*plain)))

    class Client(openai.OpenAI):
        @cached_property
        def chat(self) -> Chat:
            chat = Chat(self)
            chat.completions = GatewayCompletions(self)  # type: ignore[misc]
            return chat

        def close(self) -> None:
            """Do nothing, because other executions share the HTTP client."""

    def answer(request: Any) -> Any:
        got = _received(gateway, request)
        return _response(got if isinstance(got, Reply) else reply_to(got[0], _waited(*got)))

    http = _HTTP.Client(transport=_HTTP.MockTransport(answer), trust_env=False, timeout=None)
    return Client(base_url=_URL, api_key="none", max_retries=0, http_client=http)


# openai builds on httpx or on httpx2, depending on its version.
_HTTP: Any = importlib.import_module(openai.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0])


def _received(gateway: Gateway, request: Any) -> Reply | tuple[Call, Execution]:
    return gateway.receive(request.method, request.url.path, {**request.headers, **node_headers()}, request.content)


def _response(reply: Reply) -> object:
    return _HTTP.Response(reply.status, headers={"content-type": reply.kind}, content=reply.body)


def _plain(gateway: Gateway, client: Any, named: JSONObject) -> tuple[Call, Execution] | None:
    """Return the call of a plain request; None if the request is not plain or must be rejected."""
    # Not an attribute: the client is a part of a reference cycle, which would keep the execution alive.
    execution = gateway.at(client.base_url.path)
    named = dict(named)
    sent = {**client._custom_headers, **(named.pop("extra_headers", None) or {})}
    headers = {str(key).lower(): str(value) for key, value in sent.items()}
    if execution is None or execution.over or not named.keys() <= _PLAIN or not headers.keys() <= _AGENT:
        return None
    # openai's omitted values, and messages that are objects; httpx raises rejections as openai exceptions.
    with suppress(TypeError, ValueError, CallError):
        return gateway.fitted(parsed_call(named, headers | node_headers(), gateway.normalize)), execution
    return None


async def _awaited(call: Call, execution: Execution) -> list[str]:
    """Return the replies to a call of a task."""
    texts = execution.ask(call, Origin.CLIENT if execution.here else Origin.HTTP, _Awaited)
    return await texts.texts() if isinstance(texts, _Awaited) else texts


def _waited(call: Call, execution: Execution) -> list[str]:
    """Return the replies to a call of a thread."""
    return execution.wait_for(execution.ask(call, Origin.LOOP if execution.here else Origin.CLIENT, in_thread))


class _Awaited:
    """A pending reply that a task of the running loop awaits."""

    __slots__ = ("_context", "_execution", "_here", "_soon")

    def __init__(self, execution: Execution) -> None:
        loop, place = asyncio.get_running_loop(), execution.place
        self._execution = execution
        self._here: asyncio.Future[list[str]] = loop.create_future()
        self._soon = place.soon if place is not None and place.here else loop.call_soon_threadsafe
        # The loop uses it to find the execution of the reply.
        self._context = copy_context()

    def set_result(self, texts: list[str]) -> None:
        """Set the texts; may be called on any thread."""
        self._context.copy().run(self._soon, _done, self._here, texts)

    async def texts(self) -> list[str]:
        """Wait for the texts; withdraw the call if its client disconnects. Raises `ProgramStopped`."""
        try:
            return given(await self._here)
        except asyncio.CancelledError:
            self._execution.withdraw(self)
            raise


def _done(here: asyncio.Future[list[str]], texts: list[str]) -> None:
    if not here.done():
        here.set_result(texts)
