"""What the critic sees: the full routed transcript against the acting agent's local view."""

from __future__ import annotations

from benchmarks.paper.held_out import pair_accuracy, pair_cells
from benchmarks.paper.lab import (
    LIKELIHOOD,
    MASPRM,
    MCTS,
    SCORE_HEADER,
    Lab,
    Recipe,
    arm,
    command,
    keep_rows,
    score_cells,
)
from benchmarks.paper.page import Page, claim
from rewardmodels import load_critic

ASKS = """
MCTS(10,3) with a MASPRM of the full transcript and with one that sees the task and the local view of the agent whose
message it judges. The paper finds the full view 5.5 points better on GSM8K (2.2 to 5.5 over four tasks) and the local
view still above policy likelihood.
"""


def run(lab: Lab) -> Page:
    page = Page("views", "Full against local view", ASKS)
    critics = {"full": lab.critic(lab.home, MASPRM), "local": lab.critic(lab.home, Recipe(view="local"))}
    arms = [arm(MCTS, load_critic(LIKELIHOOD), "PL"), *(arm(MCTS, critic, name) for name, critic in critics.items())]
    scores = lab.measure(lab.home, arms)
    likelihood, full, local = scores
    pairs = {name: pair_cells(pair_accuracy(lab, lab.home, critic)) for name, critic in critics.items()}
    dash = ("\N{EN DASH}",) * 3
    names = {"policy likelihood": likelihood, "full": full, "local": local}
    rows = [(name, *score_cells(score), *pairs.get(name, dash)) for name, score in names.items()]
    page.table(("view", *SCORE_HEADER, "pairwise accuracy, dev trees, %", "95% interval", "by depth"), rows)
    page.claims = [
        claim("full view over local view", "+5.5", full.shares, local.shares),
        claim("local view over policy likelihood", "+14.9", local.shares, likelihood.shares),
    ]
    keep_rows(lab, page.name, scores)
    return page


if __name__ == "__main__":
    command(run, "views")
