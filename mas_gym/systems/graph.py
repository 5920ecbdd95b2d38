"""The communication graph of a multi-agent system, as plain immutable data.

Nodes are numbered as in the paper's listings (App. "MAS Graph, Prompts, and
Configuration"): the question node ``q`` is -1, the agents are ``0 .. M-1``, the
terminal node ``sink`` is ``M``. In actions, ``M + 1`` stands for `ALL`, every
enabled recipient at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property
from hashlib import blake2b
from typing import Literal

from mas_gym.internal.json_types import JSONObject
from mas_gym.systems.conditions import Condition

Q = -1
"""The question node, which contains the question and never acts."""

History = Literal["inputs", "private"]

Route = Literal["edges", "message"]

RETURNED = "\n\n[program returned] "
FAILED = "\n\n[program failed] "
"""Separators between a program's last reply and its answer, if the answer is another text, or its error."""

SCHEMA = 1
"""Version of the config format that `MAS.to_dict` writes and `load_mas` reads."""


def unmarked(text: str) -> str:
    """Return a text in which `RETURNED` and `FAILED` are broken up by a space."""
    return text.replace(RETURNED, RETURNED.replace("[", "[ ")).replace(FAILED, FAILED.replace("[", "[ "))


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent of a MAS.

    Attributes:
        name: Unique within the MAS.
        system_prompt: The instructions that precede the agent's inputs.
        max_new_tokens: Token limit of one message, at least 1.
        route: With ``"edges"``, a message reaches every agent that the edges allow. With ``"message"``, it reaches
            the one recipient that it names (see `mas_gym.systems.prompts`).
        fallback: With ``route: message``, the recipient of a message that names no legal recipient; None if such a
            message is an invalid action.
        temperature: Softmax temperature of its messages; None for that of the run.
        top_p: Probability mass of its nucleus sampling, in ``(0, 1]``; None for that of the run.
    """

    name: str
    system_prompt: str
    max_new_tokens: int
    route: Route = "edges"
    fallback: int | None = None
    temperature: float | None = None
    top_p: float | None = None


@dataclass(frozen=True, slots=True)
class Edge:
    """A directed edge ``source -> target``, open to every message or only to those that meet a condition."""

    source: int
    target: int
    condition: Condition | None = None


@dataclass(frozen=True)
class MAS:
    """A multi-agent system: agents in schedule order and the edges between them.

    Build a system with `mas_gym.load_mas`, which validates it; the constructor does not.

    Attributes:
        name: The name in reports, such as ``"rpsv"``.
        agents: In the order in which they act (fixed schedule) or are visited (dynamic schedule).
        edges: Explicit edges, in file order. The last scheduled agent's edge to ``sink`` is implicit.
        max_turns: None for a schedule in which each agent acts at most once. With a number, edges may form cycles:
            an agent acts each time that messages have reached it, in the order of their arrival, and the episode
            ends after at most this many turns.
        min_turns: With ``max_turns``, no message reaches ``sink`` before this turn unless no other agent can act.
        history: Content of an agent's prompt besides the question: ``"inputs"``, the messages that reached it, or
            ``"private"``, all messages that it sent or received, in order and with their speakers.
        external: Whether an agent program (see `mas_gym.programs`) selects the next agent, writes the prompts and
            returns the answer. Without edges, any agent may follow any other.
        policies: Pairs of an agent's name, or ``"*"`` for all others, and the policy string to use for its messages
            if a run's policy is ``"from-config"``. They are not part of the system's identity: `to_dict`, the
            fingerprint and equality leave them out, so a stored run can be resumed after a server has moved.
    """

    name: str
    agents: tuple[Agent, ...]
    edges: tuple[Edge, ...]
    policies: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    max_turns: int | None = None
    min_turns: int = 1
    history: History = "inputs"
    external: bool = False

    @cached_property
    def sink(self) -> int:
        """The index of the terminal node, ``M``."""
        return len(self.agents)

    @cached_property
    def ALL(self) -> int:
        """The recipient index for all enabled out-edges, ``M + 1``."""
        return len(self.agents) + 1

    @cached_property
    def dynamic(self) -> bool:
        """Whether the schedule depends on messages: with conditions, ``max_turns``, or externally without edges."""
        free = self.external and not self.edges
        return free or self.max_turns is not None or any(edge.condition is not None for edge in self.edges)

    @cached_property
    def sees_question(self) -> tuple[bool, ...]:
        """For each agent, whether the edge ``q -> agent`` exists."""
        heard = {edge.target for edge in self.edges if edge.source == Q}
        return tuple(i in heard or not self.edges for i in range(len(self.agents)))

    @cached_property
    def targets(self) -> tuple[tuple[int, ...], ...]:
        """For each agent, the nodes that its explicit edges lead to, in node order."""
        return tuple(tuple(sorted(e.target for e in self.edges if e.source == i)) for i in range(len(self.agents)))

    def node_name(self, node: int) -> str:
        """Return a readable name for a node or recipient index."""
        special = {Q: "q", self.sink: "sink", self.ALL: "ALL"}
        return special.get(node) or self.agents[node].name

    @cached_property
    def final_text(self) -> Callable[[str], str]:
        """A function that returns the graded part of a terminal state's text.

        For a MAS, this is the whole text; for a program, its return value, or an empty text if the program failed.
        """
        return _returned if self.external else str

    @property
    def kind(self) -> str:
        """The kind of system, as shown in reports: ``"MAS"`` or ``"program"``."""
        return "program" if self.external else "MAS"

    def to_dict(self) -> JSONObject:
        """Return the JSON-serializable config, which `mas_gym.load_mas` reads back to an equal system."""
        edges: list[list[int | str]] = []
        for edge in self.edges:
            condition = [] if edge.condition is None else [str(edge.condition)]
            edges.append([edge.source, self._node_key(edge.target), *condition])
        agents = [_stated(agent) for agent in self.agents]
        for agent in agents:
            if "fallback" in agent:
                agent["fallback"] = self._node_key(agent["fallback"])
        stated = _stated(self) | {"agents": agents, "edges": edges}
        stated.pop("policies", None)
        return {"schema": SCHEMA, **stated}

    def _node_key(self, node: int) -> int | str:
        return "sink" if node == self.sink else node

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that identify the system, the same in every process and on every machine."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return blake2b(text.encode(), digest_size=16).hexdigest()


def _returned(text: str) -> str:
    returned, failed = text.rfind(RETURNED), text.rfind(FAILED)
    if failed > returned:
        return ""
    return text if returned < 0 else text[returned + len(RETURNED) :]


def _stated(part: Agent | MAS) -> JSONObject:
    """Return the fields that differ from their defaults; a new field changes no fingerprint."""
    return {one.name: value for one in fields(part) if (value := getattr(part, one.name)) != one.default}
