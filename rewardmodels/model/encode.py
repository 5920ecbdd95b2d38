"""States to token ids, part by part; each distinct part is tokenized once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from mas_gym.errors import CriticError, DataError
from mas_gym.graph import MAS
from mas_gym.state import MASState
from rewardmodels.data.serialise import CUT, View, drop_oldest, state_parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = tuple[int, ...]

_MEMORY = 100_000
_LEAST_QUESTION = 16


class Encoded(NamedTuple):
    """A state's token ids.

    Attributes:
        parts: Ids of each part; joined, they are the input.
        dropped: Number of tokens left out because the state was longer than ``max_length``.
    """

    parts: tuple[Ids, ...]
    dropped: int = 0

    @property
    def length(self) -> int:
        """Number of tokens."""
        return sum(map(len, self.parts))


class Encoder:
    """Turns states into token ids.

    Args:
        tokenizer: Any fast tokenizer of transformers.
        max_length: Longest input, in tokens. A longer one loses its oldest messages, then the start of the
            question, but no token of the newest message.
        view: What the critic sees.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int, view: View = "full") -> None:
        """Keep the settings and tokenize the opening."""
        self.tokenizer, self.max_length, self.view = tokenizer, max_length, view
        self._known: dict[str, Ids] = {}
        with_special: list[int] = tokenizer("a")["input_ids"]
        plain: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
        if not plain:
            raise DataError("expected a tokenizer that knows letters, got one without a vocabulary; copy it again")
        # Some tokenizers start every text with a special token, which belongs to the first part only.
        self._opening: Ids = tuple(with_special[: with_special.index(plain[0])])

    def encode(self, states: Sequence[tuple[MAS, MASState]]) -> list[Encoded]:
        """Encode states; raises `CriticError` when a newest message alone is longer than ``max_length``."""
        return self.encode_parts([state_parts(mas, state, self.view) for mas, state in states])

    def encode_parts(self, states: Sequence[Sequence[str]]) -> list[Encoded]:
        """Encode states given by the parts of their texts (`rewardmodels.data.serialise.state_parts`)."""
        if len(self._known) > _MEMORY:
            self._known.clear()
        self._learn(sorted({part for parts in states for part in parts}))
        return [self._fit(list(parts), Encoded(self._ids(parts))) for parts in states]

    def _ids(self, parts: Sequence[str]) -> tuple[Ids, ...]:
        ids = tuple(self._known[part] for part in parts)
        return (self._opening + ids[0], *ids[1:]) if self._opening else ids

    def _learn(self, parts: list[str]) -> None:
        new = [part for part in parts if part not in self._known]
        if new:
            found = self.tokenizer(new, add_special_tokens=False)["input_ids"]
            self._known.update(zip(new, map(tuple, found), strict=True))

    def _fit(self, parts: list[str], whole: Encoded) -> Encoded:
        if whole.length <= self.max_length:
            return whole
        messages = len(parts) - 2
        fitted = whole
        for count in range(1, messages):
            shorter = drop_oldest(parts, count)
            self._learn(shorter[1:2])
            fitted = Encoded(self._ids(shorter), whole.length - sum(len(self._known[p]) for p in shorter))
            if fitted.length <= self.max_length:
                return fitted
        return self._cut_question(fitted, whole.length)

    def _cut_question(self, fitted: Encoded, length: int) -> Encoded:
        self._learn([CUT])
        marker = self._known[CUT]
        room = self.max_length - (fitted.length - len(fitted.parts[1])) - len(marker)
        if room < min(_LEAST_QUESTION, len(fitted.parts[1])):
            newest = len(fitted.parts[-1]) if len(fitted.parts) > 2 else 0
            raise CriticError(
                f"expected a state of at most {self.max_length} tokens, got a newest message of {newest} tokens and no "
                "room for the question; a newest message is never cut: lower the agent's max_new_tokens, or use a "
                "critic that was trained with a larger max_length"
            )
        parts = (fitted.parts[0], marker + fitted.parts[1][-room:], *fitted.parts[2:])
        kept = sum(map(len, parts)) - len(marker)
        return Encoded(parts, length - kept)
