"""Graph sensitivity: MAS1 to MAS3 with one MASPRM that was trained on MAS1 alone."""

from __future__ import annotations

import numpy as np

from benchmarks.paper.lab import MCTS, Lab, Score, arm, command, keep_rows
from benchmarks.paper.page import Page, claim, claim_of, percent, span

GRAPHS = ("rpsv", "refine", "consensus")
METHODS = ("single", "sbs:5,1", "sbs:5,3", MCTS)
PAPER = {
    "single": (47.2, 54.4, 56.2),
    "sbs:5,1": (73.4, 73.7, 75.2),
    "sbs:5,3": (77.5, 78.5, 79.7),
    MCTS: (82.9, 81.4, 80.9),
}
ASKS = """
The same task played by three systems: Reader, Planner, Solver, Verifier (MAS1); Solver, Evaluator, Reflector, Reviser
(MAS2); Reader, two Solvers, Judge (MAS3). The critic was trained on MAS1 and is used unchanged. The paper finds guided
search far less sensitive to the graph than a single pass: ranges of 1.8 to 2.2 points against 9.0 (GSM8K, 7B critic).
"""


def run(lab: Lab) -> Page:
    page = Page("graphs", "Graph sensitivity", ASKS)
    table: dict[str, list[Score]] = {method: [] for method in METHODS}
    for graph in GRAPHS:
        setting = lab.home._replace(mas=graph)
        critic = lab.critic(lab.home, force=graph != lab.home.mas)
        arms = [arm("single"), *(arm(method, critic, f"MASPRM of {lab.home.mas}") for method in METHODS[1:])]
        scores = lab.measure(setting, arms)
        for method, score in zip(METHODS, scores, strict=True):
            table[method].append(score)
        keep_rows(lab, f"graphs-{graph}", scores)
    rows = [
        (
            method,
            *(f"{percent(score.hit)} ({span(*score.row.interval)})" for score in scores),
            percent(_range(np.array([score.hit for score in scores]))),
            " / ".join(map(str, PAPER[method])),
        )
        for method, scores in table.items()
    ]
    page.table(("method", "MAS1 rpsv", "MAS2 refine", "MAS3 consensus", "range", "paper"), rows)
    page.claims = [
        *(
            claim(
                f"{graph}: MCTS(10,3)+MASPRM over a single pass", f"{guided - plain:+.1f}", mcts.shares, single.shares
            )
            for graph, mcts, single, guided, plain in zip(
                GRAPHS, table[MCTS], table["single"], PAPER[MCTS], PAPER["single"], strict=True
            )
        ),
        *(_narrower(method, table["single"], table[method]) for method in METHODS[1:]),
    ]
    return page


def _range(means: np.ndarray) -> np.ndarray:
    return means.max(axis=-1) - means.min(axis=-1)


def _narrower(method: str, single: list[Score], guided: list[Score]):
    columns = [score.shares for score in (*single, *guided)]
    paper = f"+{max(PAPER['single']) - min(PAPER['single']) - max(PAPER[method]) + min(PAPER[method]):.1f}"

    def narrows(means: np.ndarray) -> np.ndarray:
        return _range(means[..., : len(single)]) - _range(means[..., len(single) :])

    return claim_of(f"range over graphs: single pass over {method}+MASPRM", paper, columns, narrows)


if __name__ == "__main__":
    command(run, "graphs")
