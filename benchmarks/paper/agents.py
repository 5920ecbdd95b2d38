"""Transfer to other agents: critics trained on one model's rollouts guide another model, without retraining."""

from __future__ import annotations

from benchmarks.paper.lab import MCTS, Lab, command, keep_rows, paper_arms
from benchmarks.paper.main import VOTE, guide_claims
from benchmarks.paper.page import Page, claim
from search.compare import to_markdown

PAPER = {
    (MCTS, "PL"): "+11.2",
    (MCTS, "ORM"): "+8.0",
    ("sbs:5,3", "PL"): "+15.1",
    ("sbs:5,1", "PL"): "+16.2",
    (VOTE, "PL"): "+5.6",
    (VOTE, "ORM"): "+1.0",
}
ASKS = """
The agents are swapped for another model; the critics stay those of the first. The paper swaps Qwen2.5-1.5B for
Llama-3.2-3B and finds MASPRM-7B ahead of every other guide; its figures are those of GSM8K. In the miniature the other
agents are a second tiny model of another width, trained from nothing with other random numbers.
"""


def run(lab: Lab) -> Page:
    page = Page("agents", "Transfer to other agents", ASKS)
    guides = lab.guides()
    scores = lab.measure(lab.home._replace(policy=lab.other_policy), paper_arms(guides))
    found = {(score.row.planner, score.row.critic): score for score in scores}
    page.blocks.append(to_markdown([score.row for score in scores]))
    best, single = found[MCTS, "MASPRM"].shares, found["single", ""].shares
    page.claims = [*guide_claims(found, PAPER), claim("MCTS(10,3)+MASPRM over a single pass", "+22.7", best, single)]
    keep_rows(lab, page.name, scores)
    return page


if __name__ == "__main__":
    command(run, "agents")
