"""Batches of a local policy and of a critic, and threads for slow graders and concurrent critics.

A local engine computes on the event loop's thread. `Batches` therefore waits until no search can go on without an
engine, and then runs one unit of work: a batch of states if the critic's batch is full or the policy has capacity,
otherwise one step of the policy. No result depends on when a request runs.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from mas_gym.critics import Critic, Scores, ScoringContext, score_batch
from mas_gym.internal.event_loop import Threads, outside_loop, settle
from mas_gym.policies.calls import SessionCalls

_TURNS = 5
"""Turns of the event loop between a reply and the requests that follow from it."""


class Batches:
    """Runs a local policy's steps and a critic's batches."""

    def __init__(self, critic: Critic | None, failed: Callable[[BaseException], None]) -> None:
        """Start without work.

        Args:
            critic: Scores states.
            failed: Called if the policy's engine fails.
        """
        self.policy: SessionCalls | None = None
        self._critic, self._failed = critic, failed
        self._waiting: OrderedDict[asyncio.Future[Scores], Sequence[ScoringContext]] = OrderedDict()
        self._states = 0
        self._thread = Threads("mas-gym-critic") if critic is not None and critic.concurrent else None
        self._scoring: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """Start working if there is no work in progress."""
        if self._task is None or self._task.done():
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
        while True:
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            policy = self.policy
            if self._ready(policy):
                batch = self._next_batch()
                if self._thread is None:
                    self._score(batch)
                else:
                    self._scoring = asyncio.create_task(self._score_beside(self._thread, batch))
            elif policy is not None and policy.pending:
                try:
                    outside_loop(policy.step)
                except Exception as error:
                    self._failed(error)
            else:
                return

    def _ready(self, policy: SessionCalls | None) -> bool:
        """Return whether to score now: a batch is full, the policy has capacity, or the critic's thread is idle."""
        if self._critic is None or not self._waiting:
            return False
        if self._thread is not None:
            return self._scoring is None or self._scoring.done()
        return policy is None or policy.has_capacity or self._states >= self._critic.max_batch

    def _next_batch(self) -> dict[asyncio.Future[Scores], Sequence[ScoringContext]]:
        assert self._critic is not None
        batch: dict[asyncio.Future[Scores], Sequence[ScoringContext]] = {}
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

    def _score(self, batch: dict[asyncio.Future[Scores], Sequence[ScoringContext]]) -> None:
        assert self._critic is not None
        for future, outcome in outside_loop(partial(score_batch, self._critic, batch)):
            settle(future, outcome)

    async def _score_beside(
        self, thread: Threads, batch: dict[asyncio.Future[Scores], Sequence[ScoringContext]]
    ) -> None:
        assert self._critic is not None
        for future, outcome in await thread.run(partial(score_batch, self._critic, batch)):
            settle(future, outcome)
        self._scoring = None
        self.wake()

    async def close(self) -> None:
        """Stop; scoring in progress on a thread is abandoned."""
        tasks = [task for task in (self._task, self._scoring) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # A closed run may be kept, and a task keeps its event loop and the frames of its errors.
        self._task = self._scoring = None
        if self._thread is not None:
            self._thread.close()
