"""Programs: their kinds, options, agents, identity and environment."""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from gymnasium import spaces

from mas_gym.envs.env import Info, MASEnv, Observation
from mas_gym.envs.spaces import Records
from mas_gym.errors import ConfigError, IllegalActionError, MASGymError, shown, whole_number
from mas_gym.internal.json_types import JSONObject
from mas_gym.policies.base import PolicyBase, SamplingRequest, effective_temperature, spoken
from mas_gym.programs.calls import Call, difference
from mas_gym.programs.execution import Ended, Execution, Failed, Outcome, Script, Waiting
from mas_gym.programs.replay import ProgramError, Runner, Session
from mas_gym.programs.schemas import structured_reply
from mas_gym.programs.sources import PROGRAMS, CommandSource, FunctionSource, IsolatedSource, ServiceSource, Source
from mas_gym.programs.worlds import World
from mas_gym.systems.graph import FAILED, MAS, Agent
from mas_gym.systems.prompts import ChatMessage
from mas_gym.systems.state import MASState
from mas_gym.systems.tool_calls import ToolCall, with_calls
from mas_gym.systems.validation import MAX_NEW_TOKENS, MAX_TURNS, RESERVED

logger = logging.getLogger("mas_gym.programs")

OTHERS = "other agents"
"""The last agent of a program with agents found in a dry run: it represents all agents that were not found."""

_PARKED, _PARKED_LIGHT = 256, 1024
_REHEARSED_CALLS = 32
_REHEARSED_QUESTION, _REHEARSED_REPLY = "What is 2 + 2?", "APPROVED. Final Answer: 4"
_ROLE = re.compile(r"(?i)\byou are (?:an? |the |our )?([^\n.,:;!?()]{1,60})")
_WITH_WHAT = re.compile(r"(?i) (?:who|whose|that|which|with|managing|tasked|responsible|specialized|specialised)\b")
_HANDOFF = "transfer_to_"
_LONGEST_NAME = 40
_OWN_PROMPTS = "(its prompts are the program's)"


