"""Immutable search states: a question, a routed transcript and the agent to act.

A state is one link of a chain: it holds its last turn and its parent, so that a
transition allocates one small object however long the transcript is, and sibling
states share everything but their own message. Nothing here recurses, so chains
of any length can be hashed, compared, pickled, walked and freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Any, NamedTuple, cast

SCHEMA = 1
_DIGEST_BYTES = 16


class Action(NamedTuple):
    """What an acting agent does: say ``text`` to ``recipient`` (a node index, or ALL)."""

    text: str
    recipient: int


class Message(NamedTuple):
    """One routed message, the triple of the paper's Sec. "Preliminaries"."""

    speaker: int
    text: str
    recipient: int


class Turn(NamedTuple):
    """One agent's action with the recipients that it reached, in node order."""

    speaker: int
    text: str
    recipients: tuple[int, ...]


class LocalView(NamedTuple):
    """What one agent sees: the question if ``q -> agent`` exists, and the messages it sent or received."""

    question: str | None
    messages: tuple[Message, ...]


class Link:
    """The fields of a `MASState` while they are being filled in; calling it returns a sealed `MASState`.

    Changing the class at the end seals the fields at no cost, where a frozen
    dataclass would double the time of a transition.
    """

    __slots__ = ("_delivered", "_digest", "acting", "depth", "parent", "question", "recipients", "speaker", "text")

    def __init__(
        self,
        question: str,
        acting: int,
        parent: MASState | None = None,
        speaker: int = -1,
        text: str = "",
        recipients: tuple[int, ...] = (),
        delivered: int = 0,
    ) -> None:
        """Link a new state to its parent; constant time."""
        self.question = question
        self.acting = acting
        self.parent = parent
        self.speaker = speaker
        self.text = text
        self.recipients = recipients
        self.depth: int = 0 if parent is None else parent.depth + 1
        self._delivered = delivered
        self._digest: bytes | None = None
        self.__class__ = MASState


class MASState(Link):
    """A state ``s_t = (x, H_{t-1}, i_t)`` (paper, Sec. "Preliminaries").

    Immutable, hashable, picklable; ``copy`` and ``deepcopy`` return the object
    itself. Two states are equal when question, transcript and acting agent are.
    Made by `mas_gym.Dynamics`, never by hand.

    Attributes:
        question: The text ``x``.
        acting: Index of the agent to act, or ``sink`` (= M) in a terminal state.
        parent: The state before the last turn; None in an initial state.
        speaker: Speaker of the last turn; -1 in an initial state.
        text: Text of the last turn; empty in an initial state.
        recipients: Recipients of the last turn, in node order; empty when every condition was closed.
        depth: Number of turns taken.
    """

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> MASState:
        """Return a sealed state."""
        return cast(MASState, Link(*args, **kwargs))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `Link` has filled the fields."""

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse: states are shared by trees, snapshots and caches."""
        raise AttributeError(f"a MASState never changes: cannot set {name!r}; use Dynamics.transition to get a new one")

    def __delattr__(self, name: str) -> None:
        """Refuse, as `__setattr__` does."""
        raise AttributeError(f"a MASState never changes: cannot delete {name!r}")

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
        """A 16-byte fingerprint of question and transcript, equal in every process and on every machine."""
        if self._digest is None:
            fresh: list[MASState] = []
            state: MASState | None = self
            while state is not None and state._digest is None:
                fresh.append(state)
                state = state.parent
            for link in reversed(fresh):
                _set_digest(link, link._own_digest())
        assert self._digest is not None
        return self._digest

    def _own_digest(self) -> bytes:
        if self.parent is None:
            head, body = b"q", self.question
        else:
            # The first byte keeps a question from imitating a fingerprint followed by a turn.
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
        """Hash the fingerprint."""
        return hash(self.digest)

    def __copy__(self) -> MASState:
        """Return the state itself, which never changes."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> MASState:
        """Return the state itself, which never changes."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a flat list of links."""
        links = [(s.acting, s.speaker, s.text, s.recipients, s._delivered) for s in self.path()]
        return _relink, (self.question, links)

    def __repr__(self) -> str:
        """Show question, depth and who acts."""
        return f"MASState({self.question[:40]!r}, depth={self.depth}, acting={self.acting})"

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form; `mas_gym.Dynamics.state_from_dict` reads it back.

        One caveat is JSON's own: it cannot tell a character outside the basic plane
        from the two surrogate code points that would encode it.
        """
        turns = [[t.speaker, t.text, list(t.recipients)] for t in self.turns]
        return {"schema": SCHEMA, "question": self.question, "turns": turns, "acting": self.acting}


# Sealing closes ordinary assignment; the fingerprint is a cache and comes in through its slot.
_set_digest: Callable[[MASState, bytes], None] = Link.__dict__["_digest"].__set__


def _relink(question: str, links: Iterable[tuple[int, int, str, tuple[int, ...], int]]) -> MASState:
    state: MASState | None = None
    for acting, speaker, text, recipients, delivered in links:
        state = cast(MASState, Link(question, acting, state, speaker, text, recipients, delivered))
    assert state is not None
    return state
