"""Programs as a Gymnasium environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gymnasium import spaces

from mas_gym.envs.env import Info, MASEnv, Observation
from mas_gym.envs.spaces import Records
from mas_gym.errors import ConfigError, IllegalActionError
from mas_gym.policies.base import SamplingRequest, spoken
from mas_gym.programs.program import Program, load_program
from mas_gym.programs.replay import ProgramSession
from mas_gym.programs.runner import Runner
from mas_gym.systems.graph import FAILED
from mas_gym.systems.prompts import ChatMessage
from mas_gym.systems.state import MASState

_MOST_MESSAGES = 10_000
_MOST_PROMPT_BYTES = 2**26


class ProgramEnv(MASEnv):
    """A program that solves problems of a task; each step is a reply to the waiting model call.

    Differences from `MASEnv`: ``observation["messages"]`` is the prompt of the call. The recipient of an action is
    `ALL`, because the program chooses the next agent. The program's return value is graded. A program that fails ends
    the episode with reward -1 and its error in ``info["program_error"]``. `restore_state` replays the program.

    Example:
        >>> env = gym.make("MAS-Program-v0", program="my_agents.py:solve", task="arithmetic")  # doctest: +SKIP
    """

    def __init__(
        self,
        program: str | Callable[..., Any] | Program | None = None,
        task: Any = "arithmetic",
        *,
        program_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Load the program.

        Args:
            program: A program, or a source for `mas_gym.programs.load_program`.
            task: As for `MASEnv`.
            program_options: Options of `mas_gym.programs.Program`, such as ``agents``.
            options: Further arguments of `MASEnv`.
        """
        if program is None:
            raise ConfigError(
                'expected a program, as in gym.make("MAS-Program-v0", program="my_agents.py:solve", task="gsm8k")'
            )
        self.program = load_program(program, **dict(program_options or {}))
        self._runner: Runner | None = None
        self._session: tuple[str, ProgramSession] | None = None
        super().__init__(task, self.program.mas, **options)

    def _make_observation_space(self) -> spaces.Dict:
        space = super()._make_observation_space()
        space["messages"] = Records(ChatMessage, (None, None), _MOST_MESSAGES, _MOST_PROMPT_BYTES)
        return space

    def close(self) -> None:
        """End the program's executions."""
        if self._session is not None:
            self._session[1].close()
        if self._runner is not None:
            self._runner.close()
        self._runner = self._session = None

    def _states(self, question: str) -> ProgramSession:
        """Return the states of the episode's question; the program is opened on first use."""
        if self._runner is None:
            self._runner = self.program.open()
        if self._session is None or self._session[0] != question:
            if self._session is not None:
                self._session[1].close()
            self._session = question, ProgramSession(self._runner, question)
        return self._session[1]

    def _first(self, question: str) -> MASState:
        return self._states(question).extend(None).result()

    def _next(self, state: MASState, text: str, recipient: int) -> MASState:
        if recipient != self.ALL:
            raise IllegalActionError(f"expected ALL ({self.ALL}) as the recipient: the program selects the next agent")
        session = self._states(state.question)
        session.reach(state)
        return session.extend(state, text).result()

    def _prompt(self, state: MASState) -> tuple[ChatMessage, ...]:
        if state.acting == self.sink:
            return ()
        session = self._states(state.question)
        session.reach(state)
        call = session.call(state)
        return spoken(call.messages, call.extra_body)[0]

    def request(self, seeds: tuple[int, ...], temperature: float = 0.7, top_p: float = 0.95) -> SamplingRequest:
        """Return the request to a policy for the waiting call; the program's settings take precedence."""
        plain = super().request(seeds, temperature, top_p)
        call = self._states(self.state.question).call(self.state)
        cap = min(call.max_tokens or plain.max_new_tokens, plain.max_new_tokens)
        fields: dict[str, Any] = {"messages": call.messages, "max_new_tokens": cap, "extra_body": call.extra_body}
        return replace(plain, **fields, **call.settings)

    def _legal(self, state: MASState) -> tuple[int, ...]:
        return (self.ALL,)

    def _end(self, reward: float, facts: Info) -> tuple[Observation, float, bool, bool, Info]:
        _, failed, error = self.state.text.rpartition(FAILED)
        more = {"program_error": error} if failed and self.state.acting == self.sink else {}
        return super()._end(reward, facts | more)

    def __getstate__(self) -> dict[str, object]:
        """Pickle the environment without its running executions."""
        return super().__getstate__() | {"_runner": None, "_session": None}

    def __deepcopy__(self, memo: dict[int, object]) -> MASEnv:
        """Copy the episode; the copy runs the program separately."""
        memo |= {id(self.program): self.program, id(self._runner): None, id(self._session): None}
        return super().__deepcopy__(memo)
