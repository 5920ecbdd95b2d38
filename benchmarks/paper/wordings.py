"""Transfer between two wordings of Arithmetic on one graph: the same problems in kind, told in other sentences."""

from __future__ import annotations

from benchmarks.paper.lab import Lab, command
from benchmarks.paper.page import NEW, Page
from benchmarks.paper.tasks import transfer
from mas_gym.tasks.sequences import DEFAULT_DIFFICULTY

ASKS = """
MCTS(10,3) with policy likelihood, with a MASPRM of the same wording and with one of the other: the stories of
Arithmetic, and stories of the same facts and difficulty whose every sentence is another (`retold`). Agents and graph
are the same, and the agents know both wordings. With [difficulty](difficulty.md) it is the miniature's likeness of the
paper's transfer between GSM8K and MATH, where the related critic is 3.7 to 9.3 points below the data set's own and 5.3
to 11.1 above policy likelihood.
"""


def run(lab: Lab) -> Page:
    page = Page("wordings", "Transfer between two wordings", ASKS)
    _, _, level = lab.home.task.partition("-")
    transfer(lab, page, lab.home._replace(task=f"retold-{level or DEFAULT_DIFFICULTY}"), NEW, NEW)
    return page


if __name__ == "__main__":
    command(run, "wordings")
