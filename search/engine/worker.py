"""The part of a fleet that runs inside an actor: an engine with its scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mas_gym.policies.base import AsyncPolicy, Meter, Policy, meters_of
from mas_gym.tasks.base import Problem
from search.engine.scheduler import Scheduler
from search.plan import Plan
from search.protocol import Critic
from search.setup import SampleRecord, Setup
from search.store import engine_identity

_CRITIC_FACTS = ("terminal_only", "free", "scores_actions")


class Found(NamedTuple):
    """A finished search: its plan, what the store keeps beside it, and the actor's running costs."""

    plan: Plan
    samples: Mapping[tuple[bytes, str], SampleRecord]
    meters: Mapping[str, Meter]


class Worker:
    """An engine on some machine; an asynchronous Ray actor, so that open calls take no threads."""

    def __init__(
        self,
        setup: Callable[[Critic | None], Setup],
        concurrency: int,
        task: Any,
        make_policy: Callable[[], Policy | AsyncPolicy],
        make_critic: Callable[[], Critic] | None,
    ) -> None:
        """Load the engines."""
        self._policy = make_policy()
        self._critic = make_critic() if make_critic is not None else None
        self._scheduler = Scheduler(setup(self._critic), self._policy, concurrency=concurrency, task=task).start()

    async def facts(self, stored: bool) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Return what the head must know of policy and critic; for a store, their identities too."""

        def stated(role: str, engine: Any) -> dict[str, Any]:
            return engine_identity(role, engine) if stored else {"name": engine.name}

        policy, critic = stated("policy", self._policy), self._critic
        if critic is None:
            return policy, None
        more = {name: getattr(critic, name) for name in _CRITIC_FACTS if hasattr(critic, name)}
        return policy, stated("critic", critic) | more

    async def search(self, problem: Problem) -> Found:
        """Search one problem. Raises `mas_gym.errors.EngineUnavailableError`."""
        future = self._scheduler.submit(problem)
        plan = await asyncio.wrap_future(future)
        return Found(plan, future.samples, meters_of(self._policy))
