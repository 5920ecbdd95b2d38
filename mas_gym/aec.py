"""The environment as a PettingZoo AEC game, in which each agent observes only its local view."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
from gymnasium import spaces

from mas_gym.env import MASEnv
from mas_gym.errors import ConfigError, MissingDependencyError, refuse_unknown
from mas_gym.prompts import chat_messages

try:
    from pettingzoo import AECEnv
except ImportError:
    # The class must exist for `from mas_gym import *`; only building a game needs PettingZoo.
    AECEnv = object

AgentObservation = dict[str, Any]


def aec_env(env: str | MASEnv = "MAS-Arithmetic-v0", **kwargs: Any) -> MASAECEnv:
    """Return an environment as an AEC game; requires the extra ``mas-gym[aec]``.

    Args:
        env: A registered id, or an environment, which must not be used directly afterwards.
        kwargs: Arguments of ``gym.make``; only with an id.

    Returns:
        A `pettingzoo.AECEnv` whose agents are named as in the MAS.

    Raises:
        MissingDependencyError: PettingZoo is not installed.

    >>> game = aec_env("MAS-Arithmetic-v0")
    >>> game.reset(seed=0)
    >>> for agent in game.agent_iter():
    ...     view, reward, terminated, truncated, info = game.last()
    ...     game.step(None if terminated else ("Final Answer: none", game.ALL))
    >>> agent, reward
    ('Verifier', -1.0)
    """
    return MASAECEnv(env, **kwargs)


class MASAECEnv(AECEnv):  # type: ignore[misc]
    """An AEC game in which agents act in schedule order and share the terminal reward.

    ``observe(agent)`` is a dict with the agent's local view: ``question`` (empty if the agent does not see it),
    ``transcript`` (the messages it sent or received) and ``messages`` (its chat prompt while it acts, else empty).
    ``infos[agent]["action_mask"]`` is an argument for ``action_space(agent).sample``: None and the recipients' mask.

    An agent that a dynamic schedule skips never acts and terminates with the others.
    """

    def __init__(self, env: str | MASEnv, **kwargs: Any) -> None:
        """Build the view; see `aec_env`."""
        if AECEnv is object:
            raise MissingDependencyError("the AEC view needs PettingZoo: pip install 'mas-gym[aec]'")
        super().__init__()
        if isinstance(env, str):
            env = gym.make(env, **kwargs).unwrapped  # type: ignore[assignment]
        else:
            refuse_unknown("option", kwargs, ())
        if not isinstance(env, MASEnv):
            raise ConfigError(f"env: expected a registered MAS id or a MASEnv, got {env!r}")
        self.env = env
        self.render_mode = env.render_mode
        self.metadata = {**env.metadata, "name": "mas_gym_v0", "is_parallelizable": False}
        self.possible_agents = [agent.name for agent in env.mas.agents]
        self.ALL, self.sink = env.ALL, env.sink
        inner = env.observation_space
        assert isinstance(inner, spaces.Dict)
        view = spaces.Dict({key: inner[key] for key in ("question", "transcript", "messages")})
        # One copy each, so that seeding one agent's space does not affect the others.
        self.observation_spaces = {name: copy.deepcopy(view) for name in self.possible_agents}
        self.action_spaces = {name: copy.deepcopy(env.action_space) for name in self.possible_agents}
        self._index = {name: i for i, name in enumerate(self.possible_agents)}

    def observation_space(self, agent: str) -> spaces.Dict:
        """Return an agent's observation space, always the same object."""
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> Any:
        """Return an agent's action space, always the same object."""
        return self.action_spaces[agent]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Start an episode; only the option ``problem_id`` is read, because PettingZoo may pass others."""
        known = {key: value for key, value in (options or {}).items() if key == "problem_id"}
        _, info = self.env.reset(seed=seed, options=known)
        self.agents = self.possible_agents[:]
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self._skip_agent_selection = None
        self._set_infos(info)
        self.agent_selection = self.agents[self.env.state.acting]

    def step(self, action: tuple[str, int] | None) -> None:
        """Let the selected agent act; after the end, pass None for each agent."""
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        assert action is not None
        _, reward, terminated, _, info = self.env.step(action)
        self._cumulative_rewards[agent] = 0.0
        self.rewards = dict.fromkeys(self.agents, reward)
        self._set_infos(info)
        if terminated:
            self.terminations = dict.fromkeys(self.agents, True)
        else:
            self.agent_selection = self.possible_agents[self.env.state.acting]
        self._accumulate_rewards()
        self._deads_step_first()

    def _set_infos(self, info: dict[str, Any]) -> None:
        mask = info.pop("action_mask")
        self.infos = {agent: dict(info) for agent in self.agents}
        for own in self.infos.values():
            own["action_mask"] = (None, mask.copy())

    def observe(self, agent: str) -> AgentObservation:
        """Return an agent's current local view."""
        index, state = self._index[agent], self.env.state
        question, transcript = self.env.dynamics.local_view(state, index)
        prompt = chat_messages(self.env.mas, state) if state.acting == index else ()
        return {"question": question or "", "transcript": transcript, "messages": prompt}

    def render(self) -> Any:
        """Render as `MASEnv.render` does."""
        return self.env.render()

    def close(self) -> None:
        """Close the environment."""
        self.env.close()
