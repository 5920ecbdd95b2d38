"""Views of the critic: the full routed transcript compared with the acting agent's local view."""

from __future__ import annotations

from benchmarks.paper.held_out import pair_accuracy, pair_cells
from benchmarks.paper.lab import MASPRM, MCTS, SCORE_HEADER, Lab, Recipe, command, keep_rows, row_of, score_cells
from benchmarks.paper.page import Page
from benchmarks.paper.published import LOCAL, MAIN, ORDER, lead, shown
from benchmarks.paper.rivals import compared, rivals

ASKS = f"""
This page compares two MASPRMs in MCTS(10,3). The input of one is the full transcript. The input of the other is the
task and the local view of the agent that wrote the scored message. In the paper, the full view is better on all four
data sets, and the local view outperforms policy likelihood. {ORDER}
"""


def run(lab: Lab) -> Page:
    page = Page("views", "Full versus local view", ASKS)
    critics = {"full": lab.critic(lab.home, MASPRM), "local": lab.critic(lab.home, Recipe(view="local"))}
    searches = [row_of("single"), *(row_of(MCTS, critic, name) for name, critic in critics.items())]
    single, full, local = lab.measure(lab.home, searches)
    equal = rivals(lab, lab.home, full, single)
    likelihood = equal.likelihood
    pairs = {name: pair_cells(pair_accuracy(lab, lab.home, critic)) for name, critic in critics.items()}
    dash = ("\N{EN DASH}",) * 3
    names = {"policy likelihood": likelihood, equal.best.row.label: equal.best, "full": full, "local": local}
    rows = [(name, *score_cells(score), *pairs.get(name, dash)) for name, score in names.items()]
    page.table(("view", *SCORE_HEADER, "pairwise accuracy, dev trees, %", "95% interval", "by depth"), rows)
    page.claims = [
        compared("full view over local view", f"7B: {shown(MAIN[MCTS, 'MASPRM-7B'], LOCAL)}", full, local),
        compared("local view over policy likelihood", f"7B: {shown(LOCAL, MAIN[MCTS, 'PL'])}", local, likelihood),
        *equal.claims(lead(MCTS, "MASPRM", "PL")),
    ]
    keep_rows(lab, page.name, [single, full, local, likelihood, equal.best])
    return page


if __name__ == "__main__":
    command(run, "views")
