"""Any policy as an `AsyncPolicy`, so that policies of different shapes can run side by side."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from mas_gym.policies.base import AsyncPolicy, Policy, SamplingReply, SamplingRequest, SamplingSession
from mas_gym.policies.session import open_session

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


class _SessionPolicy:
    """A batch policy's session behind an inbox; one worker thread at a time drives it, none while it is idle."""

    def __init__(self, policy: Policy) -> None:
        self.name = policy.name
        self.max_concurrency = policy.max_batch * _QUEUE_FACTOR
        self._policy = self.identical_to = policy
        self._inbox: deque[_Waiting] = deque()
        self._lock = threading.Lock()
        self._busy = False
        self._session: SamplingSession | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"mas-gym-{policy.name}")

    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        """Answer one request. Raises `mas_gym.errors.PolicyError`."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(request, loop, loop.create_future())
        with self._lock:
            self._inbox.append(waiting)
            start, self._busy = not self._busy, True
        if start:
            # One loop iteration later, so that the requests of this iteration enter the batch together.
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
                for waiting in self._take(2 * self._policy.max_batch - session.pending):
                    submitted += 1
                    open_ones[submitted] = waiting
                    session.submit(submitted, waiting.request)
                for key, outcome in session.step():
                    assert isinstance(key, int)
                    open_ones.pop(key).deliver(outcome)
            except BaseException as error:
                # The session's state is unknown: all its requests fail, and the next request opens a fresh one.
                self._session = None
                for waiting in open_ones.values():
                    waiting.deliver(error)
                open_ones.clear()
            with self._lock:
                if not self._inbox and not open_ones:
                    self._busy = False
                    return

    def _take(self, room: int) -> list[_Waiting]:
        """Remove requests that were not cancelled from the inbox, up to a number of samples."""
        taken: list[_Waiting] = []
        with self._lock:
            while self._inbox and room > 0:
                waiting = self._inbox.popleft()
                if not waiting.future.cancelled():
                    taken.append(waiting)
                    room -= len(waiting.request.seeds)
        return taken


def as_async(policy: Policy | AsyncPolicy) -> AsyncPolicy:
    """Return ``policy`` itself if it is asynchronous, else an asynchronous view of it with the same replies.

    Requests that arrive while the engine is busy join its batch (`StreamingPolicy`) or form its next one.
    """
    return policy if isinstance(policy, AsyncPolicy) else _SessionPolicy(policy)
