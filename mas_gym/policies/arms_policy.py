"""A policy that combines several models (arms); a planner chooses one for each message."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import replace

from mas_gym.errors import ConfigError, PolicyError, shown
from mas_gym.policies.base import ARMS, AsyncPolicy, Policy, SamplingReply, SamplingRequest
from mas_gym.policies.per_agent import CombinedPolicy, PerAgentPolicy

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_FORM = "arms:small=tiny,large=transformers:DIR"


class ArmsPolicy(CombinedPolicy):
    """Sends each request to the model that its ``tag`` names; requests without a tag go to the first one.

    Planners choose arms with `search.Propose`. If they do not, the scheduler uses the arms in turn.

    Attributes:
        name: Each arm with its policy's name, such as ``"arms:small=tiny|large=openai:m"``.
        takes_extra_body: The fields that all policies support.
        independent_samples: False if it is False for any policy; True if it is True for all; else None.
    """

    def __init__(self, policies: Mapping[str, Policy | AsyncPolicy]) -> None:
        """Combine policies.

        Args:
            policies: Maps the name of each arm to its policy.

        Raises:
            ConfigError: There are no arms, a name is not made of letters, digits, ``_``, ``.`` and ``-``, or an arm
                has several policies.
        """
        if not policies:
            raise ConfigError(f"expected at least one arm, got none; write {_FORM}")
        for arm, policy in policies.items():
            check_arm(arm)
            if isinstance(policy, ArmsPolicy | PerAgentPolicy):
                raise ConfigError(
                    f"arm {arm!r}: expected a single-model policy, got {policy.name}; do not nest arms; for "
                    "different arms per agent, map each agent to its arms"
                )
        super().__init__(policies)
        self.name = ARMS + "|".join(f"{arm}={view.name}" for arm, view in self._views.items())
        self.takes_extra_body = _common([policy.takes_extra_body for policy in policies.values()])
        independent = {policy.independent_samples for policy in policies.values()}
        self.independent_samples = False if False in independent else True if independent == {True} else None

    def tags(self, agent: str) -> tuple[str, ...]:
        """Return the names of the arms, in the order in which they were given."""
        return tuple(self._views)

    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        """Return the reply to one request.

        Raises:
            PolicyError: There is no such arm, or its policy fails.
        """
        arm = request.tag or next(iter(self._views))
        if arm not in self._views:
            raise PolicyError(f"expected one of the arms {', '.join(self._views)}, got {arm!r}")
        return await self._views[arm].sample_async(replace(request, tag=""))


def _common(supported: list[bool | Set[str]]) -> bool | Set[str]:
    """Return the fields of a chat request that all policies support."""
    named = [set(fields) for fields in supported if isinstance(fields, Set)]
    if False in supported:
        return False
    return frozenset.intersection(*map(frozenset, named)) if named else True


def check_arm(name: object) -> None:
    """Check an arm's name. Raises `ConfigError`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            "expected the name of an arm to begin with a letter or digit and to contain only letters, digits, '_', '.' "
            f"and '-', got {shown(name)}"
        )


def read_arms(spec: str) -> dict[str, str]:
    """Parse ``"arms:small=tiny,large=transformers:DIR"`` into the policy string of each arm.

    Raises:
        ConfigError: The spec names no arm, an arm twice, or an arm without a policy.

    >>> read_arms("arms:small=tiny,large=transformers:models/large#threads=2")
    {'small': 'tiny', 'large': 'transformers:models/large#threads=2'}
    """
    text = spec.removeprefix(ARMS).strip()
    if not text:
        raise ConfigError(f"expected at least one arm, got {shown(spec)}; write {_FORM}")
    found: dict[str, str] = {}
    for piece in text.split(","):
        arm, equals, policy = (part.strip() for part in piece.partition("="))
        if not equals or not policy:
            raise ConfigError(
                f"{shown(spec)}: expected NAME=POLICY for each arm, got {shown(piece)}; write {_FORM}, or, if a policy "
                "has commas, a mapping such as {'*': {small: tiny, large: 'my.py:Model:1,2'}}"
            )
        check_arm(arm)
        if arm in found:
            raise ConfigError(f"{shown(spec)}: expected distinct arm names, got {arm!r} twice")
        found[arm] = policy
    return found
