"""The dynamic scheduler: a DyLAN-style conditional graph compared with the fixed MAS1, each with a separate critic."""

from __future__ import annotations

from benchmarks.paper import errors
from benchmarks.paper.lab import MCTS, SCORE_HEADER, Lab, Score, command, keep_rows, row_of, score_cells
from benchmarks.paper.page import Claim, Page
from benchmarks.paper.rivals import compared, rivals

ASKS = f"""
The dynamic graph has three solvers and a Judge. If the Judge disagrees with them, three refiners and a final judge also
act. Each system has separate rollouts and a separate MASPRM. The paper reports a feasibility check on GSM8K: the
dynamic schedule reaches 51.2 against 47.2 for a single pass, and 84.6 against 82.9 for MCTS(10,3), at 93.8 agent calls
against 34.4.
{errors.ASKS}"""


def run(lab: Lab) -> Page:
    page = Page("dylan", "Dynamic scheduler", ASKS)
    found: dict[tuple[str, str], Score] = {}
    rows: list[tuple[str, ...]] = []
    rivalry: list[Claim] = []
    sights: list[str] = []
    for name, setting in {"fixed": lab.home, "dynamic": lab.home._replace(mas="dylan")}.items():
        searches = [row_of("single"), row_of(MCTS, lab.critic(setting), f"MASPRM of {setting.mas}")]
        scores = lab.measure(setting, searches)
        equal = rivals(lab, setting, scores[1], scores[0], name=f"{name}: ")
        found[name, "single"], found[name, MCTS] = scores
        truth, sight = errors.against_truth(lab, setting)
        scores += [*equal[2:], *truth]
        sights += sight
        rows += [(f"{name} schedule", one.row.label, *score_cells(one)) for one in scores]
        rivalry += equal.claims()
        keep_rows(lab, f"dylan-{name}", scores)
    page.table(("system", "search", *SCORE_HEADER), rows, left=2)
    number = lab.trees(lab.home._replace(mas="dylan"))
    page.blocks.append(f"The critic of the dynamic schedule was trained on {number:,} training searches.\n")
    page.blocks += sights
    page.claims = [
        compared("single pass: dynamic over fixed", "+4.0", found["dynamic", "single"], found["fixed", "single"]),
        compared("MCTS(10,3): dynamic over fixed", "+1.7", found["dynamic", MCTS], found["fixed", MCTS]),
        compared("dynamic: MCTS(10,3) over single", "+33.4", found["dynamic", MCTS], found["dynamic", "single"]),
        *rivalry,
    ]
    return page


if __name__ == "__main__":
    command(run, "dylan")
