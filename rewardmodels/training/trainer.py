"""Batches, and transformers' Trainer with the critics' losses; imported only during training (slow import).

Examples of one tree form a *bundle*, so that their common prefixes are encoded once. The order of all steps of all
epochs is drawn in advance from the seed, so a resumed run needs only its step number. If a step has more tokens
than fit into memory, it is computed in several forward passes, whose gradients sum to the gradient of the step.
"""

from __future__ import annotations

import math
import os
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, SequentialSampler
from transformers import PreTrainedModel, PrinterCallback, TrainingArguments

from mas_gym.internal.json_types import JSONObject
from rewardmodels.data.dataset import Example
from rewardmodels.data.encode import (
    EncodedState,
    Encoder,
    Tensors,
    chunks,
    collate,
    collate_plain,
    merge_beginnings,
    pack,
    tokens_in,
)
from rewardmodels.model.backbone import logits_at, to_device
from rewardmodels.training.checkpoints import Guarded, common_arguments
from rewardmodels.training.config import TrainingConfig
from rewardmodels.training.metrics import Floats, measured

_WINDOW = 32
_BUNDLE = 16


class Bundle(NamedTuple):
    """Examples of one tree.

    Attributes:
        states: Parts of each distinct state.
        examples: The examples, pairs first.
        better: For each example the index of its ``chosen`` state.
        worse: For each pair the index of its ``rejected`` state.
        tokens: Number of tokens, counting shared prefixes once.
    """

    states: list[EncodedState]
    examples: list[Example]
    better: list[int]
    worse: list[int]
    tokens: int


def bundles(examples: Sequence[Example], encoder: Encoder, most: int, max_tokens: int) -> list[Bundle]:
    """Encode examples tree by tree.

    Bundles are small compared to a batch, so that a batch contains examples of many trees, for diversity. Neighboring
    examples in a bundle have long common prefixes.

    A bundle has at most ``most`` examples; one with more than ``max_tokens`` tokens is halved, down to one example.
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
    states = encoder.encode_parts(list(places))
    return Bundle(states, examples, better, worse, sum(map(len, merge_beginnings(states).parts)))


def schedule(found: Sequence[Bundle], batch_size: int, epochs: float, seed: int) -> list[list[int]]:
    """Return the bundles of every step of a run.

    Each epoch has a different order. Within a window of many batches, bundles of similar length are
    batched together to reduce padding; the batches of a window are in random order.
    """
    steps: list[list[int]] = []
    whole, part = divmod(epochs, 1)
    window = _WINDOW * batch_size
    for epoch in range(int(whole) + (part > 0)):
        rng = random.Random(f"{seed}|{epoch}")
        order = list(range(len(found)))
        rng.shuffle(order)
        batches: list[list[int]] = []
        for start in range(0, len(order), window):
            ordered = sorted(order[start : start + window], key=lambda i: found[i].tokens)
            fresh = chunks(ordered, [len(found[i].examples) for i in ordered], limit=batch_size)
            rng.shuffle(fresh)
            batches += fresh
        steps += batches if epoch < whole else batches[: max(1, round(part * len(batches)))]
    return steps


def forward_passes(step: Sequence[Bundle], max_tokens: int, share: bool) -> list[list[Bundle]]:
    """Split a step into forward passes of at most ``max_tokens`` tokens, padding included.

    Bundles are never split; a larger bundle gets a separate forward pass.
    """
    if share:
        ordered = sorted(step, key=lambda bundle: bundle.tokens)
        return chunks(ordered, [bundle.tokens for bundle in ordered], padded=True, limit=max_tokens)
    longest = max(tokens_in(state) for bundle in step for state in bundle.states)
    return chunks(list(step), [longest * len(bundle.states) for bundle in step], limit=max_tokens)


def gather(chosen: Sequence[Bundle], pad: int, dtype: torch.dtype, share: bool) -> Tensors:
    """Return the tensors of one forward pass.

    Returns:
        The tensors of `rewardmodels.data.encode.collate`, indices of the ``better`` and ``worse``
        states of pairs and of labeled states (``points``), and the ``target`` of each labeled state.
    """
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
        **batch,
        "better": torch.tensor(better, dtype=torch.long),
        "worse": torch.tensor(worse, dtype=torch.long),
        "points": torch.tensor(points, dtype=torch.long),
        "target": torch.tensor(target, dtype=torch.float32),
    }


def loss_of(config: TrainingConfig, logits: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    """Return the mean loss of a forward pass (paper, Sec. "MASPRM training", App. "ORM").

    Args:
        config: Training config, which names the head.
        logits: Logits of the states, shape (K,).
        tensors: As `rewardmodels.training.trainer.gather` returns them.
    """
    points, target = logits[tensors["points"]], tensors["target"]
    if config.head == "bce":
        # A logit of z means p = sigmoid(2 z), so that tanh(z) = 2 p - 1 is on the scale of the other heads.
        return torch.nn.functional.softplus(-2 * torch.sign(target) * points).mean()
    errors = (torch.tanh(points) - target) ** 2
    if config.head == "mse":
        return errors.mean()
    worse, better = logits[tensors["worse"]], logits[tensors["better"]]
    gap = worse - better if config.bt_on == "raw" else torch.tanh(worse) - torch.tanh(better)
    total = torch.nn.functional.softplus(gap).sum() + config.anchor * errors.sum()
    return total / weight_of(config, tensors)


def weight_of(config: TrainingConfig, tensors: Tensors) -> float:
    """Return the weight of a forward pass in its step: 1 per pair, and 1 per point (``anchor`` if there are pairs)."""
    point = config.anchor if config.head == "bt" else 1.0
    return len(tensors["worse"]) + point * len(tensors["points"])


class StepData(Dataset):  # type: ignore[misc]
    """All steps of all epochs, in order; each is built on request."""

    def __init__(
        self,
        found: Sequence[Bundle],
        order: Sequence[Sequence[int]],
        max_tokens: int,
        pad: int,
        dtype: torch.dtype,
        share: bool,
    ):
        """Store the inputs of `__getitem__`."""
        self.found, self.order, self.max_tokens, self.options = found, order, max_tokens, (pad, dtype, share)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, object]:
        """Return the tensors of one step, one entry per forward pass."""
        passes = forward_passes([self.found[i] for i in self.order[index]], self.max_tokens, self.options[-1])
        return {"passes": [gather(part, *self.options) for part in passes]}


class HeldOut:
    """Held-out examples, and how to score them in forward passes of at most ``max_tokens`` tokens."""

    def __init__(self, found: Sequence[Bundle], max_tokens: int, pad: int, dtype: torch.dtype, share: bool):
        """Group bundles of similar length."""
        self.passes = forward_passes(sorted(found, key=lambda bundle: bundle.tokens), max_tokens, share)
        self.examples = [example for part in self.passes for bundle in part for example in bundle.examples]
        self.options = (pad, dtype, share)

    def logits(self, model: PreTrainedModel) -> tuple[Floats, Floats]:
        """Return the logits of the examples' better and worse states; the second is empty for labeled states."""
        better: list[Floats] = []
        worse: list[Floats] = []
        training = model.training
        model.eval()
        device = next(model.parameters()).device
        with torch.inference_mode():
            for part in self.passes:
                tensors = to_device(gather(part, *self.options), device)
                logits = logits_at(model, tensors)
                first = tensors["better"] if len(tensors["better"]) else tensors["points"]
                better.append(logits[first].double().cpu().numpy())
                worse.append(logits[tensors["worse"]].double().cpu().numpy())
        model.train(training)
        return np.concatenate(better), np.concatenate(worse)

    def metrics(self, model: PreTrainedModel, config: TrainingConfig) -> JSONObject:
        """Return a model's metrics, which depend on the kind of the held-out examples."""
        return measured(config.kind, self.examples, *self.logits(model))


