"""Transfer to other agents: critics trained on one model's rollouts guide another model, without retraining."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.paper.lab import MCTS, Lab, command, keep_rows, paper_rows, row_of
from benchmarks.paper.main import guide_claims, over_a_pass
from benchmarks.paper.page import NEW, Page
from benchmarks.paper.published import LLAMA, ORDER
from benchmarks.paper.rivals import compared, rivals
from search.results.table_formats import to_markdown

ASKS = f"""
The agents are replaced by a different model, and the critics are unchanged. The paper replaces Qwen2.5-1.5B with
Llama-3.2-3B and finds that MASPRM-7B outperforms all other critics. In the small-scale experiment, the other agents are
a second tiny model with a different width, trained from scratch with a different seed. The last rows are critics
trained on rollouts of these other agents. {ORDER}
"""


def run(lab: Lab) -> Page:
    page = Page("agents", "Transfer to other agents", ASKS)
    guides = lab.guides()
    setting = lab.home._replace(policy=lab.other_policy)
    scores = lab.measure(setting, paper_rows(guides))
    found = {(score.row.planner, score.row.critic): score for score in scores}
    equal = rivals(lab, setting, found[MCTS, "MASPRM"], found["single", ""], orm=guides["ORM"])
    scores.append(equal.best)
    page.claims = [*guide_claims(found, LLAMA), equal.claims()[1], over_a_pass(found, LLAMA)]
    if lab.options.miniature:
        [own] = lab.measure(setting, [row_of(MCTS, lab.critic(setting), "own MASPRM")])
        theirs = rivals(lab, setting, own, found["single", ""], name="own critics: ")
        scores += [own, theirs.best._replace(row=replace(theirs.best.row, critic="own ORM"))]
        text = f"{MCTS}: a MASPRM of these agents over that of {lab.home.policy}"
        page.claims += [compared(text, NEW, own, found[MCTS, "MASPRM"]), *theirs.claims()]
    page.blocks.append(to_markdown([score.row for score in scores]))
    keep_rows(lab, page.name, scores)
    return page


if __name__ == "__main__":
    command(run, "agents")
