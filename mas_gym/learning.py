"""Wrappers for reinforcement learners: rewards on the way from a critic, and candidates as numbers.

Any critic of `search.Critic` that scores unfinished states one by one will do, policy likelihood included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from mas_gym.asking import Asking, AskingWrapper, Scoring, ScoringContext, StateCritic, Step, resetting, stepping
from mas_gym.env import Info, MASEnv
from mas_gym.errors import ConfigError, shown
from mas_gym.graph import MAS
from mas_gym.policies import Sample
from mas_gym.state import Action
from mas_gym.wrappers import CandidateChoice, candidate_choice

FEATURES = ("legal", "logprob", "tokens", "turn", "value")
"""Features of each candidate, before those of the acting agent: whether it may be chosen, mean log-probability per
token (nats; 0 if unknown), hundreds of tokens, turns so far over the longest schedule, and the critic's value of the
state after it (0 without a critic)."""

_LOWEST_LOGPROB = -20.0


class DenseReward(AskingWrapper):
    """Adds the gain in a critic's value to every reward, in the form that leaves the optimal policy unchanged.

    The reward of a step is ``r + gamma * V(next) - V(state)`` with ``V = 0`` before the first message and after the
    end (Ng, Harada and Russell 1999, "Policy invariance under reward transformations"). With ``gamma = 1`` the return
    of an episode is that of the environment.

    **Info**: ``reward`` is the environment's own, ``potential`` the critic's value of the new state.
    """

    def __init__(self, env: gym.Env[Any, Any], critic: StateCritic, gamma: float = 1.0) -> None:
        """Check the arguments.

        Args:
            env: A `mas_gym.MASEnv`, wrapped or not, such as a `CandidateChoice`. Critics that read log-probabilities,
                such as policy likelihood, need a `CandidateChoice` among the wrappers.
            critic: Scores unfinished states, one by one.
            gamma: The learner's discount, in ``[0, 1]``.

        Raises:
            ConfigError: The environment is no `MASEnv`, the critic scores finished states alone or compares states, or
                gamma is out of its range.
            CriticError: The critic is not for this system.
        """
        super().__init__(env)
        if not isinstance(env.unwrapped, MASEnv):
            raise ConfigError(f"env: expected a MASEnv, such as gym.make('MAS-Arithmetic-v0'), got {env.unwrapped!r}")
        self.mas_env: MASEnv = env.unwrapped
        number = isinstance(gamma, float | int) and not isinstance(gamma, bool)
        if not number or not 0 <= gamma <= 1:
            raise ConfigError(f"gamma: expected a number in [0, 1], got {shown(gamma)}")
        self._critic, self._gamma = _checked(critic, self.mas_env.mas), gamma
        self._choice = candidate_choice(env)
        self._known: tuple[bytes, float] = b"", 0.0

    def resetting(self, seed: int | None, options: Mapping[str, Any] | None) -> Asking[tuple[Any, Info]]:
        """Start an episode, whose potential is 0."""
        return resetting(self.env, seed, options)

    def stepping(self, action: Any) -> Asking[Step]:
        """Take a step and reward the gain in value."""
        before = yield from self._potential()
        observation, reward, terminated, truncated, info = yield from stepping(self.env, action)
        after = 0.0 if terminated else (yield from self._potential())
        shaped = reward + self._gamma * after - before
        return observation, shaped, terminated, truncated, {**info, "reward": reward, "potential": after}

    def _potential(self) -> Asking[float]:
        env = self.mas_env
        if env.state.depth == 0:
            return 0.0
        # After restore_state the last state is another one.
        if self._known[0] != env.state.digest:
            sample = None if self._choice is None else self._choice.chosen
            [value] = yield Scoring(self._critic, [ScoringContext(env.state, env.mas, sample)])
            self._known = env.state.digest, value
        return self._known[1]


class CandidateFeatures(AskingWrapper):
    """Candidates as numbers, for learners that read no text.

    **Observation**: float32, shape ``(n, F)``: `FEATURES`, then one column per agent that is 1 for the acting one;
    all zeros after the end. ``action_masks()`` is that of the `CandidateChoice` below.
    """

    def __init__(self, env: gym.Env[Any, Any], critic: StateCritic | None = None) -> None:
        """Check the arguments.

        Args:
            env: A `CandidateChoice`, or a wrapper of one that leaves its observations as they are.
            critic: Scores the states after each candidate, one by one; all of a turn are asked for in one call.

        Raises:
            ConfigError: There is no `CandidateChoice`, or the critic scores finished states alone or compares states.
            CriticError: The critic is not for this system.
        """
        super().__init__(env)
        choice = candidate_choice(env)
        if choice is None:
            raise ConfigError(f"env: expected a CandidateChoice(env, policy, n), got {env!r}")
        self.choice: CandidateChoice = choice
        self._critic = None if critic is None else _checked(critic, choice.mas_env.mas)
        self._longest = max(1, self.choice.mas_env.dynamics.max_depth)
        width = len(FEATURES) + len(self.choice.mas_env.mas.agents)
        self.observation_space = spaces.Box(-np.inf, np.inf, (self.choice.n, width), np.float32)

    def resetting(
        self, seed: int | None, options: Mapping[str, Any] | None
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
            mean = max(sample.mean_logprob or 0.0, _LOWEST_LOGPROB)
            row[: len(FEATURES)] = legal, mean, sample.tokens / 100, turn, value
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


def _checked(critic: StateCritic, mas: MAS) -> StateCritic:
    """Return a critic that can score single unfinished states of a system."""
    if isinstance(critic, str):
        raise ConfigError(
            f"critic: expected a critic, got {shown(critic)}; rewardmodels.load_critic(...) loads it by name"
        )
    if getattr(critic, "reads_peers", False):
        raise ConfigError(
            f"critic: expected one that scores a state by itself, got {critic!r}, which compares the states of a "
            "search; tiny-masprm or policy-likelihood will do"
        )
    if not callable(getattr(critic, "score", None)) or getattr(critic, "terminal_only", False):
        raise ConfigError(f"critic: expected one that scores unfinished states, got {critic!r}; tiny-masprm is one")
    getattr(critic, "check_graph", lambda mas: None)(mas)
    return critic
