"""Keys and values of sequences that are being decoded, and of encoded prompts.

`Slots` is the key/value memory for continuous batching: sequences join and leave while
others are being decoded. It is laid out as with left padding: all sequences end at one
common column, so positions, sliding windows and attention masks mean what every
transformers model expects. Letters: L layers, N rows in use, H heads, W visible columns,
D head size.

`PrefixStore` keeps encoded prompts, to be reused by prompts with the same prefix: agents
that see the same question, and siblings in a search tree, have long common prefixes.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

_GROWTH = 64
_BLOCK = 8


class _SlotLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values, ``[rows, H, capacity, D]``, written in place instead of copied to grow."""

    def __init__(self, slots: Slots, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        # No reference cycle: it would keep the memory of a finished batch until the garbage collector runs.
        self.slots: Slots = weakref.proxy(slots)
        self.keys, self.values = (self._empty(t, slots.rows, slots.capacity) for t in (keys, values))
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    @staticmethod
    def _empty(like: torch.Tensor, rows: int, capacity: int) -> torch.Tensor:
        # A row's columns are adjacent in memory, not grouped by head: attention reads them up to twice as fast.
        return like.new_zeros((rows, capacity, like.shape[1], like.shape[3])).transpose(1, 2)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one new column and return the visible columns."""
        n, column, start = key_states.shape[0], self.slots.end, self.slots.start
        self.keys[:n, :, column] = key_states[:, :, 0]
        self.values[:n, :, column] = value_states[:, :, 0]
        return self.keys[:n, :, start : column + 1], self.values[:n, :, start : column + 1]

    def get_seq_length(self) -> int:
        """Return the number of visible columns before the one being written."""
        return self.slots.end - self.slots.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and offset of the columns that a mask must cover."""
        return self.get_seq_length() + query_length, 0

    def relocate(self, n: int, columns: slice, to: int, rows: int, capacity: int) -> None:
        """Move the used columns of the first ``n`` rows, into larger memory if the shape differs."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            kept = old[:n, :, columns]
            new = old if (rows, capacity) == (old.shape[0], old.shape[2]) else self._empty(old, rows, capacity)
            new[:n, :, to : to + kept.shape[2]] = kept.clone() if new is old else kept
            setattr(self, name, new)


class Prefilled(NamedTuple):
    """Prompts encoded together.

    Attributes:
        cache: Their keys and values.
        lengths: ``[n]`` tokens of each prompt.
        columns: ``[n, longest]`` cache column of each prompt's tokens, right-aligned; arbitrary for padding.
        reused: Tokens of all prompts whose keys and values came from earlier prompts.
    """

    cache: DynamicCache
    lengths: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    reused: int = 0


class Slots:
    """Sequences decoded together, one column at a time; rows and columns grow on demand.

    Attributes:
        rows: Allocated rows, one per sequence.
        capacity: Allocated columns.
        n: Sequences currently held, in rows ``0 .. n-1``.
        lengths: ``[rows]`` tokens of each sequence.
        cache: The model's ``past_key_values``.
    """

    def __init__(self, most: int) -> None:
        """Start empty, for up to ``most`` sequences; the first admission determines the shapes."""
        self._most = most
        self.rows = self.capacity = 0
        self.n = 0
        self.lengths = np.zeros(most, dtype=np.int64)
        self.end = 0
        self.cache: Cache | None = None

    @property
    def start(self) -> int:
        """The first visible column."""
        return self.end - int(self.lengths[: self.n].max(initial=0))

    def admit(self, prompts: Prefilled, source: list[int]) -> None:
        """Add sequences; ``source`` gives each one's row in ``prompts``, and several may share a prompt."""
        lengths = prompts.lengths[source]
        longest = int(lengths.max())
        self._make_room(longest, len(source))
        layers = prompts.cache.layers
        if self.cache is None:
            self.cache = Cache(layers=[_SlotLayer(self, layer.keys, layer.values) for layer in layers])
        pick = torch.tensor(source, device=layers[0].keys.device)[:, None]
        at = torch.from_numpy(prompts.columns[source, -longest:]).to(pick.device)
        rows, columns = slice(self.n, self.n + len(source)), slice(self.end - longest, self.end)
        for mine, new in zip(self.cache.layers, layers, strict=True):
            mine.keys[rows, :, columns] = new.keys[pick, :, at].transpose(1, 2)
            mine.values[rows, :, columns] = new.values[pick, :, at].transpose(1, 2)
        self.lengths[rows] = lengths
        self.n += len(source)

    def view(self, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the attention mask ``[N, W + 1]`` and the positions ``[N, 1]`` of the next token of each sequence."""
        self._make_room(0, 0)
        lengths = self.lengths[: self.n]
        width = self.end - self.start + 1
        mask = np.arange(width) >= (width - 1 - lengths)[:, None]
        return torch.from_numpy(mask).to(device), torch.from_numpy(lengths[:, None].copy()).to(device)

    def advance(self) -> None:
        """Advance past the column that the model has just written."""
        self.end += 1
        self.lengths[: self.n] += 1

    def drop(self, finished: list[int]) -> list[tuple[int, int]]:
        """Free rows and fill the gaps with the last rows; return the moves ``(from, to)``."""
        kept = self.n - len(finished)
        gone = set(finished)
        holes = [row for row in sorted(gone) if row < kept]
        movers = [row for row in range(kept, self.n) if row not in gone]
        if holes and self.cache is not None:
            columns = slice(self.end - int(self.lengths[movers].max()), self.end)
            for layer in self.cache.layers:
                for memory in (layer.keys, layer.values):
                    memory[holes, :, columns] = memory[movers, :, columns]
            self.lengths[holes] = self.lengths[movers]
        self.n = kept
        return list(zip(movers, holes, strict=True))

    def _make_room(self, prompt: int, more: int) -> None:
        """Make room for ``more`` rows, ``prompt`` columns before the common end and one after it."""
        rows = self.rows if self.n + more <= self.rows else min(self._most, 2 * (self.n + more))
        if rows == self.rows and prompt <= self.end < self.capacity:
            return
        live = self.end - self.start
        need = max(prompt, live)
        capacity = max(self.capacity, -(-(need + _GROWTH) // _GROWTH) * _GROWTH)
        if self.cache is not None:
            for layer in self.cache.layers:
                layer.relocate(self.n, slice(self.start, self.end), need - live, rows, capacity)
        self.end, self.rows, self.capacity = need, rows, capacity


@dataclass(eq=False, slots=True)
class Encoded:
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
        """Start empty, with a budget in bytes; 0 keeps nothing."""
        self._budget, self._held = budget, 0
        self._entries: OrderedDict[int, Encoded] = OrderedDict()
        self._owners: dict[int, Encoded] = {}

    def longest(self, prompt: list[int]) -> tuple[Encoded | None, int]:
        """Return the entry that shares the longest prefix with a prompt, and the length of that prefix.

        Prefixes are looked up block by block, so one shorter than a block is not found. A prompt's last token is
        never part of it, because its logits are needed.
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
        """Add an entry and evict the least recently used ones beyond the budget."""
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
    """Return a cache whose row r ends with the shared prefix of prompt r, and its width (0 if none is shared)."""
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
