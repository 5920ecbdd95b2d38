"""Batches of training: from examples to the tensors of each step.

Examples of one tree stay together in a *bundle*, so that their shared beginnings are encoded once.
The order of all steps of all epochs is drawn in advance from the seed, so a resumed run needs only
the number of its step. A step with more tokens than fit into memory at once is computed in several
forward passes, whose gradients add up to those of one.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rewardmodels.data.dataset import Example
from rewardmodels.model.encode import Encoder, Ids
from rewardmodels.model.packing import ModelInput, chunks, collate, collate_plain, merge_beginnings, pack

if TYPE_CHECKING:
    import torch

_WINDOW = 32
_BUNDLE = 16


class Bundle(NamedTuple):
    """Examples of one tree.

    Attributes:
        states: Parts of each distinct state.
        examples: The examples, pairs first.
        better: For each example the index of its ``chosen`` state.
        worse: For each pair the index of its ``rejected`` state.
        tokens: Tokens with shared beginnings written once.
    """

    states: list[tuple[Ids, ...]]
    examples: list[Example]
    better: list[int]
    worse: list[int]
    tokens: int


def bundles(examples: Sequence[Example], encoder: Encoder, most: int, max_tokens: int) -> list[Bundle]:
    """Encode examples tree by tree.

    Bundles are small beside a batch, so that a batch holds many trees, which are more diverse than the
    examples of one; neighbours in a bundle begin alike.

    Args:
        examples: The examples.
        encoder: Makes token ids of them.
        most: Largest number of examples in a bundle.
        max_tokens: Bundles with more tokens are halved while they hold more than one example.
    """
    by_tree: dict[str, list[Example]] = defaultdict(list)
    for example in examples:
        by_tree[example.tree].append(example)
    size = min(most, _BUNDLE)
    found: list[Bundle] = []
    for tree in by_tree.values():
        ordered = sorted(tree, key=lambda example: "".join(example.chosen))
        for start in range(0, len(ordered), size):
            found += _bundles(ordered[start : start + size], encoder, max_tokens)
    return found


def _bundles(examples: list[Example], encoder: Encoder, max_tokens: int) -> Iterator[Bundle]:
    bundle = _bundle(sorted(examples, key=lambda example: example.rejected is None), encoder)
    if bundle.tokens <= max_tokens or len(examples) == 1:
        yield bundle
        return
    half = len(examples) // 2
    yield from _bundles(examples[:half], encoder, max_tokens)
    yield from _bundles(examples[half:], encoder, max_tokens)


def _bundle(examples: list[Example], encoder: Encoder) -> Bundle:
    places: dict[tuple[str, ...], int] = {}
    better = [places.setdefault(example.chosen, len(places)) for example in examples]
    worse = [places.setdefault(example.rejected, len(places)) for example in examples if example.rejected is not None]
    states = [encoded.parts for encoded in encoder.encode_parts(list(places))]
    return Bundle(states, examples, better, worse, sum(map(len, merge_beginnings(states).parts)))


def schedule(found: Sequence[Bundle], batch_size: int, epochs: float, seed: int) -> list[list[int]]:
    """Return the bundles of every step of a run.

    Each epoch has its own order. Within a window of many batches, bundles of similar length go
    together to save padding; the batches of a window come in random order.
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
        count = 0
        for i in ordered:
            if count + len(found[i].examples) > batch_size and fresh[-1]:
                fresh.append([])
                count = 0
            fresh[-1].append(i)
            count += len(found[i].examples)
        rng.shuffle(fresh)
        batches += fresh
    return batches


def forward_passes(step: Sequence[Bundle], max_tokens: int, share: bool) -> list[list[Bundle]]:
    """Cut a step into forward passes of at most ``max_tokens`` tokens, padding included.

    A bundle is never cut; one that is larger gets a forward pass of its own.
    """
    if share:
        ordered = sorted(step, key=lambda bundle: bundle.tokens)
        return chunks(ordered, [bundle.tokens for bundle in ordered], padded=True, limit=max_tokens)
    longest = max(sum(map(len, state)) for bundle in step for state in bundle.states)
    return chunks(list(step), [longest * len(bundle.states) for bundle in step], limit=max_tokens)


def gather(chosen: Sequence[Bundle], pad: int, dtype: torch.dtype, share: bool) -> dict[str, Any]:
    """Return the tensors of one forward pass.

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
    target = [example.chosen_target for b in chosen for example in b.examples[len(b.worse) :]]
    return {
        **batch.inputs,
        "rows": batch.rows,
        "columns": batch.columns,
        "better": torch.tensor(better, dtype=torch.long),
        "worse": torch.tensor(worse, dtype=torch.long),
        "points": torch.tensor(points, dtype=torch.long),
        "target": torch.tensor(target, dtype=torch.float32),
    }


def model_input(tensors: dict[str, Any]) -> ModelInput:
    """Return the model's part of the tensors that `gather` returns."""
    names = [name for name in ("input_ids", "attention_mask", "position_ids") if name in tensors]
    return ModelInput({name: tensors[name] for name in names}, tensors["rows"], tensors["columns"])
