"""The dynamic scheduler: a DyLAN-style conditional graph against the fixed MAS1, each with a critic of its own."""

from __future__ import annotations

from benchmarks.paper.lab import MCTS, SCORE_HEADER, Lab, arm, command, keep_rows, score_cells
from benchmarks.paper.page import Page, claim

ASKS = """
Three solvers and a Judge; where the Judge disagrees, three refiners and a final judge act too. Each system has its
own rollouts and MASPRM. The paper reports it as a feasibility check on GSM8K: 51.2 against 47.2 for a single pass,
84.6 against 82.9 for MCTS(10,3), at 93.8 agent calls against 34.4.
"""


def run(lab: Lab) -> Page:
    page = Page("dylan", "Dynamic scheduler", ASKS)
    found = {}
    for name, setting in {"fixed": lab.home, "dynamic": lab.home._replace(mas="dylan")}.items():
        arms = [arm("single"), arm(MCTS, lab.critic(setting), f"MASPRM of {setting.mas}")]
        scores = lab.measure(setting, arms)
        found[name, "single"], found[name, MCTS] = scores
        keep_rows(lab, f"dylan-{name}", scores)
    rows = [(f"{name} schedule", search, *score_cells(score)) for (name, search), score in found.items()]
    page.table(("system", "search", *SCORE_HEADER), rows, left=2)
    number = lab.trees(lab.home._replace(mas="dylan"))
    page.blocks.append(f"The critic of the dynamic schedule has learned from {number:,} training searches.\n")
    page.claims = [
        claim(
            "single pass: dynamic over fixed",
            "+4.0",
            found["dynamic", "single"].shares,
            found["fixed", "single"].shares,
        ),
        claim("MCTS(10,3): dynamic over fixed", "+1.7", found["dynamic", MCTS].shares, found["fixed", MCTS].shares),
        claim(
            "dynamic: MCTS(10,3) over single", "+33.4", found["dynamic", MCTS].shares, found["dynamic", "single"].shares
        ),
    ]
    return page


if __name__ == "__main__":
    command(run, "dylan")
