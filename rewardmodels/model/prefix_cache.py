"""Scoring many states with few tokens: encoded prefixes are cached between calls, and there is no padding.

The keys and values of each part of a state (see `rewardmodels.data.encode`) are
cached unless the state is terminal. Therefore only the newest message of a new state is
encoded, regardless of the search that requests it and of the order of states.

In a forward pass, the tokens of all parts form one sequence that is split only for
attention. The linear layers, which do most of the work, run on all tokens at once. Attention runs
part by part, each with the keys and values of its predecessors, which are cached or come
from the same forward pass. The computation of a part therefore does not depend on the
other parts, except through the rounding of linear kernels, which may depend on the number
of rows.

Letters in shapes: L layers, H key-value heads, D head size, S tokens of a part, P tokens before it, N parts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from mas_gym.policies.local.forward import threads_for
from rewardmodels.data.encode import (
    MOST_TOKENS,
    EncodedState,
    Ids,
    Trie,
    chunks,
    collate_plain,
    merge_beginnings,
    tokens_in,
)
from rewardmodels.model.backbone import alike, hidden_at, inner, logits_at, probe, read_head, to_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "mas_gym_parts"
"""Name of this attention implementation in transformers."""

_CPU_TOKENS = 1024
"""Largest forward pass on a CPU, in tokens: the intermediate results of a longer one leave its cache."""

# Arguments of unsupported attention: a window, capped scores, sinks.
_SPECIAL = ("sliding_window", "softcap", "s_aux")


class Part(NamedTuple):
    """New tokens of a state.

    Attributes:
        ids: Token ids.
        past: Cached keys and values of the preceding tokens, shape (L, 2, H, tokens, D); None if there are none.
        above: Indices of the state's preceding parts that are computed in this forward pass, after those in ``past``.
    """

    ids: Ids
    past: torch.Tensor | None = None
    above: tuple[int, ...] = ()


@dataclass
class _Layout:
    """The position of each part in the sequence, and the keys and values computed so far.

    Attributes:
        parts: The parts.
        spans: Start and end (exclusive) of each part in the sequence.
        masks: Zero where a token may attend, minus infinity elsewhere, shape (S, P + S).
        fresh: Keys and values of all new tokens, one tensor (2, H, tokens, D) per layer run so far.
    """

    parts: Sequence[Part]
    spans: list[tuple[int, int]]
    masks: list[torch.Tensor]
    fresh: list[torch.Tensor] = field(default_factory=list)


def attend(
    module: object,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    layout: _Layout | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Attend part by part; called by transformers in each layer.

    Raises:
        TypeError: The model does not pass the layout to its layers, or uses unsupported attention.
    """
    special = [name for name in _SPECIAL if options.get(name) is not None]
    if layout is None or special:
        reason = f"unsupported arguments {special}" if special else "it received no layout"
        raise TypeError(f"{type(module).__name__} does not support attention with cached prefixes: {reason}")
    layer = len(layout.fresh)
    layout.fresh.append(torch.stack((key[0], value[0])))
    grouped = query.shape[1] != key.shape[1]
    found = []
    for part, (a, b), mask in zip(layout.parts, layout.spans, layout.masks, strict=True):
        spans = [layout.spans[i] for i in part.above]
        seen = [layout.fresh[layer][:, :, c:d] for c, d in [*spans, (a, b)]]
        if part.past is not None:
            seen.insert(0, part.past[layer])
        keys, values = torch.cat(seen, dim=2)[:, None] if len(seen) > 1 else seen[0][:, None]
        seen_by = scaled_dot_product_attention(
            query[:, :, a:b], keys, values, attn_mask=mask.to(query.dtype), scale=scaling, enable_gqa=grouped
        )
        found.append(seen_by.transpose(1, 2))
    return torch.cat(found, dim=1), None


