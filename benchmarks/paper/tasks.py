"""Transfer between tasks: a MASPRM trained on one task guides MCTS on another, without retraining."""

from __future__ import annotations

from benchmarks.paper.lab import LIKELIHOOD, MCTS, Lab, Score, Setting, command, keep_rows, row_of
from benchmarks.paper.page import Claim, Page, claim, percent, span
from benchmarks.paper.published import MAIN, shown
from benchmarks.paper.rivals import rivals
from rewardmodels import load_critic

BEST = "best-of-N with the task's own ORM"
ASKS = """
This page compares three critics in MCTS(10,3): policy likelihood, a MASPRM trained on the same task, and a MASPRM
trained on the other task. The agent graphs of the tasks may also differ. The paper transfers critics between related
tasks (GSM8K and MATH; MMLU and LogiQA). The transferred critic is 3.7 to 9.3 points below the critic of the same task
and 5.3 to 11.1 points above policy likelihood. The paper's figures are for the test sets of GSM8K, MATH, MMLU and
LogiQA, with 7B critics. Best-of-N with an ORM of the same task, at equal tokens, is not in the paper.
"""

FOREIGN = (73.6, 47.9, 69.1, 41.8)
"""MCTS(10,3) with the 7B critic of the related data set."""


def run(lab: Lab) -> Page:
    page = Page("tasks", "Transfer between tasks", ASKS)
    own = MAIN[MCTS, "MASPRM-7B"]
    transfer(lab, page, lab.partner, f"7B: {shown(own, FOREIGN)}", f"7B: {shown(FOREIGN, MAIN[MCTS, 'PL'])}")
    return page


def transfer(lab: Lab, page: Page, partner: Setting, over_foreign: str, over_likelihood: str) -> None:
    """Measure the critics of two settings on both, and write the table and its claims.

    Args:
        lab: Runs the searches.
        page: Gets the table and the claims.
        partner: The setting in addition to the main one.
        over_foreign: The paper's lead of a setting's own critic over that of the other.
        over_likelihood: The paper's lead of the other's critic over policy likelihood.
    """
    settings = (lab.home, partner)
    table: dict[tuple[str, str], Score] = {}
    rivalry: list[Claim] = []
    for test in settings:
        critics = {f"MASPRM of {train.task}": lab.critic(train, force=train != test) for train in settings}
        guides = {"policy likelihood": load_critic(LIKELIHOOD), **critics}
        single, *scores = lab.measure(
            test, [row_of("single"), *(row_of(MCTS, critic, name) for name, critic in guides.items())]
        )
        equal = rivals(lab, test, scores[1 + settings.index(test)], single, name=f"{test.task}: ")
        rivalry += equal.claims()
        table[BEST, test.task] = equal.best
        for name, score in zip(guides, scores, strict=True):
            table[name, test.task] = score
        keep_rows(lab, f"{page.name}-{test.task}", [single, *scores, equal.best])
    names = list(dict.fromkeys(name for name, _ in table))
    cells = {key: f"{percent(score.hit)} ({span(*score.row.interval)})" for key, score in table.items()}
    rows = [(name, *(cells[name, setting.task] for setting in settings)) for name in names]
    page.table(("guide", *(f"Hit@1 on {setting.task} ({setting.mas})" for setting in settings)), rows)
    for test, train in (settings, settings[::-1]):
        own, foreign = (table[f"MASPRM of {one.task}", test.task] for one in (test, train))
        plain = table["policy likelihood", test.task]
        page.claims += [
            claim(
                f"on {test.task}: its own critic over that of {train.task}", over_foreign, own.shares, foreign.shares
            ),
            claim(f"on {test.task}: that of {train.task} over PL", over_likelihood, foreign.shares, plain.shares),
        ]
    page.claims += rivalry


if __name__ == "__main__":
    command(run, "tasks")
