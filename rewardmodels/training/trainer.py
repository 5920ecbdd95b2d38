"""transformers' Trainer with the critics' losses; imported only by training, because the import is slow."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, SequentialSampler
from torch.utils.tensorboard import SummaryWriter
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from mas_gym.errors import MASGymError, TrainingError
from rewardmodels.model.backbone import logits_at
from rewardmodels.training.batches import Bundle, forward_passes, gather, model_input
from rewardmodels.training.config import TrainingConfig
from rewardmodels.training.metrics import Floats, outcome_metrics, pair_metrics, point_metrics

COMPLETE = "complete.json"
"""Written last into a checkpoint, so one that a crash interrupted is recognised."""


def loss_of(config: TrainingConfig, logits: torch.Tensor, tensors: dict[str, Any]) -> torch.Tensor:
    """Return the mean loss of a forward pass (paper, Sec. "MASPRM training", App. "ORM").

    Args:
        config: Names the head.
        logits: Logits of the states, shape (K,).
        tensors: As `rewardmodels.training.batches.gather` returns them.
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


def weight_of(config: TrainingConfig, tensors: dict[str, Any]) -> float:
    """Return the weight of a forward pass in its step: 1 per pair, 1 per point, or ``anchor`` beside pairs."""
    point = config.anchor if config.head == "bt" else 1.0
    return len(tensors["worse"]) + point * len(tensors["points"])


class Steps(Dataset):  # type: ignore[misc]
    """All steps of all epochs, in order; each is built on request."""

    def __init__(
        self,
        found: Sequence[Bundle],
        order: Sequence[Sequence[int]],
        max_tokens: int,
        pad: int,
        dtype: Any,
        share: bool,
    ):
        """Keep what `__getitem__` needs."""
        self.found, self.order, self.max_tokens, self.options = found, order, max_tokens, (pad, dtype, share)

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the tensors of one step, one entry per forward pass."""
        passes = forward_passes([self.found[i] for i in self.order[index]], self.max_tokens, self.options[-1])
        return {"passes": [gather(part, *self.options) for part in passes]}


class HeldOut:
    """Held-out examples, and how to score them.

    Args:
        found: Bundles of the held-out examples.
        max_tokens: Largest forward pass, in tokens.
        pad: Padding id.
        dtype: Of the model.
        share: Whether shared beginnings are encoded once.
    """

    def __init__(self, found: Sequence[Bundle], max_tokens: int, pad: int, dtype: Any, share: bool):
        """Put bundles of similar length together."""
        self.passes = forward_passes(sorted(found, key=lambda bundle: bundle.tokens), max_tokens, share)
        self.examples = [example for part in self.passes for bundle in part for example in bundle.examples]
        self.options = (pad, dtype, share)

    def logits(self, model: Any) -> tuple[Floats, Floats]:
        """Return the logits of the examples' better and worse states; the second is empty for labelled states."""
        better: list[Floats] = []
        worse: list[Floats] = []
        training = model.training
        model.eval()
        device = next(model.parameters()).device
        with torch.inference_mode():
            for part in self.passes:
                tensors = {k: v.to(device) for k, v in gather(part, *self.options).items()}
                logits = logits_at(model, model_input(tensors))
                first = tensors["better"] if len(tensors["better"]) else tensors["points"]
                better.append(logits[first].double().cpu().numpy())
                worse.append(logits[tensors["worse"]].double().cpu().numpy())
        model.train(training)
        return np.concatenate(better), np.concatenate(worse)

    def metrics(self, model: Any, config: TrainingConfig) -> dict[str, Any]:
        """Return the metrics of a model, by the kind of the examples."""
        better, worse = self.logits(model)
        if len(worse):
            return pair_metrics(self.examples, better, worse)
        return (outcome_metrics if config.kind == "orm" else point_metrics)(self.examples, better)


class Curves(TrainerCallback):  # type: ignore[misc]
    """Writes the Trainer's logs as TensorBoard curves, and one line per evaluation."""

    def __init__(self, folder: Path, log: Callable[[str], None]):
        """Keep the folder; the writer opens at the first number."""
        self.folder, self.log = folder, log
        self.writer: SummaryWriter | None = None

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write every number."""
        if not state.is_world_process_zero:
            return
        self.writer = self.writer or SummaryWriter(str(self.folder))
        for name, value in (logs or {}).items():
            if isinstance(value, int | float):
                self.writer.add_scalar(name.replace("eval_", "held_out/"), value, state.global_step)
        if any(name.startswith("eval_") for name in logs or {}):
            found = {name.removeprefix("eval_"): v for name, v in (logs or {}).items() if name.startswith("eval_")}
            self.log(f"step {state.global_step}: " + ", ".join(f"{name} {v:.4g}" for name, v in found.items()))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the writer."""
        if self.writer is not None:
            self.writer.close()


