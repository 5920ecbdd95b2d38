"""From rows to the batches that a training step takes.

Rows of one tree travel together, as a *bundle*, so that their shared beginnings
are encoded once. The order of all steps of all epochs is drawn in advance from
the seed: a resumed run needs nothing but the number of the step.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rewardmodels.data.dataset import Row
from rewardmodels.model.encode import Encoder, Ids
from rewardmodels.model.packing import Batch, collate, collate_plain, pack

if TYPE_CHECKING:
    import torch

_WINDOW = 32
_BUNDLE = 16


class Bundle(NamedTuple):
    """Rows of one tree, or a part of them.

    Attributes:
        states: Parts of each distinct state.
        rows: The rows, pairs first.
        better: For each row the index of its ``chosen`` state.
        worse: For each pair the index of its ``rejected`` state.
        tokens: Tokens when shared beginnings are written once.
    """

    states: list[tuple[Ids, ...]]
    rows: list[Row]
    better: list[int]
    worse: list[int]
    tokens: int


def bundles(rows: Sequence[Row], encoder: Encoder, most: int) -> list[Bundle]:
    """Encode rows tree by tree, at most ``most`` to a bundle.

    A bundle is also small beside a batch, so that a batch of many rows holds many trees, whose rows tell more than
    those of one; and rows that stand together in it begin alike.
    """
    by_tree: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_tree[row.tree].append(row)
    size = min(most, _BUNDLE)
    ordered = (sorted(tree, key=lambda row: row.chosen) for tree in by_tree.values())
    chunks = [tree[i : i + size] for tree in ordered for i in range(0, len(tree), size)]
    return [_bundle(sorted(chunk, key=lambda row: row.rejected is None), encoder) for chunk in chunks]


def _bundle(rows: list[Row], encoder: Encoder) -> Bundle:
    texts: dict[str, int] = {}
    better = [texts.setdefault(row.chosen, len(texts)) for row in rows]
    worse = [texts.setdefault(row.rejected, len(texts)) for row in rows if row.rejected is not None]
    states = [encoded.parts for encoded in encoder.encode_texts(list(texts))]
    return Bundle(states, rows, better, worse, len(pack(states).ids))


def schedule(found: Sequence[Bundle], batch_size: int, epochs: float, seed: int) -> list[list[int]]:
    """Return the bundles of every step of a run.

    Each epoch has its own order. Within a window of many batches, bundles of like length go
    together, so that little is padded; the batches of a window come in random order.
    """
    steps: list[list[int]] = []
    whole, part = divmod(epochs, 1)
    for epoch in range(int(whole) + (part > 0)):
        rng = random.Random(f"{seed}|{epoch}")
        order = list(range(len(found)))
        rng.shuffle(order)
        batches = _batches(order, found, batch_size, rng)
        steps += batches if epoch < whole else batches[: max(1, round(part * len(batches)))]
    return steps


def _batches(order: list[int], found: Sequence[Bundle], batch_size: int, rng: random.Random) -> list[list[int]]:
    batches: list[list[int]] = []
    window = _WINDOW * batch_size
    for start in range(0, len(order), window):
        ordered = sorted(order[start : start + window], key=lambda i: found[i].tokens)
        fresh: list[list[int]] = [[]]
        rows = 0
        for i in ordered:
            if rows + len(found[i].rows) > batch_size and fresh[-1]:
                fresh.append([])
                rows = 0
            fresh[-1].append(i)
            rows += len(found[i].rows)
        rng.shuffle(fresh)
        batches += fresh
    return batches


def gather(chosen: Sequence[Bundle], pad: int, dtype: torch.dtype, share: bool) -> dict[str, Any]:
    """Return the tensors of one step.

    Args:
        chosen: Its bundles.
        pad: Padding id.
        dtype: Of the model.
        share: Whether shared beginnings are encoded once.

    Returns:
        The inputs of the model, ``rows`` and ``columns`` of the states' ends, indices of the states that are
        ``better`` and ``worse`` in pairs or ``points``, and the points' ``target``.
    """
    import torch

    offsets = np.cumsum([0, *(len(b.states) for b in chosen)])[:-1]
    batch = (
        collate([pack(b.states) for b in chosen], pad, dtype)
        if share
        else collate_plain([state for b in chosen for state in b.states], pad)
    )
    placed = list(zip(offsets.tolist(), chosen, strict=True))
    better = [start + i for start, b in placed for i in b.better[: len(b.worse)]]
    worse = [start + i for start, b in placed for i in b.worse]
    points = [start + i for start, b in placed for i in b.better[len(b.worse) :]]
    target = [row.chosen_target for b in chosen for row in b.rows[len(b.worse) :]]
    return {
        **batch.inputs,
        "rows": batch.rows,
        "columns": batch.columns,
        "better": torch.tensor(better, dtype=torch.long),
        "worse": torch.tensor(worse, dtype=torch.long),
        "points": torch.tensor(points, dtype=torch.long),
        "target": torch.tensor(target, dtype=torch.float32),
    }


def as_batch(tensors: dict[str, Any]) -> Batch:
    """Return the model's part of what `gather` made."""
    names = [name for name in ("input_ids", "attention_mask", "position_ids") if name in tensors]
    return Batch({name: tensors[name] for name in names}, tensors["rows"], tensors["columns"])
