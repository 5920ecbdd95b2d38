"""`MASEnv`: the Gymnasium environment, a thin layer over the pure dynamics and a task.

An episode, with RPSV (four agents, so the recipients are 0 to 3 for agents, 4 for the sink and 5 for ALL)::

    reset()                     question, Reader to act
    step(("facts ...", 1))      reward 0, Planner to act
    step(("plan ...", ALL))     reward 0, Solver to act
    step(("work ...", 3))       reward 0, Verifier to act
    step(("Final Answer: 18", ALL))   reached sink: reward +1 or -1, terminated
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from operator import index
from pathlib import Path
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from mas_gym.envs.spaces import Records, Unicode, utf8_length
from mas_gym.errors import ConfigError, DataError, EpisodeOverError, IllegalActionError, shown, whole_number
from mas_gym.internal.suggestions import choice, refuse_unknown
from mas_gym.policies.base import Sampling, SamplingRequest
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.loading import MASSource, load_mas
from mas_gym.systems.prompts import ChatMessage, chat_messages, filled_prompt
from mas_gym.systems.state import MASState, Message
from mas_gym.tasks import TASK_NAMES, check_task_options, load_task
from mas_gym.tasks.base import SPLITS, Problem, Task, as_task
from mas_gym.tasks.catalog import TASKS, default_mas

Observation = dict[str, Any]
Info = dict[str, Any]

_SHARED = frozenset({"mas", "dynamics", "_load", "_task", "_problem", "_state"})


class Snapshot(NamedTuple):
    """A point in an episode, from `MASEnv.clone_state`: immutable, hashable, picklable, without the reference answer.

    Attributes:
        mas: Fingerprint of the system; a snapshot can only be restored in the same system.
        problem_id: The current problem.
        state: The state.
        refusals: Number of actions rejected at this state so far (``on_invalid="retry"``).
        over: Whether the episode has ended.
        rng: State of the environment's random generator as JSON text; None if not included.
    """

    mas: str
    problem_id: str
    state: MASState
    refusals: int
    over: bool
    rng: str | None


class MASEnv(gym.Env[Observation, tuple[str, int]]):
    """A multi-agent system that solves problems of a task, one agent message per step.

    **Action**: ``(text, recipient)``; the recipient is an agent's index, `sink` or `ALL`.
    ``info["action_mask"]`` marks the recipients that the acting agent may choose; `ALL` is always legal. After
    the end, it is the mask of the next episode's first turn, so sampling from a mask always works.
    For an agent with ``route: message``, `ALL` stands for the recipient that the text names.

    **Observation**: a dict of ``question`` (str), ``transcript`` (tuple of `mas_gym.Message`), ``acting``
    (index of the agent to act, ``sink`` after the end) and ``messages`` (that agent's chat prompt, a tuple
    of `mas_gym.ChatMessage`). With ``view="local"``, question and transcript are the acting agent's local
    view, and the question is empty if the agent does not see it.

    **Reward**: +1.0 or -1.0 at termination, 0.0 before (paper, Sec. "Preliminaries").

    **Info**: ``action_mask`` (a fresh int8 vector of length M + 2), ``problem_id``, ``agent`` (name);
    at the end ``correct``, ``extracted`` and ``reason`` from the task's grade; ``invalid_action`` with
    the reason if an action was rejected.

    No two calls return the same mutable object. A pickle stores how to load the dataset, not its content; copies
    share the dataset.

    Args:
        task: A task's name, such as ``"gsm8k"`` or ``"my.csv"``, as for `load_task`, or a `Task` object.
        mas: The name of a shipped MAS, or a config as a path or dict; by default the task's MAS.
        split: ``"train"``, ``"dev"`` or ``"test"``; only for tasks given by name. By default ``"train"``, or, with a
            file as ``data``, the whole file.
        data: A local file or folder instead of the hub; only for tasks given by name.
        view: Whether observations have the ``"full"`` transcript or the acting agent's ``"local"`` view.
        render_mode: One of ``metadata["render_modes"]``, or None.
        on_invalid: Effect of an illegal action, or of a message that must name its recipient but names no legal
            one (see `mas_gym.systems.prompts`). ``"terminate"`` ends the episode with reward -1. ``"retry"``
            rejects the action and leaves the state unchanged, at most ``max_retries`` times per turn.
        max_bytes: Maximum size of a message or a question in bytes of UTF-8.
        max_retries: Maximum number of rejected actions per turn before ``"retry"`` ends the episode.
        task_options: Options of the task, such as ``difficulty``, ``grading``, or ``columns`` for your own file.

    Raises:
        ConfigError: An argument or the MAS config is invalid.
        UnknownNameError: The task or the MAS is unknown.
    """

    metadata = {"render_modes": ["ansi", "human", "rgb_array"], "render_fps": 2}  # noqa: RUF012

    def __init__(
        self,
        task: str | Task | None = None,
        mas: MASSource | None = None,
        *,
        split: str | None = None,
        data: str | os.PathLike[str] | None = None,
        view: Literal["full", "local"] = "full",
        render_mode: str | None = None,
        on_invalid: Literal["terminate", "retry"] = "terminate",
        max_bytes: int = 65_536,
        max_retries: int = 3,
        **task_options: Any,
    ) -> None:
        """Check the arguments and build the spaces; the first reset loads the dataset."""
        self.render_mode = choice("render_mode", render_mode, (None, *self.metadata["render_modes"]))
        self.view = choice("view", view, ("full", "local"))
        self.on_invalid = choice("on_invalid", on_invalid, ("terminate", "retry"))
        self.max_bytes = whole_number("max_bytes", max_bytes, at_least=1)
        self.max_retries = whole_number("max_retries", max_retries, at_least=0)
        if task is None:
            raise ConfigError('expected a task, as in gym.make("MAS-Custom-v0", task="my.csv"), got none')
        split = None if split is None else choice("split", split, SPLITS)
        self._task: Task | None = None
        self._load: Callable[[], Task] | None = None
        if isinstance(task, str):
            check_task_options(task, task_options)
            self._load = partial(_load_task, task, split, None if data is None else os.fspath(data), **task_options)
        else:
            refuse_unknown("option", task_options, ())
            self._task = as_task(task)
        if mas is None:
            # A shipped task's default is known without the data.
            shipped = isinstance(task, str) and TASKS.parse(task).name in TASK_NAMES
            mas = default_mas(task if shipped else self.task)
        self.mas = load_mas(mas)
        self.dynamics = Dynamics(self.mas)
        self.sink, self.ALL = self.mas.sink, self.mas.ALL
        self._mas_id = self.mas.fingerprint
        self.action_space = spaces.Tuple((Unicode(max_bytes), spaces.Discrete(self.ALL + 1)))  # type: ignore[assignment]
        self.observation_space = self._make_observation_space()
        self._problem: Problem | None = None
        self._state: MASState | None = None
        self._over = True
        self._refusals = 0
        self._facts: Info = {}

    def _make_observation_space(self) -> spaces.Dict:
        agents = len(self.mas.agents)
        turns = self.mas.max_turns
        messages = len(self.mas.edges) + 1 if turns is None else turns * (agents + 1)
        filled = (filled_prompt(self.mas, agent, range(agents + 1), turns or 0) for agent in self.mas.agents)
        prompts = max(map(utf8_length, filled))
        heard = turns or max(sum(edge.target == i for edge in self.mas.edges) for i in range(agents))
        labels = heard * max(utf8_length(agent.name) + 2 for agent in self.mas.agents)
        prompt_bytes = prompts + labels + (heard + 1) * (self.max_bytes + 2) + 16
        return spaces.Dict(
            {
                "question": Unicode(self.max_bytes),
                "transcript": Records(Message, (agents, None, agents + 1), messages, messages * self.max_bytes),
                "acting": spaces.Discrete(agents + 1),
                "messages": Records(ChatMessage, (None, None), 2, prompt_bytes),
            }
        )

    @property
    def task(self) -> Task:
        """The task, loaded on first access and shared by all environments with the same task options."""
        if self._task is None:
            assert self._load is not None
            self._task = self._load()
        return self._task

    @property
    def state(self) -> MASState:
        """The current state. Raises `EpisodeOverError` before the first reset."""
        if self._state is None:
            raise EpisodeOverError("no episode has started: call env.reset() first")
        return self._state

    @property
    def problem_id(self) -> str:
        """The id of the current problem. Raises `EpisodeOverError` before the first reset."""
        if self._problem is None:
            raise EpisodeOverError("no episode has started: call env.reset() first")
        return self._problem.id

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, object] | None = None
    ) -> tuple[Observation, Info]:
        """Start an episode.

        Args:
            seed: Seeds the choice of problems; the same seed gives the same problems in the same order.
            options: ``{"problem_id": ...}`` selects the problem and draws no random number.

        Returns:
            The first observation and info.

        Raises:
            ConfigError: An option is unknown.
            UnknownNameError: The task has no problem with that id.
            DataNotFoundError: The data cannot be found or reached.
        """
        refuse_unknown("reset option", options or {}, ("problem_id",))
        super().reset(seed=seed)
        wanted = (options or {}).get("problem_id")
        if wanted is not None:
            problem = self.task.problem(str(wanted))
        elif len(self.task) == 0:
            raise DataError(f"the task {self.task.name!r} has no problems in the split {self.task.split!r}")
        else:
            problem = self.task[int(self.np_random.integers(len(self.task)))]
        if utf8_length(problem.question) > self.max_bytes:
            size = utf8_length(problem.question)
            raise DataError(
                f"expected a question of at most {self.max_bytes} bytes, got {size} in {problem.id}; raise max_bytes"
            )
        self._problem = problem
        self._state = self._first(problem.question)
        self._over, self._refusals = False, 0
        return self._report({})

    def step(self, action: tuple[str, int]) -> tuple[Observation, float, bool, bool, Info]:
        """Send ``text`` from the acting agent to ``recipient``.

        Args:
            action: ``(text, recipient)``.

        Returns:
            Observation, reward, terminated, truncated (always False) and info.

        Raises:
            EpisodeOverError: The episode has ended or has not started.
            IllegalActionError: The action is not a pair of a str and an integer. Illegal pairs do not
                raise: ``on_invalid`` determines their effect.
        """
        state = self._state
        if state is None or self._over:
            raise EpisodeOverError("the episode has ended or has not started: call env.reset() first")
        text, recipient = _read_action(action)
        try:
            if len(text) * 4 > self.max_bytes and utf8_length(text) > self.max_bytes:
                raise IllegalActionError(f"expected text of at most {self.max_bytes} bytes, got {utf8_length(text)}")
            following = self._next(state, text, recipient)
        except IllegalActionError as error:
            return self._refuse(str(error))
        if (failure := self.dynamics.failure(following)) is not None:
            return self._refuse(failure)
        self._state, self._refusals = following, 0
        if following.acting != self.sink:
            observation, info = self._report({})
            return observation, 0.0, False, False, info
        assert self._problem is not None
        grade = self.task.grade(self._problem, self.mas.final_text(following.text))
        return self._end(1.0 if grade.correct else -1.0, grade._asdict())

    def _refuse(self, reason: str) -> tuple[Observation, float, bool, bool, Info]:
        self._refusals += 1
        if self.on_invalid == "terminate" or self._refusals > self.max_retries:
            facts = {"correct": False, "extracted": None, "reason": "invalid action", "invalid_action": reason}
            return self._end(-1.0, facts)
        left = self.max_retries - self._refusals
        observation, info = self._report({"invalid_action": reason, "retries_left": left})
        return observation, 0.0, False, False, info

    def _end(self, reward: float, facts: Info) -> tuple[Observation, float, bool, bool, Info]:
        self._over = True
        observation, info = self._report(facts)
        return observation, reward, True, False, info

    def observe(self) -> tuple[Observation, Info]:
        """Return a new observation and info for the current state, for use after `restore_state`."""
        return self._picture({})

    def _report(self, facts: Info) -> tuple[Observation, Info]:
        self._facts = facts
        if self.render_mode == "human":
            from mas_gym.envs.rendering import print_turn

            print_turn(self.mas, self.state, facts)
        return self._picture(facts)

    def _picture(self, facts: Info) -> tuple[Observation, Info]:
        state = self.state
        acting = state.acting
        question: str | None = state.question
        if self.view == "full":
            transcript = state.transcript
        else:
            question, transcript = self.dynamics.local_view(state, acting)
        observation = {
            "question": question or "",
            "transcript": transcript,
            "acting": acting,
            "messages": self._prompt(state),
        }
        name = "sink" if acting == self.sink else self.mas.agents[acting].name
        info = {"action_mask": self.action_mask(), "problem_id": self.problem_id, "agent": name, **facts}
        return observation, info

    def action_mask(self) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
        """Return a new int8 vector of length M + 2: 1 for each recipient; see the class."""
        mask = np.zeros(self.ALL + 1, dtype=np.int8)
        state = self.dynamics.initial_state(self.state.question) if self._over else self.state
        mask[list(self._legal(state))] = 1
        return mask

    # Methods that other kinds of system override; see `mas_gym.programs.program_env`.

    def _first(self, question: str) -> MASState:
        return self.dynamics.initial_state(question)

    def _next(self, state: MASState, text: str, recipient: int) -> MASState:
        return self.dynamics.transition(state, (text, recipient))

    def request(self, seeds: tuple[int, ...], temperature: float = 0.7, top_p: float = 0.95) -> SamplingRequest:
        """Return the request to a policy for messages of the acting agent, one per seed.

        Raises:
            EpisodeOverError: The episode has ended or has not started.
        """
        state = self.state
        if state.acting == self.sink:
            raise EpisodeOverError("the episode has ended or has not started: call env.reset() first")
        agent = self.mas.agents[state.acting]
        own = Sampling(temperature, top_p).for_agent(agent)
        return SamplingRequest(self._prompt(state), seeds, agent.max_new_tokens, own.temperature, own.top_p, agent.name)

    def _prompt(self, state: MASState) -> tuple[ChatMessage, ...]:
        return chat_messages(self.mas, state)

    def _legal(self, state: MASState) -> tuple[int, ...]:
        return self.dynamics.legal_recipients(state)

    def clone_state(self, *, include_rng: bool = False) -> Snapshot:
        """Return a snapshot of the episode in constant time.

        Args:
            include_rng: Include the random generator's state, so that later resets choose the same problems.

        Raises:
            EpisodeOverError: No episode has started.
        """
        rng = json.dumps(self.np_random.bit_generator.state) if include_rng else None
        return Snapshot(self._mas_id, self.problem_id, self.state, self._refusals, self._over, rng)

    def restore_state(self, snapshot: Snapshot) -> None:
        """Restore a snapshot in constant time; `observe` then returns the observation and info.

        Raises:
            ConfigError: The argument is not a snapshot, or was taken in another system.
            UnknownNameError: The task does not contain the snapshot's problem.
        """
        if not isinstance(snapshot, Snapshot):
            raise ConfigError(f"expected a Snapshot, from clone_state(), got {type(snapshot).__name__}")
        if snapshot.mas != self._mas_id:
            raise ConfigError(
                f"expected a snapshot of the MAS {self.mas.name!r}, got one of another MAS; restore it in an "
                "environment with that other MAS"
            )
        if snapshot.rng is not None:
            self.np_random.bit_generator.state = json.loads(snapshot.rng)
        if self._problem is None or self._problem.id != snapshot.problem_id:
            self._problem = self.task.problem(snapshot.problem_id)
        self._state, self._refusals, self._over = snapshot.state, snapshot.refusals, snapshot.over
        self._facts = {}

    def render(self) -> Any:
        """Return the episode in the format of ``render_mode``.

        ``ansi``: a str; ``rgb_array``: a uint8 array of shape (640, 1120, 3); ``human``: None, because each turn is
        printed as it happens. With ``gym.make``, ``ansi_list`` gives the strings since the last call.

        Raises:
            EpisodeOverError: No episode has started.
        """
        if self.render_mode is None:
            gym.logger.warn('render() needs a mode: gym.make(..., render_mode="ansi"), "human" or "rgb_array"')
            return None
        if self.render_mode == "rgb_array":
            from mas_gym.envs.rendering import draw_state

            return draw_state(self.mas, self.state, self.problem_id, self._facts)
        from mas_gym.envs.rendering import render_text

        return render_text(self.mas, self.state, self._facts) if self.render_mode == "ansi" else None

    def __getstate__(self) -> dict[str, object]:
        """Pickle without the dataset if it can be loaded again."""
        state = dict(self.__dict__)
        if self._load is not None:
            state["_task"] = None
        return state

    def __deepcopy__(self, memo: dict[int, object]) -> MASEnv:
        """Copy the episode and the random generators; share the dataset and everything immutable."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        for name, value in self.__dict__.items():
            twin.__dict__[name] = value if name in _SHARED else copy.deepcopy(value, memo)
        return twin


def _load_task(task: str, split: str | None, path: str | None, **options: Any) -> Task:
    """Load a task; a data file without a split is used whole."""
    whole = path is not None and Path(path).expanduser().is_file()
    return load_task(task, (None if whole else "train") if split is None else split, path, **options)


def _read_action(action: object) -> tuple[str, int]:
    if isinstance(action, tuple | list) and len(action) == 2 and isinstance(action[0], str):
        try:
            return str(action[0]), index(action[1])
        except TypeError:
            pass
    expected = "expected (text, recipient), a str and an integer such as env.unwrapped.ALL"
    raise IllegalActionError(f"{expected}, got {shown(action)}")