class Program:
    """A program that answers a question by calling a chat model; search branches at its calls.

    Attributes:
        name: Its name in reports.
        source: The function, command or service to run.
        mas: The system that search uses: the agents and, if given, the edges between them.
        max_calls: See the arguments.
        timeout: See the arguments.
        settle: See the arguments.
        parked: See the arguments.
        running: See the arguments.
        normalise: See the arguments.
        temperature: See the arguments.
        world: See the arguments.
        spec: The string from which the program was loaded; None if there is none.
    """

    def __init__(
        self,
        source: str | Callable[..., Any] | Source,
        *,
        agents: Sequence[str] | Mapping[str, str] | None = None,
        mas: MAS | str | Mapping[str, object] | None = None,
        files: Sequence[str | os.PathLike[str]] = (),
        normalise: Callable[[JSONObject], object] | None = None,
        max_calls: int = 50,
        timeout: float = 60.0,
        settle: float = 0.05,
        parked: int | None = None,
        running: int = 64,
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
            files: The files that determine the behaviour of a command or service; required for a store.
            normalise: Maps a request to the value that must be equal on replay, to mask fields that may differ.
            max_calls: Maximum number of model calls in one execution; a further call is a failure of the program.
            timeout: Seconds without a call or an answer after which the program has hung.
            settle: Seconds without a new call after which concurrent calls are ordered if further calls cannot be
                predicted, as in commands and services; increased automatically if a call comes too late.
            parked: Maximum number of waiting executions to keep, to avoid replays; at most 16 for commands. The default
                is 1,024 for asynchronous functions with a client and no ``base_url``, and 256 for others, because each
                of those uses a connection or a thread.
            running: Maximum number of concurrent executions, besides the waiting ones; at most 16 for commands.
            temperature: The temperature of every call, in place of the requested one. By default the requested
                temperature is used, or the run's for calls without one.
            isolate: Whether a function runs in a new process each time, so that no state outlives an execution.
            world: The state that its tools change, such as `mas_gym.programs.Folder`. Each execution gets a copy. A
                function receives the copy's name as ``world=``, a command in ``MAS_GYM_WORLD``, a service as ``world``.

        Raises:
            ConfigError: An argument is invalid.
            DataNotFoundError: A file does not exist.
        """
        self.spec = source if isinstance(source, str) else None
        self.source = _read_source(source, files, isolate)
        self.name = self.source.name
        self.max_calls = whole_number("max_calls", max_calls, at_least=1)
        if max_calls > MAX_TURNS:
            raise ConfigError(f"max_calls: expected at most {MAX_TURNS:,}, got {shown(max_calls)}")
        self._limit(parked, running)
        for name, seconds in (("timeout", timeout), ("settle", settle)):
            if not isinstance(seconds, int | float) or not 0 < seconds < 1e7:
                raise ConfigError(f"{name}: expected a positive number of seconds, got {shown(seconds)}")
        self.timeout, self.settle, self.normalise = float(timeout), float(settle), normalise
        self.temperature = None if temperature is None else effective_temperature(temperature)
        self.world = world
        if isinstance(self.source, FunctionSource | IsolatedSource):
            self.source.check_world(world is not None)
        self._greedy = False
        self._unseen = set[str]()
        if mas is not None and agents is not None:
            raise ConfigError("expected mas= or agents=, got both; mas= already names the agents")
        self._given_mas, self._given_agents = mas, agents
        self._arguments = {
            "agents": agents, "mas": mas, "files": tuple(files), "normalise": normalise, "max_calls": max_calls,
            "timeout": timeout, "settle": settle, "parked": parked, "running": running,
            "temperature": temperature,
            "isolate": isolate,
            "world": world,
        }  # fmt: skip

    def _limit(self, parked: int | None, running: int) -> None:
        """Set the maximum numbers of executions."""
        light = isinstance(self.source, FunctionSource) and self.source.light
        default = _PARKED_LIGHT if light else _PARKED
        self.parked = default if parked is None else whole_number("parked", parked, at_least=0)
        self.running = whole_number("running", running, at_least=1)
        if isinstance(self.source, CommandSource):
            self.parked, self.running = min(self.parked, 16), min(self.running, 16)

    def report_greedy(self, agent: str) -> None:
        """Warn once if an agent's calls request temperature 0 although the search needs several samples."""
        told, self._greedy = self._greedy, True
        if not told:
            logger.warning(
                "program %s: the calls of %s request temperature 0, so all samples of a call are equal and search has "
                "no effect; set Program(..., temperature=0.7) or --program-temperature 0.7",
                self.name,
                ascii(agent),
            )

    def _report_unseen(self, agent: str) -> None:
        """Warn once about each agent that the dry run has not reached."""
        if agent not in self._unseen:
            self._unseen.add(agent)
            logger.warning(
                "program %s: the dry run did not reach the agent %s, which counts as %r; name all agents with "
                "--program-agent NAME for each, or Program(..., agents=[...])",
                self.name,
                ascii(agent),
                OTHERS,
            )

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the constructor's arguments, for other processes."""
        own = self.source.function if isinstance(self.source, FunctionSource | IsolatedSource) else self.source
        return _again, (self.spec or own, self._arguments)

    @cached_property
    def mas(self) -> MAS:
        """See the class. The first access may start a dry run.

        Raises:
            ProgramError: The program ended before its first call.
        """
        if self._given_mas is not None:
            from mas_gym.systems.loading import load_mas

            return replace(load_mas(self._given_mas), program=True)
        if self._given_agents is not None:
            names = list(self._given_agents)
            if not names or not all(isinstance(name, str) and name.strip() for name in names):
                raise ConfigError(f"agents: expected at least one name, got {shown(self._given_agents)}")
        else:
            names = [*rehearse(self), OTHERS]
        prompts = self._given_agents if isinstance(self._given_agents, Mapping) else {}
        agents = tuple(Agent(name, prompts.get(name) or _OWN_PROMPTS, MAX_NEW_TOKENS) for name in names)
        return MAS(self.name, agents, (), max_turns=self.max_calls, program=True)

    def agent_of(self, call: Call) -> int:
        """Return the index of the agent that makes a call.

        Raises:
            ProgramError: The agent is not one of the given agents.
        """
        agents = self.mas.agents
        for i, agent in enumerate(agents):
            if call.agent == agent.name or (not call.agent and call.system == agent.system_prompt.strip()):
                return i
        if isinstance(self._given_agents, Mapping) and not call.agent:
            for i, text in enumerate(self._given_agents.values()):
                if any(text in message.content for message in call.messages if message.role == "system"):
                    return i
        # A node has many names if its prompt depends on its input.
        for name in dict.fromkeys((agent_name(call), _shortened(call.node))):
            for i, agent in enumerate(agents):
                if _plain(agent.name) == _plain(name):
                    return i
        if len(agents) == 1:
            return 0
        if agents[-1].name == OTHERS:
            self._report_unseen(agent_name(call))
            return len(agents) - 1
        raise ProgramError(
            f"expected a call of one of {', '.join(agent.name for agent in agents)}, got one of {agent_name(call)!r}; "
            "add it to agents=, map its name to a part of its system prompt, or send the header X-MAS-Agent"
        )

    def identity(self) -> object:
        """Return everything that determines the program's results.

        Raises:
            IdentityError: A command or service has no ``files``.
        """
        stated: JSONObject = {"source": self.source.identity(), "max_calls": self.max_calls}
        if self.normalise is not None:
            stated["normalise"] = self.normalise
        if self.temperature is not None:
            stated["temperature"] = self.temperature
        if isinstance(self._given_agents, Mapping):
            stated["agents"] = dict(self._given_agents)
        if self.world is not None:
            stated["world"] = self.world.identity()
        return stated

    def open(self, policy: PolicyBase | None = None) -> Runner:
        """Return a new runner for replies of ``policy``; close it after use. Takes the snapshot of the world."""
        if self.world is not None:
            self.world.start  # noqa: B018 - before anything can change it
        return Runner(self, policy)


def load_program(source: str | Callable[..., Any] | Program, **options: Any) -> Program:
    """Return a program unchanged, or create one from a source; ``FILE.py:NAME`` may also name a `Program`."""
    if isinstance(source, str) and _is_function(source):
        found = _named(source)
        source = found if isinstance(found, Program) else source
    if not isinstance(source, Program):
        return Program(source, **options)
    if options:
        raise ConfigError(
            f"expected no options for a finished Program, got {', '.join(options)}; pass them to Program(...)"
        )
    return source


def _again(source: Any, arguments: dict[str, Any]) -> Program:
    return Program(source, **arguments)


def _is_function(source: str) -> bool:
    spec = PROGRAMS.parse(source)
    # A command may have the same ending: python my.py:x
    return (" " not in source or Path(spec.file).is_file()) if spec.file else spec.name in PROGRAMS


def _named(source: str) -> Any:
    """Return the function or program of ``FILE.py:NAME`` or of a package's name."""
    spec = PROGRAMS.parse(source)
    if spec.argument or spec.fragment:
        raise ConfigError(f"program {source!r}: expected FILE.py:NAME without settings")
    return PROGRAMS.find(spec, lambda found: callable(found) or isinstance(found, Program))


def _label(source: str) -> str:
    """Return a program's name in reports: the name of its file."""
    spec = PROGRAMS.parse(source)
    return Path(spec.file).stem if spec.file else spec.name


def _read_source(source: object, files: Sequence[str | os.PathLike[str]], isolate: bool) -> Source:
    if isolate:
        if isinstance(source, str) and _is_function(source):
            return IsolatedSource(_named(source), source, _label(source))
        if isinstance(source, str) or not callable(source):
            raise ConfigError(
                f"isolate: expected a function or FILE.py:NAME, got {shown(source)}, which is already a process"
            )
        return IsolatedSource(source)
    if isinstance(source, str):
        if source.startswith(("http://", "https://")):
            return ServiceSource(source, files)
        if _is_function(source):
            return FunctionSource(_named(source), _label(source))
        return CommandSource(source, files)
    if isinstance(source, CommandSource | ServiceSource | FunctionSource):
        return source
    if callable(source):
        return FunctionSource(source)
    raise ConfigError(f"program: expected a function, FILE.py:NAME, a command or a URL, got {shown(source)}")


def agent_name(call: Call) -> str:
    """Return the name of the agent that makes a call, based only on the call.

    The sources of the name, in order: the header or metadata; "You are ..." in the system prompt; the calling node of a
    graph; the beginning of the system prompt; the model.

    >>> from mas_gym.systems.prompts import ChatMessage
    >>> agent_name(Call((ChatMessage("system", "You are the Planner. Propose a plan."),)))
    'Planner'
    """
    if call.agent:
        return call.agent[:_LONGEST_NAME]
    found = _ROLE.search(call.system[:500])
    name = _WITH_WHAT.split(found[1], 1)[0] if found else call.node or call.system or call.model or "agent"
    return _shortened(name)


def _shortened(name: str) -> str:
    words = " ".join(name.split())
    return words if len(words) <= _LONGEST_NAME else words[:_LONGEST_NAME].rpartition(" ")[0] or words[:_LONGEST_NAME]


def _plain(name: str) -> str:
    """Normalise a name for comparison: "math agent" in a prompt corresponds to the node ``math_agent``."""
    return name.replace("_", " ").casefold()


def rehearse(program: Program) -> list[str]:
    """Run a program twice with a fixed reply to every call, and return the names of its agents.

    The agents that make calls come first, in order, then the other nodes of the graphs (see
    `mas_gym.programs.frameworks`).

    A function that was loaded from a file also runs in a new process, to find requests that depend on the order of a
    set. This run is skipped if ``PYTHONHASHSEED`` is set, because the order is then the same in every process.

    A call that requires structured output gets a small instance of its schema. Only tools that hand over to another
    agent are called, each once, because other tools may have side effects. The log reports where the run ended.

    Raises:
        ProgramError: The program ended before its first call, or made different calls in the second run.
    """
    calls, end = _rehearsed(program)
    again, _ = _rehearsed(program)
    if [call.text for call in calls] != [call.text for call in again]:
        if Counter(call.text for call in calls) == Counter(call.text for call in again):
            # The order differs.
            program.settle = max(program.settle, _LONG_SETTLE)
        else:
            raise ProgramError(f"the program {program.name} {_change(calls, again)}\n{_CHANGES}")
    _compare_elsewhere(program, calls)
    names = list(dict.fromkeys(agent_name(call) for call in calls))
    nodes = dict.fromkeys(_shortened(node) for call in calls for node in call.nodes)
    known = {_plain(name) for name in (*names, *RESERVED)}
    silent = [node for node in nodes if _plain(node) not in known]
    _log_rehearsal(program.name, names, silent, [not (call.agent or call.node or call.system) for call in calls], end)
    return [*names, *silent]


_LONG_SETTLE = 0.5
_CHANGES = (
    "The replies were equal, so the calls depend on state that outlives a run (a checkpointer, a global list, a "
    "cache), on the time or on random ids. Create the state inside the program for each run, mask irrelevant parts "
    "with normalise=, or run each execution in a new process with isolate=True (--isolate)"
)


def _compare_elsewhere(program: Program, calls: Sequence[Call]) -> None:
    """Warn if the requests differ in a new process, because stored searches then cannot be resumed there."""
    fixed = os.environ.get("PYTHONHASHSEED", "random") != "random"
    if fixed or not program.spec or not isinstance(program.source, FunctionSource):
        return
    try:
        there, end = _rehearsed(_again(program.spec, {**program._arguments, "isolate": True}))
    except MASGymError:
        return
    if isinstance(end, Ended | Waiting) and Counter(c.text for c in calls) != Counter(c.text for c in there):
        logger.warning(
            "the program %s makes different calls in another process, so a later run cannot resume its searches; - is "
            "this process, + the other:\n%s\nUsual causes are the order of sets and values created on import: "
            "sort them, mask them with normalise=, or start every run with PYTHONHASHSEED=0",
            program.name,
            _first_change(calls, there)[1],
        )


def _first_change(calls: Sequence[Call], again: Sequence[Call]) -> tuple[int, str]:
    """Return the number of the first call that differs between two dry runs, and how; 0 if only the counts differ."""
    for number, (before, now) in enumerate(zip(calls, again, strict=False), 1):
        if before.text != now.text:
            return number, difference(before.text, now.text)
    return 0, f"{len(calls)} calls and {len(again)} calls"


def _change(calls: Sequence[Call], again: Sequence[Call]) -> str:
    """Describe the first difference between two dry runs."""
    number, changed = _first_change(calls, again)
    if number:
        return (
            f"made a different call in the second of two dry runs, at call {number}; - is the first run, + the "
            f"second:\n{changed}"
        )
    return f"made {len(calls)} calls in the first of two dry runs and {len(again)} in the second"


def _rehearsed(program: Program) -> tuple[list[Call], Outcome | Exception]:
    """Run a program with a fixed reply to every call; return the calls in order and the end. Raises `ProgramError`."""
    seen: list[Call] = []
    handed: list[str] = []
    reports: SimpleQueue[tuple[Execution, Outcome | Exception]] = SimpleQueue()

    def reply(call: Call) -> str:
        offered = json.loads(call.extra_body).get("tools", ()) if call.tools else ()
        names = (tool["function"]["name"] for tool in offered)
        tool = next((name for name in names if name.startswith(_HANDOFF) and name not in handed), None)
        if tool is None:
            return structured_reply(call, _REHEARSED_REPLY) or _REHEARSED_REPLY
        handed.append(tool)
        return with_calls("", [ToolCall(tool, "{}")])

    def report(execution: Execution, outcome: Outcome | Exception) -> None:
        reports.put((execution, outcome))

    runner = program.open()
    try:
        runner.start(_REHEARSED_QUESTION, Script(), report)
        execution, end = reports.get()
        while isinstance(end, Waiting) and len(seen) < _REHEARSED_CALLS - 1:
            seen.append(end.calls[0])
            execution.answer(reply(end.calls[0]), report)
            execution, end = reports.get()
    finally:
        runner.close()
    if isinstance(end, Waiting):
        seen.extend(end.calls)
    program.settle = max(program.settle, runner.settle)
    if not seen:
        what = f"failed: {end.error}" if isinstance(end, Failed) else "returned"
        raise ProgramError(f"the program {program.name} {what} before its first model call")
    return seen, end


def _log_rehearsal(
    name: str, names: Sequence[str], silent: Sequence[str], unnamed: Sequence[bool], end: Outcome | Exception
) -> None:
    """Log the calling agents and where the program ended.

    Args:
        name: The program's name.
        names: The agents that made calls.
        silent: The other nodes of the program's graphs.
        unnamed: For each call, whether it does not name its agent.
        end: The last outcome.
    """
    if isinstance(end, Ended):
        how = "returned an answer"
    elif isinstance(end, Waiting):
        how = f"was stopped after {_REHEARSED_CALLS} calls"
    else:
        how = f"failed: {' '.join(str(end.error if isinstance(end, Failed) else end).split())[:300]}"
    if not isinstance(end, Ended):
        how += f"; agents that it did not reach count as {OTHERS!r} unless agents= names them"
    if silent:
        how += f"; further nodes of its graph: {', '.join(silent)}"
    level = logging.INFO if isinstance(end, Ended) else logging.WARNING
    logger.log(level, "dry run of %s: %d model calls by %s; it %s", name, len(unnamed), ", ".join(names), how)
    if len(names) == 1 and len(unnamed) > 1 and all(unnamed):
        logger.warning(
            "dry run of %s: no call names its agent, so all calls count for one agent, %r, and figures per agent are "
            "not available; give each agent a system prompt, or send the header X-MAS-Agent",
            name,
            names[0],
        )


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
        self._session: tuple[str, Session] | None = None
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

    def _states(self, question: str) -> Session:
        """Return the states of the episode's question; the program is opened at first use."""
        if self._runner is None:
            self._runner = self.program.open()
        if self._session is None or self._session[0] != question:
            if self._session is not None:
                self._session[1].close()
            self._session = question, self._runner.session(question)
        return self._session[1]

    def _first(self, question: str) -> MASState:
        return self._states(question).first()

    def _next(self, state: MASState, text: str, recipient: int) -> MASState:
        if recipient != self.ALL:
            raise IllegalActionError(f"expected ALL ({self.ALL}) as the recipient: the program decides who acts next")
        session = self._states(state.question)
        session.reach(state)
        return session.after(state, text)

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
        """Pickle without running executions."""
        return super().__getstate__() | {"_runner": None, "_session": None}

    def __deepcopy__(self, memo: dict[int, object]) -> ProgramEnv:
        """Copy the episode; the copy runs the program separately."""
        held = self._runner, self._session
        self._runner = self._session = None
        memo[id(self.program)] = self.program
        try:
            twin = super().__deepcopy__(memo)
        finally:
            self._runner, self._session = held
        assert isinstance(twin, ProgramEnv)
        return twin
