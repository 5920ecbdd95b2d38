"""Hyperparameters of agent training, with defaults by method and size of the base model."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Literal

from mas_gym.internal.suggestions import choice, refuse_unknown
from rewardmodels.training.config import SMALL, check_ranges
from search.credit import METHODS

Method = Literal["sft", "dpo", "grpo"]
TRAINING_METHODS = ("sft", "dpo", "grpo")
CREDITS = tuple(name for name in METHODS if name != "exact")
"""The credit methods for training; ``exact`` is excluded, because it requires an enumeration of all messages."""
VALUE_CREDITS = ("value", "control-variate", "value-baseline")
"""The credit methods that need a critic."""


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """Hyperparameters of agent training.

    Attributes:
        method: ``"sft"`` on the messages of correct transcripts (expert iteration), ``"dpo"`` on pairs of siblings, or
            ``"grpo"`` on sampled tokens with an advantage per message.
        credit: How ``"grpo"`` computes advantages: a method of `search.credit`.
        adapters: ``"shared"`` trains one model for all agents, ``"per-agent"`` one model per agent.
        best: ``"sft"``: number of transcripts per problem, in descending order of the mean reward of their messages.
        least: ``"dpo"``: minimum difference between the mean rewards of two siblings, in ``(0, 2]``.
        beta: ``"dpo"``: the factor of the log-ratios in the loss.
        clip: ``"grpo"``: bound on the relative change of a token's probability within one run (PPO's epsilon).
        max_drift: ``"grpo"``: a warning is logged above this mean difference (nats per token) between the
            log-probabilities at sampling and those in the training forward pass.
        lora_rank: Rank of the LoRA adapters; 0 trains the whole model.
        lora_alpha: Adapters are scaled by ``lora_alpha / lora_rank``.
        lora_dropout: Dropout before the adapters.
        batch_size: Messages (pairs for ``"dpo"``) per update.
        max_rows: Messages in one forward pass; a larger batch takes several passes, with the same gradient up to
            rounding. This limits memory use.
        learning_rate: Peak of the schedule.
        epochs: Passes over the rows.
        weight_decay: Weight decay of AdamW.
        warmup: Share of the updates with an increasing learning rate; a linear decay to 0 follows.
        checkpoints: Number of checkpoints in a run.
        gradient_checkpointing: Whether to recompute activations, which saves memory and takes longer.
        seed: Seed for the row order, dropout and new adapters.
    """

    method: Method = "sft"
    credit: str = "leave-one-out"
    adapters: Literal["shared", "per-agent"] = "shared"
    best: int = 4
    least: float = 0.5
    beta: float = 0.1
    clip: float = 0.2
    max_drift: float = 0.05
    lora_rank: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    batch_size: int = 32
    max_rows: int = 8
    learning_rate: float = 1e-4
    epochs: float = 1.0
    weight_decay: float = 0.01
    warmup: float = 0.1
    checkpoints: int = 5
    gradient_checkpointing: bool = False
    seed: int = 42


_LARGE: dict[str, dict[str, object]] = {
    "sft": {"learning_rate": 1e-4, "epochs": 2.0},
    "dpo": {"learning_rate": 1e-5},
    "grpo": {"learning_rate": 1e-5},
}
_TINY: dict[str, object] = {"lora_rank": 0, "batch_size": 64, "max_rows": 64}
_TINY_BY_METHOD: dict[str, dict[str, object]] = {
    "sft": {"learning_rate": 3e-4, "epochs": 2.0},
    "dpo": {"learning_rate": 1e-4, "epochs": 2.0},
    "grpo": {"learning_rate": 1e-4, "epochs": 1.0},
}


def agent_config(method: str, parameters: int, overrides: dict[str, object]) -> AgentConfig:
    """Return the defaults for a method and a base model of this size, with the given fields replaced.

    Raises:
        ConfigError: A field is unknown or a value is invalid; the message lists all errors.
    """
    choice("method", method, TRAINING_METHODS)
    refuse_unknown("setting", overrides, [one.name for one in fields(AgentConfig) if one.name != "method"])
    small = parameters < SMALL
    defaults = {**_TINY, **_TINY_BY_METHOD[method]} if small else _LARGE[method]
    config = replace(AgentConfig(method), **{**defaults, **overrides})  # type: ignore[arg-type]
    check_ranges(
        asdict(config),
        [] if config.least <= 2 else [f"least: expected at most 2, got {config.least}"],
        one_of={"credit": CREDITS, "adapters": ("shared", "per-agent")},
        at_least=dict.fromkeys(("best", "batch_size", "max_rows", "checkpoints"), 1) | {"lora_rank": 0},
        positive=("least", "beta", "clip", "max_drift", "learning_rate", "epochs"),
        shares=("clip", "warmup"),
    )
    return config
