"""Training a critic: its hyper-parameters, and the metrics of a critic on held-out problems.

The defaults are those of the paper and of the tiny model. Metrics (ranking, discrimination, loss and calibration, by
depth and agent) are pure functions of numpy arrays. Intervals are 95% bootstrap intervals over problems, the unit that
was held out, with a fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mas_gym.errors import ConfigError
from rewardmodels.data import DataKind, Example
from rewardmodels.data.encode import View
from rewardmodels.model.folder import HEADS
from search.compare.critics import auc

CriticKind = Literal["masprm", "orm"]
Head = Literal["bt", "mse", "bce"]

SMALL = 50_000_000
"""Backbones with fewer parameters get `TINY` by default, larger ones `PAPER`."""


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """Hyper-parameters (paper, App. "MASPRM model and optimization").

    Attributes:
        kind: ``"masprm"`` or ``"orm"``.
        head: ``"bt"`` or ``"mse"`` for MASPRM, ``"bce"`` or ``"mse"`` for ORM.
        bt_on: What the Bradley-Terry loss compares: ``"tanh"`` scores, as in the paper, or ``"raw"`` logits.
        anchor: Weight of the squared error of a labelled state in the Bradley-Terry loss, where a pair has weight 1.
            Pairs compare only siblings, but search compares values across branches and depths; the anchor puts
            them on one scale. 0 is the paper's loss.
        view: What the critic sees of a state.
        max_length: Longest state, in tokens.
        lora_rank: Rank of the LoRA adapters; 0 trains the whole model.
        lora_alpha: Their scale is ``lora_alpha / lora_rank``.
        lora_dropout: Dropout in front of them.
        nf4: Whether to quantise the frozen backbone to 4 bits (QLoRA).
        batch_size: Pairs or samples per step and process.
        max_tokens: Largest forward pass, in tokens; a larger step is computed in several, with the same gradient. It
            bounds memory.
        accumulation: Steps per update, whose gradients are accumulated.
        learning_rate: Peak of the schedule.
        epochs: Passes over the training rows.
        weight_decay: Of AdamW.
        warmup: Share of the updates with a rising learning rate; a cosine schedule follows.
        held_out: Share of the problems held out for metrics.
        evaluations: Number of evaluations in a run, including the last.
        checkpoints: Number of checkpoints in a run.
        gradient_checkpointing: Trade time for memory.
        cpu_bf16: Matrix products in bfloat16 on a CPU, faster if it has instructions for them; a GPU that supports
            them always uses them.
        seed: Seed of the head's initial weights, the order of the examples and dropout.
    """

    kind: CriticKind = "masprm"
    head: Head = "bt"
    bt_on: Literal["tanh", "raw"] = "tanh"
    anchor: float = 0.0
    view: View = "full"
    max_length: int = 2048
    lora_rank: int = 256
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    nf4: bool = True
    batch_size: int = 8
    max_tokens: int = 8192
    accumulation: int = 16
    learning_rate: float = 1e-5
    epochs: float = 5.0
    weight_decay: float = 0.01
    warmup: float = 0.03
    held_out: float = 0.05
    evaluations: int = 10
    checkpoints: int = 10
    gradient_checkpointing: bool = False
    cpu_bf16: bool = False
    seed: int = 42

    @property
    def data_kind(self) -> DataKind:
        """The kind of training set that the head learns from."""
        return HEADS[self.kind][self.head]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form."""
        return asdict(self)


PAPER = TrainingConfig()
# A tree of the embedded agents has about seven pairs and fifty labelled states; the anchor uses all of them.
TINY = TrainingConfig(
    anchor=1.0,
    max_length=1024,
    lora_rank=0,
    nf4=False,
    batch_size=256,
    max_tokens=2048,
    accumulation=1,
    learning_rate=5e-4,
    epochs=2.0,
    warmup=0.1,
    held_out=0.1,
    evaluations=4,
    checkpoints=2,
)


