"""Environment wrappers: a `Discrete(n)` choice among proposed messages, numeric features, and dense rewards.

`DenseReward` and `CandidateFeatures` accept any `search.Critic` that scores unfinished states individually, including
policy likelihood.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import index
from typing import Any, NamedTuple, SupportsIndex

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.core import ActType, ObsType
from gymnasium.utils import RecordConstructorArgs
from numpy.typing import NDArray

from mas_gym.critics import Critic, ScoringContext, as_critic
from mas_gym.envs.batching import Asking, AskingWrapper, SampleRequest, Scoring, Step, resetting, stepping
from mas_gym.envs.env import Info, MASEnv, Observation, Snapshot
from mas_gym.envs.spaces import Records, utf8_length
from mas_gym.errors import ConfigError, EpisodeOverError, IllegalActionError, PolicyError, shown, whole_number
from mas_gym.policies import AsyncPolicy, Policy, Sample, SamplingReply, load_policy
from mas_gym.policies.base import derive_seed, fitted
from mas_gym.policies.batch_queue import as_policy
from mas_gym.systems.graph import MAS
from mas_gym.systems.state import Action

_MOST_TOKENS = 1 << 31


class ProposedMessage(NamedTuple):
    """One proposed message and the number of its tokens."""

    text: str
    tokens: int


class ChoiceSnapshot(NamedTuple):
    """A snapshot of an episode, from `CandidateChoice.clone_state`.

    Attributes:
        base: The snapshot of the wrapped environment.
        seed: Seed of the episode's proposals.
        samples: The current proposals.
        chosen: The proposal that led to the state; None at the start.
    """

    base: Snapshot
    seed: int
    samples: tuple[Sample, ...]
    chosen: Sample | None = None


class _SharedArguments(dict[str, Any]):
    """Constructor arguments that copies of a spec share, because a policy may contain locks and sockets."""

    def __deepcopy__(self, memo: object) -> _SharedArguments:
        return _SharedArguments(self)


def _save_arguments(wrapper: RecordConstructorArgs, **arguments: object) -> None:
    """Store a wrapper's arguments, so that its spec can create it again."""
    RecordConstructorArgs.__init__(wrapper, **arguments, _disable_deepcopy=True)
    wrapper._saved_kwargs = _SharedArguments(arguments)


