"""One forward over rows of any length, without padding: all tokens form one sequence, and attention alone knows rows.

A layer's linear parts, most of its work, see as many tokens as there are. Attention
runs row by row, each row with the keys and values of its cached prefix.

Letters in shapes: L layers, H heads of keys and values, D head size, R rows, P tokens of a row's prefix, S new tokens
of a row, K states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from rewardmodels.backbone import alike, inner, logits_at, read_head, to_device
from rewardmodels.packing import Packed, collate_plain, pack

ATTENTION = "mas_gym_rows"
"""The name under which transformers knows this attention."""

_SPECIAL = ("sliding_window", "softcap", "s_aux")


class Row(NamedTuple):
    """What follows one cached prefix.

    Attributes:
        packed: The new tokens.
        past: Keys and values of the prefix, shape (L, 2, H, P, D); None without one.
    """

    packed: Packed
    past: torch.Tensor | None


@dataclass
class _Layout:
    """Where each row lies in the sequence, and what its layers have computed.

    Attributes:
        spans: First token and one past the last.
        masks: What tokens may see, shape (S, P + S).
        pasts: Of each row.
        fresh: Keys and values of the new tokens, one tensor (2, H, tokens, D) per layer run so far.
    """

    spans: list[tuple[int, int]]
    masks: list[torch.Tensor]
    pasts: list[torch.Tensor | None]
    fresh: list[torch.Tensor] = field(default_factory=list)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    rows: _Layout | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within rows; called by transformers in each layer.

    Raises:
        TypeError: The model does not pass the rows on to its layers, or its attention is not plain.
    """
    special = [name for name in _SPECIAL if options.get(name) is not None]
    if rows is None or special:
        raise TypeError(f"{type(module).__name__} cannot attend row by row: {special or 'rows are not passed on'}")
    layer = len(rows.fresh)
    rows.fresh.append(torch.stack((key[0], value[0])))
    found = torch.empty_like(query)
    grouped = query.shape[1] != key.shape[1]
    for (a, b), mask, past in zip(rows.spans, rows.masks, rows.pasts, strict=True):
        keys, values = key[:, :, a:b], value[:, :, a:b]
        if past is not None:
            keys = torch.cat((past[layer, 0][None], keys), dim=2)
            values = torch.cat((past[layer, 1][None], values), dim=2)
        found[:, :, a:b] = scaled_dot_product_attention(
            query[:, :, a:b], keys, values, attn_mask=mask, scale=scaling, enable_gqa=grouped
        )
    return found.transpose(1, 2).contiguous(), None


def forward(model: Any, rows: Sequence[Row]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run the model over rows and read the head at the end of each state.

    Args:
        model: One that `enable` has accepted.
        rows: At least one.

    Returns:
        Raw logits, shape (K,), in order of rows and their states, and for each row the keys and values of its new
        tokens, shape (L, 2, H, S, D).
    """
    weight = inner(model).score.weight
    sizes = np.cumsum([0, *(len(row.packed.ids) for row in rows)])
    spans = [(int(a), int(b)) for a, b in pairwise(sizes)]
    masks = [_mask(row).to(weight.device) for row in rows]
    layout = _Layout(spans, masks, [row.past for row in rows])
    ids, positions = (
        torch.from_numpy(np.concatenate([getattr(row.packed, name) for row in rows]))[None].to(weight.device)
        for name in ("ids", "positions")
    )
    # A mask of four dimensions is passed on untouched; attention has masks of its own.
    untouched = torch.zeros((1, 1, 1, 1), dtype=weight.dtype, device=weight.device)
    hidden = inner(model).base_model(
        input_ids=ids, attention_mask=untouched, position_ids=positions, use_cache=False, rows=layout
    )[0]
    ends = torch.from_numpy(np.concatenate([a + row.packed.ends for (a, _), row in zip(spans, rows, strict=True)]))
    fresh = torch.stack(layout.fresh)
    return read_head(model, hidden[0, ends.to(weight.device)]), [fresh[:, :, :, a:b] for a, b in spans]


def _mask(row: Row) -> torch.Tensor:
    sees = row.packed.sees
    if row.past is not None:
        sees = np.concatenate((np.ones((len(sees), row.past.shape[3]), np.bool_), sees), axis=1)
    return torch.from_numpy(sees)


def enable(model: Any, pad: int) -> bool:
    """Give a model this attention, if with it the model computes the same for shared prefixes as for whole states.

    It does for decoders with full causal attention; the answer is measured, not assumed. Other models stay as they are.

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
            logits, fresh = forward(model, [Row(pack(states[:2]), None), Row(pack(states[1:2]), None)])
            past = fresh[1][:, :, :, : len(first) + len(third)]
            rest, _ = forward(model, [Row(pack([[fourth]], offset=past.shape[3]), past)])
            if alike(torch.cat((logits[:2], rest)), whole):
                return True
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
        pass
    backbone.set_attn_implementation(before)
    return False
