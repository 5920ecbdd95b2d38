"""Routing of a program's calls to its execution: over loopback HTTP, or from clients in this process without a socket.

Each execution has a separate address with an unguessable path, so that no program can access the calls of another.

Creating an `openai` client takes longer than a replayed call. Therefore each execution receives a copy of one client
with a separate key and header. Plain chat requests go to the execution directly, all others through the transport.
"""

from __future__ import annotations

import asyncio
import hmac
import importlib
import json
import marshal
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from mas_gym.errors import MissingDependencyError, PolicyError
from mas_gym.internal.json_types import JSONObject
from mas_gym.programs.calls import (
    AGENT_HEADER,
    NODE_HEADER,
    NODES_HEADER,
    Call,
    CallError,
    Reply,
    completion,
    parsed_call,
    read_call,
    reply_to,
)
from mas_gym.programs.execution import Execution, L, Origin, ProgramStopped, given, in_thread
from mas_gym.programs.frameworks import node_headers
from mas_gym.programs.recording import answer_use

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

MAX_BODY = 16 * 2**20
MAX_HEAD = 2**16
IDLE_SECONDS = 5.0
"""Seconds that a connection waits for a request before it is closed, if its program has ended."""
_LINGER_SECONDS = 1.0
_STATUS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed"}


class Gateway:
    """Maps paths to open executions.

    Attributes:
        normalise: See `mas_gym.programs.Program`.
        fitted: Converts a call to the form that its policy supports. Raises `PolicyError` if a part is unsupported.
    """

    def __init__(
        self,
        normalise: Callable[[JSONObject], object] | None = None,
        fitted: Callable[[Call], Call] = lambda call: call,
    ) -> None:
        """Start without executions."""
        self.normalise, self.fitted = normalise, fitted
        self._open: dict[str, Execution] = {}
        self._calls: WeakValueDictionary[bytes, Call] = WeakValueDictionary()

    def add(self, execution: Execution) -> None:
        """Accept requests at an execution's path."""
        self._open[execution.token] = execution

    def remove(self, execution: Execution) -> None:
        """Stop accepting requests at an execution's path."""
        self._open.pop(execution.token, None)

    def at(self, path: str) -> Execution | None:
        """Return the execution with the token at the beginning of a path; None if there is none."""
        return self._open.get(path.strip("/").partition("/")[0])

    def read(self, known: bytes, headers: Mapping[str, str], asked: Callable[[], JSONObject] | None = None) -> Call:
        """Parse a request; repeated requests are looked up.

        Args:
            known: The body, or another form of it that serves as the look-up key.
            headers: Names in lower case.
            asked: Returns the parsed body, if ``known`` is another form.

        Raises:
            CallError: See `read_call`; or the policy does not support a part of the call.
        """
        caller = "".join(f"{headers.get(name, '')}\0" for name in (AGENT_HEADER, NODE_HEADER, NODES_HEADER))
        key = blake2b(caller.encode() + known, digest_size=16).digest()
        call = self._calls.get(key)
        if call is None:
            if asked is None:
                call = read_call(known, headers, self.normalise)
            else:
                call = parsed_call(asked(), headers, self.normalise)
            try:
                call = self._calls[key] = self.fitted(call)
            except PolicyError as error:
                raise CallError(str(error)) from None
        return call

    def receive(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        origin: Origin,
        later: Callable[[Execution], L],
    ) -> Reply | tuple[Call, list[str] | L, Execution]:
        """Handle a request: reply to it, or pass it to its execution.

        Args:
            method: The HTTP method.
            path: The path, which begins with the execution's token.
            headers: Names in lower case.
            body: The body.
            origin: How the request arrived.
            later: Returns the pending reply, which is set when the reply is available.

        Raises:
            ProgramStopped: The execution is over.
        """
        execution, route = self.at(path), path.strip("/").partition("/")[2]
        try:
            if execution is None:
                raise CallError("no program is running at this address", 404)
            sent = headers.get("authorization", "")
            if execution.key and not hmac.compare_digest(sent.encode("utf-8", "replace"), execution.bearer):
                raise CallError("expected the API key of this program", 401)
            if route == "v1/models" and method == "GET":
                entry = {"id": "mas-gym", "object": "model", "created": 0, "owned_by": "mas-gym"}
                return Reply(200, "application/json", json.dumps({"object": "list", "data": [entry]}).encode())
            if route == "v1/recorded" and method in ("POST", "PUT"):
                return answer_use(execution, method, body)
            if route != "v1/chat/completions":
                raise CallError(f"{method} /{route[:100]}: the gateway supports only /v1/chat/completions", 404)
            if method != "POST":
                raise CallError(f"expected POST, got {method}", 405)
            call = self.read(body, headers)
        except CallError as error:
            return Reply(error.status, "application/json", error.body())
        return call, execution.ask(call, origin, later), execution


