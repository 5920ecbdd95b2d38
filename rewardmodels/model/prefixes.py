"""Scoring many states in few tokens: encoded prefixes are cached between calls.

The keys and values of each part of a state (see `rewardmodels.data.serialise`) are
cached unless the state is terminal, so a new state costs only its newest message,
whichever search it comes from and in whatever order states arrive.

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

from mas_gym.policies.local.forward import threads_for
from rewardmodels.model import flat
from rewardmodels.model.backbone import logits_at, to_device
from rewardmodels.model.encode import Encoded
from rewardmodels.model.packing import Trie, chunks, collate_plain, merge_beginnings

Key = bytes


@dataclass(slots=True)
class Counts:
    """The cost of scoring so far.

    Attributes:
        states: States scored.
        encoded: Tokens computed by the model.
        whole: Tokens that it would have computed without sharing.
        shortened: States longer than ``max_length``, whose oldest messages were dropped.
    """

    states: int = 0
    encoded: int = 0
    whole: int = 0
    shortened: int = 0


class PrefixCache:
    """A least-recently-used cache of the keys and values of parts.

    Args:
        capacity: Size in bytes.
    """

    def __init__(self, capacity: int) -> None:
        """Start empty."""
        self.capacity, self.held = capacity, 0
        self._parts: OrderedDict[Key, torch.Tensor] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        """Return whether a part is cached."""
        return key in self._parts

    def get(self, key: Key) -> torch.Tensor:
        """Return a part's keys and values, shape (L, 2, H, tokens, D), and mark it as used."""
        self._parts.move_to_end(key)
        return self._parts[key]

    def put(self, key: Key, part: torch.Tensor) -> None:
        """Add a part."""
        if key in self._parts:
            self._parts.move_to_end(key)
            return
        self._parts[key] = part
        self.held += part.nbytes

    def trim(self) -> None:
        """Evict parts beyond the capacity; called between forward passes only."""
        while self.held > self.capacity:
            _, part = self._parts.popitem(last=False)
            self.held -= part.nbytes


class PrefixScorer:
    """Computes logits of encoded states.

    Args:
        model: A scalar model in evaluation mode.
        pad: Padding id.
        share: Share prefixes if the model can (`rewardmodels.model.flat.enable`).
        capacity: Size of the cache of prefixes, in bytes.
    """

    def __init__(self, model: Any, pad: int, share: bool, capacity: int) -> None:
        """Keep the model and start with an empty cache."""
        self.model, self.pad = model, pad
        self.parameters = sum(p.numel() for p in model.parameters())
        self.share = share and flat.enable(model, pad)
        self.cache = PrefixCache(capacity)
        self.counts = Counts()

    def logits(self, states: Sequence[Encoded], open_end: Sequence[bool]) -> list[float]:
        """Return the logit of each state.

        Args:
            states: Distinct states.
            open_end: For each state, whether it may be continued, so that its last part is worth caching.
        """
        self.counts.states += len(states)
        self.counts.whole += sum(state.length for state in states)
        self.counts.shortened += sum(state.dropped > 0 for state in states)
        with torch.inference_mode(), threads_for(self.parameters):
            return self._shared(states, open_end) if self.share else self._whole(states)

    def _whole(self, states: Sequence[Encoded]) -> list[float]:
        found = [0.0] * len(states)
        device = next(self.model.parameters()).device
        order = sorted(range(len(states)), key=lambda i: states[i].length)
        # States are sorted by length, so the others of a chunk are padded to its last.
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
