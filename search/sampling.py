"""Sampling of messages: temperature, top-p, length, and the seed of each sample."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from mas_gym.errors import ConfigError
from mas_gym.policies.base import effective_temperature
from mas_gym.policies.seeds import derive_seed
from mas_gym.systems.graph import MAS, Agent
from mas_gym.systems.state import MASState
from mas_gym.systems.validation import DEFAULT_MAX_NEW_TOKENS
from search.tree import Proposal


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of agents (paper, App. "Search configurations").

    Attributes:
        temperature: Softmax temperature; values below 0.01 mean greedy decoding. An agent's own value replaces it.
        top_p: Nucleus mass in ``(0, 1]``. An agent's own value replaces it.
        max_new_tokens: Maximum length of one message, in tokens; an agent's own maximum also applies. None for no
            maximum besides the agents' own, or for 1024 in a program.
    """

    temperature: float = 0.7
    top_p: float = 0.95
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", effective_temperature(self.temperature))
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"sampling: expected top_p in (0, 1], got {self.top_p!r}")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ConfigError(f"sampling: expected max_new_tokens >= 1, got {self.max_new_tokens!r}")

    @property
    def limit(self) -> int:
        """The maximum length as a number."""
        return DEFAULT_MAX_NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens

    def for_system(self, mas: MAS) -> Sampling:
        """Return the same sampling with the maximum length as a number."""
        if self.max_new_tokens is not None:
            return self
        own = () if mas.external else (agent.max_new_tokens for agent in mas.agents)
        return replace(self, max_new_tokens=max([DEFAULT_MAX_NEW_TOKENS, *own]))

    def for_agent(self, agent: Agent) -> Sampling:
        """Return the sampling of one agent of a system."""
        if agent.temperature is None and agent.top_p is None:
            return self
        temperature = self.temperature if agent.temperature is None else agent.temperature
        return replace(self, temperature=temperature, top_p=self.top_p if agent.top_p is None else agent.top_p)


class SampleOrigin(NamedTuple):
    """The origin of a message: the policy's proposal and the sampling seed, which is None for recorded messages."""

    proposal: Proposal
    seed: int | None


def sample_seeds(run_seed: int, problem_id: str, state: MASState, first: int, count: int) -> tuple[int, ...]:
    """Return the seeds of samples at a state.

    Seeds depend on the run's seed, the problem and the state, so concurrency and restarts do not change a sample.

    Args:
        run_seed: The seed of the run.
        problem_id: The problem.
        state: The state that the messages are sampled at.
        first: Number of samples this search has already requested there.
        count: Number of samples requested.
    """
    return tuple(derive_seed(run_seed, problem_id, state.digest, place) for place in range(first, first + count))
