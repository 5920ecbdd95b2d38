"""Train MASPRM and ORM on a frozen backbone from the published trees and, optionally, from rollouts.

    python -m benchmarks.real_models.critics --model FOLDER --out OUT --rollouts train.db

Both critics share the hidden states. The published trees are complete: the target of a state is the mean reward of all
transcripts below it. ``OUT`` then contains the folders ``masprm`` and ``orm``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks.real_models.table import FOLDER
from rewardmodels.data.dataset import LabeledTree, collect, stored_trees
from rewardmodels.data.encode import Encoder
from rewardmodels.training.frozen_backbone import FrozenBackbone
from rewardmodels.training.train_critic import open_backbone, train_frozen
from search.plan import Plan
from search.store import open_store
from search.tree import Tree

HEADS = {"masprm": "bt", "orm": "bce"}
ANCHOR = 1.0


def complete_trees() -> Iterator[LabeledTree]:
    """Yield the published trees, labeled with the outcomes of their transcripts."""
    with open_store(FOLDER / "trees-rpsv.db") as store:
        for info in store.runs():
            for plan in store.plans(info.run):
                yield LabeledTree(labeled(plan), info.mas, "gsm8k", plan.problem_id, int(info.config["seed"]))


def labeled(plan: Plan) -> Tree:
    """Return a plan's tree with the outcome of each candidate counted on its path."""
    tree = plan.tree
    assert tree is not None
    for candidate in plan.candidates:
        assert candidate.node is not None
        for node in tree.path(candidate.node):
            tree.visits[node] += 1
            tree.totals[node] += 1.0 if candidate.correct else -1.0
    return tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the language model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rollouts", help="store of mas-gym rollouts with the same agents")
    given = parser.parse_args()
    trees = [*complete_trees(), *(stored_trees(given.rollouts) if given.rollouts else ())]
    points = collect(trees, "points")
    backbone = None
    for kind, head in HEADS.items():
        settings = {"kind": kind, "head": head, "frozen": True, "anchor": ANCHOR if head == "bt" else 0.0}
        model, tokenizer, config = open_backbone(given.model, "cpu", settings)
        if backbone is None:
            backbone = FrozenBackbone(model, Encoder(tokenizer, config.max_length), tokenizer.pad_token_id, print)
        found = train_frozen(backbone, config, collect(trees, config.data_kind), points, given.out / kind, given.model)
        print(kind, found.info.metrics)


if __name__ == "__main__":
    main()
