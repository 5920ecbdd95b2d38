"""The HTTP server of the gateway, for calls of programs that have no client in this process.

uvicorn's protocol reads the requests and writes the replies; connections stay open while their programs run.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import TypeAlias

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from mas_gym.internal.json_types import JSONObject
from mas_gym.programs.background import ProgramStopped
from mas_gym.programs.chat_completions import HERE_HEADER, CallError, Reply, reply_to
from mas_gym.programs.execution import Origin, given
from mas_gym.programs.gateway import Gateway, refusal

MAX_BODY = 16 * 2**20
MAX_HEAD = 2**16
IDLE_SECONDS = 5
"""Seconds that a connection waits for a request before it is closed, if its program has ended."""
HEAD_SECONDS = 30.0
"""Seconds that a new connection waits for its first request before it is closed."""

Receive: TypeAlias = Callable[[], Awaitable[JSONObject]]
Send: TypeAlias = Callable[[JSONObject], Awaitable[None]]

_logger = logging.getLogger("mas_gym.programs.http")
# Programs get the reasons of rejected requests as replies.
_logger.addHandler(logging.NullHandler())


class Server:
    """The gateway on a loopback port."""

    def __init__(self, gateway: Gateway) -> None:
        """Open the port; `start` begins to handle requests."""
        self._gateway = gateway
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        self._state = ServerState()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Handle requests on the running loop."""
        config = uvicorn.Config(
            self._answer,
            interface="asgi3",
            proxy_headers=False,
            ws="none",
            lifespan="off",
            log_config=None,
            server_header=False,
            date_header=False,
            timeout_keep_alive=IDLE_SECONDS,
            h11_max_incomplete_event_size=MAX_HEAD,
        )
        config.load()
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Connection(config, self._state, {"gateway": self._gateway}), sock=self._socket
        )

    async def close(self) -> None:
        """Close the port and every connection; open requests end as if their clients had disconnected."""
        if self._server is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            # An accepted connection gets its transport two turns later; closing the server earlier would leave it open.
            for _ in range(2):
                await asyncio.sleep(0)
            self._server.close()
        self._socket.close()
        for connection in list(self._state.connections):
            connection.transport.abort()
        await asyncio.gather(*self._state.tasks)

    async def _answer(self, scope: JSONObject, receive: Receive, send: Send) -> None:
        """Answer one request, as an ASGI application; do not answer if the client has disconnected."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            reply = await self._reply(scope["method"], scope["path"], headers, receive)
        except (CallError, ProgramStopped) as error:
            ended = CallError("this program has ended", 410)
            reply = refusal(scope["path"], error if isinstance(error, CallError) else ended)
        if reply is not None:
            # x-should-retry: otherwise openai clients retry errors, although a repeated call gets the same reply.
            fields = {"content-type": reply.kind, "content-length": str(len(reply.body)), "x-should-retry": "false"}
            pairs = [(name.encode(), value.encode()) for name, value in fields.items()]
            await send({"type": "http.response.start", "status": reply.status, "headers": pairs})
            await send({"type": "http.response.body", "body": reply.body})

    async def _reply(self, method: str, path: str, headers: Mapping[str, str], receive: Receive) -> Reply | None:
        # Without the token and the key of a program, a client cannot make this process read a body.
        self._gateway.admit(path, headers)
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message["body"]
            more = message["more_body"]
            if len(body) > MAX_BODY:
                raise CallError(f"expected a body of at most {MAX_BODY:,} bytes")
        got = self._gateway.receive(method, path, headers, bytes(body))
        if isinstance(got, Reply):
            return got
        call, execution = got
        texts = execution.ask(call, _origin(headers))
        if isinstance(texts, Future):
            left = asyncio.ensure_future(receive())
            waits = asyncio.ensure_future(asyncio.wrap_future(texts))
            try:
                await asyncio.wait((left, waits), return_when=asyncio.FIRST_COMPLETED)
                if not waits.done():
                    execution.withdraw(texts)
                    return None
            finally:
                left.cancel()
                waits.cancel()
                await asyncio.gather(left, return_exceptions=True)
            texts = given(texts.result())
        return reply_to(call, texts)


class _Connection(H11Protocol):
    """A connection, which is closed after `IDLE_SECONDS` without a request if its program has ended."""

    def __init__(self, config: uvicorn.Config, state: ServerState, app_state: dict[str, Gateway]) -> None:
        super().__init__(config, state, app_state)
        self.logger, self.access_log = _logger, False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Send the head and the body of a reply without waiting for an acknowledgment between them."""
        super().connection_made(transport)
        # asyncio sets this only for sockets that name the protocol TCP, which those of `socket.create_server` do not.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.loop.call_later(HEAD_SECONDS, self._close_unused)

    def _close_unused(self) -> None:
        unused = self.scope is None
        if unused:
            self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection, or wait again."""
        if self.app_state["gateway"].at(self.scope["path"]) is None:
            # Many programs never close their clients.
            super().timeout_keep_alive_handler()
        else:
            handler = self.timeout_keep_alive_handler
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, handler)


def _origin(headers: Mapping[str, str]) -> Origin:
    """Return the origin of a request, which openai clients send in a header."""
    kind = headers.get("x-stainless-async", "") if HERE_HEADER in headers else ""
    if kind == "false":
        return Origin.THREAD
    return Origin.TASK if kind.startswith("async") else Origin.HTTP