def config_for(parameters: int, overrides: dict[str, Any]) -> TrainingConfig:
    """Return the default config for a backbone of this size, with the given fields replaced.

    Raises:
        ConfigError: A field is unknown or a value is invalid, with every fault.
    """
    base = TINY if parameters < SMALL else PAPER
    known = asdict(base)
    faults = [f"unknown setting {name!r}; known: {', '.join(known)}" for name in overrides if name not in known]
    if faults:
        raise ConfigError("; ".join(faults), tuple(faults))
    config = replace(base, **overrides)
    if config.head != "bt" and "anchor" not in overrides:
        config = replace(config, anchor=0.0)
    if config.lora_rank == 0 and config.nf4 and "nf4" not in overrides:
        config = replace(config, nf4=False)
    faults = _faults(config)
    if faults:
        raise ConfigError("; ".join(faults), tuple(faults))
    return config


def check_head(kind: str, head: str) -> None:
    """Raise `ConfigError` unless this kind of critic can have this head."""
    if kind not in HEADS:
        raise ConfigError(f"expected kind {' or '.join(map(repr, HEADS))}, got {kind!r}")
    if head not in HEADS[kind]:
        raise ConfigError(f"expected head {' or '.join(map(repr, HEADS[kind]))} for kind {kind!r}, got {head!r}")


def _faults(s: TrainingConfig) -> list[str]:
    checks = [
        (s.bt_on in ("tanh", "raw"), f'bt_on: expected "tanh" or "raw", got {s.bt_on!r}'),
        (s.anchor >= 0, f"anchor: expected 0 or more, got {s.anchor}"),
        (s.anchor == 0 or s.head == "bt", f"anchor: only head 'bt' has one, got head {s.head!r}"),
        (s.view in ("full", "local"), f'view: expected "full" or "local", got {s.view!r}'),
        (s.max_length >= 64, f"max_length: expected at least 64, got {s.max_length}"),
        (s.lora_rank >= 0, f"lora_rank: expected 0 or more, got {s.lora_rank}"),
        (s.lora_rank > 0 or not s.nf4, "nf4: a 4-bit backbone is frozen; set lora_rank above 0, or nf4=False"),
        (s.batch_size >= 1, f"batch_size: expected at least 1, got {s.batch_size}"),
        (s.max_tokens >= 1, f"max_tokens: expected at least 1, got {s.max_tokens}"),
        (s.accumulation >= 1, f"accumulation: expected at least 1, got {s.accumulation}"),
        (s.learning_rate > 0, f"learning_rate: expected more than 0, got {s.learning_rate}"),
        (s.epochs > 0, f"epochs: expected more than 0, got {s.epochs}"),
        (0 <= s.warmup < 1, f"warmup: expected a share in [0, 1), got {s.warmup}"),
        (0 < s.held_out < 1, f"held_out: expected a share in (0, 1), got {s.held_out}"),
        (s.evaluations >= 1, f"evaluations: expected at least 1, got {s.evaluations}"),
        (s.checkpoints >= 1, f"checkpoints: expected at least 1, got {s.checkpoints}"),
    ]
    try:
        check_head(s.kind, s.head)
    except ConfigError as error:
        checks.append((False, str(error)))
    return [text for good, text in checks if not good]


Floats = NDArray[np.float64]

RESAMPLES = 1000
BINS = 10


def pair_metrics(examples: Sequence[Example], better: Floats, worse: Floats) -> dict[str, Any]:
    """Measure a critic on preference pairs (paper: average margin, pairwise accuracy, AUC, BT loss).

    Args:
        examples: The pairs.
        better: Logits of the better siblings.
        worse: Logits of the worse ones.

    Returns:
        ``margin``, ``accuracy``, ``auc`` and ``bt_loss`` on the tanh scores, the accuracy's interval, and the accuracy
        by depth and by agent. A tie counts half.
    """
    high, low = np.tanh(better), np.tanh(worse)
    right = np.where(better == worse, 0.5, (better > worse).astype(float))
    scores = np.concatenate([high, low])
    labels = np.concatenate([np.ones(len(high)), np.zeros(len(low))])
    return {
        "pairs": len(examples),
        "margin": float((high - low).mean()),
        "accuracy": float(right.mean()),
        "accuracy_interval": interval(examples, lambda i: float(right[i].mean())),
        "auc": auc(scores, labels),
        "bt_loss": float(np.logaddexp(0, low - high).mean()),
        "accuracy_by_depth": _grouped([e.depth for e in examples], right),
        "accuracy_by_agent": _grouped([e.agent for e in examples], right),
    }


