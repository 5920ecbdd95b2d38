"""Convert plain data to a `MAS`, or list all of its errors.

No error is repaired silently, and validation does not stop at the first error. Each
error is reported with its location (for files, with the line) and a fix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast, get_args

from mas_gym.errors import ConfigError, is_number, shown
from mas_gym.internal.suggestions import did_you_mean
from mas_gym.systems.conditions import Condition, ConditionKind
from mas_gym.systems.graph import MAS, SCHEMA, Agent, Edge, History, Q, Route
from mas_gym.systems.recipient_names import folded

DEFAULT_MAX_NEW_TOKENS = 1024
MAX_NEW_TOKENS = 1_000_000
MAX_TURNS = 10_000
MAX_TEMPERATURE = 100
LEAST_TOP_P = 1e-6
MOST_SHOWN = 20
"""Maximum number of errors in an error message; ``faults`` contains all of them."""
ANYONE = "*"
"""In ``policies``: every agent without a separate entry."""

_ROUTING_KEYS = ("route", "fallback")
CONFIG_KEYS = ("schema", "name", "agents", "edges", "policies", "max_turns", "min_turns", "history", *_ROUTING_KEYS)
AGENT_KEYS = ("name", "system_prompt", "max_new_tokens", "temperature", "top_p", *_ROUTING_KEYS)
RESERVED = ("q", "sink", "all", ANYONE)
"""Names that no agent may have, in any case."""
LONGEST_NAME = 200
CONDITION_KINDS: tuple[str, ...] = get_args(ConditionKind)
_MOST_NAMES = 12

Place = tuple[str | int, ...]
"""The location of a value, such as ``("agents", 2, "name")``."""

ReadEdge = tuple[int | None, int | None, Condition | Literal[False] | None]
"""Source, target and condition; None for a node and False for a condition that could not be read."""


def place_text(place: Place) -> str:
    """Return a location in readable form.

    >>> place_text(("agents", 2, "name"))
    'agents[2].name'
    """
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)
    return text.removeprefix(".") or "config"


def validate(data: object, name: str, where: Callable[[Place], str] = place_text) -> MAS:
    """Build the MAS that a config describes.

    Args:
        data: Mappings, lists and scalars, as parsed from YAML or JSON.
        name: The name to use when the config has none.
        where: Converts a location to text; file loaders add the file and line.

    Raises:
        ConfigError: The config has errors. The message shows the first 20; ``faults`` contains all of them.
    """
    reader = _Reader(where)
    mas = reader.read(data, name)
    if mas is None:
        faults = tuple(reader.faults)
        if isinstance(data, Mapping) and isinstance(data.get("name"), str):
            name = data["name"]
        lines = [f"MAS config {shown(name)} has {len(faults)} error{'s' if len(faults) > 1 else ''}:"]
        lines += (f"  {fault}" for fault in faults[:MOST_SHOWN])
        if len(faults) > MOST_SHOWN:
            lines.append(f"  ... and {len(faults) - MOST_SHOWN} more; correct these first")
        raise ConfigError("\n".join(lines), faults)
    return mas


class _Reader:
    """Collects errors while reading; each method returns None for a value that cannot be read."""

    def __init__(self, where: Callable[[Place], str]) -> None:
        self.where = where
        self.faults: list[str] = []
        self.sink = 0
        self.nodes: Mapping[str, int] = {}

    def fault(self, place: Place, problem: str) -> None:
        self.faults.append(f"{self.where(place)}: {problem}")

    def near(self, word: object, known: Iterable[str]) -> str:
        # Comparing names is slow, and only the first errors are shown.
        return did_you_mean(word, known) if len(self.faults) < MOST_SHOWN else ""

    def read(self, data: object, name: str) -> MAS | None:
        if not isinstance(data, Mapping):
            self.fault((), f"expected a mapping with agents and edges, got {shown(data)}")
            return None
        # Only stores write ``external``; hand-written configs do not need it.
        self.keys((), data, (*CONFIG_KEYS, *({"external"} & data.keys())))
        schema = data.get("schema", SCHEMA)
        if schema != SCHEMA or isinstance(schema, bool):
            self.fault(("schema",), f"expected {SCHEMA}, got {shown(schema)}: this version reads only that schema")
        title = self.text(("name",), data.get("name", name), "name the MAS or drop the key")
        agents = self.agents(data.get("agents"))
        self.sink = len(agents)
        names = {agent.name: i for i, agent in reversed(list(enumerate(agents))) if agent}
        self.nodes = {**names, "q": Q, "sink": self.sink}
        external = data.get("external", False)
        if not isinstance(external, bool):
            self.fault(("external",), f"expected true or false, got {shown(external)}")
        edges = [] if external is True and not data.get("edges") else self.edges(data.get("edges"))
        agents = self.routing(data, agents, edges)
        policies = self.policies(data.get("policies"), agents)
        max_turns, min_turns = self.turns(data)
        history = data.get("history", "inputs")
        if history not in get_args(History):
            self.fault(("history",), f"expected {_or(get_args(History))}, got {shown(history)}")
        labels = [agent.name if agent else f"agent {i}" for i, agent in enumerate(agents)]
        loops = "max_turns" in data
        for place, problem in _graph_faults(labels, edges, loops) if agents and edges else ():
            self.fault(place, problem)
        if self.faults:
            return None
        good = tuple(agent for agent in agents if agent)
        read = tuple(Edge(e[0], e[1], e[2]) for e in edges)  # type: ignore[arg-type]
        return MAS(title, good, read, policies, max_turns, min_turns, cast(History, history), external)

    def turns(self, data: Mapping[Any, Any]) -> tuple[int | None, int]:
        most, least = data.get("max_turns"), data.get("min_turns", 1)
        if "max_turns" in data and not self.count(("max_turns",), most, MAX_TURNS):
            return most, least
        if "min_turns" in data and not ("max_turns" in data and _is_count(least, cast(int, most))):
            problem = f"expected an integer from 1 to max_turns, got {shown(least)}: correct it or add max_turns"
            self.fault(("min_turns",), problem)
        return most, least

    def routing(
        self, data: Mapping[object, object], agents: list[Agent | None], edges: Sequence[ReadEdge]
    ) -> list[Agent | None]:
        """Return the agents with their routes and fallbacks; an agent's keys override those of the config."""
        entries = cast(Sequence[object], data.get("agents")) if agents else ()
        own: list[Mapping[Any, Any]] = [entry if isinstance(entry, Mapping) else {} for entry in entries]
        common = self.route((), data, "edges")
        routes = [self.route(("agents", i), entry, common) for i, entry in enumerate(own)]
        named = [i for i, route in enumerate(routes) if route == "message"]
        if "fallback" in data and not named:
            self.fault(("fallback",), "no agent has route: message: add it or drop the key")
        for i, entry in enumerate(own):
            if "fallback" in entry and i not in named:
                self.fault(("agents", i, "fallback"), "the agent has no route: message: add it or drop the key")
        if not named:
            return agents
        place: Place = ("route",) if common == "message" else ("agents", named[0], "route")
        if data.get("external") is True:
            self.fault(
                place,
                "route: message has no effect, because the running system determines the next agent: drop the key",
            )
        elif "max_turns" not in data:
            self.fault(place, "route: message needs max_turns: add it")
        self.distinct_names(agents)
        shared = self.fallback((), data)
        for i in named:
            place = ("agents", i) if "fallback" in own[i] else ()
            target = self.fallback(place, own[i]) if place else shared
            if (agent := agents[i]) is not None:
                self.fallback_edge((*place, "fallback"), agents, i, target, edges)
                agents[i] = replace(agent, route="message", fallback=target)
        return agents

    def fallback_edge(
        self, place: Place, agents: Sequence[Agent | None], i: int, target: int | None, edges: Sequence[ReadEdge]
    ) -> None:
        unknown = any(source is None or goal is None or condition is False for source, goal, condition in edges)
        if target is None or unknown or (i, target, None) in edges:
            return
        name, goal = (agent.name if (agent := ([*agents, None])[n]) else "sink" for n in (i, target))
        remedy = f"add the edge, or set fallback for {name}"
        self.fault(place, f"{name} has no unconditional edge to {goal}: {remedy}")

    def distinct_names(self, agents: Sequence[Agent | None]) -> None:
        """Report agent names that are equal once folded and so could not be told apart in a message."""
        seen = {folded(name): name for name in RESERVED}
        for i, agent in enumerate(agents):
            if agent is None:
                continue
            key = folded(agent.name)
            if not key:
                self.fault(
                    ("agents", i, "name"), f"{shown(agent.name)} needs a letter or digit, so that messages can name it"
                )
            elif seen.setdefault(key, agent.name) != agent.name:
                problem = f"messages cannot distinguish {shown(agent.name)} and {shown(seen[key])}: rename one"
                self.fault(("agents", i, "name"), problem)

    def route(self, place: Place, data: Mapping[object, object], default: Route) -> Route:
        route = data.get("route", default)
        if route in get_args(Route):
            return cast(Route, route)
        self.fault((*place, "route"), f"expected {_or(get_args(Route))}, got {shown(route)}")
        return default

    def fallback(self, place: Place, data: Mapping[object, object]) -> int | None:
        if "fallback" not in data:
            return None
        node = self.node((*place, "fallback"), data["fallback"])
        if node == Q:
            self.fault((*place, "fallback"), "q receives no messages: name an agent or sink")
            return None
        return node

    def text(self, place: Place, value: object, remedy: str) -> str:
        if isinstance(value, str) and value.strip():
            return value
        self.fault(place, f"expected a non-empty text, got {shown(value)}: {remedy}")
        return ""

    def count(self, place: Place, value: object, most: int) -> int:
        if _is_count(value, most):
            return cast(int, value)
        self.fault(place, f"expected an integer from 1 to {most}, got {shown(value)}")
        return 0

    def entries(self, place: Place, value: object, expected: str, remedy: str) -> Sequence[object]:
        if _is_list(value) and value:
            return cast(Sequence[object], value)
        got = "nothing" if value is None else shown(value)
        self.fault(place, f"expected a list of {expected}, got {got}: {remedy}")
        return ()

    def keys(self, place: Place, data: Mapping[object, object], known: Sequence[str]) -> None:
        for key in data:
            if key not in known:
                problem = f"unknown key {shown(key)}: expected {_or(known)}{self.near(key, known)}"
                self.fault((*place, _step(key)), problem)

    def agents(self, data: object) -> list[Agent | None]:
        entries = self.entries(("agents",), data, "at least one agent", "list them as they act")
        agents = [self.agent(("agents", i), entry) for i, entry in enumerate(entries)]
        seen: dict[str, int] = {}
        for i, agent in enumerate(agents):
            if agent is None:
                continue
            if agent.name in seen:
                first = seen[agent.name]
                self.fault(
                    ("agents", i, "name"), f"{shown(agent.name)} is also the name of agents[{first}]: rename one"
                )
            seen.setdefault(agent.name, i)
        return agents

    def agent(self, place: Place, data: object) -> Agent | None:
        if not isinstance(data, Mapping):
            self.fault(place, f"expected a mapping with name, system_prompt and max_new_tokens, got {shown(data)}")
            return None
        self.keys(place, data, AGENT_KEYS)
        name = self.agent_name((*place, "name"), data.get("name"))
        prompt = self.text((*place, "system_prompt"), data.get("system_prompt"), "write instructions for the agent")
        cap = self.count((*place, "max_new_tokens"), data.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS), MAX_NEW_TOKENS)
        temperature = self.number((*place, "temperature"), data, 0, MAX_TEMPERATURE)
        top_p = self.number((*place, "top_p"), data, LEAST_TOP_P, 1)
        return Agent(name, prompt, cap, temperature=temperature, top_p=top_p) if name else None

    def number(self, place: Place, data: Mapping[object, object], low: float, high: float) -> float | None:
        value = data.get(place[-1])
        if value is None or (is_number(value) and low <= value <= high):
            return None if value is None else float(value)
        self.fault(place, f"expected a number from {low:g} to {high:g}, got {shown(value)}")
        return None

    def agent_name(self, place: Place, value: object) -> str | None:
        name = self.text(place, value, "name the agent, in quotes if necessary")
        if len(name) > LONGEST_NAME:
            self.fault(place, f"expected at most {LONGEST_NAME} characters, got {len(name)}: choose a shorter name")
        elif name.strip().lower() in RESERVED:
            self.fault(place, f"{name!r} is the name of a special node: choose another")
        else:
            return name or None
        return None

    def policies(self, data: object, agents: Sequence[Agent | None]) -> tuple[tuple[str, str], ...]:
        """Read the policy string of each agent; an unknown policy is found only when it is loaded."""
        if data is None:
            return ()
        if not isinstance(data, Mapping) or not data:
            self.fault(("policies",), f"expected a mapping from agents' names to policy strings, got {shown(data)}")
            return ()
        names = [agent.name for agent in agents if agent]
        known = {ANYONE, *names}
        readable = len(names) == len(agents)
        for agent, policy in data.items():
            place = ("policies", _step(agent))
            if readable and agent not in known:
                expected = _or([*names[:_MOST_NAMES], repr(ANYONE)])
                self.fault(place, f"unknown agent {shown(agent)}: expected {expected}{self.near(agent, names)}")
            if not isinstance(policy, str) or not policy.strip():
                self.fault(place, f"expected a policy string such as 'openai:MODEL@URL' or tiny, got {shown(policy)}")
        missing = [name for name in names if name not in data]
        if missing and ANYONE not in data:
            some = ", ".join(missing[:_MOST_NAMES]) + (", ..." if len(missing) > _MOST_NAMES else "")
            self.fault(("policies",), f"no policy for {some}: add each, or '{ANYONE}' for all others")
        return tuple((str(agent), str(policy)) for agent, policy in data.items()) if not self.faults else ()

    def edges(self, data: object) -> list[ReadEdge]:
        entries = self.entries(("edges",), data, "edges", "write at least [-1, 0], from the question")
        return [self.edge(i, entry) for i, entry in enumerate(entries)]

    def edge(self, i: int, entry: object) -> ReadEdge:
        if not _is_list(entry) or len(cast(Sequence[object], entry)) not in (2, 3):
            self.fault(("edges", i), f"expected [source, target] or [source, target, condition], got {shown(entry)}")
            return None, None, None
        source, target, *rest = cast(Sequence[object], entry)
        condition = self.condition(("edges", i, 2), rest[0]) if rest and rest[0] is not None else None
        return self.node(("edges", i, 0), source), self.node(("edges", i, 1), target), condition

    def node(self, place: Place, node: object) -> int | None:
        if isinstance(node, int) and not isinstance(node, bool) and Q <= node < self.sink:
            return node
        if isinstance(node, str) and node in self.nodes:
            return self.nodes[node]
        near = self.near(node, self.nodes)
        known = f"0 to {self.sink - 1}" if self.sink > 1 else "0"
        self.fault(place, f"unknown node {shown(node)}: expected {known}, an agent's name, -1 or q, or sink{near}")
        return None

    def condition(self, place: Place, text: object) -> Condition | Literal[False]:
        kind, colon, pattern = text.partition(":") if isinstance(text, str) else ("", "", "")
        if kind not in CONDITION_KINDS or not colon:
            near = self.near(kind, CONDITION_KINDS)
            self.fault(
                place, f"unknown condition {shown(text)}: expected {_or(k + ':...' for k in CONDITION_KINDS)}{near}"
            )
            return False
        if not pattern:
            self.fault(place, f"{kind}: needs a pattern, because an empty one matches every message")
            return False
        try:
            return Condition(cast(ConditionKind, kind), pattern)
        except ConfigError as error:
            self.fault(place, str(error))
            return False


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _is_list(data: object) -> bool:
    return isinstance(data, Sequence) and not isinstance(data, str | bytes)


