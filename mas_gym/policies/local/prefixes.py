"""Keys and values of encoded prompts, reused by prompts with the same beginning.

The agents of a system that see the same question, and siblings in a search tree,
have prompts with long common beginnings.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

_BLOCK = 8


@dataclass(eq=False, slots=True)
class Encoded:
    """One prompt's tokens, and for each layer its keys and values ``[H, tokens, D]``."""

    tokens: list[int]
    layers: list[tuple[torch.Tensor, torch.Tensor]]

    @property
    def size(self) -> int:
        """Bytes held."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in layer)


class PrefixStore:
    """The most recently used encoded prompts, up to a number of bytes."""

    def __init__(self, budget: int) -> None:
        """Start empty; a budget of 0 keeps nothing."""
        self._budget, self._held = budget, 0
        self._entries: OrderedDict[int, Encoded] = OrderedDict()
        self._owners: dict[int, Encoded] = {}

    def longest(self, prompt: list[int]) -> tuple[Encoded | None, int]:
        """Return the entry that shares the longest beginning with a prompt, and the length of that beginning.

        Beginnings are looked up block by block, so one shorter than a block is not found. A prompt's last token
        is never part of one: its logits are wanted.
        """
        best: Encoded | None = None
        for key in _keys(prompt):
            owner = self._owners.get(key)
            if owner is None:
                break
            best = owner
        if best is None:
            return None, 0
        self._entries.move_to_end(id(best))
        pairs = zip(best.tokens, prompt[:-1], strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(best.tokens), len(prompt) - 1))
        return best, shared

    def add(self, entry: Encoded) -> None:
        """Keep an entry, and evict the least recently used ones beyond the budget."""
        if entry.size > self._budget:
            return
        self._entries[id(entry)] = entry
        self._held += entry.size
        for key in _keys(entry.tokens):
            self._owners[key] = entry
        while self._held > self._budget:
            _, old = self._entries.popitem(last=False)
            self._held -= old.size
            for key in _keys(old.tokens):
                if self._owners.get(key) is old:
                    del self._owners[key]


def _keys(tokens: list[int]) -> Iterator[int]:
    key = 0
    for end in range(_BLOCK, len(tokens) + 1, _BLOCK):
        key = hash((key, *tokens[end - _BLOCK : end]))
        yield key


def gathered(found: list[tuple[Encoded | None, int]]) -> tuple[DynamicCache, int]:
    """Return a cache whose row r ends with the shared beginning of prompt r, and its width (0 if nobody shares)."""
    cache = DynamicCache()
    width = max(length for _, length in found)
    if width == 0:
        return cache, 0
    pattern = next(entry for entry, _ in found if entry is not None)
    for index, pair in enumerate(pattern.layers):
        filled: list[Any] = []
        for part, like in enumerate(pair):
            memory = like.new_zeros((len(found), like.shape[0], width, like.shape[2]))
            for row, (entry, length) in enumerate(found):
                if entry is not None:
                    memory[row, :, width - length :] = entry.layers[index][part][:, :length]
            filled.append(memory)
        cache.update(*filled, index)
    return cache, width
