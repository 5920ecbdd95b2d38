"""The search tree: flat columns, one entry per node, the root at index 0.

Node ``i`` represents a state and also the edge ``(s, a)`` that leads to it, so
``visits[i]`` is ``N(s, a)`` and ``totals[i]`` is ``W(s, a)``. No function is recursive,
and siblings share all earlier messages. A tree therefore takes less than 200 bytes per
node, including the states but not the texts.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from mas_gym.critics import Proposal
from mas_gym.errors import DataError, MASGymError
from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.policies.base import mean_logprob
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.state import Action, MASState

SCHEMA = 1
TERMINAL = -1
"""Value in ``Tree.first`` for a terminal state; 0 means no children yet."""

_NAN = math.nan


_UNKNOWN = Proposal(Action("", -1))


class Node(NamedTuple):
    """A readable copy of one tree entry; its message is described as in `Proposal`.

    Attributes:
        id: Position in the tree.
        parent: Index of the parent; -1 for the root.
        visits: ``N``, virtual visits included.
        total: ``W``.
        q: ``W / N``; None if never visited.
        value: The critic's value of the state, or the true reward; None if unknown.
    """

    id: int
    parent: int
    state: MASState
    visits: int
    total: float
    q: float | None
    value: float | None
    tokens: int
    logprob: float | None
    finish_reason: str
    tag: str = ""


class Tree:
    """A growing tree of states.

    Columns are public for reading; planners write ``visits``, ``totals`` and ``values``.

    Attributes:
        states: The state of each node.
        parents: Index of each node's parent; -1 for the root.
        first: Index of each node's first child, 0 for a node without children, `TERMINAL` for a terminal state.
        last: End (exclusive) of the block of children that starts at ``first``.
        visits: ``N``.
        totals: ``W``.
        values: The value of each state; NaN if unknown.
        tokens: Generated tokens of each node's message.
        logprobs: Log-probabilities of each node's message; NaN if unknown.
        tags: The tag of each node's message, by node; nodes without a tag are missing.
    """

    def __init__(self, root: MASState) -> None:
        self.states = [root]
        self.parents = array("i", [-1])
        self.first = array("i", [0])
        self.last = array("i", [0])
        # These are lists, not arrays: selection reads both constantly, and lists share small integers and first values.
        self.visits = [0]
        self.totals = [0.0]
        self.values = array("d", [_NAN])
        self.tokens = array("i", [0])
        self.logprobs = array("d", [_NAN])
        self.tags: dict[int, str] = {}
        self._cut = bytearray(1)
        self._late: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, index: int) -> Node:
        index = range(len(self.states))[index]
        visits, value, logprob = self.visits[index], self.values[index], self.logprobs[index]
        return Node(
            index,
            self.parents[index],
            self.states[index],
            visits,
            self.totals[index],
            self.totals[index] / visits if visits else None,
            None if math.isnan(value) else value,
            self.tokens[index],
            None if math.isnan(logprob) else logprob,
            "length" if self._cut[index] else "stop",
            self.tags.get(index, ""),
        )

    def __iter__(self) -> Iterator[Node]:
        """Iterate over the nodes in order of creation, parents before children."""
        return (self[index] for index in range(len(self.states)))

    def add(self, parent: int, state: MASState, proposal: Proposal | None = None, terminal: bool = False) -> int:
        """Append a child and return its index.

        Consecutively added children of one node form the block from `first` to `last`; children added later are found
        only by `children`.

        Args:
            parent: Index of the parent.
            state: The child's state.
            proposal: The message of the child, for its tokens, log-probability and tag.
            terminal: Whether the state is terminal.
        """
        index = len(self.states)
        self.states.append(state)
        self.parents.append(parent)
        self.first.append(TERMINAL if terminal else 0)
        self.last.append(0)
        self.visits.append(0)
        self.totals.append(0.0)
        self.values.append(_NAN)
        message = _UNKNOWN if proposal is None else proposal
        self.tokens.append(message.tokens)
        self.logprobs.append(_NAN if message.logprob is None else message.logprob)
        self._cut.append(message.finish_reason == "length")
        if message.tag:
            self.tags[index] = message.tag
        if self.first[parent] == 0:
            self.first[parent] = self.last[parent] = index
        if self.last[parent] == index:
            self.last[parent] = index + 1
        else:
            self._late.setdefault(parent, []).append(index)
        return index

    def children(self, node: int) -> Sequence[int]:
        """Return the indices of a node's children, oldest first."""
        block = range(self.first[node], self.last[node]) if self.first[node] > 0 else range(0)
        late = self._late.get(node)
        return [*block, *late] if late else block

    def mean_logprob(self, node: int) -> float:
        """Return the length-normalized log-likelihood of a node's message, in nats per token; NaN if unknown."""
        return mean_logprob(self.logprobs[node], self.tokens[node])

    def is_terminal(self, node: int) -> bool:
        """Return whether a node's state is terminal."""
        return self.first[node] == TERMINAL

    def path(self, node: int) -> list[int]:
        """Return the indices from the root to a node, inclusive."""
        path = [node]
        parents = self.parents
        while (node := parents[node]) >= 0:
            path.append(node)
        path.reverse()
        return path

    def to_dict(self) -> JSONObject:
        """Return the columns as JSON values, with each distinct text stored once; `from_dict` reads them back."""
        texts: dict[str, int] = {}
        rest = self.states[1:]
        tags = {"tag": [self.tags.get(index, "") for index in range(len(self))]} if self.tags else {}
        return {
            "schema": SCHEMA,
            "root": self.states[0].to_dict(),
            "parent": self.parents.tolist(),
            "text": [texts.setdefault(s.text, len(texts)) for s in rest],
            "texts": list(texts),
            "recipients": [list(s.recipients) for s in rest],
            "visits": list(self.visits),
            "total": list(self.totals),
            "value": [None if math.isnan(v) else v for v in self.values],
            "tokens": self.tokens.tolist(),
            "logprob": [None if math.isnan(v) else v for v in self.logprobs],
            "truncated": [index for index, cut in enumerate(self._cut) if cut],
            **tags,
        }

    @classmethod
    def from_dict(cls, data: JSONMapping, model: Dynamics) -> Tree:
        """Rebuild a tree from `to_dict`, replaying every transition.

        Args:
            data: The JSON-serializable form.
            model: The transition model of the system that the tree belongs to.

        Raises:
            DataError: The form, the schema version or a transition is invalid.
        """
        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
            raise DataError(f"expected a tree of schema {SCHEMA}, got {str(data)[:80]!r}; write it with to_dict()")
        try:
            tree = cls(model.state_from_dict(data["root"]))
            cut = set(data["truncated"])
            tags = data.get("tag") or [""] * len(data["parent"])
            for index, parent in enumerate(data["parent"][1:], 1):
                if not 0 <= parent < index:
                    raise DataError(f"node {index}: expected an earlier node as its parent, got {parent}")
                text, recipients = data["texts"][data["text"][index - 1]], tuple(data["recipients"][index - 1])
                finish = "length" if index in cut else "stop"
                message = Action(text, -1), data["tokens"][index], data["logprob"][index]
                proposal = Proposal(*message, finish, tag=str(tags[index]))
                state = model.replay(tree.states[parent], text, recipients)
                tree.add(parent, state, proposal, model.is_terminal(state))
            tree.visits[:] = [int(v) for v in data["visits"]]
            tree.totals[:] = [float(v) for v in data["total"]]
            tree.values[:] = array("d", (_NAN if v is None else v for v in data["value"]))
        except (KeyError, IndexError, TypeError, ValueError, MASGymError) as error:
            raise DataError(
                f"expected a tree of this MAS, got the error {error!r}; write trees with to_dict()"
            ) from error
        if not len(tree.visits) == len(tree.totals) == len(tree.values) == len(tree):
            raise DataError("expected columns of equal length, got different lengths; write trees with to_dict()")
        return tree
