"""The recipe from problems to a critic: training searches into a store, their trees, and a critic trained on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mas_gym.errors import DataError
from mas_gym.tasks.same import Same
from rewardmodels.data.dataset import LabelledTree, RewardData, collect, stored_trees
from rewardmodels.data.serialise import View
from rewardmodels.training.config import CriticKind, Head, TrainingConfig
from rewardmodels.training.run import Trained, train
from search.compare.bench import Arm, Bench, drain, named_planners, start
from search.engine.progress import Progress
from search.store import engine_identity, open_store

ROLLOUTS = "mcts:40,3"
"""The paper's search for training data."""


def grow(
    bench: Bench, planner: str = ROLLOUTS, listen: Callable[[Progress], None] | bool = False
) -> BaseException | None:
    """Search the problems of a training split with the true reward, into the bench's store.

    Args:
        bench: Problems, system, policy and store; the first seed is used.
        planner: The search, in its short form.
        listen: Called with every progress update; True for a progress bar.

    Returns:
        What ended the searches early; None if every tree is in the store.
    """
    [(name, method)] = named_planners([planner]).items()
    return drain(start(Arm(name, method), bench, bench.seeds[0], listen, training=True), lambda plan: None)


def trees(bench: Bench, first: int | None = None) -> Iterator[LabelledTree]:
    """Read the trees that `grow` stored for the bench's policy, seed and problems, skipping all others in the store.

    Args:
        bench: The bench given to `grow`.
        first: Only the trees of the first ``first`` problems; all by default.

    Raises:
        DataError: The store holds no training run of this policy.
    """
    assert bench.store is not None and bench.policy is not None
    wanted = {problem.id for problem in bench.task[: first or len(bench.task)]}
    policy = engine_identity("policy", bench.policy)
    with open_store(bench.store) as store:
        runs = [
            info
            for info in store.runs()
            if info.config["training"] and info.config["seed"] == bench.seeds[0] and info.config["policy"] == policy
        ]
    if not runs:
        raise DataError(f"{bench.store}: expected a training run of the policy {bench.policy.name!r}, found none")
    for info in runs:
        for item in stored_trees(bench.store, info.run, bench.mas):
            if item.problem_id in wanted:
                yield item


def teach(
    source: Callable[[], Iterator[LabelledTree]],
    out: Path,
    kind: CriticKind,
    head: Head,
    base: str = "tiny",
    view: View = "full",
    pairs_per_tree: int = 8,
    same: str | Same | None = "text",
    log: Callable[[str], None] = lambda line: None,
    **settings: Any,
) -> Trained:
    """Mine trees and train a critic on them; the same call resumes, or returns the trained critic at once.

    Args:
        source: Yields the trees; called once per pass over them.
        out: The critic's folder.
        kind: What to train.
        head: The loss.
        base: The backbone.
        view: Which part of a state the critic reads.
        pairs_per_tree: The cap on mined pairs.
        same: When siblings are duplicates, as in `rewardmodels.collect`.
        log: Called with each line about progress.
        settings: Fields of `rewardmodels.TrainingConfig`.
    """
    wanted = TrainingConfig(kind=kind, head=head).data_kind

    def mined(what: Any) -> RewardData:
        return collect(source(), what, view=view, pairs_per_tree=pairs_per_tree, same=same)

    points = mined("points") if wanted == "pairs" else None
    options = {**settings, "kind": kind, "head": head, "view": view}
    return train(mined(wanted), out, base, points=points, log=log, **options)
