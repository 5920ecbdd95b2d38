"""Routing of a program's calls to its execution, and the HTTP server for the calls of other processes.

Each execution has a separate address with an unguessable path, so that no program can access the calls of another.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from hashlib import blake2b
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from mas_gym.errors import PolicyError
from mas_gym.internal.json_types import JSONObject
from mas_gym.programs.execution import Execution, L, Origin, ProgramStopped, given, in_thread
from mas_gym.programs.model_calls import (
    AGENT_HEADER,
    NODE_HEADER,
    NODES_HEADER,
    Call,
    CallError,
    Reply,
    parsed_call,
    read_call,
    reply_to,
)
from mas_gym.programs.recording import answer_use

MAX_BODY = 16 * 2**20
MAX_HEAD = 2**16
IDLE_SECONDS = 5.0
"""Seconds that a connection waits for a request before it is closed, if its program has ended."""
_STATUS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed"}


class Gateway:
    """Maps paths to open executions.

    Attributes:
        normalise: See `mas_gym.programs.Program`.
        fitted: Converts a call to the form that its policy supports. Raises `PolicyError` if a part is unsupported.
    """

    def __init__(
        self,
        normalise: Callable[[JSONObject], Any] | None = None,
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
        """Return the execution whose token is at the beginning of a path; None if there is no such execution."""
        return self._open.get(path.strip("/").partition("/")[0])

    def read(self, known: bytes, headers: Mapping[str, str], asked: Callable[[], JSONObject] | None = None) -> Call:
        """Parse a request; repeated requests are looked up in a cache.

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

    def admit(self, path: str, headers: Mapping[str, str]) -> Execution:
        """Return the execution that a request belongs to; its body need not have been read.

        Raises:
            CallError: There is no such execution, or the request lacks its key.
        """
        execution = self.at(path)
        if execution is None:
            raise CallError("no program is running at this address", 404)
        sent = headers.get("authorization", "")
        if execution.key and not hmac.compare_digest(sent.encode("utf-8", "replace"), execution.bearer):
            raise CallError("expected the API key of this program", 401)
        return execution

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
        route = path.strip("/").partition("/")[2]
        try:
            execution = self.admit(path, headers)
            if route == "v1/models" and method == "GET":
                entry = {"id": "mas-gym", "object": "model", "created": 0, "owned_by": "mas-gym"}
                return Reply(200, "application/json", json.dumps({"object": "list", "data": [entry]}).encode())
            if route == "v1/recorded" and method in ("POST", "PUT"):
                return answer_use(execution, method, body)
            if route != "v1/chat/completions":
                raise CallError(f"expected a request to /v1/chat/completions, got {method} /{route[:100]}", 404)
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
                        raise CallError(f"expected headers of at most {MAX_HEAD:,} bytes, got more") from None
            if path and self._gateway.at(path) is None:
                # Many programs never close their clients.
                raise ConnectionError

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, last: str) -> str | None:
        """Handle one request; return its path, or None to close the connection.

        ``last`` is the path of the previous request on this connection; empty for the first request.
        """
        try:
            head = await self._head(reader, last)
            method, path, headers = _head_of(head)
            # Without the token and the key of a program, a client cannot make this process read a body.
            self._gateway.admit(path, headers)
            body = await _body_of(headers, reader, writer)
            got = self._gateway.receive(method, path, headers, body, _origin(headers), in_thread)
        except CallError as error:
            await _send(writer, Reply(error.status, "application/json", error.body()), False)
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
            texts = given(texts.result())
        await _send(writer, reply_to(call, texts), stays)
        return path if stays else None


def _origin(headers: Mapping[str, str]) -> Origin:
    """Return the origin of a request, which openai clients send in a header."""
    kind = headers.get("x-stainless-async", "")
    if kind == "false":
        return Origin.THREAD
    return Origin.TASK if kind.startswith("async") else Origin.HTTP


def _head_of(head: bytes) -> tuple[str, str, dict[str, str]]:
    """Return method, path and headers of a request. Raises `CallError` if it is malformed."""
    first, *lines = head[:-4].decode("latin-1").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    try:
        method, target, _ = first.split(" ")
        return method, urlsplit(target).path, headers
    except ValueError:
        raise _malformed() from None


async def _body_of(headers: Mapping[str, str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Read the body of a request.

    Raises:
        CallError: The request is malformed or too large.
        IncompleteReadError: The client has disconnected.
    """
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    try:
        if "chunked" in headers.get("transfer-encoding", "").lower():
            return await _chunks(reader)
        length = int(headers.get("content-length", "0"))
    except ValueError:
        raise _malformed() from None
    if not 0 <= length <= MAX_BODY:
        raise CallError(f"expected a body of at most {MAX_BODY:,} bytes")
    return await reader.readexactly(length)


def _malformed() -> CallError:
    return CallError("expected a well-formed HTTP request")


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
