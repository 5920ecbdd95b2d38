"""Different agents of one MAS on different policies."""

from __future__ import annotations

from collections.abc import Mapping

from mas_gym.errors import ConfigError, PolicyError
from mas_gym.policies.as_async import as_async
from mas_gym.policies.base import AsyncPolicy, Policy, SamplingReply, SamplingRequest
from mas_gym.policies.meter import Meter, meters_of
from mas_gym.validation import ANYONE


class PerAgentPolicy:
    """An `AsyncPolicy` that sends each request to its acting agent's policy.

    Attributes:
        name: The policies' names, each with its agents.
        max_concurrency: The sum over the policies.
        policies: The policy of each key.
    """

    def __init__(self, policies: Mapping[str, Policy | AsyncPolicy]) -> None:
        """Route by agent name.

        Args:
            policies: From an agent's name, or ``"*"`` for all others, to its policy; agents may share one.

        Raises:
            ConfigError: When there are none.
        """
        if not policies:
            raise ConfigError("expected a policy for at least one agent, got none; name agents, or '*' for all")
        self.policies = dict(policies)
        views = {id(policy): as_async(policy) for policy in self.policies.values()}
        self._routes = {agent: views[id(policy)] for agent, policy in self.policies.items()}
        self.name = ", ".join(f"{agent}={policy.name}" for agent, policy in self._routes.items())
        self.max_concurrency = sum(view.max_concurrency for view in views.values())

    def identity(self) -> dict[str, Policy | AsyncPolicy]:
        """Return the policy of each agent, each stated by its own identity."""
        return self.policies

    @property
    def meters(self) -> dict[str, Meter]:
        """The meters of its policies, each with the first of its agents."""
        first: dict[int, str] = {}
        for agent, policy in self.policies.items():
            first.setdefault(id(policy), agent)
        own = ((agent, policy) for agent, policy in self.policies.items() if first[id(policy)] == agent)
        return {f"{agent}={name}": meter for agent, policy in own for name, meter in meters_of(policy).items()}

    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        """Answer one request.

        Raises:
            PolicyError: When the acting agent has no policy, or its policy cannot answer.
        """
        policy = self._routes.get(request.agent) or self._routes.get(ANYONE)
        if policy is None:
            known = ", ".join(self._routes)
            raise PolicyError(f"expected a policy for the agent {request.agent!r}, got policies for {known}; add '*'")
        return await policy.sample_async(request)
