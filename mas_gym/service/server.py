"""The HTTP server of the service: uvicorn, with a timeout for silent clients and a quiet exit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from mas_gym.service.wire import ApiError

HEAD_SECONDS = 30.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class HangsUpOnSilence(H11Protocol):
    """Closes connections without a complete request, so that idle clients cannot occupy all of them."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection."""
        super().connection_made(transport)
        self.loop.call_later(HEAD_SECONDS, self._look, None)

    def _look(self, before: Any) -> None:
        silent = self.cycle is before and (before is None or before.response_complete)
        if silent:
            self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(HEAD_SECONDS, self._look, self.cycle)

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP with a JSON error, like every other error."""
        body = json.dumps(ApiError(400, msg).body()).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        reply = h11.Response(status_code=400, headers=[*headers, (b"connection", b"close")], reason=b"Bad Request")
        for event in (reply, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class _Server(uvicorn.Server):
    """Stops at the first signal: cancels the open searches, waits for their replies to be sent, and returns."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals from now on; unlike uvicorn, do not raise them again after serving."""
        for number in _SIGNALS:
            signal.signal(number, self.handle_exit)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop; a second signal ends the process at once, even while it waits for threads at exit."""
        if self.should_exit:
            os._exit(128 + sig)
        # uvicorn would log a traceback for every request that the exit interrupts.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)
        self._app.state.stop()
        super().handle_exit(sig, frame)


def listen(app: FastAPI, host: str, port: int, limit: int) -> None:
    """Serve an app until SIGINT or SIGTERM. The signal handlers stay installed, so call it last in a process.

    Args:
        app: The service.
        host: Address to listen on.
        port: Port to listen on.
        limit: Maximum number of open connections; further ones get status 503.
    """
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=HangsUpOnSilence,
        log_level="warning",
        limit_concurrency=limit,
        timeout_graceful_shutdown=5,
    )
    _Server(config, app).run()
