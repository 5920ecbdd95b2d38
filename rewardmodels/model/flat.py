"""One forward pass over parts of states, without padding: all tokens form one sequence, split only inside attention.

The linear layers, most of the work, run on all tokens at once. Attention runs part by
part, each with the keys and values of its predecessors, cached or from the same
forward pass. Each part is therefore computed in the same way whatever else is in the
pass, and its result depends on its neighbours only if the rounding of the linear
kernels depends on their number of rows.

Letters in shapes: L layers, H heads of keys and values, D head size, S tokens of a part, P tokens before it, N parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from rewardmodels.model.backbone import alike, inner, logits_at, read_head, to_device
from rewardmodels.model.encode import Ids
from rewardmodels.model.packing import collate_plain

ATTENTION = "mas_gym_parts"
"""Name of this attention implementation in transformers."""

# Arguments of attention that is not plain: a window, capped scores, sinks.
_SPECIAL = ("sliding_window", "softcap", "s_aux")


class Part(NamedTuple):
    """New tokens of a state.

    Attributes:
        ids: Their ids.
        past: Cached keys and values of their predecessors, shape (L, 2, H, tokens, D); None if there are none.
        above: Indices of the parts of this forward pass that come between.
    """

    ids: Ids
    past: torch.Tensor | None = None
    above: tuple[int, ...] = ()


@dataclass
class _Layout:
    """Where each part lies in the sequence, and the keys and values computed so far.

    Attributes:
        parts: The parts.
        spans: First token of each and one past the last.
        masks: Zero where a token may attend, minus infinity elsewhere, shape (S, P + S).
        fresh: Keys and values of all new tokens, one tensor (2, H, tokens, D) per layer run so far.
    """

    parts: Sequence[Part]
    spans: list[tuple[int, int]]
    masks: list[torch.Tensor]
    fresh: list[torch.Tensor] = field(default_factory=list)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    layout: _Layout | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend part by part; called by transformers in each layer.

    Raises:
        TypeError: The model does not pass the layout on to its layers, or its attention is not plain.
    """
    special = [name for name in _SPECIAL if options.get(name) is not None]
    if layout is None or special:
        raise TypeError(f"{type(module).__name__} cannot attend part by part: {special or 'no layout is passed on'}")
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


def forward(model: Any, parts: Sequence[Part]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run the model over parts and read the head at the end of each.

    Args:
        model: One that `enable` has accepted.
        parts: At least one; a part comes after those above it.

    Returns:
        Raw logits, shape (N,), and for each part the keys and values of its tokens, shape (L, 2, H, S, D).
    """
    weight = inner(model).score.weight
    device = weight.device
    spans = [(int(a), int(b)) for a, b in pairwise(np.cumsum([0, *(len(part.ids) for part in parts)]))]
    before = [_before(part, spans) for part in parts]
    masks = [
        torch.full((b - a, seen + b - a), -torch.inf, dtype=weight.dtype, device=device).triu_(seen + 1)
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
    # One by one, because the rounding of a product with one column depends on the number of rows.
    logits = torch.cat([read_head(model, hidden[0, b - 1 : b]) for _, b in spans])
    fresh = torch.stack(layout.fresh)
    return logits, [fresh[:, :, :, a:b] for a, b in spans]


def _before(part: Part, spans: Sequence[tuple[int, int]]) -> int:
    """Return how many tokens precede a part."""
    kept = 0 if part.past is None else part.past.shape[3]
    return kept + sum(spans[i][1] - spans[i][0] for i in part.above)


def enable(model: Any, pad: int) -> bool:
    """Give a model this attention if it then computes the same for shared prefixes as for whole states.

    This holds for decoders with full causal attention; it is measured, not assumed. Other models stay unchanged.

    Args:
        model: A scalar model in evaluation mode.
        pad: Padding id.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)
    backbone = inner(model)
    size, before = int(backbone.config.get_text_config().vocab_size), backbone.config._attn_implementation
    ids = [1 + i * 7919 % (size - 1) for i in range(24)]
    first, second, third, fourth = tuple(ids[:8]), tuple(ids[8:13]), tuple(ids[13:20]), tuple(ids[20:])
    states = [[first, second], [first, third], [first, third, fourth]]
    try:
        with torch.inference_mode():
            whole = logits_at(model, to_device(collate_plain(states, pad), backbone.score.weight.device))
            backbone.set_attn_implementation(ATTENTION)
            logits, fresh = forward(model, [Part(first), Part(second, above=(0,)), Part(third, above=(0,))])
            past = torch.cat((fresh[0], fresh[2]), dim=3)
            rest, _ = forward(model, [Part(fourth, past)])
            if alike(torch.cat((logits[1:], rest)), whole):
                return True
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
        pass
    backbone.set_attn_implementation(before)
    return False
