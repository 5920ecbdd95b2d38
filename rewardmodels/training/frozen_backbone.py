"""Training of a critic's head on a frozen backbone.

The backbone encodes each state once. The head is a linear function of hidden states with few parameters, so it is
fitted to all examples at once, and the weight of its penalty is selected by cross-validation. On a CPU this takes a
fraction of the time of LoRA, which encodes all states in each epoch and computes gradients through the backbone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from mas_gym.errors import TrainingError
from mas_gym.internal.json_types import JSONObject
from mas_gym.policies.local.prefix_store import prefix_cache_megabytes
from rewardmodels.data.dataset import Example
from rewardmodels.data.encode import Encoder
from rewardmodels.model.backbone import inner
from rewardmodels.model.prefix_cache import PrefixScorer
from rewardmodels.training.config import TrainingConfig
from rewardmodels.training.metrics import Floats, measured, point_metrics, problem_numbers
from rewardmodels.training.trainer import loss_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FOLDS = 5
PENALTIES = (100.0, 10.0, 1.0, 0.1, 0.01)
"""Candidate weights of the L2 penalty, per standard deviation of the features; cross-validation selects the best."""

_LOG_SECONDS = 15.0
_STEPS = 200

Log = Callable[[str], None]


class FrozenBackbone:
    """Hidden states of a backbone in evaluation mode at the ends of states, each computed once."""

    def __init__(self, model: PreTrainedModel, encoder: Encoder, pad: int, log: Log) -> None:
        """Start without hidden states."""
        self.model, self.encoder, self.log = model, encoder, log
        self._scorer = PrefixScorer(model, pad, True, prefix_cache_megabytes(model) << 20)
        self._known: dict[tuple[str, ...], torch.Tensor] = {}

    def encode(self, examples: Sequence[Example]) -> None:
        """Compute the hidden states of the examples' states, tree by tree."""
        trees: dict[str, dict[tuple[str, ...], None]] = {}
        for one in examples:
            trees.setdefault(one.tree, {}).update(dict.fromkeys(_states([one])))
        total = sum(map(len, trees.values()))
        started = logged = time.monotonic()
        done = 0
        for states in trees.values():
            new = [state for state in states if state not in self._known]
            # No state is continued in a later call.
            hidden = self._scorer.hidden(self.encoder.encode_parts(new), [False] * len(new)) if new else []
            self._known.update(zip(new, (row.float().cpu() for row in hidden), strict=True))
            done += len(states)
            if (now := time.monotonic()) - logged > _LOG_SECONDS:
                logged = now
                rate = self._scorer.counts.encoded / (now - started)
                left = (now - started) / done * (total - done)
                self.log(
                    f"hidden states of {done:,} of {total:,} states, {rate:,.0f} tokens/s, "
                    f"{left // 60:.0f}:{left % 60:02.0f} left"
                )

    @property
    def tokens(self) -> int:
        """Number of encoded tokens."""
        return self._scorer.counts.encoded

    def features(self, examples: Sequence[Example]) -> Features:
        """Return the hidden states of examples, pairs first, with their places in the loss."""
        ordered = sorted(examples, key=lambda one: one.rejected is None)
        places = {state: place for place, state in enumerate(dict.fromkeys(_states(ordered)))}
        pairs = sum(one.rejected is not None for one in ordered)
        better = torch.tensor([places[one.chosen] for one in ordered], dtype=torch.long)
        worse = [places[one.rejected] for one in ordered if one.rejected is not None]
        target = torch.tensor([one.chosen_target for one in ordered[pairs:]], dtype=torch.float32)
        hidden = torch.stack([self._known[state] for state in places])
        return Features(ordered, hidden, better, torch.tensor(worse, dtype=torch.long), target)

    def select_penalty(self, examples: Sequence[Example], config: TrainingConfig) -> float:
        """Return the penalty with the least loss in cross-validation by problem."""
        owner = problem_numbers(examples)
        folds = min(FOLDS, int(owner.max()) + 1)
        losses = dict.fromkeys(PENALTIES, 0.0)
        for fold in range(folds if folds > 1 else 0):
            inside = (owner % folds == fold).tolist()
            rest, tested = (
                self.features([one for one, here in zip(examples, inside, strict=True) if here is side])
                for side in (False, True)
            )
            for penalty in PENALTIES:
                losses[penalty] += float(tested.loss(config, fitted_head(rest, config, penalty))) / folds
        stated = ", ".join(f"{loss:.4f} with {penalty:g}" for penalty, loss in losses.items())
        self.log(f"{len(examples):,} examples; loss in cross-validation by penalty: {stated}")
        return min(PENALTIES, key=losses.__getitem__)


def _states(examples: Sequence[Example]) -> list[tuple[str, ...]]:
    return [state for one in examples for state in (one.chosen, one.rejected) if state is not None]


class Features(NamedTuple):
    """Examples as hidden states.

    Attributes:
        examples: The examples, pairs first.
        hidden: Hidden states, shape (K, hidden size).
        better: For each example the index of its ``chosen`` state.
        worse: For each pair the index of its ``rejected`` state.
        target: The target of each example that is not a pair.
    """

    examples: Sequence[Example]
    hidden: torch.Tensor
    better: torch.Tensor
    worse: torch.Tensor
    target: torch.Tensor

    def loss(self, config: TrainingConfig, head: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a head, shape (hidden size,)."""
        pairs = len(self.worse)
        places = {"better": self.better[:pairs], "worse": self.worse, "points": self.better[pairs:]}
        return loss_of(config, self.hidden @ head, {**places, "target": self.target})

    def logits(self, head: torch.Tensor) -> tuple[Floats, Floats]:
        """Return the logits of the examples' better and worse states; the second is empty for labeled states."""
        logits = (self.hidden @ head).double().numpy()
        return logits[self.better.numpy()], logits[self.worse.numpy()]


def train_head(
    backbone: FrozenBackbone,
    config: TrainingConfig,
    learned: Sequence[Example],
    held: Sequence[Example],
    labeled: Sequence[Example],
) -> JSONObject:
    """Fit the head of a backbone's model to examples, and return its metrics on held-out examples.

    ``labeled`` are held-out labeled states, for the calibration of a Bradley-Terry critic.

    Raises:
        TrainingError: The loss is not finite.
    """
    backbone.encode([*learned, *held, *labeled])
    penalty = backbone.select_penalty(learned, config)
    head = fitted_head(backbone.features(learned), config, penalty)
    if not bool(torch.isfinite(head).all()):
        raise TrainingError("the loss is not finite; check the weights of the backbone")
    weight = inner(backbone.model).score.weight
    weight.copy_(head[None].to(weight))
    tested = backbone.features(held)
    metrics = measured(config.kind, tested.examples, *tested.logits(head))
    if labeled:
        calibrated = backbone.features(labeled)
        metrics["points"] = point_metrics(calibrated.examples, calibrated.logits(head)[0])
    return {**metrics, "penalty": penalty}


def fitted_head(features: Features, config: TrainingConfig, penalty: float) -> torch.Tensor:
    """Return the head with the least penalized loss."""
    scale = features.hidden.std(dim=0).clamp(min=1e-6)
    # Without a bias, features are scaled but not centered.
    scaled = features._replace(hidden=features.hidden / scale)
    head = torch.zeros(features.hidden.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([head], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = scaled.loss(config, head) + penalty * (head @ head)
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    return (head / scale).detach()
