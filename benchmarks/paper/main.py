"""The main table: search methods and critics, with Hit@k (paper, Tables "main results" and "Hit@k", first figure)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from benchmarks.paper.lab import MCTS, Lab, Score, arm, command, keep_rows, paper_arms
from benchmarks.paper.page import NEW, Page, claim, claim_of
from search.compare import save_tradeoff, to_markdown

VOTE = "sc:5,weights=critic"
NARROW, BEST_LEAF = "mcts:20,2", "mcts:10,3,answer=best"
EXTRA = (("bon:5", "ORM"), ("bon:10", "ORM"), (NARROW, "MASPRM"), (BEST_LEAF, "ORM"))
"""Rows beside the paper's: best-of-N at the tokens of the tree searches, and the ORM's best ranking of leaves."""

EQUAL_TOKENS = (
    ("MASPRM MCTS(20,2) over best-of-5 with the ORM, equal tokens", NARROW, "bon:5"),
    ("MASPRM MCTS(10,3) over best-of-10 with the ORM, equal tokens", MCTS, "bon:10"),
    ("MASPRM MCTS(10,3) over ORM MCTS(10,3) that answers by its best leaf", MCTS, BEST_LEAF),
)
"""Comparisons that the paper does not make: claim, MASPRM's planner, the ORM's planner."""

ASKS = """
Search methods with three guides: policy likelihood (PL), an outcome model of finished transcripts (ORM) and the process
model of routed transcripts (MASPRM). The paper finds MASPRM ahead of policy likelihood under step-level search and
MCTS, ahead of an ORM of its size under MCTS, about level with it in a weighted vote, and with smaller gaps between
Hit@1 and Hit@5. Its figures are those of GSM8K with 1.5B and 7B critics; for the gaps, the range over its four tasks
with the 7B critic.

Four rows are not in the paper. Best-of-N with the ORM spends about as many tokens as the tree searches that MASPRM
guides: best-of-5 as MCTS(20,2), whose size was chosen on the dev split, and best-of-10 as MCTS(10,3). With
`answer=best`, the ORM's search answers by the best leaf that it found instead of by the largest Q at each turn.
"""


def run(lab: Lab) -> Page:
    page = Page("main", "Main table in miniature", ASKS)
    guides = lab.guides()
    arms = [*paper_arms(guides), *(arm(planner, guides[guide], guide) for planner, guide in EXTRA)]
    scores = lab.measure(lab.home, arms)
    found = {(score.row.planner, score.row.critic): score for score in scores}
    rows = [score.row for score in scores]
    page.blocks.append(to_markdown(rows))
    page.picture("main.png", "accuracy against tokens", lambda path: save_tradeoff(rows, path))
    page.claims = [
        *guide_claims(found),
        claim("MCTS(10,3)+MASPRM over a single pass", "+22.6 / +35.7", found[MCTS, "MASPRM"].shares, _single(found)),
        _gap("MCTS(10,3)", "+8.6 to +14.3", found[MCTS, "PL"], found[MCTS, "MASPRM"]),
        _gap("SC@5", "+6.6 to +12.7", found[VOTE, "PL"], found[VOTE, "MASPRM"]),
        *(
            claim(text, NEW, found[ours, "MASPRM"].shares, found[theirs, "ORM"].shares)
            for text, ours, theirs in EQUAL_TOKENS
        ),
    ]
    keep_rows(lab, page.name, scores)
    return page


def guide_claims(found: Mapping[tuple[str, str], Score], paper: Mapping[tuple[str, str], str] | None = None) -> list:
    """Compare MASPRM with the other guides, method by method.

    Args:
        found: Planner and critic to score.
        paper: Planner and other critic to the paper's figure; those of the main table if None.
    """
    figures = paper or {
        (MCTS, "ORM"): "+3.0 / +14.5",
        (MCTS, "PL"): "+7.3 / +20.4",
        ("sbs:5,3", "PL"): "+8.8 / +17.2",
        ("sbs:5,1", "PL"): "+8.4 / +18.4",
        (VOTE, "ORM"): "-1.2 / +1.2",
        (VOTE, "PL"): "+3.0 / +6.6",
    }
    return [
        claim(f"{planner}: MASPRM over {other}", text, found[planner, "MASPRM"].shares, found[planner, other].shares)
        for (planner, other), text in figures.items()
    ]


def _single(found: Mapping[tuple[str, str], Score]) -> Mapping[str, float]:
    return found["single", ""].shares


def _gap(method: str, paper: str, wide: Score, narrow: Score):
    columns = [wide.hits(5), wide.shares, narrow.hits(5), narrow.shares]

    def shrinks(means: np.ndarray) -> np.ndarray:
        return (means[..., 0] - means[..., 1]) - (means[..., 2] - means[..., 3])

    return claim_of(f"{method}: the gap from Hit@1 to Hit@5 shrinks with MASPRM", paper, columns, shrinks)


if __name__ == "__main__":
    command(run, "main")
