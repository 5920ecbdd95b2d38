"""Backbones of the critics: a quarter and three times the parameters, and one trained without the Auditor."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.paper.held_out import auc_cells, outcome_auc, pair_accuracy, pair_cells
from benchmarks.paper.lab import (
    LIKELIHOOD,
    MCTS,
    ORM,
    SCORE_HEADER,
    Lab,
    Score,
    TinyShape,
    command,
    keep_rows,
    row_of,
    score_cells,
)
from benchmarks.paper.options import parameters
from benchmarks.paper.page import NEW, Page
from benchmarks.paper.published import MAIN, shown
from benchmarks.paper.rivals import compared, passes_at
from rewardmodels import LearnedCritic, load_critic

SMALL, SAME, BLIND, LARGE = "small", "agents' size", "without Auditor", "large"
BACKBONES = {
    SMALL: TinyShape(128, 2),
    SAME: TinyShape(192, 4),
    BLIND: TinyShape(192, 4, without="audit"),
    LARGE: TinyShape(256, 7, rate=0.0015),
}
"""At the smaller ones' learning rate the large one stays behind them (benchmarks/LOG.md)."""

ASKS = """
The paper's critics have 1.5 and 7 billion parameters, and its agents 1.5 billion. Here, backbones of three sizes are
trained from scratch with the same method and number of steps; the large backbone has half the learning rate. On each
backbone, a MASPRM and an ORM are trained on the same searches of the same agents. A fourth backbone, of the agents'
size, was trained without the messages of the Auditor, a role that identifies the first error of a transcript and that
no system uses. The paper's figures are for GSM8K, MATH, MMLU and LogiQA.
"""


class Backbone(NamedTuple):
    """The critics on one backbone, and their results."""

    parameters: int
    masprm: LearnedCritic
    orm: LearnedCritic
    guided: Score
    judged: Score
    best: Score


def run(lab: Lab) -> Page:
    page = Page("backbones", "Backbones of the critics", ASKS)
    single, likelihood = lab.measure(lab.home, [row_of("single"), row_of(MCTS, load_critic(LIKELIHOOD), "PL")])
    found = {name: _measure(lab, name, shape, single) for name, shape in BACKBONES.items()}
    scores = [likelihood, *(score for one in found.values() for score in one[3:])]
    page.table(("search", *SCORE_HEADER), [(score.row.label, *score_cells(score)) for score in scores])
    page.blocks.append("Metrics on held-out trees of the dev split:\n")
    page.table(
        ("backbone", "parameters", "MASPRM: pairs, %", "95% interval", "by depth", "ORM: AUC", "95% interval"),
        [
            (
                name,
                f"{one.parameters:,}",
                *pair_cells(pair_accuracy(lab, lab.home, one.masprm)),
                *auc_cells(outcome_auc(lab, lab.home, one.orm)),
            )
            for name, one in found.items()
        ],
    )
    small, same, blind, large = (found[name] for name in (SMALL, SAME, BLIND, LARGE))
    papers = {kind: f"{shown(MAIN[MCTS, f'{kind}-7B'], MAIN[MCTS, f'{kind}-1.5B'])}" for kind in ("MASPRM", "ORM")}
    page.claims = [
        compared("MASPRM: large over the agents' size", papers["MASPRM"], large.guided, same.guided),
        compared("MASPRM: the agents' size over small", NEW, same.guided, small.guided),
        compared("ORM: large over the agents' size", papers["ORM"], large.judged, same.judged),
        compared("ORM: the agents' size over small", NEW, same.judged, small.judged),
        compared("MASPRM: with the Auditor over without", NEW, same.guided, blind.guided),
        compared("ORM: with the Auditor over without", NEW, same.judged, blind.judged),
        *(
            claim
            for name, one in found.items()
            for claim in (
                compared(f"{name}: MASPRM over ORM", NEW, one.guided, one.judged),
                compared(f"{name}: MASPRM over policy likelihood", NEW, one.guided, likelihood),
                compared(f"{name}: MASPRM over best-of-N with the ORM, equal tokens", NEW, one.guided, one.best),
            )
        ),
    ]
    lab.notes.append(f"backbones trained for {lab.options.other_steps:,} steps each")
    keep_rows(lab, page.name, [single, *scores])
    return page


def _measure(lab: Lab, name: str, shape: TinyShape, single: Score) -> Backbone:
    base = lab.tiny_model(f"backbone-{shape.name}", shape)
    sized = lab.on(base)
    masprm, orm = sized.critic(lab.home), sized.critic(lab.home, ORM)
    guided, judged = lab.measure(lab.home, [row_of(MCTS, masprm, f"MASPRM, {name}"), row_of(MCTS, orm, f"ORM, {name}")])
    [best] = lab.measure(lab.home, [row_of(f"bon:{passes_at(guided, single)}", orm, f"ORM, {name}")])
    return Backbone(parameters(base), masprm, orm, guided, judged, best)


if __name__ == "__main__":
    command(run, "backbones")
