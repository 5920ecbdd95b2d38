"""Scoring many states in few tokens: prefixes stay encoded between calls.

Each part of a state (see `rewardmodels.serialise`) that may be continued keeps
its keys and values, so a new state costs its newest message alone, whichever
search it comes from and however the states arrive.

Letters in shapes: L layers, H heads, D head size, R rows, P tokens of a prefix, S new tokens of a row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch

from rewardmodels.backbone import logits_at, to_device
from rewardmodels.encode import Encoded, Ids
from rewardmodels.packing import Packed, collate, collate_plain, pack

Key = bytes

MOST_TOKENS = 8192

FORWARD_COST = {"cpu": 48, "cuda": 2048}
"""What starting a forward costs, in tokens: padding below that is cheaper than another forward."""


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
        """Hold a part; parts are put root first, so that no part outlives the ones before it."""
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


class _Row(NamedTuple):
    """New states under one cached prefix.

    Attributes:
        prefix: Keys of the prefix's parts.
        length: Its tokens.
        states: Indices of the states.
        packed: What follows the prefix.
        keys: For each part in ``packed.spans`` its key.
    """

    prefix: tuple[Key, ...]
    length: int
    states: list[int]
    packed: Packed
    keys: list[Key]


class PrefixScorer:
    """Computes logits of encoded states.

    Args:
        model: A scalar model in evaluation mode.
        pad: Padding id.
        share: Whether the model can share prefixes (`rewardmodels.backbone.can_share`).
        capacity: Bytes of prefixes to keep between calls.
    """

    def __init__(self, model: Any, pad: int, share: bool, capacity: int) -> None:
        """Remember the model."""
        self.model, self.pad, self.share = model, pad, share
        self.cache = PrefixCache(capacity)
        self.counts = Counts()
        weight = next(p for p in model.parameters() if p.is_floating_point())
        self._device, self._dtype = weight.device, weight.dtype

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
        order = sorted(range(len(states)), key=lambda i: states[i].length)
        for chunk in self._chunks(order, [states[i].length for i in order]):
            batch = to_device(collate_plain([states[i].parts for i in chunk], self.pad), self._device)
            self.counts.encoded += sum(states[i].length for i in chunk)
            for i, value in zip(chunk, logits_at(self.model, batch)[0].tolist(), strict=True):
                found[i] = value
        return found

    def _shared(self, states: Sequence[Encoded], open_end: Sequence[bool]) -> list[float]:
        found = [0.0] * len(states)
        keys = [part_keys(state.parts) for state in states]
        closed = {keys[i][-1] for i in range(len(states)) if not open_end[i]}
        rows = sorted(self._rows(states, keys), key=lambda row: (len(row.packed.ids), row.length, row.keys[0]))
        for chunk in self._chunks(range(len(rows)), [len(row.packed.ids) for row in rows]):
            part = [rows[i] for i in chunk]
            values = iter(self._forward(part, closed))
            for row in part:
                for i in row.states:
                    found[i] = next(values)
        self.cache.trim()
        return found

    def _chunks(self, order: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
        start = FORWARD_COST.get(self._device.type, FORWARD_COST["cuda"])
        return [[order[i] for i in range(a, b)] for a, b in cut(sizes, start, MOST_TOKENS)]

    def _rows(self, states: Sequence[Encoded], keys: Sequence[list[Key]]) -> list[_Row]:
        """Group states of one question by the longest prefix that is already encoded."""
        groups: dict[tuple[Key, int], list[int]] = {}
        for i, path in enumerate(keys):
            known = 0
            while known < len(path) - 1 and path[known] in self.cache:
                known += 1
            # Before the question's own part nothing tells problems apart, and a row must not hold them all.
            groups.setdefault((path[max(known - 1, 1)], known), []).append(i)
        rows = []
        for (_, known), members in groups.items():
            prefix = tuple(keys[members[0]][:known])
            length = sum(map(len, states[members[0]].parts[:known]))
            packed = pack([states[i].parts[known:] for i in members], offset=length)
            names: list[Key] = [b""] * len(packed.spans)
            for i, nodes in zip(members, packed.nodes, strict=True):
                for node, key in zip(nodes, keys[i][known:], strict=True):
                    names[node] = key
            rows.append(_Row(prefix, length, members, packed, names))
        return rows

    def _forward(self, rows: Sequence[_Row], closed: set[Key]) -> list[float]:
        prefixes = [row.length for row in rows]
        batch = collate([row.packed for row in rows], self.pad, self._dtype, prefixes)
        past = self._past(rows, max(prefixes))
        logits, cache = logits_at(self.model, to_device(batch, self._device), past, keep=True)
        self.counts.encoded += sum(len(row.packed.ids) for row in rows)
        start = max(prefixes)
        fresh = torch.stack([torch.stack((x.keys[:, :, start:], x.values[:, :, start:])) for x in cache.layers])
        for r, row in enumerate(rows):
            for key, (a, b) in zip(row.keys, row.packed.spans, strict=True):
                if key not in closed:
                    self.cache.put(key, fresh[:, :, r, :, a:b].clone())
        return logits.tolist()  # type: ignore[no-any-return]

    def _past(self, rows: Sequence[_Row], width: int) -> Any:
        from transformers import DynamicCache

        if not width:
            return None
        parts = [[self.cache.get(key) for key in row.prefix] for row in rows]
        like = next(row[0] for row in parts if row)
        layers, _, heads, _, size = like.shape
        whole = like.new_zeros((layers, 2, len(rows), heads, width, size))
        for r, row in enumerate(parts):
            if row:
                joined = torch.cat(row, dim=3)
                whole[:, :, r, :, : joined.shape[3]] = joined
        return DynamicCache([(layer[0], layer[1]) for layer in whole])


def part_keys(parts: Sequence[Ids]) -> list[Key]:
    """Return for each part a fingerprint of everything up to its end."""
    keys: list[Key] = []
    above = b""
    for ids in parts:
        above = blake2b(above + np.array(ids, np.int32).tobytes(), digest_size=16).digest()
        keys.append(above)
    return keys


def cut(sizes: Sequence[int], start: int, most: int) -> list[tuple[int, int]]:
    """Cut sorted rows into forwards at the least cost.

    Args:
        sizes: Tokens of each row, ascending; a forward pads its rows to the last one's.
        start: What a forward costs beside its tokens.
        most: The most tokens of a forward, padding included; a single row may have more.

    Returns:
        The first row of each forward and one past its last.
    """
    best = [0.0]
    begins = [0]
    for end in range(1, len(sizes) + 1):
        width, found, begin = sizes[end - 1], float("inf"), end - 1
        for first in range(end - 1, -1, -1):
            tokens = (end - first) * width
            if tokens > most and first < end - 1:
                break
            if best[first] + start + tokens < found:
                found, begin = best[first] + start + tokens, first
        best.append(found)
        begins.append(begin)
    cuts = []
    end = len(sizes)
    while end:
        cuts.append((begins[end], end))
        end = begins[end]
    return cuts[::-1]
