"""Queues of a scheduler's requests to the policy, the critic and the graders.

Each has ``submit`` and ``cancel`` for one request. Work on the scheduler's thread happens in ``step``; outcomes from
other threads and from the event loop arrive in the scheduler's mailbox. No result depends on when a request runs.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from queue import SimpleQueue
from typing import Any, Protocol

from mas_gym.envs.critic_base import Critic, Scores, ScoringContext, score_batch
from mas_gym.errors import PolicyError
from mas_gym.policies.base import AsyncPolicy, Policy, SamplingReply, SamplingRequest, SamplingSession
from search.grading import ProblemGrader

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
    """Requests to batch and streaming policies, run on the scheduler's thread in a session opened by the first request.

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
    """Requests to asynchronous policies, awaited on the engine loop; at most ``max_concurrency`` requests are open."""

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


BATCH_DONE = "batch done"
"""Mailbox key: a batch on the critic's thread is complete."""


class CriticBatches:
    """Collects the states of many searches into batches for one critic.

    Attributes:
        name: The critic's name.
        inline: Whether `step` scores on the scheduler's thread; False for critics that are ``concurrent``.
        waiting: States not yet submitted to the critic.
    """

    def __init__(self, critic: Critic, mail: Mail) -> None:
        """Start empty, with a thread if the critic is ``concurrent``."""
        self._critic, self._mail = critic, mail
        self.name = critic.name
        self.max_batch = critic.max_batch
        self.inline = not critic.concurrent
        self.waiting = 0
        self._jobs: OrderedDict[Hashable, Sequence[ScoringContext]] = OrderedDict()
        self._inbox: SimpleQueue[Mapping[Hashable, Sequence[ScoringContext]] | None] = SimpleQueue()
        self._scoring = False
        if not self.inline:
            threading.Thread(target=self._serve, name="mas-gym-critic", daemon=True).start()

    def submit(self, key: Hashable, contexts: Sequence[ScoringContext]) -> None:
        """Queue new states of one search."""
        self._jobs[key] = contexts
        self.waiting += len(contexts)

    def cancel(self, key: Hashable) -> None:
        """Drop the queued states of one search; a batch in progress is not affected."""
        self.waiting -= len(self._jobs.pop(key, ()))

    def ready(self, engine_has_capacity: bool) -> bool:
        """Return whether to score now: a batch is full, the engine has capacity, or the critic's thread is idle."""
        if not self.waiting:
            return False
        return self.waiting >= self.max_batch or engine_has_capacity if self.inline else not self._scoring

    def step(self) -> Sequence[tuple[Hashable, Scores | Exception]]:
        """Score one batch, or submit it to the critic's thread."""
        batch: dict[Hashable, Sequence[ScoringContext]] = {}
        size = 0
        while self._jobs:
            key, contexts = self._jobs.popitem(last=False)
            if batch and size + len(contexts) > self.max_batch:
                self._jobs[key] = contexts
                self._jobs.move_to_end(key, last=False)
                break
            batch[key] = contexts
            size += len(contexts)
        self.waiting -= size
        if self.inline:
            return score_batch(self._critic, batch)
        self._scoring = True
        self._inbox.put(batch)
        return ()

    def done(self) -> None:
        """Record that the outcomes of the thread's batch have arrived."""
        self._scoring = False

    def _serve(self) -> None:
        while (batch := self._inbox.get()) is not None:
            for outcome in score_batch(self._critic, batch):
                self._mail.put(outcome)
            self._mail.put((BATCH_DONE, None))

    def close(self) -> None:
        """End the thread after its current batch."""
        self._inbox.put(None)


class GradingThreads:
    """Grades messages on daemon threads, which start on demand.

    Most graders use one thread; graders that can process several messages at once use a few.
    """

    def __init__(self, mail: Mail) -> None:
        """Start without threads."""
        self._mail = mail
        self._jobs: dict[int, SimpleQueue[tuple[Hashable, ProblemGrader, Sequence[str]] | None]] = {}
        self._started: dict[int, int] = {}
        self._open: set[Hashable] = set()

    def submit(self, key: Hashable, grader: ProblemGrader, texts: Sequence[str]) -> None:
        """Queue messages for grading. The grader caches the grades; the outcome is None or an error."""
        count = max(1, grader.threads)
        jobs = self._jobs.setdefault(count, SimpleQueue())
        self._open.add(key)
        jobs.put((key, grader, texts))
        if self._started.get(count, 0) < count:
            self._started[count] = self._started.get(count, 0) + 1
            threading.Thread(target=self._serve, args=(jobs,), name="mas-gym-grading", daemon=True).start()

    def cancel(self, key: Hashable) -> None:
        """Drop the queued messages of one search; grading in progress is not affected."""
        self._open.discard(key)

    def _serve(self, jobs: SimpleQueue[tuple[Hashable, ProblemGrader, Sequence[str]] | None]) -> None:
        while (job := jobs.get()) is not None:
            key, grader, texts = job
            outcome: Exception | None = None
            try:
                for text in texts:
                    if key in self._open:
                        grader.grade(text)
            except Exception as error:
                outcome = error
            self._open.discard(key)
            self._mail.put((key, outcome))

    def close(self) -> None:
        """End the threads after their current messages; queued messages are dropped."""
        self._open.clear()
        for count, jobs in self._jobs.items():
            for _ in range(self._started.get(count, 0)):
                jobs.put(None)
