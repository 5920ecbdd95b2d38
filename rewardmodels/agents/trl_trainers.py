"""TRL trainers on token ids; imported only during training, because the import is slow.

TRL provides the loss and the training loop. Prompts and messages are token ids. Prompts therefore equal those of the
policy (`mas_gym.policies.local.chat`), and GRPO trains on exactly the tokens that were sampled.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, Trainer
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from rewardmodels.agents.config import AgentConfig
from rewardmodels.training.checkpoints import Curves, Guarded, common_arguments

logger = logging.getLogger("rewardmodels.agents")

Row = dict[str, Any]


class DemonstrationTrainer(Guarded, SFTTrainer):
    """TRL's SFT trainer for rows of ``input_ids`` and ``labels``."""


class PreferenceTrainer(Guarded, DPOTrainer):
    """TRL's DPO trainer for rows of ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``."""

    def _prepare_dataset(self, dataset: object, *arguments: object, **options: object) -> object:
        # The rows are already tokenized.
        return dataset


class CreditTrainer(Guarded, GRPOTrainer):
    """TRL's GRPO trainer for samples that already have advantages.

    Rows have ``prompt_ids``, ``completion_ids``, ``logprobs`` and ``advantage``. The loss is that of Dr. GRPO (arXiv
    2503.20783): the sum over tokens, divided by a constant, so that its gradient is the policy gradient, without
    length bias. The importance ratio is relative to the log-probabilities at sampling.
    """

    def get_train_dataloader(self) -> object:
        """Return the rows in seeded order, without generating samples."""
        return Trainer.get_train_dataloader(self)

    def _get_train_sampler(self, dataset: object = None) -> object:
        return Trainer._get_train_sampler(self, dataset)

    def _prepare_inputs(self, generation_batch: object) -> object:
        return Trainer._prepare_inputs(self, generation_batch)

    def drift(self, rows: Sequence[Row], batch_size: int) -> dict[str, float]:
        """Compare the log-probabilities at sampling with those of the model's forward pass.

        Returns:
            The ``mean`` (over the batches) and the ``largest`` absolute difference per token, in nats.
        """
        means, largest = [], []
        training = self.model.training
        self.model.eval()
        for start in range(0, len(rows), batch_size):
            batch = {k: v.to(self.args.device) for k, v in self.data_collator(rows[start : start + batch_size]).items()}
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
            mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
            width = batch["completion_ids"].size(1)
            with torch.no_grad():
                logprobs, *_ = self._get_per_token_logps_and_entropies(self.model, ids, mask, width)
            gaps = (logprobs - batch["old_per_token_logps"]).abs()[batch["completion_mask"].bool()]
            means.append(gaps.mean().item())
            largest.append(gaps.max().item())
        self.model.train(training)
        return {"mean": sum(means) / len(means), "largest": max(largest)}


def padded(rows: Sequence[Row], pad: int) -> dict[str, torch.Tensor]:
    """Collate rows for GRPO: prompts are padded on the left, messages on the right.

    Returns:
        ``[B, P]`` prompts, ``[B, T]`` messages and log-probabilities, their masks, and ``[B]`` advantages.
    """

    def column(values: Sequence[Sequence[float]], fill: float, side: str, dtype: torch.dtype) -> torch.Tensor:
        return pad_sequence([torch.tensor(one, dtype=dtype) for one in values], True, fill, side)

    found = {}
    for name, side in (("prompt", "left"), ("completion", "right")):
        ids = [row[f"{name}_ids"] for row in rows]
        found[f"{name}_ids"] = column(ids, pad, side, torch.long)
        found[f"{name}_mask"] = column([[1] * len(one) for one in ids], 0, side, torch.long)
    found["old_per_token_logps"] = column([row["logprobs"] for row in rows], 0.0, "right", torch.float32)
    found["advantages"] = torch.tensor([row["advantage"] for row in rows], dtype=torch.float32)
    return found


def _advantages(**columns: Any) -> list[float]:
    """Placeholder for the reward function that TRL requires; advantages are computed before training."""
    return list(columns["advantage"])


def make_trainer(
    config: AgentConfig,
    rows: Sequence[Row],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    device: str,
    curves: Curves,
) -> Guarded:
    """Return the trainer of a method."""
    size = min(config.batch_size, config.max_rows)
    accumulation = math.ceil(config.batch_size / size)
    updates = max(1, math.ceil(len(rows) / (size * accumulation) * config.epochs))
    common = common_arguments(asdict(config), folder, updates, device) | {
        "num_train_epochs": config.epochs,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": accumulation,
        "lr_scheduler_type": "linear",
    }
    peft = None
    if config.lora_rank:
        from peft import LoraConfig

        peft = LoraConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,
            lora_dropout=config.lora_dropout,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
    data = Dataset.from_list(list(rows))
    parts: dict[str, Any] = {
        "train_dataset": data, "processing_class": tokenizer, "peft_config": peft, "callbacks": [curves]
    }  # fmt: skip
    if config.method == "sft":
        trainer: Any = DemonstrationTrainer(model, args=SFTConfig(**common, max_length=None), **parts)
    elif config.method == "dpo":
        arguments = DPOConfig(**common, max_length=None, beta=config.beta)
        trainer = PreferenceTrainer(model, args=arguments, **parts)
    else:
        mean = sum(len(row["completion_ids"]) for row in rows) / len(rows)
        arguments = GRPOConfig(
            **common,
            loss_type="dr_grpo",
            max_completion_length=math.ceil(mean),
            temperature=1.0,
            beta=0.0,
            epsilon=config.clip,
            # TRL checks that its generation batches, which are not used here, divide evenly.
            num_generations=2,
            steps_per_generation=2 * accumulation,
        )
        trainer = CreditTrainer(model, _advantages, args=arguments, **parts)
        trainer.data_collator = partial(padded, pad=trainer._tokenizer.pad_token_id)
    trainer.remove_callback(PrinterCallback)
    return trainer  # type: ignore[no-any-return]
