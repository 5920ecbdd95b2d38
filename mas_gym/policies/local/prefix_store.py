"""Storage of encoded prompts, for prompts that begin alike.

Agents that answer the same question, and siblings in a search tree, have long common prefixes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import DynamicCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BLOCK = 8


def prefix_cache_megabytes(model: PreTrainedModel) -> int:
    """Return the default size of a cache of encoded prefixes: a quarter of the weights, at least 64 MB.

    A token of a model with half a billion parameters takes 12 to 24 KB, so 64 MB hold only about ten prompts.
    """
    size: int = sum(weights.nbytes for weights in model.parameters())
    return max(64, size // 4 >> 20)


@dataclass(eq=False, slots=True)
class EncodedPrompt:
    """A prompt's tokens, and each layer's keys and values ``[H, tokens, D]``."""

    tokens: list[int]
    layers: list[tuple[torch.Tensor, torch.Tensor]]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in layer)


class PrefixStore:
    """The most recently used encoded prompts, up to a size in bytes."""

    def __init__(self, budget: int) -> None:
        """Create an empty store with a budget in bytes; 0 disables storage."""
        self._budget, self._held = budget, 0
        self._entries: OrderedDict[int, EncodedPrompt] = OrderedDict()
        self._owners: dict[int, EncodedPrompt] = {}

    def longest(self, prompt: list[int]) -> tuple[EncodedPrompt | None, int]:
        """Return the entry that shares the longest prefix with a prompt, and the length of that prefix.

        Prefixes are looked up block by block, so a prefix shorter than a block is not found. A prompt's last token is
        never part of the prefix, because its logits are needed.
        """
        best: EncodedPrompt | None = None
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

    def add(self, entry: EncodedPrompt) -> None:
        """Add an entry and evict the least recently used ones beyond the budget."""
        if entry.size > self._budget:
            return
        self._entries[id(entry)] = entry
        self._held += entry.size
        for key in _keys(entry.tokens):
            self._owners[key] = entry
        while self._held > self._budget:
            old = next(iter(self._entries.values()))
            for key in _keys(old.tokens):
                if self._owners.get(key) is old:
                    del self._owners[key]
            # Last, because each owner must be an entry, even after an interrupt.
            self._held -= self._entries.pop(id(old)).size


def _keys(tokens: list[int]) -> Iterator[int]:
    key = 0
    for end in range(_BLOCK, len(tokens) + 1, _BLOCK):
        key = hash((key, *tokens[end - _BLOCK : end]))
        yield key


def gathered(found: list[tuple[EncodedPrompt | None, int]]) -> tuple[DynamicCache, int]:
    """Return a cache with the shared prefix of each prompt, right-aligned, and its width; 0 if no prefix is shared."""
    cache = DynamicCache()
    width = max(length for _, length in found)
    if width == 0:
        return cache, 0
    pattern = next(entry for entry, _ in found if entry is not None)
    for index, pair in enumerate(pattern.layers):
        filled: list[object] = []
        for part, like in enumerate(pair):
            memory = like.new_zeros((len(found), like.shape[0], width, like.shape[2]))
            for row, (entry, length) in enumerate(found):
                if entry is not None:
                    memory[row, :, width - length :] = entry.layers[index][part][:, :length]
            filled.append(memory)
        cache.update(*filled, index)
    return cache, width
