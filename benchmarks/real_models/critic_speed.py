"""States per second of a critic on a real backbone, with and without shared prefixes.

    python -m benchmarks.real_models.critic_speed --base FOLDER -n 2

MCTS(10,3) searches the published trees, so no messages are generated. The critic has a new head: its values are
arbitrary, but they cost as much as those of a trained critic.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

import search
from mas_gym.policies.local.packed_linear import fast_bfloat16
from rewardmodels.model.backbone import load_scalar, load_tokenizer
from rewardmodels.model.critic_folder import CriticInfo, model_card, save_folder
from rewardmodels.model.trained_critics import LearnedCritic

TREES = Path(__file__).with_name("trees-rpsv.db")


def new_critic(base: str, folder: Path) -> None:
    """Write a critic with a new head."""
    tokenizer = load_tokenizer(base)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if fast_bfloat16() else torch.float32
    model = load_scalar(base, dtype, tokenizer.pad_token_id, new_head=True)
    info = CriticInfo("masprm", "bt", "full", 2048, {}, [], Path(base).name, {}, {}, {}, {})
    save_folder(model, tokenizer, folder, info, model_card(info))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="folder of the language model")
    parser.add_argument("-n", type=int, default=2, help="trees")
    given = parser.parse_args()
    recorded = search.Recorded(TREES, distinct=True)
    problems = list(recorded)[: given.n]
    with tempfile.TemporaryDirectory() as folder:
        new_critic(given.base, Path(folder) / "critic")
        for share in (True, False):
            critic = LearnedCritic(Path(folder) / "critic", share=share, force=True)
            start = time.perf_counter()
            for _ in search.run("mcts:10,3", problems, recorded=recorded, critic=critic, seed=1):
                pass
            seconds, counts = time.perf_counter() - start, critic.counts
            print(
                f"{'shared' if share else 'whole'}: {counts.states / seconds:.2f} states/s, "
                f"{counts.encoded / counts.states:.0f} tokens a state of {counts.whole / counts.states:.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
