"""The HTTP server of the search service: uvicorn's, which by itself waits for ever for a request's head."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 30.0


class HangsUpOnSilence(H11Protocol):
    """Hangs up on clients that hold a connection without a whole request, so that they cannot take all of them."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection."""
        super().connection_made(transport)
        self.loop.call_later(HEAD_SECONDS, self._look, None)

    def _look(self, before: Any) -> None:
        silent = self.cycle is before and (before is None or before.response_complete)
        if silent:
            self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(HEAD_SECONDS, self._look, self.cycle)


def listen(app: FastAPI, host: str, port: int, limit: int) -> None:
    """Serve an app until Ctrl-C.

    Args:
        app: The service.
        host: Address to listen on.
        port: Port to listen on.
        limit: Connections that may be open; the next ones get status 503.
    """
    uvicorn.run(
        app,
        host=host,
        port=port,
        http=HangsUpOnSilence,
        log_level="warning",
        limit_concurrency=limit,
        timeout_graceful_shutdown=5,
    )