def forward_parts(model: PreTrainedModel, parts: Sequence[Part]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run the model over parts.

    Args:
        model: A model that `enable_parts` has accepted.
        parts: At least one part; each comes after the parts in its ``above``.

    Returns:
        The last hidden state at the end of each part, shape (N, hidden size), and for each part the keys and values of
        its tokens, shape (L, 2, H, S, D).
    """
    device, dtype = inner(model).device, inner(model).dtype
    spans = [(int(a), int(b)) for a, b in pairwise(np.cumsum([0, *(len(part.ids) for part in parts)]))]
    before = [_before(part, spans) for part in parts]
    masks = [
        torch.full((b - a, seen + b - a), -torch.inf, dtype=dtype, device=device).triu_(seen + 1)
        for (a, b), seen in zip(spans, before, strict=True)
    ]
    layout = _Layout(parts, spans, masks)
    ids = [token for part in parts for token in part.ids]
    positions = [i for part, start in zip(parts, before, strict=True) for i in range(start, start + len(part.ids))]
    # transformers passes a 4-D mask on unchanged; the attention above uses its own masks.
    untouched = torch.zeros((1, 1, 1, 1), device=device)
    hidden = inner(model).base_model(
        input_ids=torch.tensor([ids], device=device),
        attention_mask=untouched,
        position_ids=torch.tensor([positions], device=device),
        use_cache=False,
        layout=layout,
    )[0]
    fresh = torch.stack(layout.fresh)
    return hidden[0, [b - 1 for _, b in spans]], [fresh[:, :, :, a:b] for a, b in spans]


def _before(part: Part, spans: Sequence[tuple[int, int]]) -> int:
    """Return the number of tokens before a part."""
    kept = 0 if part.past is None else part.past.shape[3]
    return kept + sum(spans[i][1] - spans[i][0] for i in part.above)


def enable_parts(model: PreTrainedModel, pad: int) -> bool:
    """Enable part-by-part attention in a model if it gives equal results for shared prefixes and for whole states.

    Decoders with full causal attention satisfy this; it is tested, not assumed. Other models are not changed.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)
    backbone = inner(model)
    before = backbone.config._attn_implementation
    states = probe(model)
    (first, second), (_, third, fourth) = states[0], states[2]
    try:
        with torch.inference_mode():
            whole = logits_at(model, to_device(collate_plain(states, pad), backbone.device))
            backbone.set_attn_implementation(ATTENTION)
            ends, fresh = forward_parts(model, [Part(first), Part(second, above=(0,)), Part(third, above=(0,))])
            past = torch.cat((fresh[0], fresh[2]), dim=3)
            rest, _ = forward_parts(model, [Part(fourth, past)])
            if alike(read_head(model, torch.cat((ends[1:], rest))), whole, backbone.dtype):
                return True
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
        pass
    backbone.set_attn_implementation(before)
    return False


Key = bytes


@dataclass(slots=True)
class Counts:
    """The cost of scoring so far.

    Attributes:
        states: States scored.
        encoded: Tokens processed by the model.
        whole: Tokens that the model would have processed without sharing.
    """

    states: int = 0
    encoded: int = 0
    whole: int = 0


