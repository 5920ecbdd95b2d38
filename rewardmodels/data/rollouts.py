"""Training trees from run stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mas_gym.errors import DataError
from mas_gym.graph import MAS
from rewardmodels.data.dataset import LabelledTree, graph_of
from search.plan import Plan
from search.store import RunInfo, open_store


def stored_trees(path: str | Path, run: str | None = None, mas: MAS | None = None) -> Iterator[LabelledTree]:
    """Read the trees of training searches (with the true reward) from a store.

    Args:
        path: The store.
        run: One run's name or fingerprint; None reads every training run.
        mas: The expected MAS; None accepts any.

    Yields:
        The trees, run by run in order of start, and by problem id within a run.

    Raises:
        StoreError: There is no store, its schema is another, or there is no such run.
        DataError: It holds no training run, or one of another MAS.
    """
    with open_store(path) as store:
        runs = [store.find(run)] if run is not None else store.runs()
        chosen = [info for info in runs if info.config["training"]]
        if not chosen:
            held = "; ".join(info.label for info in runs) or "nothing"
            raise DataError(
                f"expected a training run in {path}, found {held}: trees to learn from come from searches with the "
                "true reward; make them with mas-gym rollouts"
            )
        for info in chosen:
            yield from _trees(store.plans(info.run), info, mas, path)


def _trees(plans: Iterator[Plan], info: RunInfo, expected: MAS | None, path: str | Path) -> Iterator[LabelledTree]:
    mas = info.mas
    if expected is not None and graph_of(expected) != graph_of(mas):
        raise DataError(
            f"expected trees of the MAS {expected.name!r} in {path}, but run {info.run[:8]} is of {mas.name!r} with "
            "other agents or edges; make rollouts with the MAS that the critic is for, or name another run"
        )
    task, seed = str(info.facts.get("task") or "problems"), int(info.config["seed"])
    for plan in plans:
        if plan.tree is not None:
            yield LabelledTree(plan.tree, mas, task, plan.problem_id, seed)
