"""The environment under other interfaces: a `Discrete(n)` choice among proposed messages, and a PettingZoo AEC game.

As an AEC game each agent observes only its local view.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs
from numpy.typing import NDArray

from mas_gym.env import Info, MASEnv, Observation, Snapshot
from mas_gym.errors import (
    ConfigError,
    EpisodeOverError,
    IllegalActionError,
    MissingDependencyError,
    PolicyError,
    refuse_unknown,
    whole_number,
)
from mas_gym.policies import AsyncPolicy, Policy, Sample, SamplingReply, SamplingRequest, load_policy
from mas_gym.policies.adapters import engine_loop
from mas_gym.policies.base import derive_seed, refuse_extra_body
from mas_gym.prompts import chat_messages
from mas_gym.spaces import Records, utf8_length

try:
    from pettingzoo import AECEnv
except ImportError:
    # The class must exist for `from mas_gym import *`; only building a game needs PettingZoo.
    AECEnv = object

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
        self._samples = self._propose()
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
        self._samples = () if terminated or truncated else self._propose()
        observation, info = self._with_candidates(observation, info)
        return observation, float(reward), terminated, truncated, info

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The current proposals as the policy gave them; empty after the end."""
        return self._samples

    def action_masks(self) -> NDArray[np.bool_]:
        """Return which proposals may be selected, under the name that sb3-contrib looks for."""
        mask: NDArray[np.bool_] = self._mask().astype(bool)
        return mask

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

    def _propose(self) -> tuple[Sample, ...]:
        env = self.mas_env
        seeds = tuple(derive_seed(self._seed, env.problem_id, env.state.digest, i) for i in range(self.n))
        request = env.request(seeds, self._temperature, self._top_p)
        if isinstance(self._policy, str):
            self._policy = load_policy(self._policy)
        refuse_extra_body(self._policy, request)
        reply = _ask(self._policy, request)
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
    """An AEC game in which agents act in the system's order, with loops any number of times, and share the reward.

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