class CandidateChoice(AskingWrapper, RecordConstructorArgs):
    """At each turn a policy proposes ``n`` messages, and the action selects one by its index.

    The selected message is sent to `ALL`. The action space is ``Discrete(n)``, so any discrete agent or planner works.

    **Observation**: as in the environment, plus ``candidates``, a tuple of `ProposedMessage`; empty after the end.

    **Info**: ``action_mask`` has length n and is 0 for a proposal that repeats an earlier one or is too long for
    the environment; after the end it is 1 everywhere. ``logprobs`` is a float vector of length n, with minus infinity
    where the policy reports none and, after the end, everywhere.

    **Errors**: `reset` and `step` raise the policy's errors; afterwards only `reset()` is valid. `step` raises
    `EpisodeOverError` outside an episode, and `IllegalActionError` for an action that is not a proposal's index.

    Attributes:
        samples: The current proposals as returned by the policy; empty after the end.
        chosen: The proposal that led to the current state; None at the start of an episode.

    Args:
        env: A `mas_gym.MASEnv`, wrapped or not.
        policy: A policy, or a name for `mas_gym.policies.load_policy`, such as ``"tiny"``.
        n: Proposals per turn, at least 1.
        seed: With a seed, proposals depend only on it and on the transcript, so each problem is one fixed tree.
            Without one, each episode draws a seed from the environment's random generator.
        temperature: Sampling temperature.
        top_p: Probability mass for nucleus sampling.
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
        _save_arguments(self, policy=policy, n=n, seed=seed, temperature=temperature, top_p=top_p)
        gym.Wrapper.__init__(self, env)
        self.n = whole_number("n", n, at_least=1)
        self.mas_env = _mas_env(env)
        self._policy = policy if isinstance(policy, str) else as_policy(policy)
        self._fixed_seed = None if seed is None else whole_number("seed", seed, at_least=0)
        self._temperature, self._top_p = temperature, top_p
        self._seed = 0
        self.samples: tuple[Sample, ...] = ()
        self.chosen: Sample | None = None
        self.action_space = spaces.Discrete(n)
        room = n * self.mas_env.max_bytes
        inner = self.mas_env.observation_space
        assert isinstance(inner, spaces.Dict)
        self.observation_space = spaces.Dict(
            {**inner.spaces, "candidates": Records(ProposedMessage, (None, _MOST_TOKENS), n, room)}
        )

    def resetting(self, seed: int | None, options: Mapping[str, object] | None) -> Asking[tuple[Observation, Info]]:
        """Start an episode and request the first proposals."""
        observation, info = yield from resetting(self.env, seed, options)
        self.samples, self.chosen = (), None
        fresh = self.mas_env.np_random.integers(2**31) if self._fixed_seed is None else self._fixed_seed
        self._seed = int(fresh)
        self.samples = yield from self._propose()
        return self._with_candidates(observation, info)

    def stepping(self, action: int) -> Asking[Step]:
        """Send the selected proposal to `ALL` and request the next ones."""
        if not self.samples:
            raise EpisodeOverError(
                "the episode has ended, has not started or was ended by an error: call env.reset() first"
            )
        picked, before = self.samples[self._place(action)], self.mas_env.state
        # If the policy fails, there are no proposals and no step is possible.
        self.samples = ()
        sent = (picked.text, self.mas_env.ALL)
        observation, reward, terminated, truncated, info = yield from stepping(self.env, sent)
        if self.mas_env.state is not before:
            self.chosen = picked
        if not terminated and not truncated:
            self.samples = yield from self._propose()
        observation, info = self._with_candidates(observation, info)
        return observation, reward, terminated, truncated, info

    def _place(self, action: SupportsIndex) -> int:
        try:
            place = index(action)
        except TypeError:
            place = -1
        if not 0 <= place < self.n:
            raise IllegalActionError(f"expected a proposal index from 0 to {self.n - 1}, got {shown(action)}")
        return place

    def action_masks(self) -> NDArray[np.bool_]:
        """Return the mask of the proposals that may be selected; sb3-contrib requires this method name."""
        mask: NDArray[np.bool_] = self.action_mask().astype(bool)
        return mask

    def clone_state(self, *, include_rng: bool = False) -> ChoiceSnapshot:
        """Return a snapshot of the episode with its current proposals, in constant time."""
        base = self.mas_env.clone_state(include_rng=include_rng)
        return ChoiceSnapshot(base, self._seed, self.samples, self.chosen)

    def restore_state(self, snapshot: ChoiceSnapshot) -> None:
        """Restore a snapshot in constant time, without calling the policy."""
        if not isinstance(snapshot, ChoiceSnapshot):
            raise ConfigError(f"expected a ChoiceSnapshot, from clone_state(), got {type(snapshot).__name__}")
        self.mas_env.restore_state(snapshot.base)
        self._seed, self.samples, self.chosen = snapshot.seed, snapshot.samples, snapshot.chosen

    def observe(self) -> tuple[Observation, Info]:
        """Return a new observation and info for the current state, for use after `restore_state`."""
        return self._with_candidates(*self.mas_env.observe())

    def _propose(self) -> Asking[tuple[Sample, ...]]:
        env = self.mas_env
        seeds = tuple(derive_seed(self._seed, env.problem_id, env.state.digest, i) for i in range(self.n))
        request = env.request(seeds, self._temperature, self._top_p)
        if isinstance(self._policy, str):
            self._policy = load_policy(self._policy)
        messages, extra_body = fitted(self._policy, request.agent, request.messages, request.extra_body)
        request = replace(request, messages=messages, extra_body=extra_body)
        reply: SamplingReply = yield SampleRequest(self._policy, request)
        if len(reply.samples) != self.n:
            raise PolicyError(f"policy {self._policy.name!r}: expected {self.n} samples, got {len(reply.samples)}")
        return reply.samples

    def _with_candidates(self, observation: Observation, info: Info) -> tuple[Observation, Info]:
        logprobs = np.full(self.n, -np.inf)
        candidates = []
        for i, sample in enumerate(self.samples):
            if sample.logprob is not None:
                logprobs[i] = sample.logprob
            candidates.append(ProposedMessage(sample.text if self._fits(sample) else "", sample.tokens))
        observation = {**observation, "candidates": tuple(candidates)}
        return observation, {**info, "action_mask": self.action_mask(), "logprobs": logprobs}

    def _fits(self, sample: Sample) -> bool:
        return utf8_length(sample.text) <= self.mas_env.max_bytes

    def action_mask(self) -> NDArray[np.int8]:
        """Return a new int8 vector of length n: 1 for each proposal that may be selected; see the class."""
        texts = [sample.text for sample in self.samples]
        legal = [self._fits(sample) and sample.text not in texts[:i] for i, sample in enumerate(self.samples)]
        return np.array(legal or [True] * self.n, dtype=np.int8)

    def __deepcopy__(self, memo: dict[int, object]) -> CandidateChoice:
        """Copy the episode and share the policy."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        shared = ("_policy", "samples", "chosen", "_saved_kwargs")
        for name, value in self.__dict__.items():
            twin.__dict__[name] = value if name in shared else copy.deepcopy(value, memo)
        return twin