# ---- over HTTP


class Server:
    """The gateway on a loopback port, with the subset of HTTP/1.1 that API clients use.

    Attributes:
        port: The port.
    """

    def __init__(self, gateway: Gateway) -> None:
        """Open the port; `start` begins to handle requests."""
        self._gateway = gateway
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Handle requests on the running loop."""
        self._server = await asyncio.start_server(self._connect, sock=self._socket, limit=MAX_HEAD)

    async def close(self) -> None:
        """Close the port and every connection."""
        if self._server is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            # An accepted connection gets its task two turns later; closing the server earlier would leave it open.
            for _ in range(2):
                await asyncio.sleep(0)
            self._server.close()
        self._socket.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task that is cancelled before its first step would not reach its `finally` block.
        task.add_done_callback(lambda _: writer.close())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path: str | None = ""
        with suppress(OSError, asyncio.IncompleteReadError, ProgramStopped, asyncio.CancelledError):
            while path is not None:
                path = await self._one(reader, writer, path)

    async def _head(self, reader: asyncio.StreamReader, path: str) -> bytes:
        """Read the head of the next request. Raises `ConnectionError` if the previous request's program has ended."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(IDLE_SECONDS):
                    try:
                        return await reader.readuntil(b"\r\n\r\n")
                    except asyncio.LimitOverrunError:
                        raise CallError("expected shorter headers") from None
            if path and self._gateway.at(path) is None:
                # Many programs never close their clients.
                raise ConnectionError

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, last: str) -> str | None:
        """Handle one request, after one to the path ``last``; return its path, or None to close the connection."""
        try:
            head = await self._head(reader, last)
            method, path, headers, body = await _request(head, reader, writer)
            got = self._gateway.receive(method, path, headers, body, _origin(headers), in_thread)
        except CallError as error:
            await _send(writer, Reply(error.status, "application/json", error.body()), False)
            # A connection that is closed with unread data is reset, and its client does not see the reply.
            with suppress(TimeoutError):
                async with asyncio.timeout(_LINGER_SECONDS):
                    while await reader.read(MAX_HEAD):
                        pass
            return None
        stays = headers.get("connection", "").casefold() != "close"
        if isinstance(got, Reply):
            await _send(writer, got, stays)
            return path if stays else None
        call, texts, execution = got
        if isinstance(texts, Future):
            left = asyncio.ensure_future(reader.read(1))
            waits = asyncio.ensure_future(asyncio.wrap_future(texts))
            try:
                await asyncio.wait((left, waits), return_when=asyncio.FIRST_COMPLETED)
                if not waits.done():
                    # The client disconnected, or sent a second request before the reply, which clients do not do.
                    execution.withdraw(texts)
                    return None
            finally:
                left.cancel()
                waits.cancel()
                await asyncio.gather(left, return_exceptions=True)
            texts = given(texts)
        await _send(writer, reply_to(call, texts), stays)
        return path if stays else None


def _origin(headers: Mapping[str, str]) -> Origin:
    """Return the origin of a request, which openai clients send in a header."""
    kind = headers.get("x-stainless-async", "")
    if kind == "false":
        return Origin.THREAD
    return Origin.TASK if kind.startswith("async") else Origin.HTTP


