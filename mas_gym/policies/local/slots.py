"""`Slots`: the key/value memory for continuous batching, in which sequences join and leave while others are decoded.

Its layout is that of left padding: all sequences end at one common column, so positions, sliding windows and attention
masks have the meaning that transformers models expect. Notation: N rows in use, H heads, W visible columns, D head
size.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer


class _SlotLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values, ``[rows, H, capacity, D]``, written in place, without a copy per token."""

    def __init__(self, slots: Slots, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        # No reference cycle: it would keep the memory of a finished batch until the garbage collector runs.
        self.slots: Slots = weakref.proxy(slots)
        self.keys, self.values = (self._empty(t, slots.rows, slots.capacity) for t in (keys, values))
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    @staticmethod
    def _empty(like: torch.Tensor, rows: int, capacity: int) -> torch.Tensor:
        return like.new_zeros((rows, like.shape[1], capacity, like.shape[3]))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one new column and return the visible columns, or all columns if `Slots.column` is set."""
        n, column, start = key_states.shape[0], self.slots.end, self.slots.start
        if self.slots.column is not None:
            keys, values = self.keys[:n], self.values[:n]
            at = self.slots.column
            return keys.index_copy_(2, at, key_states), values.index_copy_(2, at, value_states)
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

        def moved(old: Any) -> Any:
            kept = old[:n, :, columns]
            new = old if (rows, capacity) == (old.shape[0], old.shape[2]) else self._empty(old, rows, capacity)
            new[:n, :, to : to + kept.shape[2]] = kept.clone() if new is old else kept
            return new

        self.keys, self.values = moved(self.keys), moved(self.values)


class Prefilled(NamedTuple):
    """Prompts encoded together.

    Attributes:
        cache: Their keys and values.
        lengths: ``[n]`` number of tokens in each prompt.
        columns: ``[n, longest]`` cache column of each prompt's tokens, right-aligned; arbitrary for padding.
    """

    cache: DynamicCache
    lengths: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]


class Slots:
    """Sequences decoded together, one column at a time; rows and columns grow on demand.

    Attributes:
        rows: Allocated rows, one per sequence.
        capacity: Allocated columns.
        n: Number of sequences, in rows ``0 .. n-1``.
        lengths: ``[rows]`` number of tokens in each sequence.
        cache: The model's ``past_key_values``.
        column: Shape (1,), the column to write if it is not known to the processor, as in a graph; else None.
    """

    def __init__(self, most: int, growth: int) -> None:
        """Create an empty batch for up to ``most`` sequences; the first call to `admit` determines the shapes.

        The capacity is a multiple of ``growth`` columns.
        """
        self._most, self._growth = most, growth
        self.rows = self.capacity = 0
        self.n = 0
        self.lengths = np.zeros(most, dtype=np.int64)
        self.end = 0
        self.cache: Cache | None = None
        self.column: torch.Tensor | None = None

    @property
    def layers(self) -> list[_SlotLayer]:
        """The layers of the cache."""
        return [] if self.cache is None else self.cache.layers

    @property
    def start(self) -> int:
        """The first visible column."""
        return self.end - int(self.lengths[: self.n].max(initial=0))

    def admit(self, prompts: Prefilled, source: list[int]) -> None:
        """Add sequences; ``source`` is each sequence's row in ``prompts``; several sequences may share a row."""
        lengths = prompts.lengths[source]
        longest = int(lengths.max())
        self.make_room(longest, len(source))
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

    def make_room(self, prompt: int = 0, more: int = 0) -> None:
        """Make room for ``more`` rows, ``prompt`` columns before the common end and one after it."""
        rows = self.rows if self.n + more <= self.rows else min(self._most, 2 * (self.n + more))
        if rows == self.rows and prompt <= self.end < self.capacity:
            return
        live = self.end - self.start
        need = max(prompt, live)
        capacity = max(self.capacity, -(-(need + self._growth) // self._growth) * self._growth)
        if self.cache is not None:
            for layer in self.cache.layers:
                layer.relocate(self.n, slice(self.start, self.end), need - live, rows, capacity)
        self.end, self.rows, self.capacity = need, rows, capacity
