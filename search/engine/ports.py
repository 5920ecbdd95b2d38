"""How the driver reaches engines: one port for policies of every shape, one for critics.

A port takes work with `submit` and hands back outcomes. A working port does its work
inside `step`, in the driver's thread; a waiting port works elsewhere and puts its
outcomes into the driver's queue. Ports decide when work is done, never what comes out.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from mas_gym.errors import ConfigError, CriticError, EngineUnavailableError, PolicyError
from mas_gym.graph import MAS
from mas_gym.policies.base import AsyncPolicy, Policy, SamplingReply, SamplingRequest
from search.protocol import Critic, ScoringContext

Outcome = SamplingReply | Sequence[float] | Exception
Events = SimpleQueue[tuple[Hashable, Outcome]]
"""Outcomes of work that was done in other threads."""

DEFAULT_CRITIC_BATCH = 64


def settled_policy(mas: MAS, policy: Policy | AsyncPolicy | None) -> Policy | AsyncPolicy:
    """Return the policy that was given, else the one that the MAS names.

    Raises:
        ConfigError: There is neither.
    """
    if policy is not None:
        return policy
    if not mas.policies:
        raise ConfigError(
            f"expected a policy, and the MAS {mas.name!r} names none: pass policy=load_policy('tiny'), "
            "or write policies: into its config"
        )
    from mas_gym.policies import load_policy

    return load_policy(dict(mas.policies))


class PolicyPort(Protocol):
    """Where sampling requests go.

    Attributes:
        works: Whether `step` does the work; otherwise outcomes arrive in the driver's queue.
    """

    works: bool

    def submit(self, key: Hashable, request: SamplingRequest) -> None:
        """Take a request; never blocks."""
        ...

    def step(self) -> list[tuple[Hashable, SamplingReply | PolicyError]]:
        """Do one piece of work and return what it finished."""
        ...

    @property
    def hungry(self) -> bool:
        """Whether the engine has room for more than it was given."""
        ...

    @property
    def busy(self) -> bool:
        """Whether requests are open."""
        ...

    def close(self) -> None:
        """Forget open requests."""
        ...


def policy_port(policy: Policy | AsyncPolicy, events: Events) -> PolicyPort:
    """Return the port for a policy.

    Raises:
        ConfigError: It is no policy.
    """
    if isinstance(policy, AsyncPolicy):
        return _AsyncPort(policy, events)
    if isinstance(policy, Policy):
        return _SessionPort(policy)
    raise ConfigError(
        f"expected a policy with sample(requests) or sample_async(request), got {type(policy).__name__}; "
        "make one with mas_gym.policies.load_policy('tiny')"
    )


class _SessionPort:
    """Batch and streaming policies, worked on in the driver's thread."""

    works = True

    def __init__(self, policy: Policy) -> None:
        from mas_gym.policies import open_session

        self._session = open_session(policy)
        self._rows = policy.max_batch
        self.submit = self._session.submit

    def step(self) -> list[tuple[Hashable, SamplingReply | PolicyError]]:
        return self._session.step()

    @property
    def hungry(self) -> bool:
        return self._session.pending < self._rows

    @property
    def busy(self) -> bool:
        return self._session.pending > 0

    def close(self) -> None:
        self._session.close()


class _AsyncPort:
    """Asynchronous policies, awaited on the engine loop; at most ``max_concurrency`` requests are open."""

    works = False
    hungry = True

    def __init__(self, policy: AsyncPolicy, events: Events) -> None:
        from mas_gym.policies.loop import engine_loop

        self._policy, self._events, self._loop = policy, events, engine_loop()
        self._waiting: deque[tuple[Hashable, SamplingRequest]] = deque()
        self._open: dict[Hashable, Future[SamplingReply]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, key: Hashable, request: SamplingRequest) -> None:
        with self._lock:
            self._waiting.append((key, request))
        self._start()

    def _start(self) -> None:
        import asyncio

        while True:
            with self._lock:
                if self._closed or not self._waiting or len(self._open) >= self._policy.max_concurrency:
                    return
                key, request = self._waiting.popleft()
                future = asyncio.run_coroutine_threadsafe(self._policy.sample_async(request), self._loop)
                self._open[key] = future
            future.add_done_callback(lambda done, key=key: self._done(key, done))  # type: ignore[misc]

    def _done(self, key: Hashable, future: Future[SamplingReply]) -> None:
        with self._lock:
            self._open.pop(key, None)
        try:
            outcome: Outcome = future.result()
        except CancelledError:
            outcome = PolicyError(f"{self._policy.name}: the request was cancelled")
        except Exception as error:
            outcome = error
        self._events.put((key, outcome))
        self._start()

    def step(self) -> list[tuple[Hashable, SamplingReply | PolicyError]]:
        return []

    @property
    def busy(self) -> bool:
        return bool(self._open or self._waiting)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._waiting.clear()
            futures = list(self._open.values())
        for future in futures:
            future.cancel()


