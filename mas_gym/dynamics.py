"""The transition model of a MAS: pure functions on immutable states.

Two schedules, as in DESIGN and the paper:

* without conditions the schedule is fixed, one turn per agent in listed order,
  and routing decides only who reads what (Sec. "Preliminaries");
* with conditions it is dynamic: in listed (topological) order an agent acts only
  if each of its in-edges delivered, and a speaker after whom nobody can act
  routes to ``sink`` (App. "DyLAN-style dynamic scheduler").

Everything that depends on the graph alone is tabulated once, so that a
transition costs a few dictionary and list look-ups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mas_gym.errors import DataError, EpisodeOverError, IllegalActionError
from mas_gym.graph import MAS, Q
from mas_gym.state import SCHEMA, Action, LocalView, MASState, Message


class Dynamics:
    """The deterministic model ``next(s, a)`` of one MAS.

    Args:
        mas: A validated system, from `mas_gym.load_mas`.

    Attributes:
        mas: The system.
        max_depth: The scheduled depth ``D``, an upper bound on the number of turns.
    """

    def __init__(self, mas: MAS) -> None:
        """Tabulate the graph."""
        self.mas = mas
        self.max_depth = len(mas.agents)
        self._sink, self._all = mas.sink, mas.ALL
        out: list[list[tuple[int, int]]] = [[] for _ in mas.agents]
        need = [0] * len(mas.agents)
        for bit, edge in enumerate(mas.edges):
            if edge.source != Q:
                out[edge.source].append((edge.target, bit))
                if edge.target != self._sink:
                    need[edge.target] |= 1 << bit
        self._need = need
        self._out = [tuple(sorted(edges)) for edges in out]
        self._conditions = [edge.condition for edge in mas.edges]
        self._bits = [dict(edges) for edges in self._out]
        self._first = 0 if not mas.dynamic else self._next_ready(-1, 0)
        self._fixed = None if mas.dynamic else [self._fixed_routes(i) for i in range(self.max_depth)]

    def _fixed_routes(self, agent: int) -> dict[int, tuple[int, ...]]:
        targets = [t for t, _ in self._out[agent]]
        if agent == self.max_depth - 1 and self._sink not in targets:
            targets.append(self._sink)
        return {**{t: (t,) for t in targets}, self._all: tuple(targets)}

    def initial_state(self, question: str) -> MASState:
        """Return ``s_1(x) = (x, empty, sigma(1))``."""
        return MASState(question, self._first)

    def is_terminal(self, state: MASState) -> bool:
        """Return whether the last message reached ``sink``."""
        return state.acting == self._sink

    def legal_recipients(self, state: MASState) -> tuple[int, ...]:
        """Return the recipients that some message could be routed to, in index order, `ALL` last.

        In a dynamic graph the conditions look at the text, so a recipient listed here
        can still be refused for a given text; `ALL` never is.
        """
        if state.acting == self._sink:
            return ()
        if self._fixed is not None:
            return tuple(self._fixed[state.acting])
        targets = [t for t, _ in self._out[state.acting]]
        if self._sink not in targets and self._ends(state, ()):
            targets.append(self._sink)
        return (*targets, self._all)

    def route(self, state: MASState, action: tuple[str, int]) -> tuple[int, ...]:
        """Return the nodes that an action reaches, in node order.

        Raises:
            EpisodeOverError: The state is terminal.
            IllegalActionError: The recipient is not legal for this text, with the reason.
        """
        text, recipient = action
        if state.acting == self._sink:
            raise EpisodeOverError("the state is terminal: no agent can act; start from initial_state(question)")
        if self._fixed is not None:
            routes = self._fixed[state.acting].get(recipient)
            if routes is None:
                raise IllegalActionError(self._refusal(state, recipient))
            return routes
        return self._dynamic_route(state, text, recipient)

    def _dynamic_route(self, state: MASState, text: str, recipient: int) -> tuple[int, ...]:
        enabled = tuple(t for t, bit in self._out[state.acting] if self._open(bit, text))
        if recipient == self._all:
            chosen = enabled
        elif recipient in enabled:
            chosen = (recipient,)
        elif recipient == self._sink and self._ends(state, enabled):
            return (self._sink,)
        else:
            raise IllegalActionError(self._refusal(state, recipient))
        if self._sink not in chosen and self._ends(state, chosen):
            return (*chosen, self._sink)
        return chosen

    def transition(self, state: MASState, action: tuple[str, int]) -> MASState:
        """Return the successor ``next(s, a)``.

        Args:
            state: A non-terminal state.
            action: ``(text, recipient)``; the recipient is a node index or `ALL`.

        Raises:
            EpisodeOverError: The state is terminal.
            IllegalActionError: The recipient is not legal for this text.
        """
        routed = self.route(state, action)
        delivered = 0
        if routed[-1] == self._sink:
            acting = self._sink
        elif self._fixed is not None:
            acting = state.acting + 1
        else:
            delivered = self._deliver(state, routed)
            acting = self._next_ready(state.acting, delivered)
        return MASState(state.question, acting, state, state.acting, action[0], routed, delivered)

    def local_view(self, state: MASState, agent: int) -> LocalView:
        """Return what an agent sees of a state (paper, Sec. "Preliminaries", ``H^(i)``)."""
        seen: list[Message] = []
        link: MASState = state
        while link.parent is not None:
            if link.speaker == agent:
                seen.extend(Message(agent, link.text, r) for r in reversed(link.recipients))
            elif agent in link.recipients:
                seen.append(Message(link.speaker, link.text, agent))
            link = link.parent
        seen.reverse()
        return LocalView(state.question if self.mas.sees_question[agent] else None, tuple(seen))

    def state_from_dict(self, data: Mapping[str, Any]) -> MASState:
        """Read back `MASState.to_dict`, checking every turn against this graph.

        Raises:
            DataError: The form, the schema version or a turn is not right.
        """
        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
            raise DataError(f"expected a state of schema {SCHEMA}, got {str(data)[:80]!r}; write it with to_dict()")
        try:
            state = self.initial_state(str(data["question"]))
            for speaker, text, recipients in data["turns"]:
                state = self._replay(state, int(speaker), str(text), tuple(int(r) for r in recipients))
        except (KeyError, TypeError, ValueError, EpisodeOverError) as error:
            raise DataError(f"not a transcript of MAS {self.mas.name!r}: {error}") from error
        return state

    def _replay(self, state: MASState, speaker: int, text: str, recipients: tuple[int, ...]) -> MASState:
        if speaker != state.acting:
            raise DataError(f"turn {state.depth + 1}: expected speaker {state.acting}, got {speaker}")
        for choice in (self._all, *recipients):
            following = self.transition(state, Action(text, choice))
            if following.recipients == recipients:
                return following
        raise DataError(f"turn {state.depth + 1}: no action of agent {speaker} reaches {list(recipients)}")

    def _open(self, bit: int, text: str) -> bool:
        condition = self._conditions[bit]
        return condition is None or condition.holds(text)

    def _deliver(self, state: MASState, targets: tuple[int, ...]) -> int:
        delivered = state._delivered
        bits = self._bits[state.acting]
        for target in targets:
            bit = bits.get(target)
            if bit is not None:
                delivered |= 1 << bit
        return delivered

    def _next_ready(self, speaker: int, delivered: int) -> int:
        need = self._need
        for agent in range(speaker + 1, self.max_depth):
            if need[agent] & ~delivered == 0:
                return agent
        return self._sink

    def _ends(self, state: MASState, targets: tuple[int, ...]) -> bool:
        return self._next_ready(state.acting, self._deliver(state, targets)) == self._sink

    def _refusal(self, state: MASState, recipient: int) -> str:
        names = [f"{r} ({self.mas.node_name(r)})" for r in self.legal_recipients(state)]
        speaker = self.mas.agents[state.acting].name
        why = "the edge's condition does not hold for this text" if recipient in self._bits[state.acting] else "no edge"
        return f"{speaker} cannot route to {recipient}: {why}; expected one of {', '.join(names)}"
