"""The transition model of a MAS: pure functions on immutable states.

Two schedules, as in the paper:

* without conditions the schedule is fixed, one turn per agent in listed order,
  and routing decides only who reads what (Sec. "Preliminaries");
* with conditions it is dynamic: in listed (topological) order an agent acts only
  if each of its in-edges delivered, and a speaker after whom nobody can act
  routes to ``sink`` (App. "DyLAN-style dynamic scheduler").

Everything that depends on the graph alone is tabulated once, so that a
transition costs a few dictionary and list look-ups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import index
from typing import Any, cast

from mas_gym.errors import DataError, EpisodeOverError, IllegalActionError, UnknownNameError, shown
from mas_gym.graph import MAS, Condition, Q
from mas_gym.state import SCHEMA, Action, Link, LocalView, MASState, Message

_NAMES_SHOWN = 12


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
        out: list[dict[int, Condition | None]] = [{} for _ in mas.agents]
        for edge in mas.edges:
            if edge.source != Q:
                out[edge.source][edge.target] = edge.condition
        self._out = [dict(sorted(targets.items())) for targets in out]
        self._conditions = [{condition for condition in o.values() if condition is not None} for o in self._out]
        self._open = [tuple(t for t, condition in o.items() if condition is None) for o in self._out]
        self._fixed = None if mas.dynamic else [self._fixed_routes(i) for i in range(self.max_depth)]
        self._number_edges()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the system alone; the tables follow from it."""
        return Dynamics, (self.mas,)

    def _fixed_routes(self, agent: int) -> dict[int, tuple[int, ...]]:
        targets = list(self._out[agent])
        if agent == self.max_depth - 1 and self._sink not in targets:
            targets.append(self._sink)
        return {**{t: (t,) for t in targets}, self._all: tuple(targets)}

    def _number_edges(self) -> None:
        """Give each edge between agents a bit; an agent's in-edges are neighbours, so a state keeps only open ones.

        A state's ``_delivered`` starts at the first in-edge of its acting agent: earlier bits are shifted away,
        and a long chain of agents carries a few bits, not one per edge of the graph.
        """
        between = sorted((e.target, e.source) for e in self.mas.edges if e.source != Q and e.target != self._sink)
        self._bit = [dict[int, int]() for _ in range(self.max_depth)]
        self._first_bit = [0] * (self.max_depth + 1)
        in_degree = [0] * self.max_depth
        for bit, (target, source) in enumerate(between):
            self._bit[source][target] = bit
            in_degree[target] += 1
        for agent, degree in enumerate(in_degree):
            self._first_bit[agent + 1] = self._first_bit[agent] + degree
        self._needed = [(1 << degree) - 1 for degree in in_degree]
        # For each agent, the next one at or after it that waits for no other agent.
        self._next_free = [self._sink] * (self.max_depth + 1)
        for agent in reversed(range(self.max_depth)):
            self._next_free[agent] = self._next_free[agent + 1] if in_degree[agent] else agent

    def initial_state(self, question: str) -> MASState:
        """Return ``s_1(x) = (x, empty, sigma(1))``."""
        if not isinstance(question, str):
            raise DataError(f"a question is a str, got {type(question).__name__}; take it from problem.question")
        return cast(MASState, Link(question, self._next_free[0]))

    def is_terminal(self, state: MASState) -> bool:
        """Return whether the last message reached ``sink``."""
        return state.acting == self._sink

    def legal_recipients(self, state: MASState) -> tuple[int, ...]:
        """Return the recipients that some message could be routed to, in index order, `ALL` last.

        In a dynamic graph the conditions look at the text, so a recipient listed here
        can still be refused for a given text; `ALL` never is. In a terminal state nobody
        acts and the result is empty.
        """
        if state.acting == self._sink:
            return ()
        if self._fixed is not None:
            return tuple(self._fixed[state.acting])
        targets = list(self._out[state.acting])
        if self._sink not in targets and self._ends(state, self._open[state.acting]):
            targets.append(self._sink)
        return (*targets, self._all)

    def route(self, state: MASState, action: tuple[str, int]) -> tuple[int, ...]:
        """Return the nodes that an action reaches, in node order.

        The result is empty when `ALL` meets only closed conditions and other agents can
        still act: the message then reaches nobody.

        Raises:
            EpisodeOverError: The state is terminal.
            IllegalActionError: The recipient is not legal for this text, with the reason.
        """
        text, recipient = action
        if state.acting == self._sink:
            raise EpisodeOverError("the state is terminal: no agent can act; start from initial_state(question)")
        if not isinstance(text, str):
            raise IllegalActionError(f"an action is (text, recipient) with text a str, got {type(text).__name__}")
        if self._fixed is None:
            return self._dynamic_route(state, text, index(recipient))
        routes_of_agent = self._fixed[state.acting]
        routes = routes_of_agent.get(recipient)
        if routes is None:
            raise IllegalActionError(self._refusal(state, recipient, routes_of_agent))
        return routes

    def _dynamic_route(self, state: MASState, text: str, recipient: int) -> tuple[int, ...]:
        out = self._out[state.acting]
        # Each condition reads the text once, however many edges share it.
        holds = {condition: condition.holds(text) for condition in self._conditions[state.acting]}
        enabled = tuple(t for t, condition in out.items() if condition is None or holds[condition])
        if recipient == self._all:
            chosen = enabled
        elif recipient in enabled:
            chosen = (recipient,)
        elif recipient == self._sink and self._ends(state, enabled):
            return (self._sink,)
        else:
            legal = [*enabled, *([self._sink] if self._ends(state, enabled) else []), self._all]
            raise IllegalActionError(self._refusal(state, recipient, legal))
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
        if routed and routed[-1] == self._sink:
            acting = self._sink
        elif self._fixed is not None:
            acting = state.acting + 1
        else:
            reached = self._deliver(state, routed)
            acting = self._next_ready(state.acting, reached)
            delivered = reached >> (self._first_bit[acting] - self._first_bit[state.acting])
        return cast(MASState, Link(state.question, acting, state, state.acting, action[0], routed, delivered))

    def local_view(self, state: MASState, agent: int) -> LocalView:
        """Return what an agent sees of a state (paper, Sec. "Preliminaries", ``H^(i)``).

        Args:
            state: Any state.
            agent: An agent's index, or ``sink``, which sees what was routed to it.

        Raises:
            UnknownNameError: There is no such node.
        """
        if not 0 <= agent <= self._sink:
            raise UnknownNameError(f"no agent {agent}: expected 0 to {self._sink - 1}, or {self._sink} for sink")
        seen: list[Message] = []
        link: MASState = state
        while link.parent is not None:
            if link.speaker == agent:
                seen.extend(Message(agent, link.text, r) for r in reversed(link.recipients))
            elif agent in link.recipients:
                seen.append(Message(link.speaker, link.text, agent))
            link = link.parent
        seen.reverse()
        sees = agent < self._sink and self.mas.sees_question[agent]
        return LocalView(state.question if sees else None, tuple(seen))

    def state_from_dict(self, data: Mapping[str, Any]) -> MASState:
        """Read back `MASState.to_dict`, checking every turn against this graph.

        Raises:
            DataError: The form, the schema version or a turn is not right.
        """
        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
            raise DataError(f"expected a state of schema {SCHEMA}, got {str(data)[:80]!r}; write it with to_dict()")
        try:
            state = self.initial_state(data["question"])
            for speaker, text, recipients in data["turns"]:
                state = self._replay(state, speaker, text, tuple(index(r) for r in recipients))
            if state.acting != data["acting"]:
                raise DataError(f"expected agent {state.acting} to act after these turns, got {data['acting']!r}")
        except (KeyError, TypeError, ValueError, EpisodeOverError) as error:
            raise DataError(f"not a transcript of MAS {self.mas.name!r}: {error}") from error
        return state

    def _replay(self, state: MASState, speaker: int, text: str, recipients: tuple[int, ...]) -> MASState:
        if speaker != state.acting:
            raise DataError(f"turn {state.depth + 1}: expected speaker {state.acting}, got {speaker!r}")
        for choice in (self._all, *recipients):
            following = self.transition(state, Action(text, choice))
            if following.recipients == recipients:
                return following
        raise DataError(f"turn {state.depth + 1}: no action of agent {speaker} reaches {list(recipients)}")

    def _deliver(self, state: MASState, targets: tuple[int, ...]) -> int:
        delivered = state._delivered
        bits, base = self._bit[state.acting], self._first_bit[state.acting]
        for target in targets:
            bit = bits.get(target)
            if bit is not None:
                delivered |= 1 << (bit - base)
        return delivered

    def _next_ready(self, speaker: int, delivered: int) -> int:
        base = self._first_bit[speaker]
        for agent in range(speaker + 1, self.max_depth):
            waiting = delivered >> (self._first_bit[agent] - base)
            if waiting == 0:
                return self._next_free[agent]
            if waiting & self._needed[agent] == self._needed[agent]:
                return agent
        return self._sink

    def _ends(self, state: MASState, targets: tuple[int, ...]) -> bool:
        return self._next_ready(state.acting, self._deliver(state, targets)) == self._sink

    def _refusal(self, state: MASState, recipient: int, legal: Iterable[int]) -> str:
        names = [f"{r} ({self.mas.node_name(r)})" for r in dict.fromkeys(legal)]
        listed = names if len(names) <= _NAMES_SHOWN else [*names[: _NAMES_SHOWN - 1], "...", names[-1]]
        speaker = self.mas.agents[state.acting].name
        closed = recipient in self._out[state.acting]
        why = "the edge's condition does not hold for this text" if closed else "no edge"
        return f"{speaker} cannot route to {shown(recipient)}: {why}; expected one of {', '.join(listed)}"
