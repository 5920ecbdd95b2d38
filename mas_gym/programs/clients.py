"""OpenAI clients of programs in this process, which send their requests to the gateway without a socket.

Creating a client or sending a request takes longer than replaying a call. Therefore each execution receives a copy of
one client with a separate address and key. Plain chat requests go directly to the execution, all others through httpx.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from concurrent.futures import Future
from contextlib import suppress
from functools import cached_property
from typing import Any

import openai
from openai.resources.chat import AsyncChat, AsyncCompletions, Chat, Completions
from openai.types.chat import ChatCompletion

from mas_gym.internal.json_types import JSONObject
from mas_gym.programs.background import CURRENT, ProgramStopped
from mas_gym.programs.chat_completions import (
    AGENT_HEADER,
    Call,
    CallError,
    Reply,
    parsed_call,
    reply_to,
    unstreamed_reply,
)
from mas_gym.programs.execution import Execution, Origin, given
from mas_gym.programs.frameworks import node_headers
from mas_gym.programs.gateway import Gateway

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
    if (caller := CURRENT.get()) is not None and caller.over:
        # A client may retry an error without end.
        raise ProgramStopped
    # Not an attribute: the client is a part of a reference cycle, which would keep the execution alive.
    execution = gateway.at(client.base_url.path)
    named = dict(named)
    sent = {**client._custom_headers, **(named.pop("extra_headers", None) or {})}
    headers = {str(key).lower(): str(value) for key, value in sent.items()}
    if execution is None or execution.over or not named.keys() <= _PLAIN or not headers.keys() <= _AGENT:
        return None
    # openai's omitted values, and messages that are objects; httpx raises rejections as openai exceptions.
    with suppress(TypeError, ValueError, CallError):
        # As JSON over HTTP, in which a member of a str enumeration is a plain text.
        named = json.loads(json.dumps(named))
        return gateway.fitted(parsed_call(named, headers | node_headers(), gateway.normalize)), execution
    return None


async def _awaited(call: Call, execution: Execution) -> list[str]:
    """Return the replies to a call of a task."""
    texts = execution.ask(call, Origin.CLIENT if execution.here else Origin.HTTP)
    if not isinstance(texts, Future):
        return texts
    try:
        return given(await asyncio.wrap_future(texts))
    except asyncio.CancelledError:
        execution.withdraw(texts)
        raise


def _waited(call: Call, execution: Execution) -> list[str]:
    """Return the replies to a call of a thread."""
    return execution.wait_for(execution.ask(call, Origin.LOOP if execution.here else Origin.CLIENT))
