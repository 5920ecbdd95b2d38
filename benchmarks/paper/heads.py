"""Reward heads: Bradley-Terry and regression for MASPRM, cross-entropy and regression for the ORM."""

from __future__ import annotations

from benchmarks.paper.held_out import auc_cells, outcome_auc, pair_accuracy, pair_cells
from benchmarks.paper.lab import MASPRM, MCTS, ORM, SCORE_HEADER, Lab, Recipe, command, keep_rows, row_of, score_cells
from benchmarks.paper.page import NEW, Page
from benchmarks.paper.published import ORDER, heads, lead
from benchmarks.paper.rivals import compared, rivals

RECIPES = {
    "ORM, BCE": ORM,
    "ORM, MSE": Recipe("orm", "mse"),
    "MASPRM, BT": MASPRM,
    "MASPRM, MSE": Recipe("masprm", "mse"),
}
PLAIN = {"MASPRM, BT alone": Recipe(plain=True)}
"""Added if the recipe of this backbone anchors the Bradley-Terry loss to the targets."""

ASKS = f"""
This page compares critics in MCTS(10,3) that were trained on the same trees with different losses. In the paper,
Bradley-Terry is best for MASPRM on all four tasks, and cross-entropy is best or tied for the ORM. {ORDER} The training
config can anchor the Bradley-Terry loss by adding the squared error between values and targets, which makes values
comparable across branches. In that case, a separate row shows the Bradley-Terry loss alone, as in the paper.
"""


def run(lab: Lab) -> Page:
    page = Page("heads", "Reward heads", ASKS)
    critics = {name: lab.critic(lab.home, recipe) for name, recipe in RECIPES.items()}
    if critics["MASPRM, BT"].info.settings["anchor"]:
        critics |= {name: lab.critic(lab.home, recipe) for name, recipe in PLAIN.items()}
    single, *scores = lab.measure(
        lab.home, [row_of("single"), *(row_of(MCTS, critic, name) for name, critic in critics.items())]
    )
    found = dict(zip(critics, scores, strict=True))
    equal = rivals(lab, lab.home, found["MASPRM, BT"], single, orm=critics["ORM, BCE"])
    shown = {**found, "policy likelihood": equal.likelihood, f"{equal.best.row.planner} + ORM, BCE": equal.best}
    page.table(("head", *SCORE_HEADER), [(name, *score_cells(score)) for name, score in shown.items()])
    page.blocks.append("Metrics on held-out trees of the dev split:\n")
    aucs = {name: outcome_auc(lab, lab.home, critic) for name, critic in critics.items()}
    process = {name: critic for name, critic in critics.items() if not critic.terminal_only}
    pairs = {name: pair_accuracy(lab, lab.home, critic) for name, critic in process.items()}
    dash = ("\N{EN DASH}",) * 3
    rows = [(name, *(pair_cells(pairs[name]) if name in pairs else dash), *auc_cells(aucs[name])) for name in critics]
    header = ("head", "pairwise accuracy, %", "95% interval", "by depth", "AUC of finished transcripts", "95% interval")
    page.table(header, rows)
    page.claims = [
        compared("MASPRM: BT over MSE", heads("MASPRM", "BT", "MSE"), found["MASPRM, BT"], found["MASPRM, MSE"]),
        compared("ORM: BCE over MSE", heads("ORM", "BCE", "MSE"), found["ORM, BCE"], found["ORM, MSE"]),
        compared("best heads: MASPRM over ORM", lead(MCTS, "MASPRM", "ORM"), found["MASPRM, BT"], found["ORM, BCE"]),
        *equal.claims(lead(MCTS, "MASPRM", "PL")),
    ]
    if "MASPRM, BT alone" in found:
        alone = found["MASPRM, BT alone"]
        page.claims += [
            compared("MASPRM: BT alone over MSE", heads("MASPRM", "BT", "MSE"), alone, found["MASPRM, MSE"]),
            compared("MASPRM: anchored BT over BT alone", NEW, found["MASPRM, BT"], alone),
        ]
    keep_rows(lab, page.name, list(shown.values()))
    return page


if __name__ == "__main__":
    command(run, "heads")