def _step(key: object) -> str:
    return key[:LONGEST_NAME] if isinstance(key, str) else shown(key)


def _or(options: Iterable[str]) -> str:
    *rest, last = options
    return f"{', '.join(rest)} or {last}" if rest else last


def _graph_faults(names: Sequence[str], edges: Sequence[ReadEdge], loops: bool) -> Iterator[tuple[Place, str]]:
    """Yield the errors of the graph as a whole; with ``loops``, edges may go in any direction.

    If a node of an edge could not be read, it is None, and its error is already reported; the node at the other end
    counts as connected.
    """
    sink = len(names)
    yield from _edge_faults(edges, sink)
    if loops:
        yield from _agent_faults(names, edges, loops=True)
        return
    for i, (source, target, _) in enumerate(edges):
        if source is not None and target is not None and sink > source >= target >= 0:
            remedy = f"list {names[source]} first, remove the edge, or set max_turns to allow loops"
            yield ("edges", i), f"{names[source]} -> {names[target]} goes against the order of the agents: {remedy}"
    yield from _agent_faults(names, edges, loops=False)


def _edge_faults(edges: Sequence[ReadEdge], sink: int) -> Iterator[tuple[Place, str]]:
    seen: dict[tuple[int, int], int] = {}
    for i, (source, target, condition) in enumerate(edges):
        if source == sink:
            yield ("edges", i), "an edge out of sink, which ends the episode: remove it"
        if target == Q:
            yield ("edges", i), "an edge into q, which is only the question: remove it"
        if source == Q and target == sink:
            yield ("edges", i), "an edge from q to sink skips every agent: remove it"
        if source == Q and condition is not None:
            yield ("edges", i), "a condition on an edge from q, which sends no message: remove the condition"
        if source is None or target is None:
            continue
        first = seen.setdefault((source, target), i)
        if first != i:
            yield ("edges", i), f"repeats edges[{first}]: remove one, or join their conditions into one regex"


