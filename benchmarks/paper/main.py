"""The main table: search methods and critics, with Hit@k (paper, Tables "main results" and "Hit@k", first figure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from benchmarks.paper.lab import MCTS, Lab, Score, command, keep_rows, paper_rows, row_of, rule_for
from benchmarks.paper.page import NEW, Claim, Page, claim_of
from benchmarks.paper.published import MAIN, ORDER, Table, lead, narrowing, over_single
from benchmarks.paper.rivals import compared
from search.results.plots import save_tradeoff
from search.results.summary import ResultRow
from search.results.table_formats import to_markdown

VOTE = "sc:5,weights=critic"
NARROW, BEST_LEAF = "mcts:20,2", "mcts:10,3,answer=best"
EXTRA = (("bon:5", "ORM"), ("bon:10", "ORM"), (NARROW, "MASPRM"), (BEST_LEAF, "ORM"))
"""Additional rows: best-of-N at the tokens of the tree searches, and the ORM's best ranking of leaves."""

WIDE = (("mcts:20,4", "bon:7"), ("mcts:20,6", "bon:11"))
"""If the task defines equal messages: larger sets of distinct messages, and best-of-N at their tokens."""

EQUAL_TOKENS = (
    ("MASPRM MCTS(20,2) over best-of-5 with the ORM, equal tokens", NARROW, "bon:5"),
    ("MASPRM MCTS(10,3) over best-of-10 with the ORM, equal tokens", MCTS, "bon:10"),
    ("MASPRM MCTS(10,3) over ORM MCTS(10,3) that answers with its best leaf", MCTS, BEST_LEAF),
)
"""Comparisons that the paper does not make: claim, MASPRM's planner, the ORM's planner."""

PICTURED = (
    *(("single", ""), ("sc:5", ""), ("bon:5", "ORM"), ("bon:10", "ORM")),
    *((MCTS, "PL"), (MCTS, "ORM"), (MCTS, "MASPRM"), (NARROW, "MASPRM")),
)
"""The rows of the page's picture, by planner and critic."""

ASKS = f"""
This page compares search methods, each with three critics: policy likelihood (PL), an outcome reward model of finished
transcripts (ORM) and the process reward model of partial transcripts (MASPRM). In the paper, MASPRM outperforms policy
likelihood in step-level search and MCTS, outperforms an ORM of the same size in MCTS and, with 7B critics, in a
weighted vote (with 1.5B critics they are about equal), and has smaller gaps between Hit@1 and Hit@5. {ORDER}

Four rows are not in the paper. Best-of-N with the ORM uses about as many tokens as a tree search with MASPRM: best-of-5
as many as MCTS(20,2), which was chosen on the dev split, and best-of-10 as many as MCTS(10,3). With `answer=best`, the
search with the ORM returns the best leaf instead of following the largest Q at each turn. If the task has a rule that
states which messages are equal, there are four more rows. Their planners use `same`, which merges children that differ
only in their opening word; the saved tokens are used for more children per state. Their sizes were also chosen on dev
(`benchmarks.paper.frontier`).
"""


def run(lab: Lab) -> Page:
    page = Page("main", "Main table at small scale", ASKS)
    guides = lab.guides()
    rule = rule_for(lab.home)
    wide = [(f"{spec},same={rule}", passes) for spec, passes in WIDE] if rule != "text" else []
    extra = [*EXTRA, *(row for spec, passes in wide for row in ((spec, "MASPRM"), (passes, "ORM")))]
    searches = [*paper_rows(guides), *(row_of(planner, guides[guide], guide) for planner, guide in extra)]
    scores = lab.measure(lab.home, searches)
    found = {(score.row.planner, score.row.critic): score for score in scores}
    rows = [score.row for score in scores]
    page.blocks.append(to_markdown(rows))
    page.picture("main.png", "accuracy against tokens", lambda path: save_tradeoff(pictured(rows), path))
    page.claims = [
        *guide_claims(found),
        over_a_pass(found),
        _gap("MCTS(10,3)", MCTS, found),
        _gap("SC@5", VOTE, found),
        *(compared(text, NEW, found[ours, "MASPRM"], found[theirs, "ORM"]) for text, ours, theirs in EQUAL_TOKENS),
        *(
            compared(
                f"MASPRM {spec} over {passes} with the ORM, equal tokens",
                NEW,
                found[spec, "MASPRM"],
                found[passes, "ORM"],
            )
            for spec, passes in wide
        ),
    ]
    keep_rows(lab, page.name, scores)
    return page


def pictured(rows: Iterable[ResultRow]) -> list[ResultRow]:
    """Return the rows of the page's picture."""
    return [row for row in rows if (row.planner, row.critic) in PICTURED]


def guide_claims(found: Mapping[tuple[str, str], Score], table: Table = MAIN) -> list[Claim]:
    """Compare MASPRM with the other guides, method by method.

    Args:
        found: Planner and critic to score.
        table: The paper's figures.
    """
    pairs = ((MCTS, "ORM"), (MCTS, "PL"), ("sbs:5,3", "PL"), ("sbs:5,1", "PL"), (VOTE, "ORM"), (VOTE, "PL"))
    return [
        compared(
            f"{planner}: MASPRM over {other}",
            lead(planner, "MASPRM", other, table),
            found[planner, "MASPRM"],
            found[planner, other],
        )
        for planner, other in pairs
    ]


def over_a_pass(found: Mapping[tuple[str, str], Score], table: Table = MAIN) -> Claim:
    """Compare MCTS(10,3) with MASPRM with a single pass, which spends far fewer tokens."""
    paper = over_single(MCTS, "MASPRM", table)
    return compared("MCTS(10,3)+MASPRM over a single pass", paper, found[MCTS, "MASPRM"], found["single", ""])


def _gap(method: str, planner: str, found: Mapping[tuple[str, str], Score]) -> Claim:
    wide, narrow = found[planner, "PL"], found[planner, "MASPRM"]
    columns = [wide.hits(5), wide.shares, narrow.hits(5), narrow.shares]

    def shrinks(means: np.ndarray) -> np.ndarray:
        return (means[..., 0] - means[..., 1]) - (means[..., 2] - means[..., 3])

    text = f"{method}: the gap from Hit@1 to Hit@5 shrinks with MASPRM"
    return claim_of(text, narrowing(planner), columns, shrinks)


if __name__ == "__main__":
    command(run, "main")
