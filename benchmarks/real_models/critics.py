"""Train MASPRM and ORM on a frozen backbone from the published trees and from rollouts.

    python -m benchmarks.real_models.critics --model FOLDER --out OUT

``OUT`` then contains the folders ``masprm`` and ``orm``, and the values of all states of the complete trees by heads
that were trained on the other problems (five-fold cross-validation). The heads share the hidden states. The target of a
state of a complete tree is the mean reward of all transcripts below it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import save_file

from benchmarks.real_models.table import FOLDER
from benchmarks.real_models.trees import VALUES, Values, complete_trees, true_values
from rewardmodels.data.dataset import Example, LabeledTree, collect, stored_trees
from rewardmodels.data.encode import Encoder, Parts, state_parts
from rewardmodels.training.config import TrainingConfig
from rewardmodels.training.frozen_backbone import FrozenBackbone, fitted_head
from rewardmodels.training.train_critic import open_backbone, train_frozen

FOLDS = 5


class Head(NamedTuple):
    """A kind of critic, its loss and the weight of its anchor."""

    kind: str
    loss: str
    anchor: float = 0.0

    def settings(self) -> dict[str, object]:
        return {"kind": self.kind, "head": self.loss, "frozen": True, "anchor": self.anchor}


HEADS = {
    "MASPRM": Head("masprm", "bt", 1.0),
    "MASPRM, BT alone": Head("masprm", "bt"),
    "MASPRM, MSE": Head("masprm", "mse"),
    "ORM": Head("orm", "bce"),
    "ORM, MSE": Head("orm", "mse"),
}


def examples_of(trees: Sequence[LabeledTree], truth: Values) -> dict[bytes, Example]:
    """Return each state below a root as a labeled example, by its digest."""
    found = {}
    for item in trees:
        for state in item.tree.states[1:]:
            agent = item.mas.agents[state.speaker].name
            source = item.problem_id, item.task, item.problem_id, item.mas.name, state.depth - 1, agent
            found[state.digest] = Example(*source, tuple(state_parts(item.mas, state)), truth[state.digest])
    return found


def held_out_values(
    backbone: FrozenBackbone, config: TrainingConfig, trees: Sequence[LabeledTree], tested: Mapping[bytes, Example]
) -> list[float]:
    """Return the value of each state of ``tested``, by a head trained on the other problems."""
    points = collect(trees, "points").examples if config.anchor else ()
    examples = [*collect(trees, config.data_kind).examples, *points]
    problems = list(dict.fromkeys(one.problem_id for one in tested.values()))
    found: dict[Parts, float] = {}
    for fold in range(FOLDS):
        out = set(problems[fold::FOLDS])
        learned = backbone.features([one for one in examples if one.problem_id not in out])
        head = fitted_head(learned, config, backbone.select_penalty(learned.examples, config))
        states = [one for one in tested.values() if one.problem_id in out]
        values = np.tanh(backbone.features(states).logits(head)[0])
        found |= dict(zip((one.chosen for one in states), values.tolist(), strict=True))
    return [found[one.chosen] for one in tested.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the language model")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    complete = list(complete_trees())
    trees = [*complete, *stored_trees(FOLDER / "train-rpsv.db")]
    tested = examples_of(complete, true_values(complete))
    columns = {"digest": np.array([list(digest) for digest in tested], dtype=np.uint8)}
    backbone = None
    for name, head in HEADS.items():
        model, tokenizer, config = open_backbone(given.model, "cpu", head.settings())
        if backbone is None:
            backbone = FrozenBackbone(model, Encoder(tokenizer, config.max_length), tokenizer.pad_token_id, print)
        if name.lower() == head.kind:
            data, points = collect(trees, config.data_kind), collect(trees, "points")
            found = train_frozen(backbone, config, data, points, given.out / head.kind, given.model)
            print(name, {key: value for key, value in found.info.metrics.items() if isinstance(value, int | float)})
            backbone.encode(list(tested.values()))
        columns[name] = np.array(held_out_values(backbone, config, trees, tested), dtype=np.float32)
    save_file(columns, given.out / VALUES.name)


if __name__ == "__main__":
    main()