def _mas_env(env: gym.Env[ObsType, ActType]) -> MASEnv:
    if not isinstance(env.unwrapped, MASEnv):
        raise ConfigError(f"env: expected a MASEnv, such as gym.make('MAS-Arithmetic-v0'), got {env.unwrapped!r}")
    return env.unwrapped


def candidate_choice(env: gym.Env[ObsType, ActType]) -> CandidateChoice | None:
    """Return the `CandidateChoice` among an environment's wrappers; None if there is none."""
    while isinstance(env, gym.Wrapper):
        if isinstance(env, CandidateChoice):
            return env
        env = env.env
    return None


FEATURES = ("legal", "logprob", "tokens", "turn", "value")
"""Features of each candidate: whether it may be chosen, mean log-probability per token (nats; 0 if unknown), hundreds
of tokens, turns so far divided by the longest schedule, and the critic's value of the state after it (0 without a
critic). The columns of the acting agent follow."""

_LOWEST_LOGPROB = -20.0
_LARGEST = np.finfo(np.float32).max


class DenseReward(AskingWrapper, RecordConstructorArgs):
    """Potential-based reward shaping with a critic's value as potential; leaves the optimal policy unchanged.

    The reward of a step is ``r + gamma * V(next) - V(state)`` with ``V = 0`` before the first message and after the
    end (Ng, Harada and Russell 1999, "Policy invariance under reward transformations"). With ``gamma = 1`` the return
    of an episode equals the environment's return.

    **Info**: ``reward`` is the environment's reward, ``potential`` is the critic's value of the new state.
    """

    def __init__(self, env: gym.Env[ObsType, ActType], critic: Critic, gamma: float = 1.0) -> None:
        """Check the arguments.

        Args:
            env: A `mas_gym.MASEnv`, wrapped or not, such as a `CandidateChoice`. Critics that read log-probabilities,
                such as policy likelihood, need a `CandidateChoice` among the wrappers.
            critic: Scores unfinished states individually.
            gamma: The discount factor of the RL algorithm, in ``[0, 1]``.

        Raises:
            ConfigError: The environment is not a `MASEnv`, the critic scores only finished states or compares states,
                or gamma is out of range.
            CriticError: The critic does not support this system.
        """
        _save_arguments(self, critic=critic, gamma=gamma)
        gym.Wrapper.__init__(self, env)
        self.mas_env = _mas_env(env)
        number = isinstance(gamma, float | int) and not isinstance(gamma, bool)
        if not number or not 0 <= gamma <= 1:
            raise ConfigError(f"gamma: expected a number in [0, 1], got {shown(gamma)}")
        self._critic, self._gamma = _checked(critic, self.mas_env.mas), gamma
        self._choice = candidate_choice(env)
        self._known: tuple[bytes, float] = b"", 0.0

    def resetting(self, seed: int | None, options: Mapping[str, object] | None) -> Asking[tuple[object, Info]]:
        """Start an episode with potential 0."""
        return resetting(self.env, seed, options)

    def stepping(self, action: Any) -> Asking[Step]:
        """Take a step and add the gain in value to the reward."""
        before = yield from self._potential()
        observation, reward, terminated, truncated, info = yield from stepping(self.env, action)
        after = 0.0 if terminated else (yield from self._potential())
        shaped = reward + self._gamma * after - before
        return observation, shaped, terminated, truncated, {**info, "reward": reward, "potential": after}

    def _potential(self) -> Asking[float]:
        env = self.mas_env
        if env.state.depth == 0:
            return 0.0
        # `restore_state` may have changed the state.
        if self._known[0] != env.state.digest:
            sample = None if self._choice is None else self._choice.chosen
            [value] = yield Scoring(self._critic, [ScoringContext(env.state, env.mas, sample)])
            self._known = env.state.digest, value
        return self._known[1]


