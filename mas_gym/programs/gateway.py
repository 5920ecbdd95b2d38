"""Routing of a program's calls to its execution, and the HTTP server for the calls of other processes.

Each execution has a separate address with an unguessable path, so that no program can access the calls of another.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from hashlib import blake2b
from typing import Any
from weakref import WeakValueDictionary

from mas_gym.errors import PolicyError
from mas_gym.internal.json_types import JSONObject
from mas_gym.programs.calls import (
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
from mas_gym.programs.execution import Execution, L, Origin, ProgramStopped, given, in_thread
from mas_gym.programs.recording import answer_use

Receive = Callable[[], Awaitable[Any]]
IDLE_SECONDS = 5
"""Seconds after which a connection without a request is closed, because many programs never close their clients."""


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
            return _rejected(error)
        return call, execution.ask(call, origin, later), execution


def _rejected(error: CallError) -> Reply:
    return Reply(error.status, "application/json", error.body())


# ---- over HTTP


class Server:
    """The gateway on a loopback port, served by uvicorn.

    Attributes:
        port: The port.
    """

    def __init__(self, gateway: Gateway) -> None:
        """Open the port; `start` begins to handle requests."""
        # Imported here, because programs with client= need no server.
        import uvicorn

        self._gateway = gateway
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        options: dict[str, Any] = {"interface": "asgi3", "lifespan": "off", "ws": "none", "proxy_headers": False}
        logs: dict[str, Any] = {"log_config": None, "access_log": False}
        self._server = uvicorn.Server(uvicorn.Config(self._answer, timeout_keep_alive=IDLE_SECONDS, **options, **logs))

    async def start(self) -> None:
        """Handle requests on the running loop, until the task is cancelled."""
        await self._server.serve([self._socket])

    async def close(self) -> None:
        """Close the port and every connection, and wait for their requests, which end without a reply."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        # A connection that was just accepted is known two turns later.
        for _ in range(2):
            await asyncio.sleep(0)
        state = self._server.server_state
        for connection in state.connections:
            connection.transport.abort()
        await asyncio.gather(*state.tasks)

    async def _answer(self, scope: Mapping[str, Any], receive: Receive, send: Callable[[Any], Awaitable[None]]) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        method, path = scope["method"], scope["path"]
        try:
            got = self._gateway.receive(method, path, headers, body, _origin(headers), in_thread)
            reply = got if isinstance(got, Reply) else await _waited(*got, receive)
        except ProgramStopped:
            reply = _rejected(CallError("the program is over", 404))
        if reply is None:
            return
        # x-should-retry: otherwise openai clients retry errors, although a repeated call gets the same reply.
        head = {"content-type": reply.kind, "content-length": str(len(reply.body)), "x-should-retry": "false"}
        pairs = [(name.encode(), value.encode()) for name, value in head.items()]
        await send({"type": "http.response.start", "status": reply.status, "headers": pairs})
        await send({"type": "http.response.body", "body": reply.body})


async def _waited(
    call: Call, texts: list[str] | Future[list[str]], execution: Execution, receive: Receive
) -> Reply | None:
    """Return the reply to a call; None if its client disconnects first. Raises `ProgramStopped`."""
    if isinstance(texts, Future):
        left = asyncio.ensure_future(receive())
        waits = asyncio.ensure_future(asyncio.wrap_future(texts))
        await asyncio.wait((left, waits), return_when=asyncio.FIRST_COMPLETED)
        left.cancel()
        if not waits.done():
            waits.cancel()
            execution.withdraw(texts)
            return None
    return reply_to(call, given(texts))


def _origin(headers: Mapping[str, str]) -> Origin:
    """Return the origin of a request, which openai clients send in a header."""
    kind = headers.get("x-stainless-async", "")
    if kind == "false":
        return Origin.THREAD
    return Origin.TASK if kind.startswith("async") else Origin.HTTP
