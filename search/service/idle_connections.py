"""Limits for connections without a request: they are closed after a time, and early if others need the room.

uvicorn has no time limit for the headers of a request, and counts connections that wait for one as requests.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""Seconds for the first byte and all headers of a request."""


class IdleLimits(H11Protocol):
    """uvicorn's protocol for one connection, with the limits of this module."""

    _deadline: asyncio.TimerHandle | None = None

    @property
    def waits(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection; if this reaches the limit, close the one that has waited longest for its request."""
        super().connection_made(transport)
        self._limit()
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            waiting = [one for one in self.connections if isinstance(one, IdleLimits) and one.waits]
            oldest = min(waiting, key=lambda one: one._deadline.when() if one._deadline is not None else 0.0)
            if oldest is not self:
                oldest.transport.close()
                # The connection is lost one turn of the loop later; until then it would count.
                self.connections.discard(oldest)

    def data_received(self, data: bytes) -> None:
        """Read a part of a request."""
        super().data_received(data)
        self._limit()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        super().connection_lost(exc)
        self._stop_timer()

    def _limit(self) -> None:
        if not self.waits:
            self._stop_timer()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
