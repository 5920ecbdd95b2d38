"""Hyperparameters of training, with the defaults of the paper and of the tiny model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from mas_gym.errors import ConfigError
from mas_gym.internal.json_types import JSONObject
from mas_gym.internal.suggestions import choice, refuse_unknown
from rewardmodels.data.dataset import DataKind
from rewardmodels.data.encode import View
from rewardmodels.model.critic_folder import HEADS

CriticKind = Literal["masprm", "orm"]
Head = Literal["bt", "mse", "bce"]

SMALL = 50_000_000
"""Models with fewer parameters get the defaults of small models: for critics `TINY`, for larger models `PAPER`."""


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """Hyperparameters (paper, App. "MASPRM model and optimization").

    Attributes:
        kind: ``"masprm"`` or ``"orm"``.
        head: ``"bt"`` or ``"mse"`` for MASPRM, ``"bce"`` or ``"mse"`` for ORM.
        bt_on: Input of the Bradley-Terry loss: ``"tanh"`` scores, as in the paper, or ``"raw"`` logits.
        anchor: Weight of each labeled state's squared error in the Bradley-Terry loss, in which a pair has weight 1.
            Pairs compare only siblings, but search compares values across branches and depths; the anchor puts
            these values on one scale. 0 is the paper's loss.
        view: Part of a state that the critic reads.
        max_length: Longest state, in tokens.
        frozen: Whether to train only the head, on hidden states that the backbone computes once
            (`rewardmodels.training.frozen_backbone`). The settings of adapters and of the optimizer are not used.
        lora_rank: Rank of the LoRA adapters; 0 trains the whole model.
        lora_alpha: Adapters are scaled by ``lora_alpha / lora_rank``.
        lora_dropout: Dropout before the adapters.
        nf4: Whether to quantize the frozen backbone to 4 bits (QLoRA).
        batch_size: Pairs or samples per step and process.
        max_tokens: Largest forward pass, in tokens; a larger step takes several passes, with the same gradient. This
            limits memory use.
        accumulation: Number of gradient accumulation steps per update.
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
        seed: Seed for the head's initial weights, the order of the examples and dropout.
    """

    kind: CriticKind = "masprm"
    head: Head = "bt"
    bt_on: Literal["tanh", "raw"] = "tanh"
    anchor: float = 0.0
    view: View = "full"
    max_length: int = 2048
    frozen: bool = False
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


PAPER = TrainingConfig()
# A tree of the bundled agents has about seven pairs and fifty labeled states; the anchor uses all of them.
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
    refuse_unknown("setting", overrides, [one.name for one in fields(base)])
    config = replace(base, **overrides)
    if config.head != "bt" and "anchor" not in overrides:
        config = replace(config, anchor=0.0)
    if config.frozen and "lora_rank" not in overrides:
        config = replace(config, lora_rank=0)
    if config.lora_rank == 0 and config.nf4 and "nf4" not in overrides:
        config = replace(config, nf4=False)
    faults = []
    if config.frozen and config.lora_rank:
        faults.append("frozen: expected lora_rank=0, because adapters are not trained on a frozen backbone")
    if config.anchor and config.head != "bt":
        faults.append(f"anchor: expected 0 for every head except 'bt', got head {config.head!r}")
    if config.nf4 and not config.lora_rank:
        faults.append("nf4: a 4-bit backbone is frozen; expected lora_rank above 0, or nf4=False")
    check_head(config.kind, config.head)
    check_ranges(
        asdict(config),
        faults,
        one_of={"bt_on": ("tanh", "raw"), "view": get_args(View)},
        at_least={"anchor": 0, "max_length": 64, "lora_rank": 0}
        | dict.fromkeys(("batch_size", "max_tokens", "accumulation", "evaluations", "checkpoints"), 1),
        positive=("learning_rate", "epochs", "held_out"),
        shares=("warmup", "held_out"),
    )
    return config


def check_ranges(
    settings: JSONObject,
    faults: Sequence[str],
    one_of: Mapping[str, Sequence[str]],
    at_least: Mapping[str, int],
    positive: Sequence[str],
    shares: Sequence[str],
) -> None:
    """Check the ranges of hyperparameters; ``positive`` numbers are above 0, and ``shares`` in ``[0, 1)``.

    Raises:
        ConfigError: A value is invalid; the message lists all errors, including the ``faults`` found earlier.
    """
    expected = [(name, f"one of {', '.join(known)}", settings[name] in known) for name, known in one_of.items()]
    numbers = {name: value if isinstance(value, int | float) else math.nan for name, value in settings.items()}
    expected += [(name, f"at least {least}", numbers[name] >= least) for name, least in at_least.items()]
    expected += [(name, "more than 0", numbers[name] > 0) for name in positive]
    expected += [(name, "a share below 1", 0 <= numbers[name] < 1) for name in shares]
    found = [
        *faults,
        *(f"{name}: expected {what}, got {settings[name]!r}" for name, what, good in expected if not good),
    ]
    if found:
        raise ConfigError("; ".join(found), tuple(found))


def check_head(kind: str, head: str) -> None:
    """Raise `ConfigError` unless this kind of critic supports this head."""
    choice("kind", kind, tuple(HEADS))
    choice(f"head of kind {kind!r}", head, tuple(HEADS[kind]))
