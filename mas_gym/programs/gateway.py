"""How calls reach their execution: over loopback HTTP, or inside the process through a client's transport.

Each execution has an address of its own with an unguessable path, so that no program sees another's calls.
"""

from __future__ import annotations

import asyncio
import hmac
import importlib
import json
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from mas_gym.errors import MissingDependencyError
from mas_gym.programs.calls import Call, CallError, Reply, read_call, reply_to
from mas_gym.programs.execution import Execution, ProgramStopped, Quiet
from mas_gym.programs.tools import answer_use

MAX_BODY = 16 * 2**20
MAX_HEAD = 2**16
_LINGER_SECONDS = 1.0
_STATUS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed"}
Waits = tuple[Call, "Future[list[str]]", Execution]


class Gateway:
    """Knows the open executions by their path.

    Attributes:
        normalise: See `mas_gym.programs.Program`.
        refusal: Says why a call cannot be answered as it asks; empty if it can.
    """

    def __init__(
        self,
        normalise: Callable[[dict[str, Any]], Any] | None = None,
        refusal: Callable[[Call], str] = lambda call: "",
    ) -> None:
        """Start without executions."""
        self.normalise, self.refusal = normalise, refusal
        self._open: dict[str, Execution] = {}

    def add(self, execution: Execution) -> None:
        """Answer at an execution's path from now on."""
        self._open[execution.token] = execution

    def remove(self, execution: Execution) -> None:
        """Answer there no more."""
        self._open.pop(execution.token, None)

    def receive(self, method: str, path: str, headers: Mapping[str, str], body: bytes, quiet: Quiet) -> Reply | Waits:
        """Take a request: answer it, or hand it to its execution.

        Args:
            method: The HTTP method.
            path: The path, which begins with the execution's token.
            headers: Names in lower case.
            body: The body.
            quiet: How to find out that the program makes no more calls.

        Raises:
            ProgramStopped: The execution is over.
        """
        token, _, route = path.strip("/").partition("/")
        execution = self._open.get(token)
        try:
            if execution is None:
                raise CallError("no program is running at this address", 404)
            sent = headers.get("authorization", "")
            if execution.key and not hmac.compare_digest(sent.encode("utf-8", "replace"), execution.bearer):
                raise CallError("expected the API key that the program was given", 401)
            if route == "v1/models" and method == "GET":
                entry = {"id": "mas-gym", "object": "model", "created": 0, "owned_by": "mas-gym"}
                return Reply(200, "application/json", json.dumps({"object": "list", "data": [entry]}).encode())
            if route == "v1/recorded" and method in ("POST", "PUT"):
                return answer_use(execution, method, body)
            if route != "v1/chat/completions":
                raise CallError(f"{method} /{route[:100]}: the gateway answers /v1/chat/completions alone", 404)
            if method != "POST":
                raise CallError(f"expected POST, got {method}", 405)
            call = read_call(body, headers, self.normalise)
            if reason := self.refusal(call):
                raise CallError(reason)
        except CallError as error:
            return Reply(error.status, "application/json", error.body())
        return call, execution.ask(call, quiet), execution


# ---- inside the process


def make_client(gateway: Gateway, execution: Execution, thread: int | None, asynchronous: bool) -> Any:
    """Return an `openai.AsyncOpenAI` or `openai.OpenAI` whose requests reach an execution without a socket.

    Args:
        gateway: The gateway.
        execution: Whose calls they are.
        thread: The only thread of the program, if its calls can come from there alone; None for one event loop.
        asynchronous: Which of the two.
    """
    try:
        import openai
    except ImportError as error:
        raise MissingDependencyError("a program with client= needs openai: pip install 'mas-gym[openai]'") from error
    base: Any = openai.DefaultAsyncHttpxClient if asynchronous else openai.DefaultHttpxClient
    # openai builds on httpx or on httpx2, depending on its version.
    http = importlib.import_module(base.__mro__[1].__module__.partition(".")[0])
    transport = _transports(http)[0 if asynchronous else 1](gateway, thread)
    inner = (http.AsyncClient if asynchronous else http.Client)(transport=transport, trust_env=False, timeout=None)
    make: Any = openai.AsyncOpenAI if asynchronous else openai.OpenAI
    url = f"http://mas-gym/{execution.token}/v1"
    client = make(base_url=url, api_key=execution.key or "none", max_retries=0, http_client=inner)
    _shorten(client, gateway, execution, thread, asynchronous)
    if hasattr(client, "_platform"):
        # Otherwise the first call asks a thread for it, and calls made at once come in any order.
        client._platform = "Unknown"
    return client


def _shorten(client: Any, gateway: Gateway, execution: Execution, thread: int | None, asynchronous: bool) -> None:
    """Let the client's plain chat requests skip the making of an HTTP request, which takes most of a replay's time."""
    completions = client.chat.completions
    whole = completions.create

    def asked(named: dict[str, Any]) -> tuple[bytes, dict[str, str]] | None:
        if named.keys() - _PLAIN or named.get("stream"):
            return None
        extra = named.get("extra_headers") or {}
        try:
            body = json.dumps({key: value for key, value in named.items() if key != "extra_headers"}).encode()
        except (TypeError, ValueError):
            # Omitted values of openai, and messages that are objects.
            return None
        return body, {**{str(key).lower(): str(value) for key, value in extra.items()}, "authorization": bearer}

    def taken(plain: tuple[bytes, dict[str, str]], quiet: Quiet) -> Waits | None:
        got = gateway.receive("POST", f"{execution.token}/v1/chat/completions", plain[1], plain[0], quiet)
        # Refusals become exceptions of openai on the long way.
        return None if isinstance(got, Reply) else got

    async def create_async(*args: Any, **named: Any) -> Any:
        plain = None if args else asked(named)
        got = None if plain is None else taken(plain, Quiet.IDLE if thread is None else Quiet.SETTLED)
        if got is None:
            return await whole(*args, **named)
        call, reply, _ = got
        if not reply.done():
            await _awaited(reply, execution)
        return _completion(call, reply.result())

    def create(*args: Any, **named: Any) -> Any:
        plain = None if args else asked(named)
        quiet = Quiet.NOW if threading.get_ident() == thread else Quiet.SETTLED
        got = None if plain is None else taken(plain, quiet)
        return whole(*args, **named) if got is None else _completion(got[0], got[1].result())

    bearer = f"Bearer {execution.key}"
    completions.create = create_async if asynchronous else create


