"""Shared parts of all training runs: complete checkpoints, checks for NaN and infinity, and TensorBoard curves."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.tensorboard import SummaryWriter
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerState

from mas_gym.errors import MASGymError, TrainingError
from mas_gym.internal.json_types import JSONObject
from mas_gym.internal.whole_files import write_file

COMPLETE = "complete.json"
"""The file written last into a checkpoint; it is missing if a crash interrupted the write."""


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint."""
    done = [path.parent for path in folder.glob(f"checkpoint-*/{COMPLETE}")]
    return max(done, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


class Curves(TrainerCallback):  # type: ignore[misc]
    """Writes the Trainer's logs as TensorBoard curves.

    It also logs a line for each evaluation and, about ten times in a run, the loss and the time left.
    """

    def __init__(self, folder: Path, log: Callable[[str], None]):
        """Store the folder; the writer opens when the first number is logged."""
        self.folder, self.log = folder, log
        self.writer: SummaryWriter | None = None
        self.began, self.first, self.loss = 0.0, 0, ""

    def on_train_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Start the clock."""
        self.began, self.first = time.monotonic(), state.global_step

    def on_log(
        self, args: object, state: TrainerState, control: object, logs: dict[str, float], **kwargs: object
    ) -> None:
        """Write every number."""
        if not state.is_world_process_zero:
            return
        self.writer = self.writer or SummaryWriter(str(self.folder))
        for name, value in logs.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(name.replace("eval_", "held_out/"), value, state.global_step)
        if found := {name.removeprefix("eval_"): v for name, v in logs.items() if name.startswith("eval_")}:
            self.log(f"step {state.global_step}: " + ", ".join(f"{name} {v:.4g}" for name, v in found.items()))
        if "loss" in logs:
            self.loss = f", loss {logs['loss']:.4g}"

    def on_step_end(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Report the loss and the time left."""
        step, steps = state.global_step, state.max_steps
        if state.is_world_process_zero and (step % max(1, steps // 10) == 0 or step == steps):
            left = (time.monotonic() - self.began) / (step - self.first) * (steps - step)
            self.log(f"step {step:,} of {steps:,}{self.loss}, {left // 60:.0f}:{left % 60:02.0f} left")

    def on_train_end(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Close the writer."""
        if self.writer is not None:
            self.writer.close()


def common_arguments(settings: JSONObject, folder: Path, updates: int, device: str) -> JSONObject:
    """Return the arguments of transformers' and TRL's trainers that all training runs share."""
    passed = ("gradient_checkpointing", "learning_rate", "weight_decay", "seed")
    return {name: settings[name] for name in passed} | {
        "output_dir": str(folder),
        "use_cpu": device == "cpu",
        "bf16": device != "cpu" and torch.cuda.is_bf16_supported(),
        "warmup_steps": round(settings["warmup"] * updates),
        "optim": "adamw_torch",
        "logging_steps": max(1, updates // 50),
        "logging_nan_inf_filter": False,
        "save_strategy": "steps",
        "save_steps": max(1, updates // settings["checkpoints"]),
        "save_total_limit": 2,
        "dataloader_pin_memory": False,
        "remove_unused_columns": False,
        "disable_tqdm": True,
        "report_to": "none",
    }


class Guarded(Trainer):  # type: ignore[misc]
    """A Trainer that stops if the loss or weights are not finite, and never leaves partial checkpoints."""

    def resume(self, log: Callable[[str], None]) -> None:
        """Train, from the newest complete checkpoint if there is one."""
        last = last_checkpoint(Path(self.args.output_dir))
        if last is not None:
            log(f"resuming from {last.name}")
        self.train(resume_from_checkpoint=None if last is None else str(last))

    def check_loss(self, loss: float) -> None:
        """Raise `TrainingError` if the loss of this step is not finite."""
        if not math.isfinite(loss):
            raise TrainingError(
                f"step {self.state.global_step + 1}: expected a finite loss, got {loss}; training stops. "
                f"{self._last_checkpoint()} Lower learning_rate, or check the weights of the base model"
            )

    def training_step(
        self, model: PreTrainedModel, inputs: JSONObject, num_items_in_batch: object = None
    ) -> torch.Tensor:
        """Compute a step and return its loss.

        Raises:
            TrainingError: The loss is not finite.
        """
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        self.check_loss(loss.item())
        return loss

    def _last_checkpoint(self) -> str:
        last = last_checkpoint(Path(self.args.output_dir))
        return f"The last good checkpoint is kept: {last.name}." if last else "No checkpoint had been written yet."

    def _save_checkpoint(self, model: PreTrainedModel, trial: object) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        if not all(bool(torch.isfinite(p).all()) for p in self.model.parameters() if p.requires_grad):
            raise TrainingError(
                f"step {self.state.global_step}: expected finite weights, got infinite or NaN weights; training stops. "
                f"{self._last_checkpoint()} Lower learning_rate"
            )
        try:
            super()._save_checkpoint(model, trial)
            if self.args.should_save:
                write_file(folder / COMPLETE, json.dumps({"step": self.state.global_step}))
        except MASGymError:
            raise
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise TrainingError(
                f"cannot write {folder.name} ({error}); training stops. {self._last_checkpoint()} Free some space and "
                "run the same command again"
            ) from error
