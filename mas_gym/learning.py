"""Wrappers for reinforcement learners: rewards on the way from a critic, and candidates as numbers.

A critic is anything with ``score(contexts)``, as in `search.protocol.Critic`; a context has ``state``, ``mas``
and ``proposal``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from mas_gym.env import Info, MASEnv
from mas_gym.errors import ConfigError
from mas_gym.graph import MAS
from mas_gym.policies import Sample
from mas_gym.state import Action, MASState
from mas_gym.wrappers import CandidateChoice

FEATURES = ("legal", "logprob", "tokens", "turn", "value")
"""Features of each candidate, before those of the acting agent: whether it may be chosen, mean log-probability per
token (nats; 0 if unknown), hundreds of tokens, turns so far over the longest schedule, and the critic's value of the
state after it (0 without a critic)."""

_LOWEST_LOGPROB = -20.0


class Context(NamedTuple):
    """A state to score, with its context.

    Attributes:
        state: The state to score.
        mas: The system that it belongs to.
        proposal: What led to the state, with ``tokens`` and ``logprob``; None if no policy wrote it.
    """

    state: MASState
    mas: MAS
    proposal: Sample | None


class StateCritic(Protocol):
    """The part of a critic that these wrappers use."""

    def score(self, contexts: Sequence[Any]) -> list[float]:
        """Return one value per state."""
        ...


class DenseReward(gym.Wrapper[Any, Any, Any, Any]):
    """Adds the gain in a critic's value to every reward, in the form that leaves the optimal policy unchanged.

    The reward of a step is ``r + gamma * V(next) - V(state)`` with ``V = 0`` before the first message and after the
    end (Ng, Harada and Russell 1999, "Policy invariance under reward transformations"). With ``gamma = 1`` the return
    of an episode is that of the environment.

    **Info**: ``reward`` is the environment's own, ``potential`` the critic's value of the new state.
    """

    def __init__(self, env: gym.Env[Any, Any], critic: StateCritic, gamma: float = 1.0) -> None:
        """Check the arguments.

        Args:
            env: A `mas_gym.MASEnv`, wrapped or not, such as a `CandidateChoice`.
            critic: Scores unfinished states.
            gamma: The learner's discount, in ``[0, 1]``.

        Raises:
            ConfigError: The environment is no `MASEnv`, the critic scores finished states alone, or gamma is out of
                its range.
        """
        super().__init__(env)
        self.mas_env = _mas_env(env)
        if not callable(getattr(critic, "score", None)) or getattr(critic, "terminal_only", False):
            raise ConfigError(f"critic: expected one that scores unfinished states, got {critic!r}; tiny-masprm is one")
        if not 0 <= gamma <= 1:
            raise ConfigError(f"gamma: expected a number in [0, 1], got {gamma!r}")
        self._critic, self._gamma = critic, gamma
        self._known: tuple[bytes, float] = b"", 0.0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Info]:
        """Take a step and reward the gain in value."""
        before = self._potential(None)
        samples = getattr(self.env, "samples", ())
        sample = samples[int(action)] if samples else None
        observation, reward, terminated, truncated, info = self.env.step(action)
        after = 0.0 if terminated else self._potential(sample)
        shaped = float(reward) + self._gamma * after - before
        return observation, shaped, terminated, truncated, {**info, "reward": float(reward), "potential": after}

    def _potential(self, sample: Sample | None) -> float:
        state = self.mas_env.state
        if state.depth == 0:
            return 0.0
        # After restore_state the last state is another one.
        if self._known[0] != state.digest:
            [value] = self._critic.score([Context(state, self.mas_env.mas, sample)])
            self._known = state.digest, _finite(value)
        return self._known[1]


class CandidateFeatures(gym.Wrapper[Any, Any, Any, Any]):
    """Candidates as numbers, for learners that read no text.

    **Observation**: float32, shape ``(n, F)``: `FEATURES`, then one column per agent that is 1 for the acting one;
    all zeros after the end. ``action_masks()`` is that of the `CandidateChoice` below.
    """

    def __init__(self, env: gym.Env[Any, Any], critic: StateCritic | None = None) -> None:
        """Check the arguments.

        Args:
            env: A `CandidateChoice`, or a wrapper of one that leaves its observations as they are.
            critic: Scores the states after each candidate, all of a turn in one call.

        Raises:
            ConfigError: There is no `CandidateChoice`.
        """
        super().__init__(env)
        choice: Any = env
        while not isinstance(choice, CandidateChoice):
            if not isinstance(choice, gym.Wrapper):
                raise ConfigError(f"env: expected a CandidateChoice(env, policy, n), got {env!r}")
            choice = choice.env
        self.choice: CandidateChoice = choice
        self._critic = critic
        self._longest = max(1, self.choice.mas_env.dynamics.max_depth)
        width = len(FEATURES) + len(self.choice.mas_env.mas.agents)
        self.observation_space = spaces.Box(-np.inf, np.inf, (self.choice.n, width), np.float32)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], Info]:
        """Start an episode."""
        _, info = self.env.reset(seed=seed, options=None if options is None else dict(options))
        return self._features(info), info

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, Info]:
        """Send the chosen candidate."""
        _, reward, terminated, truncated, info = self.env.step(action)
        return self._features(info), float(reward), terminated, truncated, info

    def _features(self, info: Info) -> NDArray[np.float32]:
        assert self.observation_space.shape is not None
        table = np.zeros(self.observation_space.shape, dtype=np.float32)
        env, samples = self.choice.mas_env, self.choice.samples
        if not samples:
            return table
        values = self._values(samples)
        for row, sample, legal, value in zip(table, samples, info["action_mask"], values, strict=True):
            mean = sample.logprob / max(1, sample.tokens) if sample.logprob is not None else 0.0
            turn = env.state.depth / self._longest
            row[: len(FEATURES)] = legal, max(mean, _LOWEST_LOGPROB), sample.tokens / 100, turn, value
            row[len(FEATURES) + env.state.acting] = 1
        return table

    def _values(self, samples: Sequence[Sample]) -> list[float]:
        if self._critic is None:
            return [0.0] * len(samples)
        env = self.choice.mas_env
        states = [env.dynamics.transition(env.state, Action(sample.text, env.ALL)) for sample in samples]
        scored = self._critic.score([Context(s, env.mas, sample) for s, sample in zip(states, samples, strict=True)])
        return [_finite(value) for value in scored]


def _mas_env(env: gym.Env[Any, Any]) -> MASEnv:
    if not isinstance(env.unwrapped, MASEnv):
        raise ConfigError(f"env: expected a MASEnv, such as gym.make('MAS-Arithmetic-v0'), got {env.unwrapped!r}")
    return env.unwrapped


def _finite(value: object) -> float:
    number = float(value) if isinstance(value, float | int | np.floating) else math.nan
    if not math.isfinite(number):
        raise ConfigError(f"critic: expected finite values, got {value!r:.80}; check its weights")
    return number
