"""Trains the bundled critics: rollouts, MASPRM, ORM, metrics on the dev split, and model cards.

Run with one thread; repeating the command resumes an interrupted run::

    OMP_NUM_THREADS=1 python -m benchmarks.shipped_critics --work models/shipped --out rewardmodels/shipped
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from hashlib import file_digest
from pathlib import Path

import torch

import mas_gym
import mas_gym.tiny
import search
from mas_gym.policies import Policy, load_policy
from rewardmodels.model.critic_folder import load_folder, model_card, save_folder
from rewardmodels.training.config import CriticKind, Head
from rewardmodels.training.train_critic import ROLLOUTS, grow, teach, trees
from search.setup import RunSpec

SEED = 42
CONCURRENCY = 64
PLANNER = "mcts:10,3"
HEADS: Mapping[CriticKind, Head] = {"masprm": "bt", "orm": "bce"}


def measure(work: Path, policy: Policy, problems: int) -> str:
    """Search the dev split, on which nothing was trained, and return the figures as Markdown."""
    dev = mas_gym.load_task("arithmetic", split="dev", limit=problems)
    critics = [str(work / "masprm"), str(work / "orm"), "policy-likelihood"]
    planners = [PLANNER, "single"]
    found = search.compare(planners, dev, critics=critics, mas="rpsv", policy=policy, seeds=(SEED,), progress=True)
    return found.to_markdown()


def agents_digest() -> str:
    with (mas_gym.tiny.path() / "model.safetensors").open("rb") as file:
        return file_digest(file, "sha256").hexdigest()[:16]


def card_tail(figures: str, trees: int, problems: int) -> str:
    lines = [
        "## Origin",
        "",
        "`OMP_NUM_THREADS=1 python -m benchmarks.shipped_critics --work models/shipped --out rewardmodels/shipped`",
        "",
        f"Trained on {ROLLOUTS} with the true reward on {trees:,} Arithmetic problems of the train split, seed {SEED}. "
        f"The agents are the bundled model (SHA-256 of its weights {agents_digest()}). The critic's weights are stored "
        "in float16.",
        "",
        f"Searches of {problems} dev problems, seed {SEED}:",
        "",
        figures,
        "",
        "The bundled model was also trained to name the first error of a transcript, so its hidden states distinguish "
        "right from wrong, as those of a large model do. This critic starts from its weights. The agents err by "
        "design, so the figures are evidence about the pipeline and do not predict results of large models.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("models/shipped"), help="rollouts, checkpoints, curves")
    parser.add_argument("--out", type=Path, default=Path("rewardmodels/shipped"))
    parser.add_argument("--trees", type=int, default=600)
    parser.add_argument("--problems", type=int, default=300, help="of the dev split, for the card")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    policy = load_policy("tiny")
    problems = mas_gym.load_task("arithmetic", split="train", limit=arguments.trees)
    shared = {"seed": SEED, "concurrency": CONCURRENCY, "store": arguments.work / "rollouts.db"}
    spec = RunSpec(problems, mas_gym.load_mas("rpsv"), policy, **shared)
    if (stop := grow(spec, listen=True)) is not None:
        raise stop
    halves = arguments.work / "float16"
    for kind, head in HEADS.items():
        # bfloat16 products halve the time where a CPU has them; the rest is the default for the bundled model.
        teach(lambda: trees(spec), arguments.work / kind, kind, head, log=print, cpu_bf16=True)
        model, tokenizer, info = load_folder(arguments.work / kind, torch.float16)
        save_folder(model, tokenizer, halves / kind, info, model_card(info))
    figures = measure(halves, policy, arguments.problems)
    print(figures)
    for kind in HEADS:
        model, tokenizer, info = load_folder(halves / kind, torch.float16)
        card = model_card(info) + "\n" + card_tail(figures, arguments.trees, arguments.problems)
        save_folder(model, tokenizer, arguments.out / kind, info, card)
        # safetensors makes files readable by their owner only; an installed package must be readable by all.
        (arguments.out / kind / "model.safetensors").chmod(0o644)


if __name__ == "__main__":
    main()
