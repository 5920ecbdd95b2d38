"""Batches of states for the critic.

States wait until no search can go on without an engine, and until the critic's batch is full or the batch of a local
policy is not. No value depends on when its state is scored.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from mas_gym.critics import Critic, Scores, ScoringContext, score_batch
from mas_gym.internal.event_loop import Threads, outside_loop, settle

_TURNS = 5
"""Turns of the event loop between a reply and the requests that follow from it."""

Waiting = OrderedDict[asyncio.Future[Scores], Sequence[ScoringContext]]


class CriticBatches:
    """Runs a critic's batches: on the event loop's thread, or on another one if the critic is concurrent."""

    def __init__(self, critic: Critic | None, policy_is_full: Callable[[], bool]) -> None:
        """Start without work.

        Args:
            critic: Scores states.
            policy_is_full: Returns whether the policy computes in this process and has a full batch.
        """
        self._critic, self._policy_is_full = critic, policy_is_full
        self._waiting: Waiting = OrderedDict()
        self._states = 0
        self._thread = Threads("mas-gym-critic") if critic is not None and critic.concurrent else None
        self._task: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """Start scoring waiting states."""
        if self._waiting and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def score(self, contexts: Sequence[ScoringContext]) -> Scores:
        """Return the critic's values of one search's states, scored in a batch with those of other searches."""
        future: asyncio.Future[Scores] = asyncio.get_running_loop().create_future()
        self._waiting[future] = contexts
        self._states += len(contexts)
        self.wake()
        try:
            return await future
        finally:
            self._states -= len(self._waiting.pop(future, ()))

    async def _work(self) -> None:
        assert self._critic is not None
        while True:
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            if not self._waiting or (
                self._thread is None and self._states < self._critic.max_batch and self._policy_is_full()
            ):
                return
            score = partial(score_batch, self._critic, self._next_batch())
            for future, outcome in outside_loop(score) if self._thread is None else await self._thread.run(score):
                settle(future, outcome)

    def _next_batch(self) -> Waiting:
        assert self._critic is not None
        batch: Waiting = OrderedDict()
        size = 0
        for future, contexts in self._waiting.items():
            if batch and size + len(contexts) > self._critic.max_batch:
                break
            batch[future] = contexts
            size += len(contexts)
        for future in batch:
            del self._waiting[future]
        self._states -= size
        return batch

    async def close(self) -> None:
        """Stop; scoring in progress on a thread is abandoned."""
        # A closed run may be kept, and a task keeps its event loop and the frames of its errors.
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self._thread is not None:
            self._thread.close()
