"""The environment as a PettingZoo AEC game, in which each agent observes only its local view."""

from __future__ import annotations

import copy
import re
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from mas_gym.envs.env import Info, MASEnv
from mas_gym.errors import ConfigError, EpisodeOverError, need
from mas_gym.internal.suggestions import choice, refuse_unknown
from mas_gym.systems.loading import MASSource
from mas_gym.systems.prompts import chat_messages
from mas_gym.tasks.base import Task

try:
    from pettingzoo import AECEnv
except ImportError:
    # The class must exist for `from mas_gym import *`; only building a game needs PettingZoo.
    AECEnv = object

Rewards = Literal["shared", "own"]

_ID = re.compile(r"^[\w.:-]+-v\d+$")
_OF_EPISODES = ("agents", "agent_selection", "rewards", "_cumulative_rewards", "terminations", "truncations", "infos")


class NotResetError(EpisodeOverError, AttributeError):
    """The game has not started; also an AttributeError, because PettingZoo's episode attributes do not exist yet."""


def aec_env(
    env: str | Task | gym.Env[Any, Any] | None = None,
    mas: MASSource | None = None,
    *,
    rewards: Rewards = "shared",
    **kwargs: Any,
) -> MASAECEnv:
    """Return an environment as an AEC game; requires the extra ``mas-gym[aec]``.

    Args:
        env: A task or its name, as for `MASEnv`; a registered id (by default ``"MAS-Arithmetic-v0"``); or a `MASEnv`,
            optionally with wrappers such as `CandidateChoice`, `CandidateFeatures` and `DenseReward`. Do not use the
            environment directly afterwards.
        mas: The MAS, as for `MASEnv`.
        rewards: ``"shared"`` gives every reward to every agent. ``"own"`` gives each reward only to the agent that
            acted, so the agents' returns sum to the environment's return. With a `DenseReward`, an agent's own reward
            is the gain in value from its messages.
        kwargs: Further arguments of `MASEnv`, or of ``gym.make`` for an id.

    Returns:
        A `pettingzoo.AECEnv` with the agent names of the MAS.

    Raises:
        ConfigError: An argument is invalid.
        MissingDependencyError: PettingZoo is not installed.

    >>> game = aec_env("MAS-Arithmetic-v0")
    >>> game.reset(seed=0)
    >>> for agent in game.agent_iter():
    ...     view, reward, terminated, truncated, info = game.last()
    ...     game.step(None if terminated else ("Final Answer: none", game.ALL))
    >>> agent, reward
    ('Verifier', -1.0)
    """
    need("pettingzoo", "the AEC view", "aec")
    if mas is not None:
        kwargs["mas"] = mas
    if env is None and "task" not in kwargs:
        env = "MAS-Arithmetic-v0"
    if isinstance(env, str) and _ID.search(env):
        # Gymnasium's checks of single-agent use do not fit.
        env = gym.make(env, **kwargs).unwrapped
    elif isinstance(env, gym.Env):
        refuse_unknown("option", kwargs, ())
    else:
        env = MASEnv(**kwargs if env is None else {"task": env, **kwargs})
    return MASAECEnv(env, choice("rewards", rewards, ("shared", "own")) == "own")