async def _request(
    head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[str, str, dict[str, str], bytes]:
    """Read the rest of one request after its head.

    Raises:
        CallError: The request is malformed or too large.
        IncompleteReadError: The client has disconnected.
    """
    first, *lines = head[:-4].decode("latin-1").split("\r\n")
    try:
        method, target, _ = first.split(" ")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        path = urlsplit(target).path
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if "chunked" in headers.get("transfer-encoding", "").lower():
            return method, path, headers, await _chunks(reader)
        length = int(headers.get("content-length", "0"))
    except ValueError:
        raise CallError("expected an HTTP request") from None
    if not 0 <= length <= MAX_BODY:
        raise CallError(f"expected a body of at most {MAX_BODY:,} bytes")
    return method, path, headers, await reader.readexactly(length)


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while size := int((await reader.readline()).split(b";")[0], 16):
        if size < 0 or len(body) + size > MAX_BODY:
            raise CallError(f"expected a body of at most {MAX_BODY:,} bytes")
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    while (await reader.readline()).strip():
        pass
    return bytes(body)


async def _send(writer: asyncio.StreamWriter, reply: Reply, stays: bool) -> None:
    # x-should-retry: otherwise openai clients retry errors, although a repeated call gets the same reply.
    head = (
        f"HTTP/1.1 {reply.status} {_STATUS.get(reply.status, 'Error')}\r\ncontent-type: {reply.kind}\r\n"
        f"content-length: {len(reply.body)}\r\nconnection: {'keep-alive' if stays else 'close'}\r\n"
        "x-should-retry: false\r\n\r\n"
    )
    writer.write(head.encode() + reply.body)
    await writer.drain()


_EXECUTION_HEADER = "x-mas-execution"
_PLAIN = {
    *("messages", "model", "temperature", "top_p", "max_tokens", "max_completion_tokens", "n", "metadata"),
    *("tools", "tool_choice", "parallel_tool_calls", "response_format", "stop"),
}
_AGENT = {AGENT_HEADER}


class _Template(NamedTuple):
    """A client without an execution, and the class of the copies' ``chat``."""

    client: OpenAI | AsyncOpenAI
    chat: Callable[[Clients, Execution], object]


class Clients:
    """Creates the clients of one gateway's executions."""

    def __init__(self, gateway: Gateway) -> None:
        """Start without clients."""
        self.gateway = gateway
        self._templates: dict[bool, _Template] = {}

    def make(self, execution: Execution, asynchronous: bool) -> OpenAI | AsyncOpenAI:
        """Return an `openai.AsyncOpenAI` or `openai.OpenAI` that sends requests for an execution.

        Raises:
            MissingDependencyError: `openai` is not installed.
        """
        client = self.whole(execution, asynchronous)
        client.__dict__["chat"] = self._templates[asynchronous].chat(self, execution)
        return client

    def whole(self, execution: Execution, asynchronous: bool) -> OpenAI | AsyncOpenAI:
        """Return a client that sends all requests through the transport."""
        if asynchronous not in self._templates:
            self._templates[asynchronous] = _template(self.gateway, asynchronous)
        template = self._templates[asynchronous].client
        # Equivalent to copy.copy, without its dispatch overhead.
        client = object.__new__(type(template))
        client.__dict__.update(template.__dict__)
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
    # Otherwise an asynchronous client computes it on a thread at the first call, which reorders concurrent calls.
    client._platform = "Unknown"
    return _Template(client, _async_chat() if asynchronous else _chat())


# ---- plain chat requests


def _async_chat() -> Callable[[Clients, Execution], object]:
    from openai.resources.chat import AsyncChat, AsyncCompletions
    from openai.types.chat import ChatCompletion

    class Completions(AsyncCompletions):
        def __init__(self, clients: Clients, execution: Execution) -> None:
            self._clients, self._execution = clients, execution

        def __getattr__(self, name: str) -> object:
            return _completed(self, AsyncCompletions, name, True)

        async def create(self, *args: Any, **named: Any) -> Any:
            execution = self._execution
            call = None if args else _plain(self._clients.gateway, execution, named)
            if call is None:
                return await super().create(*args, **named)
            texts = execution.ask(call, _of_task(execution), _Awaited)
            if isinstance(texts, _Awaited):
                texts = await texts.texts()
            return ChatCompletion.model_validate(completion(call, texts))

    class Chat(AsyncChat):
        def __init__(self, clients: Clients, execution: Execution) -> None:
            self.__dict__["completions"] = Completions(clients, execution)

    return Chat


def _chat() -> Callable[[Clients, Execution], object]:
    from openai.resources.chat import Chat as WholeChat
    from openai.resources.chat import Completions as WholeCompletions
    from openai.types.chat import ChatCompletion

    class Completions(WholeCompletions):
        def __init__(self, clients: Clients, execution: Execution) -> None:
            self._clients, self._execution = clients, execution

        def __getattr__(self, name: str) -> object:
            return _completed(self, WholeCompletions, name, False)

        def create(self, *args: Any, **named: Any) -> Any:
            execution = self._execution
            call = None if args else _plain(self._clients.gateway, execution, named)
            if call is None:
                return super().create(*args, **named)
            texts = execution.ask(call, _of_thread(execution), in_thread)
            return ChatCompletion.model_validate(completion(call, given(texts)))

    class Chat(WholeChat):
        def __init__(self, clients: Clients, execution: Execution) -> None:
            self.__dict__["completions"] = Completions(clients, execution)

    return Chat


def _completed(resource: object, kind: Any, name: str, asynchronous: bool) -> object:
    """Return an attribute of an openai resource that is set only on demand, because few programs need it."""
    own = resource.__dict__
    if not name.startswith("__") and "_client" not in own:
        kind.__init__(resource, own["_clients"].whole(own["_execution"], asynchronous))
        if name in own:
            return own[name]
    raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")


def _plain(gateway: Gateway, execution: Execution, named: JSONObject) -> Call | None:
    """Return the call of a plain request; None if the request is not plain or must be rejected."""
    headers: dict[str, str] = {}
    if "extra_headers" in named:
        named = dict(named)
        headers = {str(key).lower(): str(value) for key, value in (named.pop("extra_headers") or {}).items()}
    if not named.keys() <= _PLAIN or not headers.keys() <= _AGENT or execution.over:
        return None
    # openai's omitted values, and messages that are objects; the transport raises rejections as openai exceptions.
    with suppress(TypeError, ValueError, CallError):
        return gateway.read(marshal.dumps(named, 0), headers | node_headers(), partial(_asked, gateway, named))
    return None


def _asked(gateway: Gateway, named: JSONObject) -> JSONObject:
    # A hook may change its argument, which is JSON.
    return named if gateway.normalise is None else json.loads(json.dumps(named))


def _of_task(execution: Execution | None) -> Origin:
    ours = execution is not None and execution.place is not None and execution.place.here
    return Origin.CLIENT if ours else Origin.HTTP


def _of_thread(execution: Execution | None) -> Origin:
    ours = execution is not None and execution.place is not None and execution.place.here
    return Origin.LOOP if ours else Origin.CLIENT


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
        """Set the texts, on any thread."""
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


# ---- every other request


def _async_http(http: Any, gateway: Gateway) -> Any:
    """Return an asynchronous httpx or httpx2 client that sends requests to the gateway."""

    class Transport(http.AsyncBaseTransport):  # type: ignore[misc]
        async def handle_async_request(self, request: Any) -> Any:
            token = request.headers.get(_EXECUTION_HEADER, "")
            execution = gateway.at(token)
            path = f"/{token}{request.url.path}"
            headers, body = {**request.headers, **node_headers()}, await request.aread()
            got = gateway.receive(request.method, path, headers, body, _of_task(execution), _Awaited)
            if isinstance(got, Reply):
                return _response(http, got)
            call, texts, execution = got
            if isinstance(texts, _Awaited):
                texts = await texts.texts()
            return _response(http, reply_to(call, texts))

    class Client(http.AsyncClient):  # type: ignore[misc]
        async def aclose(self) -> None:
            """Stay open: other executions share it, and there is nothing to close."""

    return Client(transport=Transport(), trust_env=False, timeout=None)


def _http(http: Any, gateway: Gateway) -> Any:
    """Return a synchronous httpx or httpx2 client that sends requests to the gateway."""

    class Transport(http.BaseTransport):  # type: ignore[misc]
        def handle_request(self, request: Any) -> Any:
            token = request.headers.get(_EXECUTION_HEADER, "")
            execution = gateway.at(token)
            path, origin = f"/{token}{request.url.path}", _of_thread(execution)
            headers = {**request.headers, **node_headers()}
            got = gateway.receive(request.method, path, headers, request.read(), origin, in_thread)
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
