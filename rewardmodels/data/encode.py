"""States as text and as token ids, part by part: version 1 of the critic's input format.

.. code-block:: text

    Agents: 0 Reader, 1 Planner, 2 Solver, 3 Verifier, 4 sink
    Maya has 14 marbles ...
    0>1: Facts: has 14, ...
    1>2,3: Plan: start 14, ...
    2

The text consists of a legend of names, the question, each message as
``speaker>recipients: text``, and the acting agent. With the legend, a header needs only a
few digits. The legend is the same for every problem, so it is encoded once.

The text has these parts: the legend, the question with the first speaker, and one
part per message, from its ``>`` to the next speaker. The parts of a state are thus a
prefix of the parts of every successor, and siblings differ only in the last part.
Parts are tokenized separately, so the same holds for token ids. The last token is
the acting agent, and the value is read at this token.

`Encoder` tokenizes each distinct part once. `merge_beginnings` merges states into a trie, for
training and for scoring. In training, the states of one tree form one row of tokens that contains
each node of the trie once. A mask lets each token attend only to its ancestors, and positions count
along the path. A decoder then computes for each state exactly what it would compute for that
state alone, with a fraction of the tokens.

Letters in shapes: R rows, S tokens of a row, K states.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from mas_gym.errors import CriticError, DataError
from mas_gym.systems.graph import MAS
from mas_gym.systems.state import MASState

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

FORMAT = 1
"""Version of the text form; saved with each critic and with each exported dataset."""

View = Literal["full", "local"]
"""``"full"``: the whole transcript. ``"local"``: the last speaker's inputs and its new message."""

Parts = tuple[str, ...]
"""The parts of a state's text: legend, question, and one per message."""

CUT = "[...]"
"""Marks an omission in a text."""

