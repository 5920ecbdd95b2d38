"""The HTTP server of the search service: uvicorn's, which by itself waits for ever for a request's head."""

from __future__ import annotations

import asyncio
from typing import Any

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
