"""Transfer between tasks: a MASPRM trained on one task guides MCTS on another, without retraining."""

from __future__ import annotations

from benchmarks.paper.lab import LIKELIHOOD, MCTS, Lab, arm, command, keep_rows
from benchmarks.paper.page import Page, claim, percent, span
from rewardmodels import load_critic

ASKS = """
MCTS(10,3) with policy likelihood, with a MASPRM of the same task, and with one of the other task; graphs may differ,
too. The paper transfers between related tasks (GSM8K and MATH; MMLU and LogiQA) and finds the transferred critic 3.7 to
9.3 points below the task's own and 5.3 to 11.1 above policy likelihood.
"""


def run(lab: Lab) -> Page:
    page = Page("tasks", "Transfer between tasks", ASKS)
    settings = (lab.home, lab.partner)
    table = {}
    for test in settings:
        critics = {f"MASPRM of {train.task}": lab.critic(train, force=train != test) for train in settings}
        guides = {"policy likelihood": load_critic(LIKELIHOOD), **critics}
        scores = lab.measure(test, [arm(MCTS, critic, name) for name, critic in guides.items()])
        for name, score in zip(guides, scores, strict=True):
            table[name, test.task] = score
        keep_rows(lab, f"tasks-{test.task}", scores)
    names = list(dict.fromkeys(name for name, _ in table))
    cells = {key: f"{percent(score.hit)} ({span(*score.row.interval)})" for key, score in table.items()}
    rows = [(name, *(cells[name, setting.task] for setting in settings)) for name in names]
    page.table(("guide", *(f"Hit@1 on {setting.task} ({setting.mas})" for setting in settings)), rows)
    for test, train in (settings, settings[::-1]):
        own, foreign = (table[f"MASPRM of {one.task}", test.task] for one in (test, train))
        plain = table["policy likelihood", test.task]
        page.claims += [
            claim(
                f"on {test.task}: its own critic over that of {train.task}", "+3.7 to +9.3", own.shares, foreign.shares
            ),
            claim(f"on {test.task}: that of {train.task} over PL", "+5.3 to +11.1", foreign.shares, plain.shares),
        ]
    return page


if __name__ == "__main__":
    command(run, "tasks")
