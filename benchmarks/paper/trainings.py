"""Training runs with three seeds: MASPRM and ORM on the same trees, and intervals that include the runs."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.nested_bootstrap import nested_bootstrap
from benchmarks.paper.lab import (
    LIKELIHOOD,
    MASPRM,
    MCTS,
    ORM,
    SCORE_HEADER,
    Lab,
    Recipe,
    Score,
    command,
    keep_rows,
    row_of,
    score_cells,
)
from benchmarks.paper.page import NEW, Claim, Page
from benchmarks.paper.published import ORDER, heads, lead
from benchmarks.paper.rivals import passes_at
from rewardmodels import load_critic

TRAININGS = (1, 2, 3)

ASKS = f"""
The critics of the main table were trained once, so its intervals do not include the variation between training seeds,
which determine the head's initial weights and the order of the training examples. Here, each of them is trained
{len(TRAININGS)} times on the same trees, and intervals are over problems and training runs. {ORDER}

In the small-scale experiment, MASPRM is also trained with the other losses: three times with regression, and twice with
Bradley-Terry without the anchor. A tree has fewer pairs than labeled states, so Bradley-Terry alone is trained for more
epochs, with the same number of updates as the main training config.
"""

INCLUDED = "The intervals include the variation between the training runs of each critic."

LOSSES = {"MASPRM, MSE": (Recipe("masprm", "mse"), len(TRAININGS)), "MASPRM, BT alone": (Recipe(plain=True), 2)}
"""Other losses of MASPRM, and how often each is trained; the second takes twice the time of the others."""


def run(lab: Lab) -> Page:
    page = Page("trainings", "Three training runs of each critic", ASKS, variation=INCLUDED)
    critics = {
        name: [lab.critic(lab.home, replace(recipe, seed=seed)) for seed in TRAININGS]
        for name, recipe in (("MASPRM", MASPRM), ("ORM", ORM))
    }
    single, likelihood = lab.measure(lab.home, [row_of("single"), row_of(MCTS, load_critic(LIKELIHOOD), "PL")])
    guided = {name: _measure(lab, MCTS, name, critics[name]) for name in critics}
    losses = _losses(lab)
    best = _measure(lab, f"bon:{passes_at(guided['MASPRM'][0], single)}", "ORM", critics["ORM"])
    others = [score for scores in losses.values() for score in scores]
    shown = [likelihood, *guided["MASPRM"], *others, *guided["ORM"], *best]
    rows = [(score.row.label, *score_cells(score)) for score in shown]
    page.table(("search", *SCORE_HEADER), rows)
    ours = guided["MASPRM"]
    page.claims = [
        _claim(f"{MCTS}: MASPRM over ORM", lead(MCTS, "MASPRM", "ORM"), ours, guided["ORM"]),
        _claim(f"{MCTS}: MASPRM over policy likelihood", lead(MCTS, "MASPRM", "PL"), ours, [likelihood]),
        _claim(f"MASPRM {MCTS} over {best[0].row.planner} with the ORM, equal tokens", NEW, ours, best),
        *_over_regression(ours, losses),
    ]
    lab.notes.append(
        f"critics trained with seeds {', '.join(map(str, TRAININGS))}; intervals over problems and training runs"
    )
    keep_rows(lab, page.name, [single, *shown])
    return page


def _losses(lab: Lab) -> dict[str, list[Score]]:
    """Train MASPRM with its other losses to the updates of the main training config, and measure them."""
    if lab.options.no_losses or not lab.options.miniature or not lab.training().anchor:
        return {}
    wanted = lab.updates(lab.home, replace(MASPRM, seed=TRAININGS[0]))
    found = {}
    for name, (recipe, times) in LOSSES.items():
        epochs = lab.training().epochs * wanted / lab.updates(lab.home, recipe)
        equal = replace(recipe, epochs=round(epochs, 2))
        critics = [lab.critic(lab.home, replace(equal, seed=seed)) for seed in TRAININGS[:times]]
        updates = lab.updates(lab.home, replace(equal, seed=TRAININGS[0]))
        lab.notes.append(f"{name}: {equal.epochs} epochs, {updates:,} updates; the main training config: {wanted:,}")
        found[name] = _measure(lab, MCTS, name, critics)
    return found


def _over_regression(ours: list[Score], losses: dict[str, list[Score]]) -> list[Claim]:
    if not losses:
        return []
    squared, alone = (losses[name] for name in LOSSES)
    paper = heads("MASPRM", "BT", "MSE")
    return [
        _claim("MASPRM: BT over MSE, equal updates", paper, ours, squared),
        _claim("MASPRM: BT alone over MSE, equal updates", paper, alone, squared),
    ]


def _measure(lab: Lab, planner: str, name: str, critics: list) -> list[Score]:
    seeds = TRAININGS[: len(critics)]
    searches = [row_of(planner, critic, f"{name}, seed {seed}") for seed, critic in zip(seeds, critics, strict=True)]
    return lab.measure(lab.home, searches)


def _claim(text: str, paper: str, better: list[Score], worse: list[Score]) -> Claim:
    sides = [[score.shares for score in side] for side in (better, worse)]
    spent = [sum(score.row.tokens.mean for score in side) / len(side) for side in (better, worse)]
    return Claim(text, paper, nested_bootstrap(*sides), (spent[0], spent[1]))


if __name__ == "__main__":
    command(run, "trainings")