class CriticTrainer(Guarded):
    """Trains a critic on `StepData` and measures it on `HeldOut`."""

    def __init__(self, config: TrainingConfig, steps: StepData, held_out: HeldOut, **kwargs: object):
        """Pass the other arguments to transformers."""
        self.config, self.held_out = config, held_out
        super().__init__(train_dataset=steps, eval_dataset=steps, data_collator=lambda items: items[0], **kwargs)
        self.model_accepts_loss_kwargs = False
        self.remove_callback(PrinterCallback)

    def _get_train_sampler(self, train_dataset: object = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)

    def training_step(
        self, model: PreTrainedModel, inputs: dict[str, object], num_items_in_batch: object = None
    ) -> torch.Tensor:
        """Accumulate the gradients of a step's forward passes and return its loss.

        Raises:
            TrainingError: The loss is not finite.
        """
        model.train()
        passes = self._prepare_inputs(inputs)["passes"]
        weights = [weight_of(self.config, tensors) for tensors in passes]
        total = torch.zeros((), device=self.args.device)
        for i, (tensors, weight) in enumerate(zip(passes, weights, strict=True)):
            # Processes may have different numbers of passes, so they synchronize gradients only in the last pass.
            wait = nullcontext() if i == len(passes) - 1 else self.accelerator.no_sync(model)
            with wait:
                with self.compute_loss_context_manager():
                    loss = loss_of(self.config, logits_at(model, tensors), tensors)
                self.check_loss(loss.item())
                loss = loss * (weight / sum(weights)) / self.current_gradient_accumulation_steps
                self.accelerator.backward(loss)
            total += loss.detach()
        return total

    def evaluate(
        self, eval_dataset: object = None, ignore_keys: object = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Measure the model on the held-out problems and log the metrics."""
        found = self.held_out.metrics(self.model, self.config)
        flat = {f"{metric_key_prefix}_{k}": v for k, v in found.items() if isinstance(v, int | float)}
        for depth, part in found.get("accuracy_by_depth", {}).items():
            flat[f"{metric_key_prefix}_accuracy_depth_{depth}"] = part["mean"]
        self.log(flat)
        # Here, because the state is part of each checkpoint.
        self.state.log_history[-1]["held_out"] = found
        self.control: object = self.callback_handler.on_evaluate(self.args, self.state, self.control, flat)
        return flat


def arguments(config: TrainingConfig, folder: Path, steps: int, device: str) -> TrainingArguments:
    """Return transformers' arguments for a run of this many steps, divided among the processes of torchrun."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    updates = max(1, math.ceil(steps / (config.accumulation * processes)))
    common = common_arguments(asdict(config), folder, updates, device)
    return TrainingArguments(
        **common | ({"bf16": config.cpu_bf16} if device == "cpu" else {}),
        num_train_epochs=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=config.accumulation,
        lr_scheduler_type="cosine",
        eval_strategy="steps",
        eval_steps=max(1, updates // config.evaluations),
        ddp_find_unused_parameters=False,
    )