_LINE_BREAK = re.compile(r"\r\n?|[\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
_HEADER = re.compile(r"(?m)^(?=[0-9]+>[0-9,]*: )")


def escape_message(text: str) -> str:
    """Return text that cannot be mistaken for another message's header or a special token.

    Line breaks of every kind become newlines, a line that looks like a header gets a leading space, ``<|``
    becomes ``< |``, and lone surrogates, which tokenizers reject, become ``?``.
    """
    text = _LINE_BREAK.sub("\n", text.strip()).replace("<|", "< |")
    return _HEADER.sub(" ", text).encode("utf-8", "replace").decode("utf-8")


def legend(mas: MAS) -> str:
    """Return the first part: the name of each agent index."""
    names = [" ".join(mas.node_name(node).split()) for node in range(mas.sink + 1)]
    return "Agents: " + ", ".join(f"{node} {name}" for node, name in enumerate(names)) + "\n"


def state_parts(mas: MAS, state: MASState, view: View = "full") -> list[str]:
    """Return the parts of a state's text.

    Args:
        mas: The system.
        state: Any state.
        view: Part of the state that the critic reads; see `View` (paper, App. "Local observability ablation").

    Returns:
        The legend, the question, and one part per message shown.
    """
    turns = [(s.speaker, s.recipients, s.text) for s in state.path()[1:]]
    if view == "local" and turns:
        turns = [*_heard(turns[:-1], state.speaker), turns[-1]]
    following = [*(speaker for speaker, _, _ in turns), state.acting]
    parts = [legend(mas), f"{escape_message(state.question)}\n{following[0]}"]
    for (_, recipients, text), speaker in zip(turns, following[1:], strict=True):
        parts.append(f">{','.join(map(str, recipients))}: {escape_message(text)}\n{speaker}")
    return parts


def _heard(turns: list[tuple[int, tuple[int, ...], str]], agent: int) -> list[tuple[int, tuple[int, ...], str]]:
    """Return the messages that an agent wrote or received."""
    kept = []
    for speaker, recipients, text in turns:
        if speaker == agent:
            kept.append((speaker, recipients, text))
        elif agent in recipients:
            kept.append((speaker, (agent,), text))
    return kept


def state_text(mas: MAS, state: MASState, view: View = "full") -> str:
    """Return a state's text: the joined parts."""
    return "".join(state_parts(mas, state, view))


def drop_oldest(parts: list[str], count: int) -> list[str]:
    """Replace the oldest messages of a state with `CUT`.

    Args:
        parts: As `state_parts` returns them.
        count: Number of messages to drop, less than the total.
    """
    question = parts[1].rpartition("\n")[0]
    speaker = parts[1 + count].rpartition("\n")[2]
    return [parts[0], f"{question}\n{CUT}\n{speaker}", *parts[2 + count :]]


Ids = tuple[int, ...]

_MEMORY = 100_000
_LEAST_QUESTION = 16


EncodedState = tuple[Ids, ...]
"""The token ids of each part of a state; joined, they are the input."""


class Encoder:
    """Converts states to token ids.

    Args:
        tokenizer: Any fast tokenizer of transformers.
        max_length: Longest input, in tokens. From longer inputs, the oldest messages are dropped, then the start of the
            question, then the start of the newest message.
        view: Part of a state that the critic reads.

    Attributes:
        shortened: Number of states that were longer than ``max_length``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int, view: View = "full") -> None:
        """Store the settings and find the special tokens that start every text."""
        self.tokenizer, self.max_length, self.view = tokenizer, max_length, view
        self.shortened = 0
        self._known: dict[str, Ids] = {}
        with_special: list[int] = tokenizer("a")["input_ids"]
        plain: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
        if not plain:
            raise DataError("expected a tokenizer with a vocabulary, got an empty one; copy the folder again")
        # Some tokenizers start every text with a special token, which belongs to the first part only.
        self._opening: Ids = tuple(with_special[: with_special.index(plain[0])])

    def encode(self, states: Sequence[tuple[MAS, MASState]]) -> list[EncodedState]:
        """Encode states; raises `CriticError` if the agents' names and a question exceed ``max_length``."""
        return self.encode_parts([state_parts(mas, state, self.view) for mas, state in states])

    def encode_parts(self, states: Sequence[Sequence[str]]) -> list[EncodedState]:
        """Encode states given by the parts of their texts (`rewardmodels.data.encode.state_parts`)."""
        if len(self._known) > _MEMORY:
            self._known.clear()
        self._learn(sorted({part for parts in states for part in parts}))
        return [self._fit(list(parts)) for parts in states]

    def _ids(self, parts: Sequence[str]) -> EncodedState:
        ids = tuple(self._known[part] for part in parts)
        return (self._opening + ids[0], *ids[1:]) if self._opening else ids

    def _learn(self, parts: list[str]) -> None:
        new = [part for part in parts if part not in self._known]
        if new:
            found = self.tokenizer(new, add_special_tokens=False)["input_ids"]
            self._known.update(zip(new, map(tuple, found), strict=True))

    def _fit(self, parts: list[str]) -> EncodedState:
        fitted = self._ids(parts)
        if tokens_in(fitted) <= self.max_length:
            return fitted
        self.shortened += 1
        for count in range(1, len(parts) - 2):
            shorter = drop_oldest(parts, count)
            self._learn(shorter[1:2])
            fitted = self._ids(shorter)
            if tokens_in(fitted) <= self.max_length:
                return fitted
        return self._cut_question(fitted)

    def _cut_question(self, fitted: EncodedState) -> EncodedState:
        self._learn([CUT])
        marker, length = self._known[CUT], tokens_in(fitted)
        room = self.max_length - (length - len(fitted[1])) - len(marker)
        least = min(_LEAST_QUESTION, len(fitted[1]))
        newest = fitted[-1] if len(fitted) > 2 else ()
        if room < least:
            left = len(newest) + room - least - len(marker)
            if left < 1:
                raise CriticError(
                    f"expected the agents' names and a question to fit in {self.max_length} tokens, got "
                    f"{length - len(newest)} tokens without the newest message; use a critic that was trained "
                    "with a larger max_length"
                )
            # The end of a message states its result, and the last token is read.
            newest, room = marker + newest[-left:], least
            fitted = (*fitted[:-1], newest)
        return (fitted[0], marker + fitted[1][-room:], *fitted[2:])


def tokens_in(state: EncodedState) -> int:
    """Return the number of tokens of a state."""
    return sum(map(len, state))


Ints = NDArray[np.int64]
T = TypeVar("T")

MOST_TOKENS = 8192
"""Largest forward pass, in tokens; a single part or state may be larger."""


class Packed(NamedTuple):
    """One row of tokens.

    Attributes:
        ids: Token ids, shape (S,).
        positions: Position of each token in its state, shape (S,).
        sees: Whether token i may attend to token j, shape (S, S).
        ends: Index of each state's last token, shape (K,).
    """

    ids: Ints
    positions: Ints
    sees: NDArray[np.bool_]
    ends: Ints


class Trie(NamedTuple):
    """States with merged shared prefixes; a node is one part of a text, in the context of all preceding parts.

    Attributes:
        parents: Parent of each node, -1 for a first part; parents come before their children.
        parts: Token ids of each node.
        ends: Last node of each state, shape (K,).
    """

    parents: list[int]
    parts: list[Ids]
    ends: list[int]

    def path(self, node: int) -> list[int]:
        """Return the path from a first part to a node, inclusive."""
        found = []
        while node >= 0:
            found.append(node)
            node = self.parents[node]
        return found[::-1]


def merge_beginnings(states: Sequence[Sequence[Ids]]) -> Trie:
    """Merge the shared prefixes of states; each state has at least one part, and parts are not empty."""
    known: dict[tuple[int, Ids], int] = {}
    trie = Trie([], [], [])
    for state in states:
        node = -1
        for ids in state:
            parent, node = node, known.setdefault((node, ids), len(trie.parts))
            if node == len(trie.parts):
                trie.parents.append(parent)
                trie.parts.append(ids)
        trie.ends.append(node)
    return trie


def pack(states: Sequence[Sequence[Ids]]) -> Packed:
    """Arrange states in one row of tokens, storing each node of their trie only once."""
    trie = merge_beginnings(states)
    starts = np.cumsum([0, *map(len, trie.parts)])
    total = int(starts[-1])
    ids_row = np.fromiter((i for part in trie.parts for i in part), np.int64, total)
    positions = np.empty(total, np.int64)
    sees = np.zeros((total, total), np.bool_)
    for node, parent in enumerate(trie.parents):
        a, b = int(starts[node]), int(starts[node + 1])
        before = 0
        if parent >= 0:
            last = int(starts[parent + 1]) - 1
            before = int(positions[last]) + 1
            sees[a:b, : last + 1] = sees[last, : last + 1]
        positions[a:b] = np.arange(before, before + b - a)
        sees[a:b, a:b] = np.tri(b - a, dtype=np.bool_)
    return Packed(ids_row, positions, sees, starts[1:][trie.ends] - 1)


Tensors: TypeAlias = "dict[str, torch.Tensor]"
"""The tensors of a forward pass.

``input_ids`` (R, S), and either ``position_ids`` (R, S) with a 4-D additive ``attention_mask`` (R, 1, S, S), or a plain
2-D mask; ``rows`` and ``columns`` (K,) of each state's last token. Training adds the places of states in the loss.
"""


def collate(rows: Sequence[Packed], pad: int, dtype: torch.dtype) -> Tensors:
    """Pad packed rows to one length.

    Args:
        rows: The rows.
        pad: Padding id.
        dtype: Data type of the additive mask: that of the model.
    """
    import torch

    count, width = len(rows), max(len(row.ids) for row in rows)
    ids = np.full((count, width), pad, np.int64)
    positions = np.zeros((count, width), np.int64)
    sees = np.zeros((count, 1, width, width), np.bool_)
    # A padding token must attend to a token; otherwise its softmax is over an empty set.
    sees[:, :, :, 0] = True
    for i, row in enumerate(rows):
        size = len(row.ids)
        ids[i, :size] = row.ids
        positions[i, :size] = row.positions
        sees[i, 0, :size, :size] = row.sees
    mask = torch.zeros(sees.shape, dtype=dtype).masked_fill_(torch.from_numpy(~sees), torch.finfo(dtype).min)
    where = np.concatenate([np.full(len(row.ends), i) for i, row in enumerate(rows)])
    columns = np.concatenate([row.ends for row in rows])
    arrays = {"input_ids": ids, "position_ids": positions, "rows": where, "columns": columns}
    return {"attention_mask": mask, **{name: torch.from_numpy(array) for name, array in arrays.items()}}


def collate_plain(states: Sequence[Sequence[Ids]], pad: int) -> Tensors:
    """Return each complete state as one row, padded on the right; for models that do not support custom masks."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    rows = [torch.tensor([token for part in state for token in part]) for state in states]
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    ids = pad_sequence(rows, batch_first=True, padding_value=pad)
    places = {"rows": torch.arange(len(states)), "columns": mask.sum(dim=1) - 1}
    return {"input_ids": ids, "attention_mask": mask, **places}


def chunks(items: Sequence[T], sizes: Sequence[int], padded: bool = False, limit: int = MOST_TOKENS) -> list[list[T]]:
    """Split items into batches of a limited size, such as forward passes of a limited number of tokens.

    Args:
        items: The items, in order.
        sizes: Size of each item, such as its tokens; ascending if ``padded``.
        padded: Whether a batch pads all items to the size of its largest item.
        limit: Largest size of a batch; a larger item gets a separate one.
    """
    cut: list[list[T]] = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        total = size * (len(cut[-1]) + 1) if cut and padded else total + size
        if not cut or total > limit:
            cut.append([])
            total = size
        cut[-1].append(item)
    return cut
