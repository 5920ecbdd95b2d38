"""The game of 24: critics trained without GPT-4 compared with GPT-4's values, on GPT-4's recorded trees of thought."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import mas_gym
import search
from benchmarks.paper.page import Page, percent
from benchmarks.ranking import Ranking, auc_cells, auc_difference, rank
from benchmarks.real.common import arguments, run_page, write_recorded
from benchmarks.real.game24_critic import (
    PLANNER,
    PUZZLES,
    FeatureModel,
    Table,
    labeled,
    states_to_learn,
    train_critic,
    training_data,
    training_task,
)
from benchmarks.real.game24_recorded import CALLS, SOURCE, Recording, read_recordings, scaled
from benchmarks.real.game24_text import read_left
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.state import Action, MASState
from mas_gym.tasks.procedural.game24 import Numbers

SEEDS = (14, 24, 42)
GPT4, MASPRM, FEATURES, TABLE = "GPT-4's values", "MASPRM", "features", "lookup table"

Array = NDArray[np.float64]
Lines = tuple[str, ...]
Values = Callable[[Recording, Sequence[Lines]], Array]
"""A critic: values of states, given by their steps, of one puzzle."""


# ------------------------------------------------------------------ critics


def from_numbers(model: Callable[[Sequence[Numbers]], Array]) -> Values:
    """Return a critic of the remaining numbers; text that is not a state of the game has the lowest value."""

    def values(recording: Recording, states: Sequence[Lines]) -> Array:
        found = [read_left(lines[-1]) for lines in states]
        legal = [left is not None and len(left) == 4 - len(s) for left, s in zip(found, states, strict=True)]
        out = np.full(len(states), -1.0)
        if any(legal):
            out[legal] = 2 * model([left for left, ok in zip(found, legal, strict=True) if ok and left]) - 1
        return out

    return values


def from_critic(critic: search.Critic) -> Values:
    """Return a trained critic, which reads the steps as messages of the system it was trained on."""
    mas = mas_gym.load_mas("game24")
    dynamics = Dynamics(mas)

    def values(recording: Recording, states: Sequence[Lines]) -> Array:
        contexts = []
        for lines in states:
            state: MASState = dynamics.initial_state(recording.problem.question)
            for line in lines:
                state = dynamics.transition(state, Action(line, mas.ALL))
            contexts.append(search.ScoringContext(state, mas, None))
        return np.array(critic.score(contexts), dtype=float)

    return values


# ------------------------------------------------------------------ measure


class Measured(NamedTuple):
    """A critic with its training runs.

    Attributes:
        trainings: One function of values per training run; without one, the values are GPT-4's, as recorded.
        calls: Calls of GPT-4 per value.
    """

    trainings: tuple[Values, ...]
    calls: int = 0


def train_all(recordings: Sequence[Recording], out: Path, seeds: Sequence[int]) -> tuple[dict[str, Measured], float]:
    """Train every critic on puzzles that were not recorded.

    Returns:
        The critics, and the share of states after step 1 whose W / N is below -0.9.
    """
    from rewardmodels import load_critic

    task = training_task({one.numbers for one in recordings})
    data = training_data(task, out)
    rows = labeled(data)
    learned = states_to_learn(data)
    folders = [train_critic(learned, out / f"masprm-{seed}", seed).folder for seed in seeds]
    low = float(np.mean([example.chosen_target < -0.9 for example in data.examples if example.depth == 0]))
    return (
        {
            GPT4: Measured((), CALLS),
            MASPRM: Measured(tuple(from_critic(load_critic(str(folder))) for folder in folders)),
            FEATURES: Measured(tuple(from_numbers(FeatureModel(rows, seed)) for seed in seeds)),
            TABLE: Measured((from_numbers(Table(rows)),)),
        },
        low,
    )


def ranking(recordings: Sequence[Recording], critic: Measured, depth: int) -> Ranking:
    """Compare all recorded proposals of a step."""
    states = [one.levels[depth].states for one in recordings]
    truth = [np.array([bool(state.winning) for state in part]) for part in states]
    values = [
        [
            value(one, [state.lines for state in part]) if part else np.zeros(0)
            for one, part in zip(recordings, states, strict=True)
        ]
        for value in critic.trainings
    ]
    # As recorded: a proposal that repeats another has the value 0.
    return rank(truth, values or [[np.array([scaled(state.value) for state in part]) for part in states]])


# --------------------------------------------------------------------- page


def make(given: argparse.Namespace) -> Path:
    recordings = read_recordings(given.data)
    critics, low = train_all(recordings, given.out, given.seeds)
    page = Page("game24", "Game of 24: critics trained without GPT-4, on GPT-4's trees of thought")
    rankings = {name: [ranking(recordings, critic, depth) for depth in range(3)] for name, critic in critics.items()}
    auc = {name: f"{float(one[0].auc(np.ones(one[0].problems))):.2f}" for name, one in rankings.items()}
    page.asks = (
        "This page compares critics with the values that GPT-4 gave in its recorded searches for the game of 24. "
        "After the first step, GPT-4's values (three calls each) separate states that can reach 24 from others with "
        f"an AUC of {auc[GPT4]}. The other critics were trained on outcomes of random moves on other puzzles, "
        f"without calls to GPT-4. Their AUCs are {', '.join(f'{auc[n]} ({n})' for n in auc if n != GPT4)}."
    )
    _auc(page, recordings, critics, rankings)
    page.text("## How the critics were trained")
    page.text(
        f"`{PLANNER}` searches {PUZZLES} puzzles of the training split of the task `game24`, excluding the recorded "
        "ones. The agents make random moves, and the leaves have the true outcome. MASPRM is a decoder of two layers "
        "and width 64 with random initial weights. It is trained on the states of these trees by squared error; the "
        "target is +1 if the search found 24 below the state and -1 otherwise. MASPRM's usual target, W / N, "
        f"measures the success of random moves, and it is below -0.9 for {percent(low)}% of the states after step 1; a "
        "beam needs the best continuation, not the mean. The features, for gradient boosting, are the remaining "
        "numbers and the sums, differences, products and quotients of pairs. The lookup table contains the share of "
        "searches that found 24 from the same numbers. No critic uses GPT-4's texts or values. The kind of target "
        "was chosen on the puzzles of the development half of the recordings; nothing else was tuned."
    )
    facts = [
        f"{len(recordings)} puzzles; critics trained with "
        f"seed{'s' * (len(given.seeds) > 1)} {', '.join(map(str, given.seeds))}",
        "Intervals are over puzzles, with the training runs of a critic averaged.",
    ]
    return write_recorded(page, SOURCE, given.pages, "python -m benchmarks.real.game24 --data DIR --out FOLDER", facts)


def _auc(
    page: Page,
    recordings: Sequence[Recording],
    critics: Mapping[str, Measured],
    rankings: Mapping[str, Sequence[Ranking]],
) -> None:
    page.text("## Does a critic rank states that can reach 24 above the others?")
    counts = [[state.winning for one in recordings for state in one.levels[depth].states] for depth in range(3)]
    page.text(
        "The table shows the AUC over all recorded proposals of all puzzles. The ground truth is whether the "
        "remaining numbers can make 24. They can in "
        + "; ".join(f"{sum(map(bool, c))} of {len(c)} proposals after step {step}" for step, c in enumerate(counts, 1))
        + "."
    )
    header = ["critic", "GPT-4 calls per value"]
    for depth in range(3):
        header += [f"step {depth + 1}", "95% interval"]
    rows: list[list[object]] = []
    for name, critic in critics.items():
        row: list[object] = [name, critic.calls]
        for one in rankings[name]:
            row += auc_cells(one)
        rows.append(row)
    page.table(header, rows)

    differences = []
    for name in (MASPRM, FEATURES, TABLE):
        gap = auc_difference(rankings[name][0], rankings[GPT4][0])
        differences.append((f"{name} minus {GPT4}", f"{gap.mean:+.3f}", f"{gap.low:+.3f} to {gap.high:+.3f}"))
    page.table(("AUC after step 1", "difference", "95% interval"), differences)


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments("game24", "Critics trained without GPT-4, on GPT-4's trees of thought.")
    parser.add_argument("--out", type=Path, default=Path("game24"), help="folder of searches and critics [game24]")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="training runs of each critic")
    run_page(make, parser.parse_args(words))


if __name__ == "__main__":
    main()
