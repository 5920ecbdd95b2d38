"""Policies of all three shapes as one coroutine, ``sample(request) -> reply``.

The scheduler of searches sees policies only through this adapter of the shapes in `mas_gym.policies.base`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import suppress
from typing import Protocol

from mas_gym.errors import PolicyError
from mas_gym.internal.event_loop import on_engine_loop, settle
from mas_gym.policies.base import AsyncPolicy, Policy, SamplingReply, SamplingRequest, SamplingSession
from mas_gym.policies.sessions import open_session


class Pump(Protocol):
    """Runs the steps of a session whenever nothing else can go on.

    Attributes:
        policy: The calls whose ``step`` is run.
    """

    policy: SessionCalls | None

    def wake(self) -> None:
        """Start running steps."""


class AwaitedCalls:
    """Calls of an asynchronous policy on the process's engine loop; at most ``max_concurrency`` are open."""

    def __init__(self, policy: AsyncPolicy) -> None:
        """Start without calls."""
        self._policy, self._slots = policy, asyncio.Semaphore(max(1, policy.max_concurrency))

    async def sample(self, request: SamplingRequest) -> SamplingReply:
        """Return the policy's reply."""
        try:
            async with self._slots:
                return await on_engine_loop(self._policy.sample_async(request))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise PolicyError(f"{self._policy.name}: the request was cancelled") from None

    def close(self) -> None:
        """No-op: calls end with their searches."""


class SessionCalls:
    """Calls of a batch or streaming policy in a session, which is opened by the first request.

    The session receives at most two batches of requests, one running and one queued; the rest can be cancelled.
    """

    def __init__(self, policy: Policy, pump: Pump) -> None:
        """Start without calls; ``pump`` runs the steps."""
        self._policy, self._pump = policy, pump
        self._session: SamplingSession | None = None
        self._waiting: OrderedDict[asyncio.Future[SamplingReply], SamplingRequest] = OrderedDict()
        self._rows = 0
        pump.policy = self

    async def sample(self, request: SamplingRequest) -> SamplingReply:
        """Return the policy's reply."""
        future: asyncio.Future[SamplingReply] = asyncio.get_running_loop().create_future()
        self._waiting[future] = request
        self._rows += len(request.seeds)
        self._pump.wake()
        try:
            return await future
        finally:
            if self._waiting.pop(future, None) is not None:
                self._rows -= len(request.seeds)

    @property
    def _size(self) -> int:
        return self._rows + (self._session.pending if self._session is not None else 0)

    @property
    def has_capacity(self) -> bool:
        """Whether fewer requests than a batch are open."""
        return self._size < self._policy.max_batch

    @property
    def pending(self) -> bool:
        """Whether requests are open."""
        return self._size > 0

    def step(self) -> None:
        """Submit waiting requests, and do one step of the session. Raises the errors of the engine."""
        if self._session is None:
            self._session = open_session(self._policy)
        while self._waiting and self._session.pending < 2 * self._policy.max_batch:
            future, request = self._waiting.popitem(last=False)
            self._rows -= len(request.seeds)
            self._session.submit(future, request)
        for key, reply in self._session.step():
            if isinstance(key, asyncio.Future):
                settle(key, reply)

    def reset(self) -> None:
        """Drop the session after a failure; the next request opens another."""
        # A failed engine may also fail to close.
        with suppress(Exception):
            self.close()

    def close(self) -> None:
        """Discard open requests."""
        session, self._session = self._session, None
        if session is not None:
            session.close()


def policy_calls(policy: Policy | AsyncPolicy, pump: Pump) -> AwaitedCalls | SessionCalls:
    """Return the calls of a policy."""
    return AwaitedCalls(policy) if isinstance(policy, AsyncPolicy) else SessionCalls(policy, pump)
