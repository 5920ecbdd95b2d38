"""A policy that combines one policy per agent."""

from __future__ import annotations

from collections.abc import Mapping

from mas_gym.errors import ConfigError, PolicyError
from mas_gym.policies.base import AsyncPolicy, Policy, PolicyBase, SamplingReply, SamplingRequest
from mas_gym.policies.batch_queue import as_policy
from mas_gym.systems.validation import ANYONE


class CombinedPolicy(AsyncPolicy):
    """A policy made of named policies.

    Attributes:
        max_concurrency: The sum over the policies.
        max_prompt_bytes: The minimum over the policies.
        meters: The meters of the policies, each named after the first name of its policy.
        policies: As passed in; several names may share a policy.
    """

    def __init__(self, policies: Mapping[str, Policy | AsyncPolicy]) -> None:
        self.policies = dict(policies)
        views = {id(policy): as_policy(policy) for policy in policies.values()}
        self._views = {name: views[id(policy)] for name, policy in policies.items()}
        self.max_concurrency = sum(view.max_concurrency for view in views.values())
        bounds = (view.max_prompt_bytes for view in views.values())
        self.max_prompt_bytes = min((bound for bound in bounds if bound is not None), default=None)
        first = {id(view): name for name, view in reversed(self._views.items())}
        self.meters = {f"{first[id(v)]}={name}": meter for v in views.values() for name, meter in v.meters.items()}

    def identity(self) -> dict[str, Policy | AsyncPolicy]:
        """Return the policies by name; each contributes its identity."""
        return self.policies


class PerAgentPolicy(CombinedPolicy):
    """Sends each request to its acting agent's policy.

    Attributes:
        name: Each agent with its policy's name.
    """

    def __init__(self, policies: Mapping[str, Policy | AsyncPolicy]) -> None:
        """Route by agent name.

        Args:
            policies: Maps an agent's name, or ``"*"`` for all others, to its policy; agents may share a policy.

        Raises:
            ConfigError: The mapping is empty.
        """
        if not policies:
            raise ConfigError("expected a policy for at least one agent, got none; name agents, or '*' for all agents")
        super().__init__(policies)
        self.name = ", ".join(f"{agent}={policy.name}" for agent, policy in self._views.items())

    def serving(self, agent: str) -> PolicyBase:
        """Return the policy for an agent's requests. Raises `PolicyError` if there is none."""
        return self._route(agent).serving(agent)

    def tags(self, agent: str) -> tuple[str, ...]:
        """Return the tags of an agent's policy. Raises `PolicyError` if there is none."""
        return self._route(agent).tags(agent)

    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        """Return the reply to one request.

        Raises:
            PolicyError: The acting agent has no policy, or its policy fails.
        """
        return await self._route(request.agent).sample_async(request)

    def _route(self, agent: str) -> AsyncPolicy:
        policy = self._views.get(agent) or self._views.get(ANYONE)
        if policy is None:
            known = ", ".join(self._views)
            raise PolicyError(
                f"expected a policy for the agent {agent!r}, got policies for {known}; add one, or '*' for any agent"
            )
        return policy