class CriticTrainer(Trainer):  # type: ignore[misc]
    """Trains a critic on `Steps` and measures it on `HeldOut`."""

    def __init__(self, config: TrainingConfig, steps: Steps, held_out: HeldOut, **kwargs: Any):
        """Pass the rest on to transformers."""
        self.config, self.held_out = config, held_out
        super().__init__(train_dataset=steps, eval_dataset=steps, data_collator=lambda items: items[0], **kwargs)
        self.model_accepts_loss_kwargs = False
        self.remove_callback(PrinterCallback)
        self.history: list[dict[str, Any]] = []

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Add up the gradients of a step's forward passes and return its loss.

        Raises:
            TrainingError: The loss is not a number.
        """
        model.train()
        passes = self._prepare_inputs(inputs)["passes"]
        weights = [weight_of(self.config, tensors) for tensors in passes]
        total = torch.zeros((), device=self.args.device)
        for i, (tensors, weight) in enumerate(zip(passes, weights, strict=True)):
            # Processes may differ in their number of passes, so they exchange gradients in the last one only.
            wait = nullcontext() if i == len(passes) - 1 else self.accelerator.no_sync(model)
            with wait:
                with self.compute_loss_context_manager():
                    loss = loss_of(self.config, logits_at(model, model_input(tensors)), tensors)
                self._check(loss.item())
                loss = loss * (weight / sum(weights)) / self.current_gradient_accumulation_steps
                self.accelerator.backward(loss)
            total += loss.detach()
        return total

    def _check(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss of step {self.state.global_step + 1} is {loss}, not a number; training stops. "
                f"{self._last_checkpoint()} Lower learning_rate, or look for broken weights in the base model"
            )

    def _last_checkpoint(self) -> str:
        last = last_checkpoint(Path(self.args.output_dir))
        return f"The last good checkpoint is kept: {last.name}." if last else "No checkpoint had been written yet."

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Measure on the held-out problems and log the numbers."""
        found = self.held_out.metrics(self.model, self.config)
        self.history.append({"step": self.state.global_step, **found})
        flat = {f"{metric_key_prefix}_{k}": v for k, v in found.items() if isinstance(v, int | float)}
        for depth, part in found.get("accuracy_by_depth", {}).items():
            flat[f"{metric_key_prefix}_accuracy_depth_{depth}"] = part["mean"]
        self.log(flat)
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, flat)
        return flat

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        if not all(bool(torch.isfinite(p).all()) for p in self.model.parameters() if p.requires_grad):
            raise TrainingError(
                f"the weights after step {self.state.global_step} are not all numbers; training stops. "
                f"{self._last_checkpoint()} Lower learning_rate"
            )
        try:
            super()._save_checkpoint(model, trial)
            if self.args.should_save:
                (folder / COMPLETE).write_text(json.dumps({"step": self.state.global_step}), encoding="utf-8")
        except MASGymError:
            raise
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise TrainingError(
                f"cannot write {folder.name} ({error}); training stops. {self._last_checkpoint()} Free some space and "
                "run the same command again to go on from there"
            ) from error


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint."""
    done = [path.parent for path in folder.glob(f"checkpoint-*/{COMPLETE}")]
    return max(done, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def arguments(config: TrainingConfig, folder: Path, steps: int, device: str) -> TrainingArguments:
    """Return transformers' arguments for a run of this many steps, divided among the processes of torchrun."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    updates = max(1, math.ceil(steps / (config.accumulation * processes)))
    on_cpu = device == "cpu"
    return TrainingArguments(
        output_dir=str(folder),
        use_cpu=on_cpu,
        bf16=config.cpu_bf16 if on_cpu else torch.cuda.is_bf16_supported(),
        num_train_epochs=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=config.accumulation,
        gradient_checkpointing=config.gradient_checkpointing,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        warmup_steps=round(config.warmup * updates),
        lr_scheduler_type="cosine",
        optim="adamw_torch",
        logging_steps=max(1, updates // 50),
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=max(1, updates // config.evaluations),
        save_strategy="steps",
        save_steps=max(1, updates // config.checkpoints),
        save_total_limit=2,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to="none",
        seed=config.seed,
    )
