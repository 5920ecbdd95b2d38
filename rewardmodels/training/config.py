"""Hyperparameters of training, with the defaults of the paper and of the tiny model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from mas_gym.errors import ConfigError
from mas_gym.internal.json_types import JSONObject
from rewardmodels.data.dataset import DataKind
from rewardmodels.data.encode import View
from rewardmodels.model.folder import HEADS

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
        bt_on: Input of the Bradley-Terry loss: ``"tanh"`` scores, as in the paper, or ``"raw"`` logits.
        anchor: Weight of the squared error of a labelled state in the Bradley-Terry loss, where a pair has weight 1.
            Pairs compare only siblings, but search compares values across branches and depths; the anchor puts
            these values on one scale. 0 is the paper's loss.
        view: Part of a state that the critic reads.
        max_length: Longest state, in tokens.
        lora_rank: Rank of the LoRA adapters; 0 trains the whole model.
        lora_alpha: Adapters are scaled by ``lora_alpha / lora_rank``.
        lora_dropout: Dropout before the adapters.
        nf4: Whether to quantise the frozen backbone to 4 bits (QLoRA).
        batch_size: Pairs or samples per step and process.
        max_tokens: Largest forward pass, in tokens; a larger step is computed in several, with the same gradient. This
            limits memory use.
        accumulation: Number of steps with accumulated gradients per update.
        learning_rate: Peak of the schedule.
        epochs: Passes over the training rows.
        weight_decay: Weight decay of AdamW.
        warmup: Share of the updates with an increasing learning rate; a cosine schedule follows.
        held_out: Share of the problems held out for metrics.
        evaluations: Number of evaluations in a run, including the last.
        checkpoints: Number of checkpoints in a run.
        gradient_checkpointing: Whether to recompute activations, which saves memory and takes longer.
        cpu_bf16: Whether to use bfloat16 matrix products on a CPU, which is faster on CPUs with bfloat16 instructions;
            GPUs with bfloat16 support always use them. On a CPU this needs about a gigabyte more memory, for kernels
            that are cached for each shape.
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

    def to_dict(self) -> JSONObject:
        """Return a JSON-able form."""
        return asdict(self)


PAPER = TrainingConfig()
# A tree of the bundled agents has about seven pairs and fifty labelled states; the anchor uses all of them.
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


def config_for(parameters: int, overrides: Mapping[str, Any]) -> TrainingConfig:
    """Return the default config for a backbone of this size, with the given fields replaced.

    Raises:
        ConfigError: A field is unknown or a value is invalid; the message lists all errors.
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
    """Raise `ConfigError` unless this kind of critic supports this head."""
    if kind not in HEADS:
        raise ConfigError(f"expected kind {' or '.join(map(repr, HEADS))}, got {kind!r}")
    if head not in HEADS[kind]:
        raise ConfigError(f"expected head {' or '.join(map(repr, HEADS[kind]))} for kind {kind!r}, got {head!r}")


def _faults(s: TrainingConfig) -> list[str]:
    checks = [
        (s.bt_on in ("tanh", "raw"), f'bt_on: expected "tanh" or "raw", got {s.bt_on!r}'),
        (s.anchor >= 0, f"anchor: expected 0 or more, got {s.anchor}"),
        (s.anchor == 0 or s.head == "bt", f"anchor: expected 0 for every head except 'bt', got head {s.head!r}"),
        (s.view in ("full", "local"), f'view: expected "full" or "local", got {s.view!r}'),
        (s.max_length >= 64, f"max_length: expected at least 64, got {s.max_length}"),
        (s.lora_rank >= 0, f"lora_rank: expected 0 or more, got {s.lora_rank}"),
        (
            s.lora_rank > 0 or not s.nf4,
            "nf4: a 4-bit backbone is frozen; expected lora_rank above 0, or nf4=False",
        ),
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