_PLAIN = {
    *("messages", "model", "temperature", "top_p", "max_tokens", "max_completion_tokens", "n", "metadata"),
    *("tools", "tool_choice", "parallel_tool_calls", "response_format", "stop", "extra_headers"),
}


def _completion(call: Call, texts: list[str]) -> Any:
    """Return what openai makes of a reply."""
    from openai.types.chat import ChatCompletion

    return ChatCompletion.model_validate_json(reply_to(call, texts).body)


async def _awaited(reply: Future[list[str]], execution: Execution) -> None:
    try:
        await asyncio.wrap_future(reply)
    except asyncio.CancelledError:
        execution.withdraw(reply)
        raise


_cache: dict[str, tuple[Any, Any]] = {}


def _transports(http: Any) -> tuple[Any, Any]:
    """Return the classes of the two transports, for httpx or httpx2."""
    if http.__name__ in _cache:
        return _cache[http.__name__]

    class Asynchronous(http.AsyncBaseTransport):  # type: ignore[misc]
        def __init__(self, gateway: Gateway, thread: int | None) -> None:
            self.gateway, self.quiet = gateway, Quiet.IDLE if thread is None else Quiet.SETTLED

        async def handle_async_request(self, request: Any) -> Any:
            got = self.gateway.receive(
                request.method, request.url.path, request.headers, await request.aread(), self.quiet
            )
            if isinstance(got, Reply):
                return _response(http, got)
            call, reply, execution = got
            if not reply.done():
                await _awaited(reply, execution)
            return _response(http, reply_to(call, reply.result()))

    class Synchronous(http.BaseTransport):  # type: ignore[misc]
        def __init__(self, gateway: Gateway, thread: int | None) -> None:
            self.gateway, self.thread = gateway, thread

        def handle_request(self, request: Any) -> Any:
            quiet = Quiet.NOW if threading.get_ident() == self.thread else Quiet.SETTLED
            got = self.gateway.receive(request.method, request.url.path, request.headers, request.read(), quiet)
            if isinstance(got, Reply):
                return _response(http, got)
            call, reply, _ = got
            return _response(http, reply_to(call, reply.result()))

    _cache[http.__name__] = Asynchronous, Synchronous
    return _cache[http.__name__]


def _response(http: Any, reply: Reply) -> Any:
    return http.Response(reply.status, headers={"content-type": reply.kind}, content=reply.body)


# ---- over HTTP


class Server:
    """The gateway on a loopback port: HTTP/1.1, as much of it as clients of an API use.

    Attributes:
        port: The port.
    """

    def __init__(self, gateway: Gateway) -> None:
        """Open the port; `start` begins to answer."""
        self._gateway = gateway
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Answer requests on the running loop."""
        self._server = await asyncio.start_server(self._serve, sock=self._socket, limit=MAX_HEAD)

    async def close(self) -> None:
        """Close the port and every connection."""
        if self._server is not None:
            self._server.close()
        self._socket.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with suppress(OSError, asyncio.IncompleteReadError, ProgramStopped, asyncio.CancelledError):
                while await self._one(reader, writer):
                    pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; whether the connection stays open."""
        try:
            method, path, headers, body = await _request(reader, writer)
            got = self._gateway.receive(method, path, headers, body, Quiet.SETTLED)
        except CallError as error:
            await _send(writer, Reply(error.status, "application/json", error.body()), False)
            # A connection that is closed with unread data is reset, and its client does not see the reply.
            with suppress(TimeoutError):
                async with asyncio.timeout(_LINGER_SECONDS):
                    while await reader.read(MAX_HEAD):
                        pass
            return False
        stays = headers.get("connection", "").casefold() != "close"
        if isinstance(got, Reply):
            await _send(writer, got, stays)
            return stays
        call, reply, execution = got
        if not reply.done():
            left = asyncio.ensure_future(reader.read(1))
            waits = asyncio.ensure_future(asyncio.wrap_future(reply))
            try:
                await asyncio.wait((left, waits), return_when=asyncio.FIRST_COMPLETED)
                if not waits.done():
                    # Closed, or a second request before the reply, which no client sends.
                    execution.withdraw(reply)
                    return False
            finally:
                left.cancel()
                waits.cancel()
                await asyncio.gather(left, return_exceptions=True)
        await _send(writer, reply_to(call, reply.result()), stays)
        return stays


async def _request(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[str, str, dict[str, str], bytes]:
    """Read one request.

    Raises:
        CallError: It is malformed or too large.
        IncompleteReadError: The client has left.
    """
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise CallError("expected shorter headers") from None
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
    # x-should-retry: a client of openai repeats errors otherwise, though a repeated call gets the same reply.
    head = (
        f"HTTP/1.1 {reply.status} {_STATUS.get(reply.status, 'Error')}\r\ncontent-type: {reply.kind}\r\n"
        f"content-length: {len(reply.body)}\r\nconnection: {'keep-alive' if stays else 'close'}\r\n"
        "x-should-retry: false\r\n\r\n"
    )
    writer.write(head.encode() + reply.body)
    await writer.drain()
