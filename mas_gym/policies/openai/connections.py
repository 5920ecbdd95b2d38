"""Many small connection pools in place of a large one.

The client's pool looks at each of its connections at each call, which at a hundred
open calls costs more than all else that a call does. Pools of a few connections,
opened as they are needed, keep that cost small; a call goes to the fullest pool
that has room, so that quiet times need few connections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mas_gym.policies.loop import close_at_exit

POOL_SIZE = 8


class Connections:
    """Clients of one server; used on the engine loop alone."""

    def __init__(self, open_client: Callable[[], Any]) -> None:
        """Open nothing yet.

        Args:
            open_client: Returns a client with a connection pool of its own.
        """
        self._open_client = open_client
        self._pools: list[Any] = []
        self._used: list[int] = []

    @contextmanager
    def one(self) -> Iterator[Any]:
        """Lend a client for one call."""
        free = [i for i, used in enumerate(self._used) if used < POOL_SIZE]
        if free:
            chosen = max(free, key=self._used.__getitem__)
        else:
            chosen = len(self._pools)
            client = self._open_client()
            self._pools.append(client)
            self._used.append(0)
            close_at_exit(client.close)
        self._used[chosen] += 1
        try:
            yield self._pools[chosen]
        finally:
            self._used[chosen] -= 1