class MASAECEnv(AECEnv):  # type: ignore[misc]
    """An AEC game in which agents act in the system's order; with loops, an agent can act several times.

    **Observation**: a dict with the agent's local view: ``question`` (empty if the agent does not see it),
    ``transcript`` (the messages it sent or received) and ``messages`` (its chat prompt while it acts, else empty).
    With a `CandidateChoice` there is also ``candidates`` (its proposals while it acts, else empty). With
    `CandidateFeatures` the observation is the feature table while the agent acts, else zeros.

    **Action**: as in the environment. Pass ``infos[agent]["action_mask"]`` to ``action_space(agent).sample``: it is
    the mask of the proposals, or, for ``(text, recipient)`` actions, the pair of None and the mask of the recipients.

    An agent that a dynamic schedule skips never acts; it terminates with the others.
    """

    def __init__(self, env: gym.Env[Any, Any], own: bool) -> None:
        """Build the game; ``own`` gives each reward only to the agent that acted."""
        super().__init__()
        if not isinstance(env.unwrapped, MASEnv):
            raise ConfigError(f"env: expected a registered MAS id or a MASEnv, wrapped or not, got {env!r}")
        self._own, self.env = own, env
        self.mas_env = env.unwrapped
        self.render_mode = env.render_mode
        self.metadata = {**self.mas_env.metadata, "name": "mas_gym_v0", "is_parallelizable": False}
        self.possible_agents = [agent.name for agent in self.mas_env.mas.agents]
        self.ALL, self.sink = self.mas_env.ALL, self.mas_env.sink
        space = env.observation_space
        if isinstance(space, spaces.Dict):
            shown = ("question", "transcript", "messages", "candidates")
            space = spaces.Dict({key: space[key] for key in shown if key in space.spaces})
        # One copy each, so that seeding one agent's space does not affect the others.
        self.observation_spaces = {name: copy.deepcopy(space) for name in self.possible_agents}
        self.action_spaces = {name: copy.deepcopy(env.action_space) for name in self.possible_agents}
        self._index = {name: i for i, name in enumerate(self.possible_agents)}
        self._latest: Any = None

    def __getattr__(self, name: str) -> Any:
        """Raise `NotResetError` if an attribute that `reset` sets is accessed before the first reset."""
        if name in _OF_EPISODES:
            raise NotResetError(f"no episode has started, so {name!r} is not available: call reset() first")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        """Return an agent's observation space, always the same object."""
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        """Return an agent's action space, always the same object."""
        return self.action_spaces[agent]

    def reset(self, seed: int | None = None, options: dict[str, object] | None = None) -> None:
        """Start an episode; only the option ``problem_id`` is read, because PettingZoo may pass others."""
        known = {key: value for key, value in (options or {}).items() if key == "problem_id"}
        self._latest, info = self.env.reset(seed=seed, options=known)
        self.agents = self.possible_agents[:]
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self._skip_agent_selection = None
        self._set_infos(info)
        self.agent_selection = self.agents[self.mas_env.state.acting]

    def step(self, action: object) -> None:
        """Take the selected agent's action; after the end, pass None for each agent."""
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        self._latest, reward, terminated, truncated, info = self.env.step(action)
        self._cumulative_rewards[agent] = 0.0
        self.rewards = dict.fromkeys(self.agents, 0.0 if self._own else float(reward))
        self.rewards[agent] = float(reward)
        self._set_infos(info)
        if terminated or truncated:
            self.terminations = dict.fromkeys(self.agents, terminated)
            self.truncations = dict.fromkeys(self.agents, truncated)
        else:
            self.agent_selection = self.possible_agents[self.mas_env.state.acting]
        self._accumulate_rewards()
        self._deads_step_first()

    def _set_infos(self, info: Info) -> None:
        info = dict(info)
        mask = info.pop("action_mask")
        of_choice = isinstance(self.env.action_space, spaces.Discrete)
        self.infos = {agent: dict(info) for agent in self.agents}
        for own in self.infos.values():
            own["action_mask"] = mask.copy() if of_choice else (None, mask.copy())

    def observe(self, agent: str) -> Any:
        """Return an agent's current observation."""
        index, state = self._index[agent], self.mas_env.state
        acts = state.acting == index
        if isinstance(self._latest, np.ndarray):
            return self._latest.copy() if acts else np.zeros_like(self._latest)
        question, transcript = self.mas_env.dynamics.local_view(state, index)
        prompt = chat_messages(self.mas_env.mas, state) if acts else ()
        view = {"question": question or "", "transcript": transcript, "messages": prompt}
        if "candidates" in self._latest:
            view["candidates"] = self._latest["candidates"] if acts else ()
        return view

    def render(self) -> object:
        """Render as `MASEnv.render` does."""
        return self.env.render()

    def close(self) -> None:
        """Close the environment."""
        self.env.close()
