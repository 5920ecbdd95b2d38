"""The environment as a choice among proposed messages."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs

from mas_gym.env import Info, MASEnv, Observation, Snapshot
from mas_gym.errors import ConfigError, EpisodeOverError, IllegalActionError, PolicyError, whole_number
from mas_gym.policies import AsyncPolicy, Policy, Sample, SamplingReply, SamplingRequest, load_policy
from mas_gym.policies.loop import engine_loop
from mas_gym.seeding import derive_seed
from mas_gym.spaces import Records, utf8_length

_MOST_TOKENS = 1 << 31


class ProposedMessage(NamedTuple):
    """One proposed message and the number of its tokens."""

    text: str
    tokens: int


class ChoiceSnapshot(NamedTuple):
    """A snapshot of an episode, from `CandidateChoice.clone_state`: the base snapshot and the current proposals."""

    base: Snapshot
    seed: int
    samples: tuple[Sample, ...]


class CandidateChoice(gym.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """At each turn a policy proposes ``n`` messages, and the action selects one by its index.

    The selected message goes to `ALL`. The action space is ``Discrete(n)``, so any discrete agent or planner works.

    **Observation**: the environment's, plus ``candidates``, a tuple of `ProposedMessage`; empty after the end.

    **Info**: ``action_mask`` has length n and is 0 for a proposal that repeats an earlier one or is too long for
    the environment; ``logprobs`` is a float vector of length n, minus infinity if the policy reports none and
    after the end.

    Args:
        env: A `mas_gym.MASEnv`, wrapped or not.
        policy: A policy, or a name for `mas_gym.policies.load_policy`, such as ``"tiny"``.
        n: Proposals per turn, at least 1.
        seed: With a seed, proposals depend only on it and on the transcript, so each problem is one fixed tree.
            Without one, each episode draws a seed from the environment's generator.
        temperature: Sampling temperature.
        top_p: Nucleus sampling mass.
    """

    def __init__(
        self,
        env: gym.Env[Observation, tuple[str, int]],
        policy: Policy | AsyncPolicy | str,
        n: int = 4,
        *,
        seed: int | None = None,
        temperature: float = 0.7,
        top_p: float = 0.95,
    ) -> None:
        """Check the arguments; the first reset loads a policy given by name."""
        RecordConstructorArgs.__init__(
            self, policy=policy, n=n, seed=seed, temperature=temperature, top_p=top_p, _disable_deepcopy=True
        )
        gym.Wrapper.__init__(self, env)
        if not isinstance(env.unwrapped, MASEnv):
            raise ConfigError(f"env: expected a MASEnv, such as gym.make('MAS-Arithmetic-v0'), got {env.unwrapped!r}")
        if not isinstance(policy, str | Policy | AsyncPolicy):
            raise ConfigError(f"policy: expected a policy or its name, such as 'tiny', got {policy!r}")
        self.n = whole_number("n", n, at_least=1)
        self.mas_env = env.unwrapped
        self._policy = policy
        self._fixed_seed = None if seed is None else whole_number("seed", seed, at_least=0)
        self._temperature, self._top_p = temperature, top_p
        self._seed = 0
        self._samples: tuple[Sample, ...] = ()
        self.action_space = spaces.Discrete(n)
        room = n * self.mas_env.max_bytes
        inner = self.mas_env.observation_space
        assert isinstance(inner, spaces.Dict)
        self.observation_space = spaces.Dict(
            {**inner.spaces, "candidates": Records(ProposedMessage, (None, _MOST_TOKENS), n, room)}
        )

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Observation, Info]:
        """Start an episode and request the first proposals.

        Raises:
            PolicyError: The policy failed to answer.
        """
        observation, info = self.env.reset(seed=seed, options=None if options is None else dict(options))
        fresh = self.mas_env.np_random.integers(2**31) if self._fixed_seed is None else self._fixed_seed
        self._seed = int(fresh)
        self._samples = self._propose(observation)
        return self._with_candidates(observation, info)

    def step(self, action: int) -> tuple[Observation, float, bool, bool, Info]:
        """Send the selected proposal to `ALL` and request the next ones.

        Raises:
            EpisodeOverError: The episode has ended or has not started.
            IllegalActionError: No proposal has that index.
            PolicyError: The policy failed to answer.
        """
        if not self._samples:
            raise EpisodeOverError("the episode has ended or has not started: call env.reset() first")
        if not 0 <= int(action) < self.n:
            raise IllegalActionError(f"expected a proposal from 0 to {self.n - 1}, got {action!r}")
        chosen = self._samples[int(action)]
        observation, reward, terminated, truncated, info = self.env.step((chosen.text, self.mas_env.ALL))
        self._samples = () if terminated or truncated else self._propose(observation)
        observation, info = self._with_candidates(observation, info)
        return observation, float(reward), terminated, truncated, info

    def clone_state(self, *, include_rng: bool = False) -> ChoiceSnapshot:
        """Return a snapshot of the episode with its current proposals, in constant time."""
        return ChoiceSnapshot(self.mas_env.clone_state(include_rng=include_rng), self._seed, self._samples)

    def restore_state(self, snapshot: ChoiceSnapshot) -> None:
        """Restore a snapshot in constant time, without calling the policy."""
        if not isinstance(snapshot, ChoiceSnapshot):
            raise ConfigError(f"expected a ChoiceSnapshot, from clone_state(), got {type(snapshot).__name__}")
        self.mas_env.restore_state(snapshot.base)
        self._seed, self._samples = snapshot.seed, snapshot.samples

    def observe(self) -> tuple[Observation, Info]:
        """Return a new observation and info for the current state, for use after `restore_state`."""
        return self._with_candidates(*self.mas_env.observe())

    def _propose(self, observation: Observation) -> tuple[Sample, ...]:
        env = self.mas_env
        agent = env.mas.agents[observation["acting"]]
        request = SamplingRequest(
            observation["messages"],
            tuple(derive_seed(self._seed, env.problem_id, env.state.digest, i) for i in range(self.n)),
            agent.max_new_tokens,
            self._temperature,
            self._top_p,
            agent.name,
        )
        if isinstance(self._policy, str):
            self._policy = load_policy(self._policy)
        reply = _ask(self._policy, request)
        if len(reply.samples) != self.n:
            raise PolicyError(f"policy {self._policy.name!r}: expected {self.n} samples, got {len(reply.samples)}")
        return reply.samples

    def _with_candidates(self, observation: Observation, info: Info) -> tuple[Observation, Info]:
        mask = np.zeros(self.n, dtype=np.int8)
        logprobs = np.full(self.n, -np.inf)
        candidates, seen = [], set[str]()
        for i, sample in enumerate(self._samples):
            fits = utf8_length(sample.text) <= self.mas_env.max_bytes
            mask[i] = fits and sample.text not in seen
            seen.add(sample.text)
            if sample.logprob is not None:
                logprobs[i] = sample.logprob
            candidates.append(ProposedMessage(sample.text if fits else "", sample.tokens))
        observation = {**observation, "candidates": tuple(candidates)}
        return observation, {**info, "action_mask": mask, "logprobs": logprobs}

    def __deepcopy__(self, memo: dict[int, Any]) -> CandidateChoice:
        """Copy the episode and share the policy."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        shared = ("_policy", "_samples", "_saved_kwargs")
        for name, value in self.__dict__.items():
            twin.__dict__[name] = value if name in shared else copy.deepcopy(value, memo)
        return twin


def _ask(policy: Policy | AsyncPolicy, request: SamplingRequest) -> SamplingReply:
    if isinstance(policy, AsyncPolicy):
        # Engines keep connections open on one event loop, so every call must use it.
        return asyncio.run_coroutine_threadsafe(policy.sample_async(request), engine_loop()).result()
    replies = policy.sample([request])
    if len(replies) != 1:
        raise PolicyError(f"policy {policy.name!r}: expected one reply to one request, got {len(replies)}")
    return replies[0]
