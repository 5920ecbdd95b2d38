"""Many states in few tokens: what several states begin with is written once.

The states of one tree are laid out in one row of tokens, each node of their
trie once; a mask lets a token see its own ancestors alone, and positions count
along the path. A decoder then computes for each state exactly what it would
compute for that state alone, at a fraction of the tokens.

Letters in shapes: R rows, S tokens of a row, K states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rewardmodels.model.encode import Ids

if TYPE_CHECKING:
    import torch

Ints = NDArray[np.int64]


class Packed(NamedTuple):
    """One row.

    Attributes:
        ids: Token ids, shape (S,).
        positions: Position of each token in its own state, shape (S,).
        sees: Whether token i may look at token j, shape (S, S).
        ends: For each state the place of its last token, shape (K,).
    """

    ids: Ints
    positions: Ints
    sees: NDArray[np.bool_]
    ends: Ints


def pack(states: Sequence[Sequence[Ids]]) -> Packed:
    """Lay out states that share their beginnings; each has parts, none of them empty."""
    known: dict[tuple[int, Ids], int] = {}
    parents: list[int] = []
    parts: list[Ids] = []
    last_parts: list[int] = []
    for state in states:
        node = -1
        for ids in state:
            key = (node, ids)
            if key not in known:
                known[key] = len(parts)
                parents.append(node)
                parts.append(ids)
            node = known[key]
        last_parts.append(node)
    starts = np.cumsum([0, *map(len, parts)])
    total = int(starts[-1])
    ids_row = np.fromiter((i for part in parts for i in part), np.int64, total)
    positions = np.empty(total, np.int64)
    sees = np.zeros((total, total), np.bool_)
    for node, parent in enumerate(parents):
        a, b = int(starts[node]), int(starts[node + 1])
        before = 0
        if parent >= 0:
            last = int(starts[parent + 1]) - 1
            before = int(positions[last]) + 1
            sees[a:b, : last + 1] = sees[last, : last + 1]
        positions[a:b] = np.arange(before, before + b - a)
        sees[a:b, a:b] = np.tri(b - a, dtype=np.bool_)
    return Packed(ids_row, positions, sees, starts[1:][last_parts] - 1)


class Batch(NamedTuple):
    """Rows as tensors.

    Attributes:
        inputs: What the backbone takes: ``input_ids`` (R, S), and ``position_ids`` (R, S) with a 4-D additive
            ``attention_mask`` (R, 1, S, S), or a plain 2-D mask.
        rows: Row of each state, shape (K,).
        columns: Place of each state's last token, shape (K,).
    """

    inputs: dict[str, torch.Tensor]
    rows: torch.Tensor
    columns: torch.Tensor


def collate(rows: Sequence[Packed], pad: int, dtype: torch.dtype) -> Batch:
    """Pad packed rows to one length.

    Args:
        rows: The rows.
        pad: Id to pad with.
        dtype: Of the additive mask: the model's.
    """
    import torch

    count, width = len(rows), max(len(row.ids) for row in rows)
    ids = np.full((count, width), pad, np.int64)
    positions = np.zeros((count, width), np.int64)
    sees = np.zeros((count, 1, width, width), np.bool_)
    # A padded token must see something, or its softmax has nothing to sum over.
    sees[:, :, :, 0] = True
    for i, row in enumerate(rows):
        size = len(row.ids)
        ids[i, :size] = row.ids
        positions[i, :size] = row.positions
        sees[i, 0, :size, :size] = row.sees
    mask = torch.zeros(sees.shape, dtype=dtype).masked_fill_(torch.from_numpy(~sees), torch.finfo(dtype).min)
    inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": mask, "position_ids": torch.from_numpy(positions)}
    where = np.concatenate([np.full(len(row.ends), i) for i, row in enumerate(rows)])
    return Batch(inputs, torch.from_numpy(where), torch.from_numpy(np.concatenate([row.ends for row in rows])))


def collate_plain(states: Sequence[Sequence[Ids]], pad: int) -> Batch:
    """Write each state out whole, one row each, padded on the right; for models that take no mask of ours."""
    import torch

    lengths = [sum(map(len, state)) for state in states]
    ids = np.full((len(states), max(lengths)), pad, np.int64)
    for i, state in enumerate(states):
        ids[i, : lengths[i]] = np.fromiter((token for part in state for token in part), np.int64, lengths[i])
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
    return Batch(inputs, torch.arange(len(states)), torch.tensor(lengths) - 1)
