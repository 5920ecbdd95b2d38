"""Transfer between two wordings of Arithmetic on one graph: the same kinds of problems in different sentences."""

from __future__ import annotations

from benchmarks.paper.lab import Lab, command
from benchmarks.paper.page import NEW, Page
from benchmarks.paper.tasks import transfer
from mas_gym.tasks.procedural.generated import DEFAULT_DIFFICULTY

ASKS = """
This page compares three critics in MCTS(10,3): policy likelihood, a MASPRM trained on the same wording, and a MASPRM
trained on the other wording. The two wordings are the stories of Arithmetic and `retold` stories, which have the same
kinds of facts and the same difficulty, but every sentence is reworded. Agents and graph are the same, and the agents
were trained on both wordings. Together with [difficulty](difficulty.md), this is the small-scale equivalent of the
paper's transfer between GSM8K and MATH, where the transferred critic is 3.7 to 9.3 points below the critic of the same
data set and 5.3 to 11.1 above policy likelihood.
"""


def run(lab: Lab) -> Page:
    page = Page("wordings", "Transfer between two wordings", ASKS)
    _, _, level = lab.home.task.partition("-")
    transfer(lab, page, lab.home._replace(task=f"retold-{level or DEFAULT_DIFFICULTY}"), NEW, NEW)
    return page


if __name__ == "__main__":
    command(run, "wordings")
