"""Vector environments that batch the policy and critic requests of all sub-environments.

>>> envs = gym.make_vec("MAS-Arithmetic-v0", num_envs=8, policy=my_policy, n=3)  # doctest: +SKIP
>>> observations, infos = envs.reset(seed=0)  # doctest: +SKIP
>>> observations, rewards, terminated, truncated, infos = envs.step([0] * 8)  # doctest: +SKIP
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.core import ActType, ObsType
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate
from numpy.typing import NDArray

from mas_gym.envs.batching import Asking, resetting, run_together, stepping
from mas_gym.envs.env import Info, MASEnv
from mas_gym.envs.wrappers import CandidateChoice
from mas_gym.errors import (
    ConfigError,
    CriticError,
    EngineUnavailableError,
    EpisodeOverError,
    IllegalActionError,
    MASGymError,
    PolicyError,
    shown,
    whole_number,
)
from mas_gym.policies import AsyncPolicy, Policy, as_policy, load_policy

logger = logging.getLogger("mas_gym.envs.vector")

_CHOICE = ("n", "seed", "temperature", "top_p")

VectorStep = tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], Info]


def make_vector(
    num_envs: int = 1,
    *,
    policy: Policy | AsyncPolicy | str | None = None,
    wrap: Callable[[MASEnv | CandidateChoice], gym.Env[ObsType, ActType]] | None = None,
    autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    **options: Any,
) -> MASVectorEnv:
    """Return a vector environment; ``gym.make_vec("MAS-...", num_envs=8, policy="tiny")`` calls this function.

    Args:
        num_envs: Number of sub-environments, at least 1.
        policy: With a policy, or its name, each sub-environment is a `CandidateChoice`; all share the policy. Without
            a policy, the actions are texts and recipients.
        wrap: Wraps each sub-environment, as in ``lambda env: CandidateFeatures(env, critic)``.
        autoreset_mode: When a sub-environment starts its next episode, as defined by Gymnasium.
        options: Arguments of `MASEnv`; with a policy also ``n``, ``seed``, ``temperature`` and ``top_p`` of
            `CandidateChoice`. This ``seed`` determines the messages that the policy samples; the ``seed`` of
            `MASVectorEnv.reset` determines the questions.

    Raises:
        ConfigError: An argument is invalid.
    """
    count = whole_number("num_envs", num_envs, at_least=1)
    if policy is None:
        for name in set(_CHOICE) & set(options):
            raise ConfigError(f"{name}: expected policy= as well, such as policy='tiny'")
    named = load_policy(policy) if isinstance(policy, str) else policy
    shared = None if named is None else as_policy(named)
    chosen = {name: options.pop(name) for name in _CHOICE if name in options}

    def make() -> gym.Env[Any, Any]:
        base = MASEnv(**options)
        env = base if shared is None else CandidateChoice(base, shared, **chosen)
        return env if wrap is None else wrap(env)

    return MASVectorEnv([make] * count, autoreset_mode=autoreset_mode)


class _Outcome(NamedTuple):
    """The result of one sub-environment's step; `final` is the last observation and info if a new episode has begun."""

    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: Info
    final: tuple[object, Info] | None = None