@dataclass(frozen=True)
class ScoringJob:
    """States of one search that its critic has not scored before."""

    key: Hashable
    contexts: Sequence[ScoringContext]


class CriticPort:
    """Collects the states of many searches into batches for one critic.

    Attributes:
        works: Whether `step` does the work; false for critics that are ``concurrent``.
        waiting: States not yet given to the critic.
    """

    def __init__(self, critic: Critic, events: Events) -> None:
        """Start empty, with a thread if the critic wants one."""
        self._critic, self._events = critic, events
        self.max_batch: int = getattr(critic, "max_batch", DEFAULT_CRITIC_BATCH)
        self.works = not getattr(critic, "concurrent", False)
        self.waiting = 0
        self._jobs: deque[ScoringJob] = deque()
        self._inbox: SimpleQueue[list[ScoringJob] | None] = SimpleQueue()
        self._scoring = False
        self._thread: threading.Thread | None = None
        if not self.works:
            self._thread = threading.Thread(target=self._serve, name="mas-gym-critic", daemon=True)
            self._thread.start()

    def submit(self, job: ScoringJob) -> None:
        """Take the states of one search."""
        self._jobs.append(job)
        self.waiting += len(job.contexts)

    @property
    def busy(self) -> bool:
        """Whether states are waiting or being scored."""
        return self.waiting > 0 or self._scoring

    @property
    def idle_thread(self) -> bool:
        """Whether a concurrent critic has nothing to do."""
        return not self.works and not self._scoring

    def step(self) -> list[tuple[Hashable, Outcome]]:
        """Score one batch, or hand it to the critic's thread."""
        batch: list[ScoringJob] = []
        size = 0
        while self._jobs and (not batch or size + len(self._jobs[0].contexts) <= self.max_batch):
            batch.append(self._jobs.popleft())
            size += len(batch[-1].contexts)
        self.waiting -= size
        if self.works:
            return score(self._critic, batch)
        self._scoring = True
        self._inbox.put(batch)
        return []

    def done(self) -> None:
        """Note that the outcomes of a batch given to the thread have arrived."""
        self._scoring = False

    def _serve(self) -> None:
        while (batch := self._inbox.get()) is not None:
            for outcome in score(self._critic, batch):
                self._events.put(outcome)
            self._events.put((BATCH_DONE, ()))

    def close(self) -> None:
        """Let the thread end after its batch."""
        self._inbox.put(None)


BATCH_DONE = "batch done"


def score(critic: Critic, jobs: Sequence[ScoringJob]) -> list[tuple[Hashable, Outcome]]:
    """Score the states of several searches at once; if that fails, each search's alone, so that one fails alone."""
    contexts = [context for job in jobs for context in job.contexts]
    try:
        values = list(critic.score(contexts))
        if len(values) != len(contexts):
            raise CriticError(f"critic {critic.name!r}: expected {len(contexts)} values, got {len(values)}")
    except Exception as error:
        if len(jobs) > 1 and not isinstance(error, EngineUnavailableError):
            return [outcome for job in jobs for outcome in score(critic, [job])]
        return [(job.key, error) for job in jobs]
    outcomes: list[tuple[Hashable, Outcome]] = []
    start = 0
    for job in jobs:
        outcomes.append((job.key, values[start : start + len(job.contexts)]))
        start += len(job.contexts)
    return outcomes