def _agent_faults(names: Sequence[str], edges: Sequence[ReadEdge], *, loops: bool) -> Iterator[tuple[Place, str]]:
    sink = len(names)
    incoming: list[set[int]] = [set() for _ in names]
    outgoing: list[set[int]] = [set() for _ in names]
    conditional = set[int]()
    ends_always = set[int]()
    for source, target, condition in edges:
        if target is not None and 0 <= target < sink:
            incoming[target].add(Q if source is None else source)
            if condition is not None:
                conditional.add(target)
        if source is not None and 0 <= source < sink:
            outgoing[source].add(sink if target is None else target)
            if target == sink and condition is None:
                ends_always.add(source)
    reached = _reached(incoming, outgoing, sink)
    # An agent acts in every episode if there is no condition upstream of it.
    sure = [False] * len(names)
    for i in range(len(names)):
        sure[i] = i not in conditional and all(s == Q or (0 <= s < i and sure[s]) for s in incoming[i])
    next_sure = [sink] * (sink + 1)
    for i in reversed(range(sink)):
        next_sure[i] = i if sure[i] else next_sure[i + 1]
    for i, name in enumerate(names):
        if i not in reached:
            yield ("agents", i), f"no path leads from q to {name}: add an edge from q or from an earlier agent"
        if loops:
            continue
        later = next_sure[i + 1]
        if not outgoing[i] and later < sink:
            problem = f"no agent reads {name}, and {names[later]} acts after it: add an edge from it or remove it"
            yield ("agents", i), problem
        if outgoing[i] == {sink} and i in ends_always and sure[i] and i + 1 < sink:
            yield (
                ("agents", i),
                f"{name} always ends the episode, so {names[i + 1]} never acts: remove its edge to sink",
            )


def _reached(incoming: Sequence[set[int]], outgoing: Sequence[set[int]], sink: int) -> set[int]:
    todo = [i for i in range(sink) if Q in incoming[i]]
    reached = set(todo)
    while todo:
        for target in outgoing[todo.pop()]:
            if 0 <= target < sink and target not in reached:
                reached.add(target)
                todo.append(target)
    return reached