class MASVectorEnv(SyncVectorEnv):
    """A vector environment that sends each policy and critic one batch for all sub-environments.

    It follows Gymnasium's vector interface (spaces, seeds, ``autoreset_mode``, ``reset_mask``, ``final_obs``). Each
    sub-environment gives the same results as a single environment with its seed.

    **Errors**: if a policy or critic fails for some of the sub-environments, their episodes are truncated: the reward
    is 0, the observation is the last one, ``infos["error"]`` is the reason, and the failure is logged. The other
    sub-environments take their step. An unavailable engine, a failure of all sub-environments, and any other error are
    raised from `step` with a note that names the sub-environment; afterwards only `reset()` is valid.

    Args:
        env_fns: Functions that build the sub-environments, each a `MASEnv` with any wrappers. `CandidateChoice`,
            `CandidateFeatures` and `DenseReward` batch their requests unless they are inside another kind of wrapper.
        autoreset_mode: When a sub-environment starts its next episode.

    Raises:
        ConfigError: There is no sub-environment, or the mode is unknown.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env[ObsType, ActType]]],
        *,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    ) -> None:
        if not env_fns:
            raise ConfigError("env_fns: expected at least one function that makes an environment, got none")
        try:
            mode = AutoresetMode(autoreset_mode)
        except ValueError as error:
            known = ", ".join(repr(mode.value) for mode in AutoresetMode)
            raise ConfigError(f"autoreset_mode: expected one of {known}, got {shown(autoreset_mode)}") from error
        super().__init__(env_fns, autoreset_mode=mode)
        self._ended: NDArray[np.bool_] | None = None

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Mapping[str, object] | None = None
    ) -> tuple[Any, Info]:
        """Start an episode in every sub-environment, or in those that ``options["reset_mask"]`` marks.

        Args:
            seed: Determines the questions. With a single number, sub-environment ``i`` gets ``seed + i``; otherwise one
                number per sub-environment. The ``seed`` of `make_vector` determines the messages that a policy samples.
            options: ``reset_mask``, a bool array of shape ``(num_envs,)``; other options as for `MASEnv.reset`.

        Raises:
            ConfigError: The number of seeds, the mask or an option is invalid.
        """
        others = dict(options or {})
        places = self._places(others.pop("reset_mask", None))
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed
        seeds = [None] * self.num_envs if seeds is None else list(seeds)
        if len(seeds) != self.num_envs:
            raise ConfigError(f"seed: expected {self.num_envs} seeds, one per environment, got {len(seeds)}")
        ended, self._ended = self._ended, None
        started = run_together([resetting(self.envs[place], seeds[place], others or None) for place in places])
        infos: Info = {}
        for place, (observation, info) in zip(places, started, strict=True):
            self._env_obs[place] = observation
            infos = self._add_info(infos, info, place)
        self._ended = np.zeros(self.num_envs, dtype=np.bool_) if ended is None else ended
        self._ended[places] = False
        return self._observed(), infos

    def step(self, actions: object) -> VectorStep:
        """Take a step in every sub-environment.

        Args:
            actions: An element of ``action_space``: one action per sub-environment. A sub-environment that starts its
                next episode ignores its action.

        Raises:
            EpisodeOverError: No episode has started, a step has failed since, or a sub-environment's episode is over
                and ``autoreset_mode`` is ``"Disabled"``.
            IllegalActionError: The number of actions is wrong, or an action is not the index of a proposal; no
                sub-environment has taken a step.
        """
        ended = self._ended
        if ended is None:
            raise EpisodeOverError("no episode has started, or a step has failed: call envs.reset() first")
        if ended.any() and self.autoreset_mode == AutoresetMode.DISABLED:
            raise EpisodeOverError(
                f"the episodes of environments {np.flatnonzero(ended).tolist()} have ended: reset them with "
                "options={'reset_mask': terminated | truncated}"
            )
        each = self._each(actions, ended)
        self._ended = None
        turns = zip(range(self.num_envs), each, ended, strict=True)
        failed: dict[int, MASGymError] = {}
        outcomes: list[_Outcome] = run_together([self._turn(*turn, failed) for turn in turns])
        if len(failed) == self.num_envs:
            raise failed[0]
        for place, error in failed.items():
            logger.warning("environment %d of %d: %s; its episode is truncated", place, self.num_envs, error)
        infos: Info = {}
        for place, outcome in enumerate(outcomes):
            self._env_obs[place] = outcome.observation
            if outcome.final is not None:
                last, info = outcome.final
                infos = self._add_info(infos, {"final_obs": last, "final_info": info}, place)
            infos = self._add_info(infos, outcome.info, place)
        rewards = np.array([outcome.reward for outcome in outcomes], dtype=np.float64)
        terminated = np.array([outcome.terminated for outcome in outcomes], dtype=np.bool_)
        truncated = np.array([outcome.truncated for outcome in outcomes], dtype=np.bool_)
        self._ended = (terminated | truncated) & (self.autoreset_mode != AutoresetMode.SAME_STEP)
        return self._observed(), rewards, terminated, truncated, infos

    def _turn(self, place: int, action: object, ended: bool, failed: dict[int, MASGymError]) -> Asking[_Outcome]:
        """Take one sub-environment's step; an error of its policy or critic is added to ``failed``."""
        env = self.envs[place]
        if ended:
            observation, info = yield from resetting(env, None, None)
            return _Outcome(observation, 0.0, False, False, info)
        try:
            outcome = _Outcome(*(yield from stepping(env, action)))
        except EngineUnavailableError:
            raise
        except (CriticError, PolicyError) as error:
            error.add_note(f"in environment {place} of {self.num_envs}")
            failed[place] = error
            reason = f"{type(error).__name__}: {error}"
            info = {"error": reason, "action_mask": env.get_wrapper_attr("action_mask")()}
            outcome = _Outcome(self._env_obs[place], 0.0, False, True, info)
        if self.autoreset_mode != AutoresetMode.SAME_STEP or not (outcome.terminated or outcome.truncated):
            return outcome
        observation, info = yield from resetting(env, None, None)
        return outcome._replace(observation=observation, info=info, final=(outcome.observation, outcome.info))

    def _observed(self) -> object:
        # A new batch each time, so that batches returned earlier do not change.
        batch: Any = create_empty_array(self.single_observation_space, self.num_envs, fn=np.zeros)
        return concatenate(self.single_observation_space, self._env_obs, batch)

    def _places(self, mask: object) -> list[int]:
        """Return the indices of the environments to reset."""
        if mask is None:
            return list(range(self.num_envs))
        if (
            not isinstance(mask, np.ndarray)
            or mask.shape != (self.num_envs,)
            or mask.dtype != np.bool_
            or not mask.any()
        ):
            raise ConfigError(
                f"reset_mask: expected a bool array of shape ({self.num_envs},) with at least one True, got "
                f"{shown(mask)}"
            )
        if self._ended is None and not mask.all():
            raise EpisodeOverError("no episode has started, or a step has failed: reset without reset_mask first")
        return [int(place) for place in np.flatnonzero(mask)]

    def _each(self, actions: object, ended: NDArray[np.bool_]) -> list[object]:
        expected = f"expected {self.num_envs} actions, one per environment"
        space = self.single_action_space
        try:
            # Actions may be tensors; a tensor's elements are not valid elements of a `Discrete` space.
            given = np.asarray(actions) if isinstance(space, spaces.Discrete) else actions
            each = list(iterate(self.action_space, given))
        except (TypeError, ValueError, LookupError) as error:
            raise IllegalActionError(f"{expected}, got {shown(actions)}") from error
        if len(each) != self.num_envs:
            raise IllegalActionError(f"{expected}, got {len(each)}")
        if isinstance(space, spaces.Discrete):
            for place, action in enumerate(each):
                if not ended[place] and action not in space:
                    expected = f"environment {place}: expected a proposal index from 0 to {space.n - 1}"
                    raise IllegalActionError(f"{expected}, got {shown(action)}")
        return each
