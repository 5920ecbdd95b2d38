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
from typing import Any

import numpy as np
import torch

from rewardmodels.model import flat
from rewardmodels.model.backbone import logits_at, to_device
from rewardmodels.model.encode import Encoded
from rewardmodels.model.packing import Trie, chunks, collate_plain, merge_beginnings

Key = bytes


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
        trie = merge_beginnings([state.parts for state in states])
        keys = node_keys(trie)
        closed = {end for end, is_open in zip(trie.ends, open_end, strict=True) if not is_open}
        new: dict[int, None] = {}
        for end in trie.ends:
            path = trie.path(end)
            # The last part is computed even if it is cached: its keys and values do not hold its logit.
            new.update(dict.fromkeys(path[self._cached([keys[node] for node in path[:-1]]) :]))
        logits: dict[int, float] = {}
        for nodes in chunks(list(new), [len(trie.parts[node]) for node in new]):
            logits.update(self._forward(trie, keys, nodes, closed))
        self.cache.trim()
        return [logits[end] for end in trie.ends]

    def _cached(self, path: Sequence[Key]) -> int:
        """Return how many leading parts are cached; eviction may leave later parts without their predecessors."""
        return sum(1 for _ in takewhile(self.cache.__contains__, path))

    def _forward(self, trie: Trie, keys: list[Key], nodes: list[int], closed: set[int]) -> dict[int, float]:
        """Compute nodes, each after its ancestors, and cache those that may be continued."""
        places = {node: i for i, node in enumerate(nodes)}
        joined: dict[tuple[Key, ...], torch.Tensor] = {}
        parts = []
        for node in nodes:
            above = trie.path(node)[:-1]
            count = self._cached([keys[i] for i in above])
            cached = tuple(keys[i] for i in above[:count])
            if cached and cached not in joined:
                joined[cached] = torch.cat([self.cache.get(key) for key in cached], dim=3)
            parts.append(flat.Part(trie.parts[node], joined.get(cached), tuple(places[i] for i in above[count:])))
        logits, fresh = flat.forward(self.model, parts)
        self.counts.encoded += sum(len(part.ids) for part in parts)
        for node, part in zip(nodes, fresh, strict=True):
            if node not in closed:
                self.cache.put(keys[node], part.clone())
        return dict(zip(nodes, logits.tolist(), strict=True))


def node_keys(trie: Trie) -> list[Key]:
    """Return for each node a digest of all tokens up to its end."""
    keys: list[Key] = []
    for parent, ids in zip(trie.parents, trie.parts, strict=True):
        above = keys[parent] if parent >= 0 else b""
        keys.append(blake2b(above + np.array(ids, np.int32).tobytes(), digest_size=16).digest())
    return keys
