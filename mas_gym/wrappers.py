"""The environment as a `Discrete(n)` choice among proposed messages."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from operator import index
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs
from numpy.typing import NDArray

from mas_gym.asking import Asking, AskingWrapper, Sampling, Step, resetting, stepping
from mas_gym.env import Info, MASEnv, Observation, Snapshot
from mas_gym.errors import ConfigError, EpisodeOverError, IllegalActionError, PolicyError, shown, whole_number
from mas_gym.policies import AsyncPolicy, Policy, Sample, SamplingReply, load_policy
from mas_gym.policies.base import derive_seed, refuse_extra_body
from mas_gym.spaces import Records, utf8_length

_MOST_TOKENS = 1 << 31


class ProposedMessage(NamedTuple):
    """One proposed message and the number of its tokens."""

    text: str
    tokens: int


class ChoiceSnapshot(NamedTuple):
    """A snapshot of an episode, from `CandidateChoice.clone_state`.

    Attributes:
        base: The environment's own.
        seed: Seed of the episode's proposals.
        samples: The current proposals.
        chosen: The proposal that led to the state; None at the start.
    """

    base: Snapshot
    seed: int
    samples: tuple[Sample, ...]
    chosen: Sample | None = None


class CandidateChoice(AskingWrapper, RecordConstructorArgs):
    """At each turn a policy proposes ``n`` messages, and the action selects one by its index.

    The selected message goes to `ALL`. The action space is ``Discrete(n)``, so any discrete agent or planner works.

    **Observation**: the environment's, plus ``candidates``, a tuple of `ProposedMessage`; empty after the end.

    **Info**: ``action_mask`` has length n and is 0 for a proposal that repeats an earlier one or is too long for
    the environment; ``logprobs`` is a float vector of length n, minus infinity if the policy reports none and
    after the end.

    **Errors**: `reset` and `step` raise what the policy raises; then only `reset` goes on. `step` raises
    `EpisodeOverError` outside an episode, and `IllegalActionError` for an action that is no proposal's index.

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
        self._chosen: Sample | None = None
        self.action_space = spaces.Discrete(n)
        room = n * self.mas_env.max_bytes
        inner = self.mas_env.observation_space
        assert isinstance(inner, spaces.Dict)
        self.observation_space = spaces.Dict(
            {**inner.spaces, "candidates": Records(ProposedMessage, (None, _MOST_TOKENS), n, room)}
        )

    def resetting(self, seed: int | None, options: Mapping[str, Any] | None) -> Asking[tuple[Observation, Info]]:
        """Start an episode and ask for the first proposals."""
        observation, info = yield from resetting(self.env, seed, options)
        self._samples, self._chosen = (), None
        fresh = self.mas_env.np_random.integers(2**31) if self._fixed_seed is None else self._fixed_seed
        self._seed = int(fresh)
        self._samples = yield from self._propose()
        return self._with_candidates(observation, info)

    def stepping(self, action: int) -> Asking[Step]:
        """Send the selected proposal to `ALL` and ask for the next ones."""
        if not self._samples:
            raise EpisodeOverError(
                "the episode has ended, has not started or was ended by an error: call env.reset() first"
            )
        picked, before = self._samples[self._place(action)], self.mas_env.state
        # Without proposals no step is possible, should the policy fail.
        self._samples = ()
        sent = (picked.text, self.mas_env.ALL)
        observation, reward, terminated, truncated, info = yield from stepping(self.env, sent)
        if self.mas_env.state is not before:
            self._chosen = picked
        if not terminated and not truncated:
            self._samples = yield from self._propose()
        observation, info = self._with_candidates(observation, info)
        return observation, reward, terminated, truncated, info

    def _place(self, action: Any) -> int:
        try:
            place = index(action)
        except TypeError:
            place = -1
        if not 0 <= place < self.n:
            raise IllegalActionError(f"expected a proposal from 0 to {self.n - 1}, got {shown(action)}")
        return place

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The current proposals as the policy gave them; empty after the end."""
        return self._samples

    @property
    def chosen(self) -> Sample | None:
        """The proposal that led to the current state; None at the start of an episode."""
        return self._chosen

    def action_masks(self) -> NDArray[np.bool_]:
        """Return which proposals may be selected, under the name that sb3-contrib looks for."""
        mask: NDArray[np.bool_] = self._mask().astype(bool)
        return mask

    def clone_state(self, *, include_rng: bool = False) -> ChoiceSnapshot:
        """Return a snapshot of the episode with its current proposals, in constant time."""
        base = self.mas_env.clone_state(include_rng=include_rng)
        return ChoiceSnapshot(base, self._seed, self._samples, self._chosen)

    def restore_state(self, snapshot: ChoiceSnapshot) -> None:
        """Restore a snapshot in constant time, without calling the policy."""
        if not isinstance(snapshot, ChoiceSnapshot):
            raise ConfigError(f"expected a ChoiceSnapshot, from clone_state(), got {type(snapshot).__name__}")
        self.mas_env.restore_state(snapshot.base)
        self._seed, self._samples, self._chosen = snapshot.seed, snapshot.samples, snapshot.chosen

    def observe(self) -> tuple[Observation, Info]:
        """Return a new observation and info for the current state, for use after `restore_state`."""
        return self._with_candidates(*self.mas_env.observe())

    def _propose(self) -> Asking[tuple[Sample, ...]]:
        env = self.mas_env
        seeds = tuple(derive_seed(self._seed, env.problem_id, env.state.digest, i) for i in range(self.n))
        request = env.request(seeds, self._temperature, self._top_p)
        if isinstance(self._policy, str):
            self._policy = load_policy(self._policy)
        refuse_extra_body(self._policy, request)
        reply: SamplingReply = yield Sampling(self._policy, request)
        if len(reply.samples) != self.n:
            raise PolicyError(f"policy {self._policy.name!r}: expected {self.n} samples, got {len(reply.samples)}")
        return reply.samples

    def _with_candidates(self, observation: Observation, info: Info) -> tuple[Observation, Info]:
        logprobs = np.full(self.n, -np.inf)
        candidates = []
        for i, sample in enumerate(self._samples):
            if sample.logprob is not None:
                logprobs[i] = sample.logprob
            candidates.append(ProposedMessage(sample.text if self._fits(sample) else "", sample.tokens))
        observation = {**observation, "candidates": tuple(candidates)}
        return observation, {**info, "action_mask": self._mask(), "logprobs": logprobs}

    def _fits(self, sample: Sample) -> bool:
        return utf8_length(sample.text) <= self.mas_env.max_bytes

    def _mask(self) -> NDArray[np.int8]:
        texts = [sample.text for sample in self._samples]
        legal = [self._fits(sample) and sample.text not in texts[:i] for i, sample in enumerate(self._samples)]
        return np.array(legal + [False] * (self.n - len(legal)), dtype=np.int8)

    def __deepcopy__(self, memo: dict[int, Any]) -> CandidateChoice:
        """Copy the episode and share the policy."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        shared = ("_policy", "_samples", "_chosen", "_saved_kwargs")
        for name, value in self.__dict__.items():
            twin.__dict__[name] = value if name in shared else copy.deepcopy(value, memo)
        return twin


def candidate_choice(env: gym.Env[Any, Any]) -> CandidateChoice | None:
    """Return the `CandidateChoice` among an environment's wrappers; None if there is none."""
    while isinstance(env, gym.Wrapper):
        if isinstance(env, CandidateChoice):
            return env
        env = env.env
    return None
