"""Critics from nothing: training searches into a store, and a critic learned from its trees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mas_gym.cli.options import read_planner
from mas_gym.cli.progress import RunProgress
from mas_gym.errors import DataError
from search.compare.bench import Arm, Bench, drain, start

if TYPE_CHECKING:
    from rewardmodels import LabelledTree, RewardData, Trained
    from rewardmodels.data.serialise import View
    from rewardmodels.training.config import CriticKind, Head

ROLLOUTS = "mcts:40,3"
"""The paper's search for training data."""


def grow(bench: Bench, planner: str = ROLLOUTS) -> BaseException | None:
    """Search the problems of a training split with the true reward, into the bench's store.

    Returns:
        What ended it early; None if every tree is there.
    """
    name, method = read_planner(planner)
    seed = bench.seeds[0]
    with RunProgress([f"{name}, true reward"], len(bench.task)) as progress:
        run = start(Arm(name, method), bench, seed, partial(progress.update, 0, seed), training=True)
        return drain(run, lambda plan: None)


def trees(bench: Bench, first: int | None = None) -> Iterator[LabelledTree]:
    """Read the trees that `grow` left: those of the bench's policy and problems, and no others of the store.

    Args:
        bench: What was given to `grow`.
        first: Only those of the first so many problems.

    Raises:
        DataError: The store holds no training run of this policy.
    """
    import rewardmodels
    import search
    from search.store import engine_identity

    assert bench.store is not None and bench.policy is not None
    wanted = {problem.id for problem in bench.task[: first or len(bench.task)]}
    policy = engine_identity("policy", bench.policy)
    with search.open_store(bench.store) as store:
        runs = [
            info
            for info in store.runs()
            if info.config["training"] and info.config["seed"] == bench.seeds[0] and info.config["policy"] == policy
        ]
    if not runs:
        raise DataError(f"{bench.store}: expected a training run of the policy {bench.policy.name!r}, found none")
    for info in runs:
        for item in rewardmodels.stored_trees(bench.store, info.run, bench.mas):
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
    log: Callable[[str], None] = lambda line: None,
    **settings: Any,
) -> Trained:
    """Mine trees and train a critic on them; the same call again goes on, or returns the finished one at once.

    Args:
        source: Gives the trees, each time it is called.
        out: The critic's folder.
        kind: What to train.
        head: Its loss.
        base: Its backbone.
        view: What it sees of a state.
        pairs_per_tree: The cap of the pair mining.
        log: Told what happens.
        settings: Fields of `rewardmodels.TrainingConfig`.
    """
    import rewardmodels

    wanted = rewardmodels.TrainingConfig(kind=kind, head=head).data_kind

    def mined(what: Any) -> RewardData:
        return rewardmodels.collect(source(), what, view=view, pairs_per_tree=pairs_per_tree)

    points = mined("points") if wanted == "pairs" else None
    options = {**settings, "kind": kind, "head": head, "view": view}
    return rewardmodels.train(mined(wanted), out, base, points=points, log=log, **options)
