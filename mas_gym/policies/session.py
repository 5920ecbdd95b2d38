"""Any batch policy as a session that takes requests while it works."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from mas_gym.errors import EngineUnavailableError, PolicyError
from mas_gym.policies.base import Policy, SamplingReply, SamplingRequest, SamplingSession, StreamingPolicy


def open_session(policy: Policy) -> SamplingSession:
    """Return the policy's own session if it has one, else one that collects batches of ``policy.max_batch`` samples."""
    return policy.open() if isinstance(policy, StreamingPolicy) else BatchSession(policy)


class BatchSession:
    """A session over `Policy.sample`: each step is one batch; see `mas_gym.policies.base.SamplingSession`."""

    def __init__(self, policy: Policy) -> None:
        """Start empty."""
        self._policy = policy
        self._waiting: deque[tuple[Hashable, SamplingRequest]] = deque()
        self.pending = 0

    def submit(self, key: Hashable, request: SamplingRequest) -> None:
        """Queue a request."""
        self._waiting.append((key, request))
        self.pending += len(request.seeds)

    def step(self) -> list[tuple[Hashable, SamplingReply | PolicyError]]:
        """Answer the oldest requests, as many as make one batch."""
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
            # The failing request is unknown, so each is retried alone.
            return [answer for item in batch for answer in self._answer([item])]
        if len(replies) != len(batch):
            raise PolicyError(f"{self._policy.name}: expected {len(batch)} replies, got {len(replies)}")
        return [(key, reply) for (key, _), reply in zip(batch, replies, strict=True)]

    def close(self) -> None:
        """Forget every open request."""
        self._waiting.clear()
        self.pending = 0
