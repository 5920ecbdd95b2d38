"""The critic of the game of 24: MASPRM trained on searches with random moves, on puzzles that were not recorded."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import mas_gym
from benchmarks.real.random_moves import proposer
from mas_gym.tasks.generated.game24 import Game24
from mas_gym.tasks.sequences import ProblemTask
from rewardmodels.training.run import grow
from search.compare import Bench

PLANNER = "mcts:400,12"
SEED = 42


def training_task(recorded: Collection[tuple[int, ...]], limit: int | None = None) -> ProblemTask:
    """Return the puzzles of the training split that were not recorded."""
    kept = [problem for problem in Game24("train") if tuple(problem.metadata["numbers"]) not in recorded]
    return ProblemTask.of(kept[:limit], name="game24", split="train", mas="game24")


def search_bench(task: ProblemTask, store: Path) -> Bench:
    """Return the searches with random moves, labelled by the outcome."""
    return Bench(task, mas_gym.load_mas("game24"), proposer(), [SEED], store=store)


def grow_trees(task: ProblemTask, store: Path) -> Bench:
    """Search the puzzles into a store; finished searches are kept."""
    bench = search_bench(task, store)
    stop = grow(bench, PLANNER, True)
    if stop is not None:
        raise stop
    return bench
