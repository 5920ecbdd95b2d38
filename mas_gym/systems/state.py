"""Immutable search states: a question, a routed transcript and the acting agent.

States form linked lists: a state contains its last turn and a reference to its parent. A
transition therefore allocates one small object for a transcript of any length, and
siblings share all earlier turns. No function is recursive, so states of any depth can be
hashed, compared, pickled, traversed and freed.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any, NamedTuple

from mas_gym.internal.json_types import JSONObject

SCHEMA = 1
_DIGEST_BYTES = 16


class Action(NamedTuple):
    """The acting agent sends ``text`` to ``recipient`` (a node index, or ALL)."""

    text: str
    recipient: int


class Message(NamedTuple):
    """One routed message: the triple defined in the paper, Sec. "Preliminaries"."""

    speaker: int
    text: str
    recipient: int


class Turn(NamedTuple):
    """One agent's message with all recipients that it reached, in node order."""

    speaker: int
    text: str
    recipients: tuple[int, ...]


class LocalView(NamedTuple):
    """One agent's view of a state: the question if ``q -> agent`` exists, and the messages it sent or received."""

    question: str | None
    messages: tuple[Message, ...]


class MASState:
    """A state ``s_t = (x, H_{t-1}, i_t)`` (paper, Sec. "Preliminaries").

    Immutable, hashable, picklable; ``copy`` and ``deepcopy`` return the object
    itself. Two states are equal if their question, transcript and acting agent are.
    Only `mas_gym.Dynamics` creates states.

    Attributes:
        question: The text ``x``.
        acting: Index of the agent to act, or ``sink`` (= M) in a terminal state.
        parent: The state before the last turn; None in an initial state.
        speaker: Speaker of the last turn; -1 in an initial state.
        text: Text of the last turn; empty in an initial state.
        recipients: Recipients of the last turn, in node order; empty if no condition held.
        delivered: In a dynamic schedule, ``(agent, n)`` for each agent that may still act and has received messages
            through ``n`` of its in-edges; with loops, for each agent with ``n`` unread messages, in order of arrival.
        depth: Number of turns taken.
    """

    __slots__ = ("_digest", "acting", "delivered", "depth", "parent", "question", "recipients", "speaker", "text")

    question: str
    acting: int
    parent: MASState | None
    speaker: int
    text: str
    recipients: tuple[int, ...]
    delivered: tuple[tuple[int, int], ...]
    depth: int
    _digest: bytes | None

    def __init__(
        self,
        question: str,
        acting: int,
        parent: MASState | None = None,
        speaker: int = -1,
        text: str = "",
        recipients: tuple[int, ...] = (),
        delivered: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """Link a new state to its parent; constant time."""
        put = object.__setattr__
        put(self, "question", question)
        put(self, "acting", acting)
        put(self, "parent", parent)
        put(self, "speaker", speaker)
        put(self, "text", text)
        put(self, "recipients", recipients)
        put(self, "delivered", delivered)
        put(self, "depth", 0 if parent is None else parent.depth + 1)
        put(self, "_digest", None)

    def __setattr__(self, name: str, value: object) -> None:
        """Raise an error, because trees, snapshots and caches share states."""
        raise AttributeError(f"a MASState is immutable: cannot set {name!r}; use Dynamics.transition to get a new one")

    def __delattr__(self, name: str) -> None:
        """Raise an error, as `__setattr__` does."""
        raise AttributeError(f"a MASState is immutable: cannot delete {name!r}")

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns taken so far, oldest first; linear in their number."""
        return tuple(Turn(s.speaker, s.text, s.recipients) for s in self.path()[1:])

    @property
    def transcript(self) -> tuple[Message, ...]:
        """The routed transcript ``H``: one message per recipient, oldest first."""
        return tuple(Message(s.speaker, s.text, r) for s in self.path()[1:] for r in s.recipients)

    def path(self) -> list[MASState]:
        """Return the states from the initial one to this one."""
        states: list[MASState] = []
        state: MASState | None = self
        while state is not None:
            states.append(state)
            state = state.parent
        states.reverse()
        return states

    @property
    def digest(self) -> bytes:
        """A 16-byte fingerprint of question and transcript, the same in every process and on every machine."""
        if self._digest is None:
            fresh: list[MASState] = []
            state: MASState | None = self
            while state is not None and state._digest is None:
                fresh.append(state)
                state = state.parent
            for link in reversed(fresh):
                object.__setattr__(link, "_digest", link._own_digest())
        assert self._digest is not None
        return self._digest

    def _own_digest(self) -> bytes:
        if self.parent is None:
            head, body = b"q", self.question
        else:
            # The first byte distinguishes a question from a digest followed by a turn.
            route = f"{self.speaker}>{','.join(map(str, self.recipients))}|"
            head, body = b"t" + (self.parent._digest or b"") + route.encode(), self.text
        return blake2b(head + body.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()

    def __eq__(self, other: object) -> bool:
        """Compare question, transcript and acting agent."""
        if self is other:
            return True
        if not isinstance(other, MASState):
            return NotImplemented
        return self.depth == other.depth and self.acting == other.acting and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __copy__(self) -> MASState:
        """Return the state itself, which never changes."""
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> MASState:
        """Return the state itself, which never changes."""
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as a flat list of links."""
        links = [(s.acting, s.speaker, s.text, s.recipients, s.delivered) for s in self.path()]
        return _relink, (self.question, links)

    def __repr__(self) -> str:
        """Show question, depth and acting agent."""
        return f"MASState({self.question[:40]!r}, depth={self.depth}, acting={self.acting})"

    def to_dict(self) -> JSONObject:
        """Return a JSON-serializable form; `mas_gym.Dynamics.state_from_dict` reads it back.

        JSON has one limitation: it cannot distinguish a character outside the Basic Multilingual
        Plane from the two surrogate code points that encode it.
        """
        turns = [[t.speaker, t.text, list(t.recipients)] for t in self.turns]
        return {"schema": SCHEMA, "question": self.question, "turns": turns, "acting": self.acting}


def _relink(question: str, links: Iterable[tuple[Any, ...]]) -> MASState:
    state: MASState | None = None
    for acting, speaker, text, recipients, delivered in links:
        state = MASState(question, acting, state, speaker, text, recipients, delivered)
    assert state is not None
    return state
