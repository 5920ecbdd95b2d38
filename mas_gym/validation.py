"""From plain data to a `MAS`, or to the list of everything that is wrong with it.

Nothing is repaired silently and nothing stops at the first fault: each one is
reported with its place (and line, for files) and its remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, cast, get_args

from mas_gym.errors import ConfigError
from mas_gym.graph import MAS, SCHEMA, Agent, Condition, ConditionKind, Edge, Q
from mas_gym.graph_faults import graph_faults
from mas_gym.regexes import regex_fault

DEFAULT_MAX_NEW_TOKENS = 1024
MAX_NEW_TOKENS = 1_000_000
ANYONE = "*"
"""In ``policies``: every agent without an entry of its own."""

_RESERVED = {"q", "sink", "all", ANYONE}
_KINDS: tuple[str, ...] = get_args(ConditionKind)

Place = tuple[str | int, ...]
"""Where a value stands, such as ``("agents", 2, "name")``."""


def place_text(place: Place) -> str:
    """Return a place as people write it.

    >>> place_text(("agents", 2, "name"))
    'agents[2].name'
    """
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)
    return text.removeprefix(".") or "config"


def validate(data: object, name: str, where: Callable[[Place], str] = place_text) -> MAS:
    """Build the MAS that a config describes.

    Args:
        data: Mappings, lists and scalars, as YAML or JSON gives them.
        name: The name to use when the config has none.
        where: Turns a place into text; loaders of files add the file and line.

    Returns:
        The system.

    Raises:
        ConfigError: With every fault in its message and in ``faults``.
    """
    reader = _Reader(where)
    mas = reader.read(data, name)
    if reader.faults:
        count = len(reader.faults)
        if isinstance(data, Mapping) and isinstance(data.get("name"), str):
            name = data["name"]
        head = f"MAS config {name!r} has {count} fault{'s' if count > 1 else ''}:"
        raise ConfigError("\n".join([head, *(f"  {fault}" for fault in reader.faults)]), tuple(reader.faults))
    assert mas is not None
    return mas


class _Reader:
    """Collects faults while reading; a method returns None for what could not be read."""

    def __init__(self, where: Callable[[Place], str]) -> None:
        self.where = where
        self.faults: list[str] = []

    def fault(self, place: Place, problem: str) -> None:
        self.faults.append(f"{self.where(place)}: {problem}")

    def read(self, data: object, name: str) -> MAS | None:
        if not isinstance(data, Mapping):
            self.fault((), f"expected a mapping with agents and edges, got {_shown(data)}")
            return None
        self._keys((), data, ("schema", "name", "agents", "edges", "policies"))
        if data.get("schema", SCHEMA) != SCHEMA or isinstance(data.get("schema"), bool):
            self.fault(("schema",), f"expected {SCHEMA}, got {_shown(data['schema'])}: only that form is read")
        title = data.get("name", name)
        if not isinstance(title, str) or not title.strip():
            self.fault(("name",), f"expected a non-empty text, got {_shown(title)}: name the MAS or drop the key")
        agents = self._agents(data.get("agents"))
        names = {agent.name: i for i, agent in reversed(list(enumerate(agents))) if agent}
        edges = self._edges(data.get("edges"), len(agents), names)
        policies = self._policies(data.get("policies"), agents)
        labels = [agent.name if agent else f"agent {i}" for i, agent in enumerate(agents)]
        for index, problem in graph_faults(labels, edges) if agents and edges else ():
            self.fault(index, problem)
        if self.faults:
            return None
        good = tuple(agent for agent in agents if agent)
        read = tuple(Edge(e[0], e[1], e[2]) for e in edges)  # type: ignore[arg-type]
        return MAS(cast(str, title), good, read, policies)

    def _keys(self, place: Place, data: Mapping[Any, Any], known: Sequence[str]) -> None:
        for key in data:
            if key not in known:
                near = _near(str(key), known)
                self.fault((*place, str(key)), f"unknown key {_shown(key)}: expected {_or(known)}{near}")

    def _agents(self, data: object) -> list[Agent | None]:
        if not _is_list(data) or not data:
            got = "nothing" if data is None else _shown(data)
            self.fault(("agents",), f"expected a list of at least one agent, got {got}: list them as they act")
            return []
        agents = [self._agent(("agents", i), entry) for i, entry in enumerate(cast(Sequence[object], data))]
        seen: dict[str, int] = {}
        for i, agent in enumerate(agents):
            if agent is None:
                continue
            if agent.name in seen:
                first = seen[agent.name]
                self.fault(("agents", i, "name"), f"{agent.name!r} is also the name of agents[{first}]: rename one")
            seen.setdefault(agent.name, i)
        return agents

    def _agent(self, place: Place, data: object) -> Agent | None:
        if not isinstance(data, Mapping):
            self.fault(place, f"expected a mapping with name, system_prompt and max_new_tokens, got {_shown(data)}")
            return None
        self._keys(place, data, ("name", "system_prompt", "max_new_tokens"))
        name, prompt = data.get("name"), data.get("system_prompt")
        cap = data.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
        if not isinstance(name, str) or not name.strip():
            self.fault(
                (*place, "name"), f"expected a non-empty text, got {_shown(name)}: name it, in quotes if need be"
            )
            name = ""
        elif name.strip().lower() in _RESERVED:
            self.fault((*place, "name"), f"{name!r} is the name of a special node: choose another")
            name = ""
        if not isinstance(prompt, str) or not prompt.strip():
            self.fault(
                (*place, "system_prompt"), f"expected a non-empty text, got {_shown(prompt)}: instruct the agent"
            )
            prompt = ""
        if not isinstance(cap, int) or isinstance(cap, bool) or not 1 <= cap <= MAX_NEW_TOKENS:
            self.fault(
                (*place, "max_new_tokens"), f"expected a whole number from 1 to {MAX_NEW_TOKENS}, got {_shown(cap)}"
            )
            cap = 1
        return Agent(name, prompt, cap) if name else None

    def _policies(self, data: object, agents: Sequence[Agent | None]) -> tuple[tuple[str, str], ...]:
        """Read who writes whose messages; whether a policy of that name exists is for its loader to say."""
        if data is None:
            return ()
        if not isinstance(data, Mapping) or not data:
            self.fault(("policies",), f"expected a mapping from agents' names to policy strings, got {_shown(data)}")
            return ()
        names = [agent.name for agent in agents if agent]
        readable = len(names) == len(agents)
        for agent, policy in data.items():
            place = ("policies", str(agent))
            if readable and agent != ANYONE and agent not in names:
                near = _near(str(agent), names)
                self.fault(place, f"unknown agent {_shown(agent)}: expected {_or([*names, repr(ANYONE)])}{near}")
            if not isinstance(policy, str) or not policy.strip():
                self.fault(place, f"expected a policy string such as 'openai:MODEL@URL' or tiny, got {_shown(policy)}")
        missing = [name for name in names if name not in data]
        if missing and ANYONE not in data:
            self.fault(("policies",), f"no policy for {', '.join(missing)}: add each, or '{ANYONE}' for all others")
        return tuple((str(agent), str(policy)) for agent, policy in data.items())

    def _edges(self, data: object, agents: int, names: Mapping[str, int]) -> list[ReadEdge]:
        if not _is_list(data) or not data:
            got = "nothing" if data is None else _shown(data)
            self.fault(("edges",), f"expected a list of edges, got {got}: write at least [-1, 0], from the question")
            return []
        edges: list[ReadEdge] = []
        for i, entry in enumerate(cast(Sequence[object], data)):
            if not _is_list(entry) or len(cast(Sequence[object], entry)) not in (2, 3):
                self.fault(
                    ("edges", i), f"expected [source, target] or [source, target, condition], got {_shown(entry)}"
                )
                edges.append((None, None, None))
                continue
            source, target, *rest = cast(Sequence[object], entry)
            condition = self._condition(("edges", i, 2), rest[0]) if rest and rest[0] is not None else None
            edges.append(
                (
                    self._node(("edges", i, 0), source, agents, names),
                    self._node(("edges", i, 1), target, agents, names),
                    condition,
                )
            )
        return edges

    def _node(self, place: Place, node: object, agents: int, names: Mapping[str, int]) -> int | None:
        if isinstance(node, int) and not isinstance(node, bool) and Q <= node < agents:
            return node
        if isinstance(node, str):
            special = {"q": Q, "sink": agents}
            if node in special or node in names:
                return special.get(node, names.get(node))
        near = _near(node, [*names, "q", "sink"]) if isinstance(node, str) else ""
        known = f"0 to {agents - 1}" if agents > 1 else "0"
        self.fault(place, f"unknown node {_shown(node)}: expected {known}, an agent's name, -1 or q, or sink{near}")
        return None

    def _condition(self, place: Place, text: object) -> Condition | Literal[False]:
        kind, colon, pattern = text.partition(":") if isinstance(text, str) else ("", "", "")
        if kind not in _KINDS or not colon:
            near = _near(kind, _KINDS)
            self.fault(place, f"unknown condition {_shown(text)}: expected {_or(k + ':...' for k in _KINDS)}{near}")
            return False
        if not pattern:
            self.fault(place, f"{kind}: needs a pattern: an empty one is found in every message")
            return False
        problem = regex_fault(pattern) if kind.endswith("regex") else None
        if problem:
            self.fault(place, f"the pattern {_shown(pattern)} {problem}")
            return False
        return Condition(cast(ConditionKind, kind), pattern)


ReadEdge = tuple[int | None, int | None, Condition | Literal[False] | None]
"""Source, target and condition; None for an unreadable node, False for an unreadable condition."""


def _is_list(data: object) -> bool:
    return isinstance(data, Sequence) and not isinstance(data, str | bytes)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _or(options: Iterable[str]) -> str:
    *rest, last = options
    return f"{', '.join(rest)} or {last}" if rest else last


def _near(word: str, known: Iterable[str]) -> str:
    near = get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
