"""Adapts vector environments to Stable-Baselines3, which does not support Gymnasium's vector environments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.core import ActType, ObsType
from gymnasium.vector import AutoresetMode

from mas_gym.envs.env import Info
from mas_gym.envs.vector import MASVectorEnv
from mas_gym.errors import ConfigError, MissingDependencyError

try:
    from stable_baselines3.common.vec_env import VecEnv
except ImportError:
    # The module must import for its documentation; only building an environment needs the package.
    VecEnv = object


class SB3VecEnv(VecEnv):  # type: ignore[misc]
    """A `MASVectorEnv` as a ``VecEnv`` of Stable-Baselines3, with the masks that sb3-contrib's MaskablePPO requires.

    Example:
        >>> envs = gym.make_vec(id, num_envs=64, policy="tiny", wrap=mas_gym.CandidateFeatures,
        ...                     autoreset_mode="SameStep")  # doctest: +SKIP
        >>> MaskablePPO("MlpPolicy", SB3VecEnv(envs)).learn(10_000)  # doctest: +SKIP
    """

    def __init__(self, envs: MASVectorEnv) -> None:
        """Check the vector environment.

        Args:
            envs: A vector environment with numeric observations (`mas_gym.CandidateFeatures`) and the autoreset mode
                ``"SameStep"``, the only mode that Stable-Baselines3 supports.

        Raises:
            ConfigError: The mode or the observations are not supported.
            MissingDependencyError: Stable-Baselines3 is not installed.
        """
        if VecEnv is object:
            raise MissingDependencyError("SB3VecEnv needs Stable-Baselines3: pip install stable-baselines3")
        if not isinstance(envs, MASVectorEnv) or envs.autoreset_mode != AutoresetMode.SAME_STEP:
            raise ConfigError(f'envs: expected a MASVectorEnv with autoreset_mode="SameStep", got {envs!r}')
        if not isinstance(envs.single_observation_space, spaces.Box):
            raise ConfigError("envs: expected numeric observations; create the environment with wrap=CandidateFeatures")
        self.envs = envs
        self._actions: object = None
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)

    def reset(self) -> object:
        """Start an episode in every sub-environment, with the previously set seeds and options."""
        options = [dict(own) for own in self._options]
        if any(own != options[0] for own in options):
            raise ConfigError("set_options: expected the same options for every environment")
        seeds = None if None in self._seeds else list(self._seeds)
        observations, infos = self.envs.reset(seed=seeds, options=options[0])
        self.reset_infos = [_of_copy(infos, place) for place in range(self.num_envs)]
        self._reset_seeds()
        self._reset_options()
        return observations

    def step_async(self, actions: object) -> None:
        """Store the actions for `step_wait`."""
        self._actions = actions

    def step_wait(self) -> tuple[object, object, object, list[Info]]:
        """Take a step; at an episode's end, ``info`` describes the last state and includes ``terminal_observation``."""
        observations, rewards, terminated, truncated, infos = self.envs.step(self._actions)
        each = [_of_copy(infos, place) for place in range(self.num_envs)]
        for place in np.flatnonzero(terminated | truncated):
            cut = bool(truncated[place] and not terminated[place])
            last = {"terminal_observation": each[place]["final_obs"], "TimeLimit.truncated": cut}
            each[place] = {**each[place]["final_info"], **last}
        return observations, rewards.astype(np.float32), terminated | truncated, each

    def close(self) -> None:
        """Close the sub-environments."""
        self.envs.close()

    def get_attr(self, attr_name: str, indices: object = None) -> list[Any]:
        """Return an attribute of each sub-environment."""
        return [self.envs.envs[place].get_wrapper_attr(attr_name) for place in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: object, indices: object = None) -> None:
        """Set an attribute of each sub-environment."""
        for place in self._get_indices(indices):
            self.envs.envs[place].set_wrapper_attr(attr_name, value)

    def env_method(self, method_name: str, *args: object, indices: object = None, **kwargs: object) -> list[Any]:
        """Call a method of each sub-environment."""
        return [method(*args, **kwargs) for method in self.get_attr(method_name, indices)]

    def env_is_wrapped(self, wrapper_class: type, indices: object = None) -> list[bool]:
        """Return which sub-environments have a wrapper of a class."""
        return [_wrapped(self.envs.envs[place], wrapper_class) for place in self._get_indices(indices)]


def _of_copy(infos: Mapping[str, Any], place: int) -> Info:
    """Return one sub-environment's part of the infos of a vector environment."""
    own = (key for key in infos if f"_{key}" in infos and infos[f"_{key}"][place])
    return {k: _of_copy(infos[k], place) if isinstance(infos[k], dict) else infos[k][place] for k in own}


def _wrapped(env: gym.Env[ObsType, ActType], kind: type) -> bool:
    return isinstance(env, kind) or (isinstance(env, gym.Wrapper) and _wrapped(env.env, kind))
