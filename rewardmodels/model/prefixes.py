"""Scoring many states in few tokens: prefixes stay encoded between calls.

Each part of a state (see `rewardmodels.data.serialise`) that may be continued keeps
its keys and values, so a new state costs its newest message alone, whichever
search it comes from and however the states arrive.

Letters in shapes: L layers, H heads, D head size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from rewardmodels.model import flat
from rewardmodels.model.backbone import logits_at, to_device
from rewardmodels.model.encode import Encoded, Ids
from rewardmodels.model.packing import collate_plain

Key = bytes
T = TypeVar("T")

MOST_TOKENS = 8192
"""The most tokens of a forward; a single part or state may have more."""


@dataclass(slots=True)
class Counts:
    """What scoring cost.

    Attributes:
        states: States scored.
        encoded: Tokens that went through the model.
        whole: Tokens that would have, with each state alone.
        shortened: States that were longer than the critic reads.
    """

    states: int = 0
    encoded: int = 0
    whole: int = 0
    shortened: int = 0


class PrefixCache:
    """Keys and values of parts, least recently used dropped first.

    Args:
        capacity: Bytes to hold.
    """

    def __init__(self, capacity: int) -> None:
        """Start empty."""
        self.capacity, self.held = capacity, 0
        self._parts: OrderedDict[Key, torch.Tensor] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        """Return whether a part is held."""
        return key in self._parts

    def get(self, key: Key) -> torch.Tensor:
        """Return a part's keys and values, shape (L, 2, H, tokens, D), and note the use."""
        self._parts.move_to_end(key)
        return self._parts[key]

    def put(self, key: Key, part: torch.Tensor) -> None:
        """Hold a part."""
        if key in self._parts:
            self._parts.move_to_end(key)
            return
        self._parts[key] = part
        self.held += part.nbytes

    def trim(self) -> None:
        """Drop what is over the capacity; called between forwards, when no row is under way."""
        while self.held > self.capacity:
            _, part = self._parts.popitem(last=False)
            self.held -= part.nbytes


class _New(NamedTuple):
    """A part that must be computed.

    Attributes:
        ids: Its tokens.
        above: Keys of the parts before it.
    """

    ids: Ids
    above: list[Key]


class PrefixScorer:
    """Computes logits of encoded states.

    Args:
        model: A scalar model in evaluation mode.
        pad: Padding id.
        share: Share prefixes if the model can (`rewardmodels.model.flat.enable`).
        capacity: Bytes of prefixes to keep between calls.
    """

    def __init__(self, model: Any, pad: int, share: bool, capacity: int) -> None:
        """Remember the model."""
        self.model, self.pad = model, pad
        self.share = share and flat.enable(model, pad)
        self.cache = PrefixCache(capacity)
        self.counts = Counts()

    def logits(self, states: Sequence[Encoded], open_end: Sequence[bool]) -> list[float]:
        """Return the logit of each state.

        Args:
            states: Distinct states.
            open_end: For each, whether it may be continued, so that its last part is worth keeping.
        """
        self.counts.states += len(states)
        self.counts.whole += sum(state.length for state in states)
        self.counts.shortened += sum(state.dropped > 0 for state in states)
        with torch.inference_mode():
            return self._shared(states, open_end) if self.share else self._whole(states)

    def _whole(self, states: Sequence[Encoded]) -> list[float]:
        found = [0.0] * len(states)
        device = next(self.model.parameters()).device
        order = sorted(range(len(states)), key=lambda i: states[i].length)
        # Sorted by length a chunk's last state is its longest, to which the others are padded.
        for chunk in chunks(order, [states[i].length for i in order], padded=True):
            batch = to_device(collate_plain([states[i].parts for i in chunk], self.pad), device)
            self.counts.encoded += sum(states[i].length for i in chunk)
            for i, value in zip(chunk, logits_at(self.model, batch).tolist(), strict=True):
                found[i] = value
        return found

    def _shared(self, states: Sequence[Encoded], open_end: Sequence[bool]) -> list[float]:
        paths = [part_keys(state.parts) for state in states]
        closed = {path[-1] for path, is_open in zip(paths, open_end, strict=True) if not is_open}
        new: dict[Key, _New] = {}
        for state, path in zip(states, paths, strict=True):
            kept = len(self._kept(path[:-1]))
            # The last part is computed even if it is kept: its keys and values do not tell its logit.
            for i in range(kept, len(path)):
                new.setdefault(path[i], _New(state.parts[i], path[:i]))
        logits: dict[Key, float] = {}
        for chunk in chunks(list(new), [len(part.ids) for part in new.values()]):
            logits.update(self._forward({key: new[key] for key in chunk}, closed))
        self.cache.trim()
        return [logits[path[-1]] for path in paths]

    def _kept(self, path: list[Key]) -> tuple[Key, ...]:
        """Return the parts that are kept with all before them; what was dropped may have left later ones behind."""
        return tuple(takewhile(self.cache.__contains__, path))

    def _forward(self, parts: dict[Key, _New], closed: set[Key]) -> dict[Key, float]:
        """Compute parts, each after those above it, and keep what may be continued."""
        places = {key: i for i, key in enumerate(parts)}
        joined: dict[tuple[Key, ...], torch.Tensor] = {}
        found = []
        for part in parts.values():
            kept = self._kept(part.above)
            if kept and kept not in joined:
                joined[kept] = torch.cat([self.cache.get(key) for key in kept], dim=3)
            found.append(flat.Part(part.ids, joined.get(kept), tuple(places[key] for key in part.above[len(kept) :])))
        logits, fresh = flat.forward(self.model, found)
        self.counts.encoded += sum(len(part.ids) for part in found)
        for key, part in zip(parts, fresh, strict=True):
            if key not in closed:
                self.cache.put(key, part.clone())
        return dict(zip(parts, logits.tolist(), strict=True))


def part_keys(parts: Sequence[Ids]) -> list[Key]:
    """Return for each part a fingerprint of everything up to its end."""
    keys: list[Key] = []
    above = b""
    for ids in parts:
        above = blake2b(above + np.array(ids, np.int32).tobytes(), digest_size=16).digest()
        keys.append(above)
    return keys


def chunks(items: Sequence[T], sizes: Sequence[int], padded: bool = False) -> list[list[T]]:
    """Cut items into forwards of at most `MOST_TOKENS` tokens.

    Args:
        items: In order.
        sizes: Tokens of each; ascending, if ``padded``.
        padded: Whether a forward pads all items to its longest.
    """
    cut: list[list[T]] = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        total = size * (len(cut[-1]) + 1) if cut and padded else total + size
        if not cut or total > MOST_TOKENS:
            cut.append([])
            total = size
        cut[-1].append(item)
    return cut
