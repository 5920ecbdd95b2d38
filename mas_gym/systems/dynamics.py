"""The transition model of a MAS: pure functions on immutable states.

There are two schedules from the paper, and one for systems with loops:

* Without conditions, the schedule is fixed: one turn per agent in listed order.
  Routing determines only which agents receive a message (Sec. "Preliminaries").
* With conditions, the schedule is dynamic: in listed (topological) order, an agent acts
  only if each of its incoming edges delivered a message. If no agent can act after a speaker,
  the speaker's message goes to ``sink`` (App. "DyLAN-style dynamic scheduler").
* With ``max_turns``, the first agent with an edge from the question acts first, and then
  agents act in the order in which messages reached them, any number of times. The message of
  the last turn goes to ``sink``, as does a message after which no agent is waiting to act.
  With ``route: message``, an agent's message names its recipient (`mas_gym.systems.prompts`).

In an ``external`` system, the recipient of a message is the agent that acts next, or ``sink``; if the
system has edges, `ALL` routes along them as above.

Everything that depends only on the graph is precomputed, so a transition takes only a
few dictionary and list look-ups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import index

from mas_gym.errors import DataError, EpisodeOverError, IllegalActionError, UnknownNameError, shown
from mas_gym.internal.json_types import JSONMapping
from mas_gym.systems.conditions import Condition
from mas_gym.systems.graph import MAS, Q
from mas_gym.systems.recipient_names import folded, nameable, named_recipient
from mas_gym.systems.state import SCHEMA, Action, LocalView, MASState, Message

_NAMES_SHOWN = 12


class Dynamics:
    """The deterministic model ``next(s, a)`` of one MAS.

    Args:
        mas: A validated system, from `mas_gym.load_mas`.

    Attributes:
        mas: The system.
        max_depth: The scheduled depth ``D`` (``max_turns`` with loops), an upper bound on the number of turns.
    """

    def __init__(self, mas: MAS) -> None:
        self.mas = mas
        self.max_depth = mas.max_turns or len(mas.agents)
        self._sink, self._all = mas.sink, mas.ALL
        out: list[dict[int, Condition | None]] = [{} for _ in mas.agents]
        for edge in mas.edges:
            if edge.source != Q:
                out[edge.source][edge.target] = edge.condition
        self._out = [dict(sorted(targets.items())) for targets in out]
        self._conditions = [{condition for condition in o.values() if condition is not None} for o in self._out]
        self._open = [tuple(t for t, condition in o.items() if condition is None) for o in self._out]
        self._fixed = None if mas.dynamic else [self._fixed_routes(i) for i in range(self._sink)]
        self._in_degree = [0] * self._sink
        for edge in mas.edges:
            if edge.source != Q and edge.target != self._sink:
                self._in_degree[edge.target] += 1
        # For each agent, the next one at or after it that waits for no other agent.
        self._next_free = [self._sink] * (self._sink + 1)
        for agent in reversed(range(self._sink)):
            self._next_free[agent] = self._next_free[agent + 1] if self._in_degree[agent] else agent
        self._first = self._next_free[0] if mas.max_turns is None else mas.sees_question.index(True)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle only the system; the tables are recomputed from it."""
        return Dynamics, (self.mas,)

    def _fixed_routes(self, agent: int) -> dict[int, tuple[int, ...]]:
        targets = list(self._out[agent])
        if agent == self._sink - 1 and self._sink not in targets:
            targets.append(self._sink)
        return {**{t: (t,) for t in targets}, self._all: tuple(targets)}

    def initial_state(self, question: str, acting: int | None = None) -> MASState:
        """Return ``s_1(x) = (x, empty, sigma(1))``.

        Args:
            question: The text ``x``.
            acting: In an external system, the agent that acts first.
        """
        if not isinstance(question, str):
            raise DataError(
                f"expected a question as a str, got {type(question).__name__}; take it from problem.question"
            )
        if self.mas.external and acting is not None and 0 <= acting <= self._sink:
            return MASState(question, acting)
        return MASState(question, self._first)

    def is_terminal(self, state: MASState) -> bool:
        """Return whether the last message reached ``sink``."""
        return state.acting == self._sink

    def legal_recipients(self, state: MASState) -> tuple[int, ...]:
        """Return the recipients that some message could be routed to, in index order, `ALL` last.

        In a dynamic graph the conditions depend on the text, so a recipient listed here
        may still be rejected for a given text; `ALL` is always accepted. An agent that cannot
        act after this message is not listed, although `transition` accepts it. For an agent with
        ``route: message``, `ALL` stands for the recipient that the message names, and
        any other choice overrides it. The result is empty in a terminal state.
        """
        if state.acting == self._sink:
            return ()
        if self._fixed is not None:
            return tuple(self._fixed[state.acting])
        if not self.mas.edges:
            return tuple(range(self._sink + 1))
        if self._names_recipients(state):
            return (*nameable(self.mas, state), self._all)
        early = self._too_early(state)
        targets = [t for t in self._out[state.acting] if (self._can_act(state, t) if t != self._sink else not early)]
        free = tuple(t for t in self._open[state.acting] if t != self._sink or not early)
        if self._sink not in targets and self._ends(state, free):
            targets.append(self._sink)
        return (*targets, self._all)

    def route(self, state: MASState, action: tuple[str, int]) -> tuple[int, ...]:
        """Return the nodes that an action reaches, in node order.

        The result is empty, so that the message reaches no agent, in two cases: `ALL` is chosen,
        but no condition holds and other agents can still act; or the message must name its
        recipient but names no legal one, and its agent has no legal ``fallback``.

        Raises:
            EpisodeOverError: The state is terminal.
            IllegalActionError: The recipient is not legal for this text; the message contains the reason.
        """
        text, recipient = action
        if state.acting == self._sink:
            raise EpisodeOverError("the state is terminal: no agent can act; start from initial_state(question)")
        if not isinstance(text, str):
            raise IllegalActionError(
                f"expected an action (text, recipient) with a str as text, got {type(text).__name__}"
            )
        if self.mas.external and (recipient != self._all or not self.mas.edges):
            return self._next_caller(index(recipient))
        if self._fixed is None:
            find = self._named_route if self._names_recipients(state) else self._dynamic_route
            return find(state, text, index(recipient))
        routes_of_agent = self._fixed[state.acting]
        routes = routes_of_agent.get(recipient)
        if routes is None:
            raise IllegalActionError(self._refusal(state, recipient, routes_of_agent))
        return routes

    def _next_caller(self, recipient: int) -> tuple[int]:
        if 0 <= recipient <= self._sink:
            return (recipient,)
        raise IllegalActionError(
            f"expected the recipient that the running system selects, an agent from 0 to {self._sink - 1} or "
            f"{self._sink} for the end, got {shown(recipient)}"
        )

    def _dynamic_route(self, state: MASState, text: str, recipient: int) -> tuple[int, ...]:
        out = self._out[state.acting]
        # Each condition is evaluated once, even if several edges share it.
        holds = {condition: condition.holds(text) for condition in self._conditions[state.acting]}
        enabled = tuple(t for t, condition in out.items() if condition is None or holds[condition])
        if self._too_early(state):
            enabled = tuple(t for t in enabled if t != self._sink)
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

    def _names_recipients(self, state: MASState) -> bool:
        return self.mas.agents[state.acting].route == "message"

    def _named_route(self, state: MASState, text: str, recipient: int) -> tuple[int, ...]:
        """Return the recipient of an agent with ``route: message``: the named one or the fallback; empty if illegal."""
        conditions, legal = self._out[state.acting], nameable(self.mas, state)
        alone = len(legal) == 1
        enabled = [t for t in legal if alone or (condition := conditions.get(t)) is None or condition.holds(text)]
        if recipient != self._all:
            if recipient not in enabled:
                raise IllegalActionError(self._refusal(state, recipient, [*enabled, self._all]))
            return (recipient,)
        if alone:
            return legal
        name = folded(named_recipient(text) or "")
        named = next((node for node in range(self._sink + 1) if folded(self.mas.node_name(node)) == name), None)
        fallback = self.mas.agents[state.acting].fallback
        return next(((target,) for target in (named, fallback) if target in enabled), ())

    def failure(self, state: MASState) -> str | None:
        """Return the reason for failure if an episode's last message names no legal recipient; else None.

        Such a state is terminal: its message reached no agent, it has no answer, and its reward is -1.
        """
        before = state.parent
        if state.acting != self._sink or before is None or state.recipients:
            return None
        name = named_recipient(state.text)
        problem = "names no recipient" if name is None else f"names {shown(name)} as its recipient"
        speaker, legal = self.mas.agents[state.speaker].name, self._listed(nameable(self.mas, before))
        return f"the message of {speaker} {problem}; expected a line RECIPIENT: with one of {legal}"

    def transition(self, state: MASState, action: tuple[str, int]) -> MASState:
        """Return the successor ``next(s, a)``.

        A message that must name its recipient ends the episode if neither this name nor the agent's
        ``fallback`` is legal; see `failure`.

        Raises:
            EpisodeOverError: The state is terminal.
            IllegalActionError: The recipient is not legal for this text.
        """
        routed = self.route(state, action)
        delivered: tuple[tuple[int, int], ...] = ()
        if routed and routed[-1] == self._sink:
            acting = self._sink
        elif self.mas.external and action[1] != self._all:
            acting = routed[0]
        elif self._fixed is not None:
            acting = state.acting + 1
        elif not routed and nameable(self.mas, state):
            acting = self._sink
        else:
            acting, delivered = self._after(state, routed)
        return MASState(state.question, acting, state, state.acting, action[0], routed, delivered)

    def local_view(self, state: MASState, agent: int) -> LocalView:
        """Return the part of a state that an agent sees (paper, Sec. "Preliminaries", ``H^(i)``).

        Args:
            state: Any state.
            agent: An agent's index, or ``sink``, which sees what was routed to it.

        Raises:
            UnknownNameError: The node does not exist.
        """
        if not 0 <= agent <= self._sink:
            raise UnknownNameError(f"no agent {agent}: expected 0 to {self._sink - 1}, or {self._sink} for the end")
        seen: list[Message] = []
        for turn in state.path()[1:]:
            if turn.speaker == agent:
                seen.extend(Message(agent, turn.text, r) for r in turn.recipients)
            elif agent in turn.recipients:
                seen.append(Message(turn.speaker, turn.text, agent))
        sees = agent < self._sink and self.mas.sees_question[agent]
        return LocalView(state.question if sees else None, tuple(seen))

    def state_from_dict(self, data: JSONMapping) -> MASState:
        """Restore a state from the output of `MASState.to_dict`, and check every turn against this graph.

        Raises:
            DataError: The form, the schema version or a turn is invalid.
        """
        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
            raise DataError(f"expected a state of schema {SCHEMA}, got {shown(data)}; write it with to_dict()")
        try:
            state = self.initial_state(data["question"], data["turns"][0][0] if data["turns"] else data["acting"])
            for speaker, text, recipients in data["turns"]:
                if speaker != state.acting:
                    raise DataError(f"turn {state.depth + 1}: expected speaker {state.acting}, got {shown(speaker)}")
                state = self.replay(state, text, tuple(index(r) for r in recipients))
            if state.acting != data["acting"]:
                raise DataError(f"expected agent {state.acting} to act after these turns, got {shown(data['acting'])}")
        except (LookupError, TypeError, ValueError, EpisodeOverError) as error:
            raise DataError(
                f"expected a transcript of MAS {self.mas.name!r}, but replaying it failed: {error}"
            ) from error
        return state

    def replay(self, state: MASState, text: str, recipients: tuple[int, ...]) -> MASState:
        """Return the successor that a recorded turn led to.

        Raises:
            DataError: No action with this text reaches these recipients.
        """
        return self.transition(state, self.replayed_action(state, text, recipients))

    def replayed_action(self, state: MASState, text: str, recipients: tuple[int, ...]) -> Action:
        """Return the action of a recorded turn: `ALL` if it reaches these recipients, otherwise one of them.

        Raises:
            DataError: No action with this text reaches these recipients.
        """
        # In an external system without edges, every action has an explicit recipient.
        choices = recipients if self.mas.external and not self.mas.edges else (self._all, *recipients)
        for choice in choices:
            if self.route(state, (text, choice)) == recipients:
                return Action(text, choice)
        problem = f"agent {state.acting} cannot send to {shown(list(recipients))}"
        raise DataError(f"turn {state.depth + 1}: {problem}")

    def _deliver(self, state: MASState, targets: tuple[int, ...]) -> dict[int, int]:
        """Return, for each waiting agent, the number of messages delivered to it so far, including this one."""
        waiting = dict(state.delivered)
        for target in targets:
            if target != self._sink:
                waiting[target] = waiting.get(target, 0) + 1
        return waiting

    def _after(self, state: MASState, targets: tuple[int, ...]) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Return the agent that acts after this message, and the deliveries to waiting agents."""
        waiting = self._deliver(state, targets)
        if self.mas.max_turns is not None:
            if not waiting or state.depth + 1 >= self.max_depth:
                return self._sink, ()
            # A dict keeps the order in which messages first reached each agent.
            (acting, _), *rest = waiting.items()
            return acting, tuple(rest)
        ready = [agent for agent, n in waiting.items() if n == self._in_degree[agent]]
        acting = min([*ready, self._next_free[state.acting + 1]])
        # Agents are visited in order, so those before the acting one never act again.
        return acting, tuple((agent, n) for agent, n in waiting.items() if agent > acting)

    def _can_act(self, state: MASState, target: int) -> bool:
        """Return whether an agent can act if this message reaches only it, and later agents send along every edge."""
        if self.mas.external:
            return True
        waiting = self._deliver(state, (target,))
        if self.mas.max_turns is not None:
            return list(waiting).index(target) < self.max_depth - state.depth - 1
        for agent in range(state.acting + 1, target):
            if waiting.get(agent, 0) == self._in_degree[agent]:
                for following in self._out[agent]:
                    waiting[following] = waiting.get(following, 0) + 1
        return waiting[target] == self._in_degree[target]

    def _ends(self, state: MASState, targets: tuple[int, ...]) -> bool:
        return self._after(state, targets)[0] == self._sink

    def _too_early(self, state: MASState) -> bool:
        return state.depth + 1 < self.mas.min_turns

    def _refusal(self, state: MASState, recipient: int, legal: Iterable[int]) -> str:
        speaker = self.mas.agents[state.acting].name
        why = "the edge's condition does not hold for this text" if recipient in self._out[state.acting] else "no edge"
        if recipient == self._sink and self._too_early(state):
            why = f"the episode cannot end before turn {self.mas.min_turns}"
        return f"{speaker} cannot route to {shown(recipient)}: {why}; expected one of {self._listed(legal)}"

    def _listed(self, nodes: Iterable[int]) -> str:
        names = [f"{node} ({self.mas.node_name(node)})" for node in dict.fromkeys(nodes)]
        return ", ".join(names if len(names) <= _NAMES_SHOWN else [*names[: _NAMES_SHOWN - 1], "...", names[-1]])
