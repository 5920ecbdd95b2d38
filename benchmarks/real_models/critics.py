"""Train MASPRM and ORM on a frozen backbone from the published trees and from rollouts, and measure both on pairs.

    python -m benchmarks.real_models.critics --model FOLDER --out OUT

``OUT`` then contains the folders ``masprm`` and ``orm``. The two critics share the hidden states. The published trees
are complete: the target of a state is the mean reward of all transcripts below it. The table shows how often a critic
prefers the better of two siblings of these trees, with five-fold cross-validation by problem.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.real_models.table import FOLDER
from rewardmodels.data.dataset import Example, LabeledTree, RewardData, collect, stored_trees
from rewardmodels.data.encode import Encoder, state_parts
from rewardmodels.training.config import TrainingConfig
from rewardmodels.training.frozen_backbone import FrozenBackbone, fitted_head
from rewardmodels.training.metrics import interval
from rewardmodels.training.train_critic import open_backbone, train_frozen
from search.plan import Plan
from search.store import open_store
from search.tree import Tree

HEADS = {"masprm": "bt", "orm": "bce"}
ANCHOR = 1.0
FOLDS = 5


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


class Siblings(NamedTuple):
    """Two siblings with different targets, as an example, and whether policy likelihood prefers the better one."""

    example: Example
    likelihood: float


def siblings(trees: list[LabeledTree]) -> list[Siblings]:
    """Return all pairs of siblings with different targets."""
    found = []
    for item in trees:
        tree = item.tree
        for parent in range(len(tree)):
            for one, other in permutations(tree.children(parent), 2):
                target, less = (tree.totals[node] / tree.visits[node] for node in (one, other))
                if target <= less:
                    continue
                states = tree.states[one], tree.states[other]
                chosen, rejected = (tuple(state_parts(item.mas, state)) for state in states)
                agent, depth = item.mas.agents[states[0].speaker].name, states[0].depth - 1
                source = item.problem_id, item.task, item.problem_id, item.mas.name, depth, agent
                gap = tree.mean_logprob(one) - tree.mean_logprob(other)
                found.append(Siblings(Example(*source, chosen, target, rejected, less), prefers(gap)))
    return found


def prefers(gap: float) -> float:
    return 0.5 if gap == 0 else float(gap > 0)


def held_out_preferences(
    backbone: FrozenBackbone, config: TrainingConfig, data: RewardData, points: RewardData, pairs: list[Example]
) -> list[float]:
    """Return whether a head trained on the other problems prefers the better sibling, for each pair."""
    examples = [*data.examples, *(points.examples if config.anchor else ())]
    problems = list(dict.fromkeys(one.problem_id for one in pairs))
    found = [0.5] * len(pairs)
    for fold in range(FOLDS):
        out = set(problems[fold::FOLDS])
        learned = backbone.features([one for one in examples if one.problem_id not in out])
        head = fitted_head(learned, config, backbone.select_penalty(learned.examples, config))
        places = [i for i, one in enumerate(pairs) if one.problem_id in out]
        better, worse = backbone.features([pairs[i] for i in places]).logits(head)
        for place, gap in zip(places, (better - worse).tolist(), strict=True):
            found[place] = prefers(gap)
    return found


def cell(pairs: list[Example], agent: str, preferred: list[float]) -> str:
    """Return the percentage of an agent's pairs in which a critic prefers the better sibling, with a 95% interval."""
    chosen = [i for i, one in enumerate(pairs) if agent in (one.agent, "all")]
    values = np.array([preferred[i] for i in chosen])
    low, high = interval([pairs[i] for i in chosen], lambda drawn: float(values[drawn].mean()))
    return f"{100 * values.mean():.0f} ({100 * low:.0f} to {100 * high:.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the language model")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    complete = list(complete_trees())
    trees = [*complete, *stored_trees(FOLDER / "train-rpsv.db")]
    points = collect(trees, "points")
    pairs = siblings(complete)
    preferred = {"policy likelihood": [one.likelihood for one in pairs]}
    examples = [one.example for one in pairs]
    backbone = None
    for kind, head in HEADS.items():
        settings = {"kind": kind, "head": head, "frozen": True, "anchor": ANCHOR if head == "bt" else 0.0}
        model, tokenizer, config = open_backbone(given.model, "cpu", settings)
        if backbone is None:
            backbone = FrozenBackbone(model, Encoder(tokenizer, config.max_length), tokenizer.pad_token_id, print)
        data = collect(trees, config.data_kind)
        found = train_frozen(backbone, config, data, points, given.out / kind, given.model)
        print(kind, {name: value for name, value in found.info.metrics.items() if isinstance(value, int | float)})
        # A process critic is measured on every state; an outcome critic was trained on terminal ones.
        backbone.encode(examples)
        preferred[kind] = held_out_preferences(backbone, config, data, points, examples)
    agents = [*dict.fromkeys(one.agent for one in examples), "all"]
    print("| agent | pairs | " + " | ".join(preferred) + " |\n|---|---|" + "---|" * len(preferred))
    for agent in agents:
        count = sum(agent in (one.agent, "all") for one in examples)
        print(f"| {agent} | {count} | " + " | ".join(cell(examples, agent, one) for one in preferred.values()) + " |")


if __name__ == "__main__":
    main()
