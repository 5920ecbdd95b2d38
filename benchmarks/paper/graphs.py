"""Graph sensitivity: MAS1 to MAS3 with one MASPRM that was trained only on MAS1."""

from __future__ import annotations

import numpy as np

from benchmarks.paper import errors
from benchmarks.paper.lab import MCTS, Lab, Score, command, keep_rows, row_of
from benchmarks.paper.page import NEW, Claim, Page, claim_of, percent, span
from benchmarks.paper.rivals import compared, rivals

GRAPHS = ("rpsv", "refine", "consensus")
OWN = ("own MASPRM", "policy likelihood", "best-of-N, own ORM", "truth")
METHODS = ("single", "sbs:5,1", "sbs:5,3", MCTS)
PAPER = {
    "single": (47.2, 54.4, 56.2),
    "sbs:5,1": (73.4, 73.7, 75.2),
    "sbs:5,3": (77.5, 78.5, 79.7),
    MCTS: (82.9, 81.4, 80.9),
}
ASKS = f"""
Three systems solve the same task: Reader, Planner, Solver, Verifier (MAS1); Solver, Evaluator, Reflector, Reviser
(MAS2); Reader, two Solvers, Judge (MAS3). The critic was trained on MAS1 and is used unchanged. In the paper, guided
search is much less sensitive to the graph than a single pass: the ranges are 1.8 to 2.2 points against 9.0 (GSM8K, 7B
critic).

Some rows are not in the paper: MCTS(10,3) with policy likelihood and with a MASPRM trained on the same graph, and
best-of-N at equal tokens with an ORM trained on the same graph.
{errors.ASKS}"""


def run(lab: Lab) -> Page:
    page = Page("graphs", "Graph sensitivity", ASKS)
    table: dict[str, list[Score]] = {method: [] for method in METHODS}
    own: dict[str, list[Score]] = {name: [] for name in OWN}
    rivalry: list[Claim] = []
    sights: list[str] = []
    for graph in GRAPHS:
        setting = lab.home._replace(mas=graph)
        critic = lab.critic(lab.home, force=graph != lab.home.mas)
        searches = [row_of("single"), *(row_of(method, critic, f"MASPRM of {lab.home.mas}") for method in METHODS[1:])]
        scores = lab.measure(setting, searches)
        for method, score in zip(METHODS, scores, strict=True):
            table[method].append(score)
        guided = scores[-1]
        if setting != lab.home:
            [guided] = lab.measure(setting, [row_of(MCTS, lab.critic(setting), f"MASPRM of {graph}")])
        equal = rivals(lab, setting, guided, scores[0], name=f"{graph}: ")
        truth, sight = errors.against_truth(lab, setting)
        sights += sight
        for name, score in zip(OWN, (*equal[1:], *truth), strict=False):
            own[name].append(score)
        rivalry += equal.claims()
        if setting != lab.home:
            text = f"{graph}: MCTS(10,3) with its own MASPRM over that of {lab.home.mas}"
            rivalry.append(compared(text, NEW, guided, scores[-1]))
        keep_rows(lab, f"graphs-{graph}", [*scores, *equal[1:], *truth])
    rows = [_row(method, scores, " / ".join(map(str, PAPER[method]))) for method, scores in table.items()]
    rows += [_row(name, scores, NEW) for name, scores in own.items() if scores]
    page.table(("method", "MAS1 rpsv", "MAS2 refine", "MAS3 consensus", "range", "paper"), rows)
    page.blocks += sights
    page.claims = [
        *(
            compared(f"{graph}: MCTS(10,3)+MASPRM over a single pass", f"{guided - plain:+.1f}", mcts, single)
            for graph, mcts, single, guided, plain in zip(
                GRAPHS, table[MCTS], table["single"], PAPER[MCTS], PAPER["single"], strict=True
            )
        ),
        *(_narrower(method, table["single"], table[method]) for method in METHODS[1:]),
        *rivalry,
    ]
    return page


def _row(name: str, scores: list[Score], paper: str) -> tuple[str, ...]:
    # Rows of several searches, such as best-of-N at equal tokens, name each.
    named = paper == NEW
    cells = [
        f"{score.row.planner}: " * named + f"{percent(score.hit)} ({span(*score.row.interval)})" for score in scores
    ]
    return (name, *cells, percent(float(np.ptp([score.hit for score in scores]))), paper)


def _narrower(method: str, single: list[Score], guided: list[Score]):
    columns = [score.shares for score in (*single, *guided)]
    paper = f"{np.ptp(PAPER['single']) - np.ptp(PAPER[method]):+.1f}"

    def narrows(means: np.ndarray) -> np.ndarray:
        return np.ptp(means[..., : len(single)], axis=-1) - np.ptp(means[..., len(single) :], axis=-1)

    return claim_of(f"range over graphs: single pass over {method}+MASPRM", paper, columns, narrows)


if __name__ == "__main__":
    command(run, "graphs")
