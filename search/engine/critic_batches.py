"""Batches of critic requests, with states of many searches."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from queue import SimpleQueue

from mas_gym.envs.critic_base import Critic, Scores, ScoringContext, score_batch
from search.engine.policy_requests import Mail

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
