"""Connection pools for an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
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
        # By event loop, because a forked child has another one, and must not use its parent's connections.
        self._pools: dict[asyncio.AbstractEventLoop, list[_Pool]] = {}

    @contextmanager
    def one(self) -> Iterator[DefaultAsyncHttpxClient]:
        """Provide a client for one call."""
        pools = self._pools.setdefault(asyncio.get_running_loop(), [])
        free = [pool for pool in pools if pool.used < POOL_SIZE]
        if free:
            chosen = max(free, key=attrgetter("used"))
        else:
            chosen = _Pool(self._open_client())
            pools.append(chosen)
            close_at_exit(chosen.client.aclose)
        chosen.used += 1
        try:
            yield chosen.client
        finally:
            chosen.used -= 1


@dataclass
class _Pool:
    """A client, and the number of its calls in progress."""

    client: DefaultAsyncHttpxClient
    used: int = 0
