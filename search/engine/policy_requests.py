"""Policy requests, run in batches on the scheduler's thread or awaited on the event loop.

The result of a request never depends on when it runs.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from concurrent.futures import CancelledError, Future
from queue import SimpleQueue
from typing import Any, Protocol

from mas_gym.errors import PolicyError
from mas_gym.policies.base import AsyncPolicy, Policy, SamplingReply, SamplingRequest, SamplingSession

Mail = SimpleQueue[tuple[Hashable, Any]]
"""The scheduler's mailbox: outcomes by key, from other threads."""


class PolicyRequests(Protocol):
    """Open requests to a policy. `policy_requests` returns the implementation for a policy.

    Attributes:
        inline: Whether `step` does the work; otherwise outcomes arrive in the mailbox.
    """

    inline: bool

    def submit(self, key: Hashable, request: SamplingRequest) -> None:
        """Queue a request; never blocks."""

    def cancel(self, key: Hashable) -> None:
        """Drop a request. If the engine has already started it, its outcome may still arrive."""

    def step(self) -> Sequence[tuple[Hashable, SamplingReply | PolicyError]]:
        """Do one unit of work and return the finished requests."""

    @property
    def has_capacity(self) -> bool:
        """Whether the engine has capacity for more requests."""

    @property
    def has_pending_work(self) -> bool:
        """Whether requests are open."""

    def close(self) -> None:
        """Drop open requests."""


def policy_requests(policy: Policy | AsyncPolicy, mail: Mail) -> PolicyRequests:
    """Return the request queue for a policy's type."""
    return _AsyncRequests(policy, mail) if isinstance(policy, AsyncPolicy) else _SessionRequests(policy)


class _SessionRequests:
    """Batch and streaming policies, run on the scheduler's thread in a session opened by the first request.

    The session receives at most two batches of requests, one running and one queued; the rest can be cancelled.
    """

    inline = True

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._session: SamplingSession | None = None
        self._waiting: OrderedDict[Hashable, SamplingRequest] = OrderedDict()
        self._rows = 0

    def submit(self, key: Hashable, request: SamplingRequest) -> None:
        self._waiting[key] = request
        self._rows += len(request.seeds)

    def cancel(self, key: Hashable) -> None:
        request = self._waiting.pop(key, None)
        self._rows -= len(request.seeds) if request is not None else 0

    def step(self) -> Sequence[tuple[Hashable, SamplingReply | PolicyError]]:
        if self._session is None:
            from mas_gym.policies import open_session

            self._session = open_session(self._policy)
        while self._waiting and self._session.pending < 2 * self._policy.max_batch:
            key, request = self._waiting.popitem(last=False)
            self._rows -= len(request.seeds)
            self._session.submit(key, request)
        return self._session.step()

    @property
    def _pending(self) -> int:
        return self._rows + (self._session.pending if self._session is not None else 0)

    @property
    def has_capacity(self) -> bool:
        return self._pending < self._policy.max_batch

    @property
    def has_pending_work(self) -> bool:
        return self._pending > 0

    def close(self) -> None:
        self._waiting.clear()
        if self._session is not None:
            self._session.close()


class _AsyncRequests:
    """Asynchronous policies, awaited on the engine loop; at most ``max_concurrency`` requests are open."""

    inline = False
    has_capacity = True

    def __init__(self, policy: AsyncPolicy, mail: Mail) -> None:
        from mas_gym.internal.event_loop import engine_loop

        self._policy, self._mail, self._loop = policy, mail, engine_loop()
        self._waiting: OrderedDict[Hashable, SamplingRequest] = OrderedDict()
        self._open: dict[Hashable, Future[SamplingReply]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, key: Hashable, request: SamplingRequest) -> None:
        with self._lock:
            self._waiting[key] = request
        self._start()

    def cancel(self, key: Hashable) -> None:
        with self._lock:
            self._waiting.pop(key, None)
            future = self._open.get(key)
        if future is not None:
            future.cancel()

    def _start(self) -> None:
        import asyncio

        while True:
            with self._lock:
                if self._closed or not self._waiting or len(self._open) >= self._policy.max_concurrency:
                    return
                key, request = self._waiting.popitem(last=False)
                future = asyncio.run_coroutine_threadsafe(self._policy.sample_async(request), self._loop)
                self._open[key] = future
            future.add_done_callback(lambda done, key=key: self._done(key, done))  # type: ignore[misc]

    def _done(self, key: Hashable, future: Future[SamplingReply]) -> None:
        with self._lock:
            self._open.pop(key, None)
        try:
            outcome: SamplingReply | Exception = future.result()
        except CancelledError:
            outcome = PolicyError(f"{self._policy.name}: the request was cancelled")
        except Exception as error:
            outcome = error
        self._mail.put((key, outcome))
        self._start()

    def step(self) -> Sequence[tuple[Hashable, SamplingReply | PolicyError]]:
        return ()

    @property
    def has_pending_work(self) -> bool:
        return bool(self._open or self._waiting)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._waiting.clear()
            futures = list(self._open.values())
        for future in futures:
            future.cancel()
