"""Sessions and asynchronous calls for all kinds of policies."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from mas_gym.errors import EngineUnavailableError, PolicyError
from mas_gym.policies.base import (
    AsyncPolicy,
    Policy,
    SamplingReply,
    SamplingRequest,
    SamplingSession,
    StreamingPolicy,
    as_policy,
)


def open_session(policy: Policy) -> SamplingSession:
    """Return the policy's own session, or one that collects batches of up to ``policy.max_batch`` samples."""
    return policy.open() if isinstance(policy, StreamingPolicy) else BatchSession(policy)


class BatchSession:
    """A session over `Policy.sample` in which each step is one batch; see `mas_gym.policies.base.SamplingSession`."""

    def __init__(self, policy: Policy) -> None:
        """Create an empty queue."""
        self._policy = policy
        self._waiting: deque[tuple[Hashable, SamplingRequest]] = deque()
        self.pending = 0

    def submit(self, key: Hashable, request: SamplingRequest) -> None:
        """Queue a request."""
        self._waiting.append((key, request))
        self.pending += len(request.seeds)

    def step(self) -> list[tuple[Hashable, SamplingReply | PolicyError]]:
        """Process one batch of the oldest requests."""
        batch: list[tuple[Hashable, SamplingRequest]] = []
        size = 0
        while self._waiting and (not batch or size + len(self._waiting[0][1].seeds) <= self._policy.max_batch):
            batch.append(self._waiting.popleft())
            size += len(batch[-1][1].seeds)
        self.pending -= size
        return self._answer(batch) if batch else []

    def _answer(
        self, batch: list[tuple[Hashable, SamplingRequest]]
    ) -> list[tuple[Hashable, SamplingReply | PolicyError]]:
        try:
            replies = list(self._policy.sample([request for _, request in batch]))
        except EngineUnavailableError:
            raise
        except PolicyError as error:
            if len(batch) == 1:
                return [(batch[0][0], error)]
            # The failing request is unknown, so each one is retried separately.
            return [answer for item in batch for answer in self._answer([item])]
        if len(replies) != len(batch):
            raise PolicyError(f"{self._policy.name}: expected {len(batch)} replies, got {len(replies)}")
        return [(key, reply) for (key, _), reply in zip(batch, replies, strict=True)]

    def close(self) -> None:
        """Discard all open requests."""
        self._waiting.clear()
        self.pending = 0


_QUEUE_FACTOR = 4


class _Waiting(NamedTuple):
    request: SamplingRequest
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[SamplingReply]

    def deliver(self, outcome: SamplingReply | BaseException) -> None:
        def settle() -> None:
            if self.future.done():
                return
            if isinstance(outcome, BaseException):
                self.future.set_exception(outcome)
            else:
                self.future.set_result(outcome)

        # The caller's event loop may be closed.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(settle)


class _SessionPolicy(AsyncPolicy):
    """Runs a batch policy's session in a worker thread, which takes requests from an inbox and stops when idle."""

    def __init__(self, policy: Policy) -> None:
        self.stand_for(policy)
        self.max_concurrency = policy.max_batch * _QUEUE_FACTOR
        self._policy = policy
        self._inbox: deque[_Waiting] = deque()
        self._lock = threading.Lock()
        self._busy = False
        self._session: SamplingSession | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"mas-gym-{policy.name}")

    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        """Return the reply to one request. Raises `mas_gym.errors.PolicyError`."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(request, loop, loop.create_future())
        with self._lock:
            self._inbox.append(waiting)
            start, self._busy = not self._busy, True
        if start:
            # Start one loop iteration later, so that all requests of this iteration enter the batch together.
            loop.call_soon(self._worker.submit, self._work)
        return await waiting.future

    def _work(self) -> None:
        open_ones: dict[int, _Waiting] = {}
        submitted = 0
        while True:
            try:
                if self._session is None:
                    self._session = open_session(self._policy)
                session = self._session
                fresh = dict(enumerate(self._take(2 * self._policy.max_batch - session.pending), submitted))
                open_ones |= fresh
                submitted += len(fresh)
                for number, waiting in fresh.items():
                    session.submit(number, waiting.request)
                for key, outcome in session.step():
                    assert isinstance(key, int)
                    open_ones.pop(key).deliver(outcome)
            except BaseException as error:
                # The session's state is unknown: all its requests fail, and the next request opens a new session.
                failed, self._session = self._session, None
                # Closing a failed session may fail, too.
                with contextlib.suppress(Exception):
                    if failed is not None:
                        failed.close()
                for waiting in open_ones.values():
                    waiting.deliver(error)
                open_ones.clear()
            with self._lock:
                if not self._inbox and not open_ones:
                    self._busy = False
                    return

    def _take(self, room: int) -> list[_Waiting]:
        """Take requests for up to ``room`` samples from the inbox, and discard cancelled ones."""
        taken: list[_Waiting] = []
        with self._lock:
            while self._inbox and room > 0:
                waiting = self._inbox.popleft()
                if not waiting.future.cancelled():
                    taken.append(waiting)
                    room -= len(waiting.request.seeds)
        return taken


def as_async(policy: Policy | AsyncPolicy) -> AsyncPolicy:
    """Return ``policy`` if it is asynchronous, else an asynchronous view of it with the same replies.

    Requests that arrive while the engine is busy join its batch (`StreamingPolicy`) or form its next batch.
    """
    policy = as_policy(policy)
    return policy if isinstance(policy, AsyncPolicy) else _SessionPolicy(policy)