def outcome_metrics(examples: Sequence[Example], logits: Floats) -> dict[str, Any]:
    """Measure an outcome critic on terminal states.

    Returns:
        ``auc`` with its interval, ``accuracy`` at a score of 0, ``bce_loss`` and ``mse``, and the calibration.
    """
    target = np.array([e.chosen_target for e in examples])
    scores, labels = np.tanh(logits), target > 0
    return {
        "states": len(examples),
        "auc": auc(scores, labels),
        "auc_interval": interval(examples, lambda i: auc(scores[i], labels[i])),
        "accuracy": float(((scores > 0) == labels).mean()),
        "bce_loss": float(np.logaddexp(0, np.where(labels, -2, 2) * logits).mean()),
        "mse": float(((scores - target) ** 2).mean()),
        "calibration": calibration(examples, logits),
    }


def point_metrics(examples: Sequence[Example], logits: Floats) -> dict[str, Any]:
    """Measure a process critic on labelled states.

    Returns:
        ``mse``, ``correlation`` with the targets, and the calibration.
    """
    target, scores = np.array([e.chosen_target for e in examples]), np.tanh(logits)
    steady = len(examples) < 2 or scores.std() == 0 or target.std() == 0
    return {
        "states": len(examples),
        "mse": float(((scores - target) ** 2).mean()),
        "correlation": None if steady else float(np.corrcoef(scores, target)[0, 1]),
        "calibration": calibration(examples, logits),
    }


def calibration(examples: Sequence[Example], logits: Floats) -> dict[str, dict[str, float]]:
    """Compare scores with targets at each depth.

    Returns:
        For each depth the number of states, the mean score, the mean target, and ``gap``: the mean over ten bins of
        the score, weighted by their states, of the distance between the bin's mean score and mean target.
    """
    depths = np.array([e.depth for e in examples])
    target, scores = np.array([e.chosen_target for e in examples]), np.tanh(logits)
    bins = np.clip(((scores + 1) / 2 * BINS).astype(int), 0, BINS - 1)
    found: dict[str, dict[str, float]] = {}
    for depth in np.unique(depths):
        here = depths == depth
        cells = [here & (bins == b) for b in np.unique(bins[here])]
        gaps = [float(abs(scores[cell].mean() - target[cell].mean()) * cell.sum()) for cell in cells]
        found[str(depth)] = {
            "states": int(here.sum()),
            "score": float(scores[here].mean()),
            "target": float(target[here].mean()),
            "gap": sum(gaps) / int(here.sum()),
        }
    return found


def interval(examples: Sequence[Example], statistic: Callable[[NDArray[np.intp]], float]) -> list[float]:
    """Return the 95% bootstrap interval of a statistic of example indices, resampling problems."""
    names = {name: i for i, name in enumerate(dict.fromkeys((e.task, e.problem_id) for e in examples))}
    owner = np.array([names[e.task, e.problem_id] for e in examples])
    order = np.argsort(owner, kind="stable")
    groups = np.split(order, np.cumsum(np.bincount(owner))[:-1])
    rng = np.random.default_rng(0)
    draws = [
        statistic(np.concatenate([groups[i] for i in rng.integers(len(groups), size=len(groups))]))
        for _ in range(RESAMPLES)
    ]
    low, high = np.quantile(draws, [0.025, 0.975])
    return [float(low), float(high)]


def _grouped(keys: Sequence[int | str], values: Floats) -> dict[str, dict[str, float]]:
    names = np.array([str(key) for key in keys])
    ordered = dict.fromkeys(str(key) for key in sorted(keys, key=lambda k: k if isinstance(k, int) else 0))
    return {
        name: {"mean": float(values[names == name].mean()), "count": int((names == name).sum())} for name in ordered
    }