class CandidateFeatures(AskingWrapper, RecordConstructorArgs):
    """Numeric features of the candidates, for RL algorithms without text input.

    **Observation**: float32, shape ``(n, F)``: `FEATURES`, then one column per agent that is 1 for the acting agent;
    all zeros after the end. ``action_masks()`` returns the mask of the wrapped `CandidateChoice`.
    """

    def __init__(self, env: gym.Env[ObsType, ActType], critic: Critic | None = None) -> None:
        """Check the arguments.

        Args:
            env: A `CandidateChoice`, or a wrapper around one that does not change its observations.
            critic: Scores the state after each candidate, independently of the others; one call scores a whole turn.

        Raises:
            ConfigError: There is no `CandidateChoice`, or the critic scores only finished states or compares states.
            CriticError: The critic does not support this system.
        """
        _save_arguments(self, critic=critic)
        gym.Wrapper.__init__(self, env)
        choice = candidate_choice(env)
        if choice is None:
            raise ConfigError(f"env: expected a CandidateChoice(env, policy, n), got {env!r}")
        self.choice: CandidateChoice = choice
        self._critic = None if critic is None else _checked(critic, choice.mas_env.mas)
        self._longest = max(1, self.choice.mas_env.dynamics.max_depth)
        width = len(FEATURES) + len(self.choice.mas_env.mas.agents)
        low, high = np.zeros((2, self.choice.n, width), np.float32)
        high += 1
        low[:, 1], high[:, 1] = _LOWEST_LOGPROB, 0
        high[:, 2] = _LARGEST
        low[:, 4], high[:, 4] = -_LARGEST, _LARGEST
        self.observation_space = spaces.Box(low, high, dtype=np.float32)

    def resetting(
        self, seed: int | None, options: Mapping[str, object] | None
    ) -> Asking[tuple[NDArray[np.float32], Info]]:
        """Start an episode."""
        _, info = yield from resetting(self.env, seed, options)
        return (yield from self._features(info)), info

    def stepping(self, action: Any) -> Asking[Step]:
        """Send the chosen candidate."""
        _, reward, terminated, truncated, info = yield from stepping(self.env, action)
        return (yield from self._features(info)), reward, terminated, truncated, info

    def _features(self, info: Info) -> Asking[NDArray[np.float32]]:
        assert self.observation_space.shape is not None
        table = np.zeros(self.observation_space.shape, dtype=np.float32)
        env, samples = self.choice.mas_env, self.choice.samples
        if not samples:
            return table
        values = yield from self._values(samples)
        for row, sample, legal, value in zip(table, samples, info["action_mask"], values, strict=True):
            turn = env.state.depth / self._longest
            mean = min(max(sample.mean_logprob or 0.0, _LOWEST_LOGPROB), 0.0)
            row[: len(FEATURES)] = legal, mean, sample.tokens / 100, turn, np.clip(value, -_LARGEST, _LARGEST)
            row[len(FEATURES) + env.state.acting] = 1
        return table

    def _values(self, samples: Sequence[Sample]) -> Asking[list[float]]:
        if self._critic is None:
            return [0.0] * len(samples)
        env = self.choice.mas_env
        states = [env.dynamics.transition(env.state, Action(sample.text, env.ALL)) for sample in samples]
        contexts = [ScoringContext(s, env.mas, sample) for s, sample in zip(states, samples, strict=True)]
        values: list[float] = yield Scoring(self._critic, contexts)
        return values


def _checked(critic: Critic, mas: MAS) -> Critic:
    """Return a critic that can score single unfinished states of a system."""
    critic = as_critic(critic)
    if critic.reads_peers:
        raise ConfigError(
            f"critic: expected one that scores a state by itself, got {critic.name!r}, which compares the states of a "
            "search; use tiny-masprm or policy-likelihood"
        )
    if critic.terminal_only:
        raise ConfigError(
            f"critic: expected one that scores unfinished states, such as tiny-masprm, got {critic.name!r}"
        )
    critic.check_graph(mas)
    return critic
