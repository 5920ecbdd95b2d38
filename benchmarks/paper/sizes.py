"""Scorer size: MASPRM and ORM on backbones of a quarter of, as many as, and three times the parameters."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.paper.held_out import auc_cells, outcome_auc, pair_accuracy, pair_cells
from benchmarks.paper.lab import LIKELIHOOD, MCTS, ORM, SCORE_HEADER, Lab, Score, arm, command, keep_rows, score_cells
from benchmarks.paper.options import parameters
from benchmarks.paper.page import NEW, Page
from benchmarks.paper.published import MAIN, shown
from benchmarks.paper.rivals import compared, passes_at
from rewardmodels import LearnedCritic, load_critic

SHAPES = {"small": (128, 2), "as the agents": (192, 4), "large": (256, 7)}
"""Width and layers of the backbones."""

ASKS = """
The paper's critics have 1.5 and 7 billion parameters, its agents 1.5. Here backbones of three sizes are trained from
nothing in the same way, with the same number of steps, and a MASPRM and an ORM on each learn from the same searches of
the same agents. The paper's figures are those of GSM8K, MATH, MMLU and LogiQA, in this order.
"""


class Size(NamedTuple):
    """The critics on one backbone, and what they get."""

    parameters: int
    masprm: LearnedCritic
    orm: LearnedCritic
    guided: Score
    judged: Score
    best: Score


def run(lab: Lab) -> Page:
    page = Page("sizes", "Scorer size", ASKS)
    single, likelihood = lab.measure(lab.home, [arm("single"), arm(MCTS, load_critic(LIKELIHOOD), "PL")])
    sizes = {name: _measure(lab, name, *shape, single) for name, shape in SHAPES.items()}
    scores = [likelihood, *(score for size in sizes.values() for score in size[3:])]
    page.table(("search", *SCORE_HEADER), [(score.row.label, *score_cells(score)) for score in scores])
    page.blocks.append("On trees of the dev split, on which none of them was trained:\n")
    page.table(
        ("backbone", "parameters", "MASPRM: pairs, %", "95% interval", "by depth", "ORM: AUC", "95% interval"),
        [
            (
                name,
                f"{size.parameters:,}",
                *pair_cells(pair_accuracy(lab, lab.home, size.masprm)),
                *auc_cells(outcome_auc(lab, lab.home, size.orm)),
            )
            for name, size in sizes.items()
        ],
    )
    small, same, large = sizes.values()
    papers = {kind: f"{shown(MAIN[MCTS, f'{kind}-7B'], MAIN[MCTS, f'{kind}-1.5B'])}" for kind in ("MASPRM", "ORM")}
    page.claims = [
        compared("MASPRM: large over the agents' size", papers["MASPRM"], large.guided, same.guided),
        compared("MASPRM: the agents' size over small", NEW, same.guided, small.guided),
        compared("ORM: large over the agents' size", papers["ORM"], large.judged, same.judged),
        compared("ORM: the agents' size over small", NEW, same.judged, small.judged),
        *(
            claim
            for name, size in sizes.items()
            for claim in (
                compared(f"{name}: MASPRM over ORM", NEW, size.guided, size.judged),
                compared(f"{name}: MASPRM over policy likelihood", NEW, size.guided, likelihood),
                compared(f"{name}: MASPRM over best-of-N with the ORM, equal tokens", NEW, size.guided, size.best),
            )
        ),
    ]
    lab.notes.append(f"backbones trained for {lab.options.other_steps:,} steps each")
    keep_rows(lab, page.name, [single, *scores])
    return page


def _measure(lab: Lab, name: str, hidden: int, layers: int, single: Score) -> Size:
    base = lab.tiny_model(f"scorer-{hidden}x{layers}", hidden, layers)
    sized = lab.on(base)
    masprm, orm = sized.critic(lab.home), sized.critic(lab.home, ORM)
    guided, judged = lab.measure(lab.home, [arm(MCTS, masprm, f"MASPRM, {name}"), arm(MCTS, orm, f"ORM, {name}")])
    [best] = lab.measure(lab.home, [arm(f"bon:{passes_at(guided, single)}", orm, f"ORM, {name}")])
    return Size(parameters(base), masprm, orm, guided, judged, best)


if __name__ == "__main__":
    command(run, "sizes")
