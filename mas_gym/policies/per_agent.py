"""A policy made of one policy per agent."""

from __future__ import annotations

from collections.abc import Mapping

from mas_gym.errors import ConfigError, PolicyError
from mas_gym.policies.base import (
    AsyncPolicy,
    Policy,
    SamplingReply,
    SamplingRequest,
)
from mas_gym.policies.meters import Meter, meters_of
from mas_gym.policies.sessions import as_async, prompt_bound
from mas_gym.systems.validation import ANYONE


class PerAgentPolicy:
    """An `AsyncPolicy` that sends each request to its acting agent's policy.

    Attributes:
        name: Each agent with its policy's name.
        max_concurrency: The sum over the policies.
        policies: As passed in.
    """

    def __init__(self, policies: Mapping[str, Policy | AsyncPolicy]) -> None:
        """Route by agent name.

        Args:
            policies: Maps an agent's name, or ``"*"`` for all others, to its policy; agents may share one.

        Raises:
            ConfigError: The mapping is empty.
        """
        if not policies:
            raise ConfigError("expected a policy for at least one agent, got none; name agents, or '*' for all")
        self.policies = dict(policies)
        views = {id(policy): as_async(policy) for policy in self.policies.values()}
        self._routes = {agent: views[id(policy)] for agent, policy in self.policies.items()}
        self.name = ", ".join(f"{agent}={policy.name}" for agent, policy in self._routes.items())
        self.max_concurrency = sum(view.max_concurrency for view in views.values())

    def identity(self) -> dict[str, Policy | AsyncPolicy]:
        """Return the policy of each agent, stated by its own identity."""
        return self.policies

    @property
    def max_prompt_bytes(self) -> int | None:
        """The smallest bound of its policies on the bytes of a message that fits; None if none of them has one."""
        bounds = [bound for bound in map(prompt_bound, self.policies.values()) if bound is not None]
        return min(bounds, default=None)

    @property
    def meters(self) -> dict[str, Meter]:
        """The meters of its policies, each named after the first agent that uses it."""
        first: dict[int, str] = {}
        for agent, policy in self.policies.items():
            first.setdefault(id(policy), agent)
        own = ((agent, policy) for agent, policy in self.policies.items() if first[id(policy)] == agent)
        return {f"{agent}={name}": meter for agent, policy in own for name, meter in meters_of(policy).items()}

    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        """Answer one request.

        Raises:
            PolicyError: The acting agent has no policy, or its policy cannot answer.
        """
        policy = self._routes.get(request.agent) or self._routes.get(ANYONE)
        if policy is None:
            known = ", ".join(self._routes)
            raise PolicyError(f"expected a policy for the agent {request.agent!r}, got policies for {known}; add '*'")
        return await policy.sample_async(request)
