"""Connection pools for an OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mas_gym.internal.event_loop import close_at_exit
from mas_gym.policies.openai_format import BadReply

if TYPE_CHECKING:
    from openai import DefaultAsyncHttpxClient

POOL_SIZE = 8
MAX_REPLY = 64 * 2**20
"""Maximum size of a reply in bytes, decompressed."""


async def read_body(parts: AsyncIterator[bytes]) -> bytes:
    """Return the body of a streamed response. Raises `BadReply` if it is longer than `MAX_REPLY`."""
    body = bytearray()
    async for part in parts:
        body += part
        if len(body) > MAX_REPLY:
            raise BadReply(f"expected at most {MAX_REPLY:,} bytes, got more")
    return bytes(body)


class Connections:
    """Many small connection pools to one server; used on the engine loop only.

    The client's pool scans its connections at each call; with a hundred of them, the scan dominates the call's cost.
    Pools of a few connections, opened on demand, avoid that; a call uses the fullest pool with free capacity, so that
    few connections are open under low load.
    """

    def __init__(self, open_client: Callable[[], DefaultAsyncHttpxClient]) -> None:
        """Configure the pools; no connection is opened yet.

        Args:
            open_client: Returns a client with a separate connection pool.
        """
        self._open_client = open_client
        self._pools: list[DefaultAsyncHttpxClient] = []
        self._used: list[int] = []

    @contextmanager
    def one(self) -> Iterator[DefaultAsyncHttpxClient]:
        """Provide a client for one call."""
        free = [i for i, used in enumerate(self._used) if used < POOL_SIZE]
        if free:
            chosen = max(free, key=self._used.__getitem__)
        else:
            chosen = len(self._pools)
            client = self._open_client()
            self._pools.append(client)
            self._used.append(0)
            close_at_exit(client.aclose)
        self._used[chosen] += 1
        try:
            yield self._pools[chosen]
        finally:
            self._used[chosen] -= 1
