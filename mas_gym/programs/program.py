"""Programs: their kinds, options, agents and identity."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from mas_gym.errors import ConfigError, shown, whole_number
from mas_gym.internal.json_types import JSONObject
from mas_gym.policies.base import PolicyBase, effective_temperature
from mas_gym.programs.agent_names import OTHERS, agent_name, agent_of_call
from mas_gym.programs.chat_completions import Call
from mas_gym.programs.dry_run import dry_run
from mas_gym.programs.program_kinds import (
    PROGRAMS,
    CommandSource,
    FunctionSource,
    IsolatedSource,
    ServiceSource,
    Source,
)
from mas_gym.programs.runner import ProgramError, Runner
from mas_gym.programs.worlds import World
from mas_gym.systems.graph import MAS, Agent
from mas_gym.systems.validation import MAX_NEW_TOKENS, MAX_TURNS

logger = logging.getLogger("mas_gym.programs")

_OWN_PROMPTS = "(its prompts are the program's)"


class Program:
    """A program that answers a question by calling a chat model; search branches at its calls.

    The constructor's arguments are attributes, too.

    Attributes:
        name: Its name in reports.
        source: The function, command or service to run.
        mas: The system that search uses: the agents and, if given, the edges between them.
        transcripts: Known replies, by question: a search first runs the program with them, so that a planner may
            continue from the states along each transcript.
        spec: The string from which the program was loaded; None if there is none.
    """

    def __init__(
        self,
        source: str | Callable[..., Any],
        *,
        agents: Sequence[str] | Mapping[str, str] | None = None,
        mas: MAS | str | Mapping[str, object] | None = None,
        files: Sequence[str | os.PathLike[str]] = (),
        normalize: Callable[[JSONObject], object] | None = None,
        max_calls: int = 50,
        timeout: float = 60.0,
        settle: float = 0.05,
        temperature: float | None = None,
        isolate: bool = False,
        world: World | None = None,
    ) -> None:
        """Describe a program without running it.

        Args:
            source: A function; ``FILE.py:NAME``; a command such as ``"python my_agents.py"``; or the URL of a service.
            agents: The agents' names, or a mapping from names to a text in their system prompts. By default they are
                found in a dry run of the program with a fixed reply to every call.
            mas: A system with the program's agents, token limits and edges, such as ``"rpsv"``. A call belongs
                to the agent with the same system prompt; messages are routed along the edges.
            files: The files that determine the behavior of a command or service; required for a store.
            normalize: Maps a request to the value that must be equal on replay, to mask fields that may differ.
            max_calls: Maximum number of model calls in one execution; one more call counts as a failure.
            timeout: Seconds without a call or an answer after which the program counts as hung.
            settle: Seconds without a new call after which concurrent calls are ordered if further calls cannot be
                predicted, as in commands and services; increased automatically if a call comes too late.
            temperature: The temperature of every call, in place of the requested one. By default the requested
                temperature is used, or the run's temperature if a call requests none.
            isolate: Whether a function runs in a new process each time, so that no state outlives an execution.
            world: The state that the program's tools change, such as `mas_gym.programs.Folder`. Each execution gets a
                copy. Functions receive its name as ``world=``, commands in ``MAS_GYM_WORLD``, services as ``world``.

        Raises:
            ConfigError: An argument is invalid.
            DataNotFoundError: A file does not exist.
        """
        self._arguments = {name: value for name, value in locals().items() if name not in ("self", "source")}
        self.spec = source if isinstance(source, str) else None
        self.source = _read_source(source, files, isolate, world is not None)
        self.name = self.source.name
        self.max_calls = whole_number("max_calls", max_calls, at_least=1)
        if max_calls > MAX_TURNS:
            raise ConfigError(f"max_calls: expected at most {MAX_TURNS:,}, got {shown(max_calls)}")
        for name, seconds in (("timeout", timeout), ("settle", settle)):
            if not isinstance(seconds, int | float) or not 0 < seconds < 1e7:
                raise ConfigError(
                    f"{name}: expected a number of seconds above 0 and below 10,000,000, got {shown(seconds)}"
                )
        self.timeout, self.settle, self.normalize = float(timeout), float(settle), normalize
        self.temperature = None if temperature is None else effective_temperature(temperature)
        self.world = world
        self.transcripts: Mapping[str, Sequence[Sequence[str]]] = {}
        self._warned = set[str]()
        if mas is not None and agents is not None:
            raise ConfigError("expected mas= or agents=, got both; mas= already names the agents")
        self._given_mas, self._given_agents = mas, agents

    def continuing(self, transcripts: Mapping[str, Sequence[Sequence[str]]]) -> Program:
        """Return a copy whose searches begin with known replies; see the attribute ``transcripts``."""
        self.mas  # noqa: B018 - a dry run would be repeated by each copy
        other = copy.copy(self)
        other.transcripts = transcripts
        return other

    def report_greedy(self, agent: str) -> None:
        """Warn once if an agent's calls request temperature 0 although the search needs several samples."""
        self._warn_once(
            "temperature 0",
            f"the calls of {agent!a} request temperature 0, so all samples of a call are equal and search has no "
            "effect; set Program(..., temperature=0.7) or --program-temperature 0.7",
        )

    def _warn_once(self, about: str, warning: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            logger.warning("program %s: %s", self.name, warning)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the constructor's arguments, for other processes."""
        function = isinstance(self.source, FunctionSource | IsolatedSource) and self.source.function
        return _again, (self.spec or function, self._arguments)

    @cached_property
    def mas(self) -> MAS:
        """See the class. The first access may start a dry run.

        Raises:
            ConfigError: The given names of agents are invalid.
            ProgramError: The program ended before its first call, or its two dry runs made different calls.
        """
        if self._given_mas is not None:
            from mas_gym.systems.loading import load_mas

            return replace(load_mas(self._given_mas), external=True)
        if self._given_agents is not None:
            names = list(self._given_agents)
            if not names or not all(isinstance(name, str) and name.strip() for name in names):
                raise ConfigError(f"agents: expected one or more non-empty names, got {shown(self._given_agents)}")
        else:
            elsewhere = None
            if self.spec and isinstance(self.source, FunctionSource):
                elsewhere = partial(_again, self.spec, {**self._arguments, "isolate": True})
            names = [*dry_run(self, elsewhere), OTHERS]
        prompts = self._given_agents if isinstance(self._given_agents, Mapping) else {}
        agents = tuple(Agent(name, prompts.get(name) or _OWN_PROMPTS, MAX_NEW_TOKENS) for name in names)
        return MAS(self.name, agents, (), max_turns=self.max_calls, external=True)

    def agent_of(self, call: Call) -> int:
        """Return the index of the agent that makes a call.

        Raises:
            ProgramError: The agent is not one of the given agents.
        """
        agents = self.mas.agents
        texts = tuple(self._given_agents.values()) if isinstance(self._given_agents, Mapping) else ()
        found = agent_of_call(call, agents, texts)
        if found is not None:
            return found
        if agents[-1].name == OTHERS:
            name = agent_name(call)
            self._warn_once(
                f"agent {name}",
                f"the dry run did not reach the agent {name!a}, which counts as {OTHERS!r}; name all agents with "
                "--program-agent NAME for each, or Program(..., agents=[...])",
            )
            return len(agents) - 1
        raise ProgramError(
            f"expected one of the agents {', '.join(agent.name for agent in agents)}, got {agent_name(call)!r}; "
            "add it to agents=, map its name to a part of its system prompt, or send the header X-MAS-Agent"
        )

    def identity(self) -> object:
        """Return everything that determines the program's results.

        Raises:
            IdentityError: A command or service has no ``files``.
        """
        stated: JSONObject = {"source": self.source.identity(), "max_calls": self.max_calls}
        if self.normalize is not None:
            stated["normalize"] = self.normalize
        if self.temperature is not None:
            stated["temperature"] = self.temperature
        if isinstance(self._given_agents, Mapping):
            stated["agents"] = dict(self._given_agents)
        if self.world is not None:
            stated["world"] = self.world.identity()
        return stated

    def open(self, policy: PolicyBase | None = None) -> Runner:
        """Return a new runner for replies of ``policy``; close it after use. Also takes the snapshot of the world."""
        if self.world is not None:
            self.world.start  # noqa: B018 - before anything can change it
        return Runner(self, policy)


def load_program(source: str | Callable[..., Any] | Program, **options: Any) -> Program:
    """Return a program unchanged, or create one from a source; ``FILE.py:NAME`` may also name a `Program`."""
    if isinstance(source, str) and (named := _named(source)) is not None and isinstance(named[0], Program):
        source = named[0]
    if not isinstance(source, Program):
        return Program(source, **options)
    if options:
        raise ConfigError(
            f"expected no options for a Program object, got {', '.join(options)}; pass them to Program(...)"
        )
    return source


def _again(source: Any, arguments: dict[str, Any]) -> Program:
    return Program(source, **arguments)


def _named(source: str) -> tuple[Any, str] | None:
    """Return the function or program that a source names, and its name in reports; None for a command or a URL."""
    spec = PROGRAMS.parse(source)
    # A command may have the same ending: python my.py:x
    if not ((" " not in source or Path(spec.file).is_file()) if spec.file else spec.name in PROGRAMS):
        return None
    if spec.argument or spec.fragment:
        raise ConfigError(f"program {source!r}: expected FILE.py:NAME without settings")
    found = PROGRAMS.find(spec, lambda found: callable(found) or isinstance(found, Program))
    return found, Path(spec.file).stem if spec.file else spec.name


def _read_source(source: Any, files: Sequence[str | os.PathLike[str]], isolate: bool, world: bool) -> Source:
    named = _named(source) if isinstance(source, str) else None
    if named is not None or callable(source):
        function, name = named or (source, "")
        inner = FunctionSource(function, name, world=world)
        return IsolatedSource(inner, source if named else None) if isolate else inner
    if isolate:
        raise ConfigError(
            f"isolate: expected a function or FILE.py:NAME, got {shown(source)}; a command and a service already run "
            "in their own processes, so omit isolate"
        )
    if not isinstance(source, str):
        raise ConfigError(f"program: expected a function, FILE.py:NAME, a command or a URL, got {shown(source)}")
    return (ServiceSource if source.startswith(("http://", "https://")) else CommandSource)(source, files)
