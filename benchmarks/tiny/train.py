"""Train the tiny model from scratch: ``python -m benchmarks.tiny.train --out models/tiny``.

The optimizer is AdamW with a one-cycle learning rate, and the loss covers only the agents'
messages. Repeating the command with the same arguments continues from the last checkpoint
and gives the same result. ``loss.jsonl`` has the loss over the steps.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.tiny.data import IGNORED, Batch, batches
from benchmarks.tiny.graphs import DEFAULT_MIX
from benchmarks.tiny.tokenizer import CONTEXT, VOCABULARY_SIZE, build_tokenizer
from mas_gym.errors import ConfigError
from mas_gym.internal.whole_files import whole_file, write_file

if TYPE_CHECKING:
    import torch
    from transformers import Qwen2ForCausalLM, Qwen2Tokenizer


def build_model(tokenizer: Qwen2Tokenizer, hidden: int, layers: int) -> Qwen2ForCausalLM:
    """Return a fresh model; every linear layer's width is a multiple of 64, which NF4 quantisation needs."""
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden,
        intermediate_size=(hidden * 8 // 3) // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_p=0.95,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def loss_of(model: Any, batch: Batch, bf16: bool) -> torch.Tensor:
    """Return the mean cross-entropy of the message tokens of a batch."""
    import torch

    with torch.autocast(batch.ids.device.type, torch.bfloat16, enabled=bf16):
        hidden = model.model(
            input_ids=batch.ids, position_ids=batch.positions, attention_mask=batch.mask, use_cache=False
        ).last_hidden_state
        # Logits only where they are trained on, as the other half of the tokens would cost as much; their number is
        # rounded up by ignored ones, so that few shapes occur.
        targets = batch.targets.flatten()
        order = (targets == IGNORED).to(torch.int8).argsort(stable=True)
        chosen = order[: -(-int((targets != IGNORED).sum()) // 256) * 256]
        logits = model.lm_head(hidden.flatten(0, 1)[chosen])
    return torch.nn.functional.cross_entropy(logits.float(), targets[chosen], ignore_index=IGNORED)


class LossCurve:
    """The loss over the steps, in ``loss.jsonl``; a resumed run continues from its checkpoint."""

    EVERY = 50

    def __init__(self, folder: Path, done: int) -> None:
        """Keep the lines up to a step."""
        self._file = folder / "loss.jsonl"
        lines = self._file.read_text(encoding="utf-8").splitlines() if done else []
        self._lines = [line for line in lines if json.loads(line)["step"] <= done]
        last = json.loads(self._lines[-1]) if self._lines else {"average": None, "cpu_seconds": 0.0}
        self.average: float | None = last["average"]
        self._before = last["cpu_seconds"] - time.process_time()

    def add(self, step: int, loss: float) -> None:
        """Take in one step's loss."""
        self.average = loss if self.average is None else 0.98 * self.average + 0.02 * loss
        if step % self.EVERY == 0:
            spent = round(self._before + time.process_time(), 1)
            row = {"schema": 1, "step": step, "average": self.average, "cpu_seconds": spent}
            self._lines.append(json.dumps(row))

    def save(self) -> None:
        """Write the file anew."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_file(self._file, "".join(f"{line}\n" for line in self._lines))


def train(
    args: argparse.Namespace, source: Callable[[Qwen2Tokenizer, int, int, int], Iterator[Batch]] | None = None
) -> None:
    """Run the training and write the model folder.

    Args:
        args: The command line's arguments.
        source: From tokenizer, seed, batch size and number of the first batch to batches; the tiny model's if None.
    """
    from mas_gym.policies.local.forward import threads_for

    with threads_for(0, args.threads):
        _train(args, source or partial(batches, mix=DEFAULT_MIX.without(args.without)))


def _train(args: argparse.Namespace, source: Callable[[Qwen2Tokenizer, int, int, int], Iterator[Batch]]) -> None:
    import torch
    from tqdm import tqdm

    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, args.hidden, args.layers).to(args.device)
    # Short rows with a dense mask: plain attention is half again as fast on a CPU as the fused kernel.
    model.set_attn_implementation("eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=args.steps, pct_start=args.warmup, cycle_momentum=False
    )
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    checkpoint = args.out / "checkpoint.pt"
    done = _resume(checkpoint, parts, args) if checkpoint.exists() else 0
    model.train()
    if args.compile:
        model.model.compile(dynamic=True)
    data = source(tokenizer, args.seed, args.batch, done)
    curve = LossCurve(args.out, done)
    progress = tqdm(range(done, args.steps), initial=done, total=args.steps, mininterval=5.0)
    for step in progress:
        batch = Batch(*(part.to(args.device) for part in next(data)))
        loss = loss_of(model, batch, args.bf16)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        curve.add(step + 1, loss.item())
        progress.set_postfix(loss=f"{curve.average:.4f}", refresh=False)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            # A kill between the two leaves lines beyond the checkpoint, which the next run drops.
            curve.save()
            _save(checkpoint, parts, args, step + 1)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


def _save(path: Path, parts: dict[str, Any], args: argparse.Namespace, step: int) -> None:
    import torch

    states = {name: part.state_dict() for name, part in parts.items()}
    with whole_file(path) as file:
        torch.save({"schema": 1, "step": step, "run": _run_of(args), **states}, file)


def _resume(path: Path, parts: dict[str, Any], args: argparse.Namespace) -> int:
    import torch

    saved = torch.load(path, map_location=args.device, weights_only=True)
    if saved.get("schema") != 1 or saved["run"] != _run_of(args):
        raise ConfigError(
            f"expected {path} to be of the same run ({_run_of(args)}), got {saved.get('run')}; "
            "give the same arguments, or another --out"
        )
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return int(saved["step"])


def _run_of(args: argparse.Namespace) -> dict[str, Any]:
    names = ("steps", "batch", "lr", "warmup", "seed", "hidden", "layers", "bf16", "without")
    return {name: getattr(args, name) for name in names}


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m benchmarks.tiny.train", description="Train the embedded tiny model.")
    out.add_argument("--out", type=Path, required=True, help="folder for the model and its checkpoint")
    out.add_argument("--steps", type=int, default=10000, help="batches to train on")
    out.add_argument("--without", default="", metavar="PREFIX", help="leave out graphs, such as audit, the Auditor's")
    out.add_argument("--batch", type=int, default=32, help="problems per batch")
    out.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
    out.add_argument("--warmup", type=float, default=0.1, help="share of steps in which the rate rises")
    out.add_argument("--hidden", type=int, default=192, help="width, a multiple of 64")
    out.add_argument("--layers", type=int, default=4)
    out.add_argument("--seed", type=int, default=0)
    out.add_argument("--device", default="cpu")
    out.add_argument("--threads", type=int, default=1)
    compiled = "fuse the element-wise work, 1.7 times as fast on a CPU; needs a C++ compiler"
    out.add_argument("--compile", action="store_true", help=compiled)
    out.add_argument("--save-every", type=int, default=500, help="steps between checkpoints")
    out.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True, help="bfloat16 matrix products")
    return out


if __name__ == "__main__":
    train(parser().parse_args())