class PrefixCache:
    """A least-recently-used cache of the keys and values of parts.

    Args:
        capacity: Size in bytes.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.held = capacity, 0
        self._parts: OrderedDict[Key, torch.Tensor] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
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
    """Computes hidden states and logits of encoded states.

    Args:
        model: A scalar model in evaluation mode.
        pad: Padding id.
        share: Whether to share prefixes if the model supports it (`enable_parts`).
        capacity: Size of the cache of prefixes, in bytes.
    """

    def __init__(self, model: PreTrainedModel, pad: int, share: bool, capacity: int) -> None:
        """Store the model and start with an empty cache."""
        self.model, self.pad = model, pad
        self.parameters = sum(p.numel() for p in model.parameters())
        self.share = share and enable_parts(model, pad)
        self.most_tokens = _CPU_TOKENS if next(model.parameters()).device.type == "cpu" else MOST_TOKENS
        self.cache = PrefixCache(capacity)
        self.counts = Counts()

    def logits(self, states: Sequence[EncodedState], open_end: Sequence[bool]) -> list[float]:
        """Return the logit of each state; the arguments are those of `hidden`."""
        with torch.inference_mode(), threads_for(self.parameters):
            # One row at a time, because the rounding of a product with one column depends on the number of rows.
            return [float(read_head(self.model, row[None])) for row in self.hidden(states, open_end)]

    def hidden(self, states: Sequence[EncodedState], open_end: Sequence[bool]) -> list[torch.Tensor]:
        """Return the last hidden state at the end of each state, shape (hidden size,).

        Args:
            states: Distinct states.
            open_end: For each state, whether it may be continued, in which case its last part is worth caching.
        """
        self.counts.states += len(states)
        self.counts.whole += sum(map(tokens_in, states))
        with torch.inference_mode(), threads_for(self.parameters):
            return self._shared(states, open_end) if self.share else self._whole(states)

    def _whole(self, states: Sequence[EncodedState]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = [None] * len(states)
        device = next(self.model.parameters()).device
        sizes = list(map(tokens_in, states))
        order = sorted(range(len(states)), key=sizes.__getitem__)
        # States are sorted by length, so a chunk is padded to the length of its last state.
        for chunk in chunks(order, [sizes[i] for i in order], padded=True, limit=self.most_tokens):
            batch = to_device(collate_plain([states[i] for i in chunk], self.pad), device)
            self.counts.encoded += sum(sizes[i] for i in chunk)
            for i, value in zip(chunk, hidden_at(self.model, batch), strict=True):
                found[i] = value
        return found

    def _shared(self, states: Sequence[EncodedState], open_end: Sequence[bool]) -> list[torch.Tensor]:
        trie = merge_beginnings(states)
        keys = node_keys(trie)
        closed = {end for end, is_open in zip(trie.ends, open_end, strict=True) if not is_open} - set(trie.parents)
        new: dict[int, None] = {}
        for end in trie.ends:
            path = trie.path(end)
            # The last part is computed even if it is cached: its hidden state is not cached.
            new.update(dict.fromkeys(path[self._cached([keys[node] for node in path[:-1]]) :]))
        found: dict[int, torch.Tensor] = {}
        for nodes in chunks(list(new), [len(trie.parts[node]) for node in new], limit=self.most_tokens):
            found.update(self._forward(trie, keys, nodes, closed))
        self.cache.trim()
        return [found[end] for end in trie.ends]

    def _cached(self, path: Sequence[Key]) -> int:
        """Return the number of leading cached parts; eviction may leave later parts without their predecessors."""
        return sum(1 for _ in takewhile(self.cache.__contains__, path))

    def _forward(self, trie: Trie, keys: list[Key], nodes: list[int], closed: set[int]) -> dict[int, torch.Tensor]:
        """Run the model on nodes, each after its ancestors, and cache those that may be continued."""
        places = {node: i for i, node in enumerate(nodes)}
        joined: dict[tuple[Key, ...], torch.Tensor] = {}
        parts = []
        for node in nodes:
            above = trie.path(node)[:-1]
            count = self._cached([keys[i] for i in above])
            cached = tuple(keys[i] for i in above[:count])
            if cached and cached not in joined:
                joined[cached] = torch.cat([self.cache.get(key) for key in cached], dim=3)
            parts.append(Part(trie.parts[node], joined.get(cached), tuple(places[i] for i in above[count:])))
        ends, fresh = forward_parts(self.model, parts)
        self.counts.encoded += sum(len(part.ids) for part in parts)
        for node, part in zip(nodes, fresh, strict=True):
            if node not in closed:
                self.cache.put(keys[node], part.clone())
        return dict(zip(nodes, ends, strict=True))


def node_keys(trie: Trie) -> list[Key]:
    """Return, for each node, a digest of all tokens up to its end."""
    keys: list[Key] = []
    for parent, ids in zip(trie.parents, trie.parts, strict=True):
        above = keys[parent] if parent >= 0 else b""
        keys.append(blake2b(above + np.array(ids, np.int32).tobytes(), digest_size=16).digest())
    return keys
