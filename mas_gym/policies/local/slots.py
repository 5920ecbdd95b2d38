"""Key/value memory for continuous batching: sequences come and go while others are being written.

The layout is that of left padding: all sequences end at one common column, so
that positions, sliding windows and attention masks mean what every transformers
model expects. Letters: L layers, N rows in use, H heads, W columns in view, D
head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

_GROWTH = 256


class _SlotLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values, ``[rows, H, capacity, D]``; writes in place instead of growing by copies."""

    def __init__(self, slots: Slots, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.slots = slots
        self.keys, self.values = (self._empty(t, slots.rows, slots.capacity) for t in (keys, values))
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    @staticmethod
    def _empty(like: torch.Tensor, rows: int, capacity: int) -> torch.Tensor:
        # A row's columns lie side by side, not head by head: attention then reads up to twice as fast.
        return like.new_zeros((rows, capacity, like.shape[1], like.shape[3])).transpose(1, 2)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one new column and return the columns in view."""
        n, column, start = key_states.shape[0], self.slots.end, self.slots.start
        self.keys[:n, :, column] = key_states[:, :, 0]
        self.values[:n, :, column] = value_states[:, :, 0]
        return self.keys[:n, :, start : column + 1], self.values[:n, :, start : column + 1]

    def get_seq_length(self) -> int:
        """Return the columns in view before the one being written."""
        return self.slots.end - self.slots.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the columns that a mask must cover."""
        return self.get_seq_length() + query_length, 0

    def relocate(self, n: int, columns: slice, to: int, rows: int, capacity: int) -> None:
        """Move the columns in use of the first ``n`` rows, into larger memory if asked."""
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
        columns: ``[n, longest]`` where each prompt's tokens lie in the cache, right-aligned; padding points anywhere.
        reused: Tokens, over all prompts, that were taken from earlier ones.
    """

    cache: DynamicCache
    lengths: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    reused: int = 0


class Slots:
    """Sequences that are decoded together, one column at a time; memory grows with need, in both directions.

    Attributes:
        rows: Sequences for which there is memory.
        capacity: Columns for which there is memory.
        n: Sequences now held, in rows ``0 .. n-1``.
        lengths: ``[rows]`` tokens held of each sequence.
        cache: What to hand to the model as ``past_key_values``.
    """

    def __init__(self, most: int) -> None:
        """Start empty, for up to ``most`` sequences; the first admission's shapes are copied."""
        self._most = most
        self.rows = self.capacity = 0
        self.n = 0
        self.lengths = np.zeros(most, dtype=np.int64)
        self.end = 0
        self.cache: Cache | None = None

    @property
    def start(self) -> int:
        """The first column in view."""
        return self.end - int(self.lengths[: self.n].max(initial=0))

    def admit(self, prompts: Prefilled, source: list[int]) -> None:
        """Add sequences; ``source`` names each one's row in ``prompts``, and one prompt may serve several."""
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
        """Count the column that the model has just written."""
        self.end += 1
        self.lengths[: self.n] += 1

    def drop(self, finished: list[int]) -> list[tuple[int, int]]:
        """Free rows and close the gaps with the last ones; return the moves ``(from, to)`` that were made."""
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
        """Make sure that ``more`` rows fit, ``prompt`` columns before the common end, and one after it."""
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
