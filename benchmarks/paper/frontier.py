"""The frontier on the dev split: search parameters with MASPRM, each against best-of-N at equal tokens."""

from __future__ import annotations

from benchmarks.paper.lab import MCTS, SCORE_HEADER, Lab, command, keep_rows, row_of, rule_for, score_cells
from benchmarks.paper.page import NEW, Page, percent
from benchmarks.paper.rivals import compared, passes_at

SEARCHES = ("sbs:5,1", "sbs:5,3", "dvts:5,2", "mcts:6,2", "mcts:10,2", "mcts:20,2", "mcts:40,2", MCTS, "mcts:20,3")
MERGED = (MCTS, "mcts:20,3", "mcts:40,3", "mcts:20,4", "mcts:40,4", "mcts:20,6", "mcts:40,6")
"""Searches that are also run with the task's rule for equal messages."""

ASKS = """
This page compares each MASPRM-guided search to best-of-N with the ORM at equal tokens. The search parameters of the
other pages were chosen here, on the dev split, which shares no problems with the test split. `same` is the task's rule
for equal messages.
"""


def run(lab: Lab) -> Page:
    page = Page("frontier", "Accuracy against tokens on dev", ASKS, split="dev")
    guides, rule = lab.guides(), rule_for(lab.home)
    specs = [*SEARCHES, *(f"{spec},same={rule}" for spec in MERGED if rule != "text")]
    single, *guided = lab.measure(
        lab.home, [row_of("single"), *(row_of(spec, guides["MASPRM"], "MASPRM") for spec in specs)], split="dev"
    )
    sizes = sorted({passes_at(score, single) for score in guided})
    passes = lab.measure(lab.home, [row_of(f"bon:{size}", guides["ORM"], "ORM") for size in sizes], split="dev")
    best = dict(zip(sizes, passes, strict=True))
    rows = []
    for score in (single, *sorted((*guided, *passes), key=lambda one: one.row.tokens.mean)):
        fifth = percent(score.row.hits[5].mean) if 5 in score.row.hits else "\N{EN DASH}"
        rows.append((score.row.label, *score_cells(score), fifth))
    page.table(("search", *SCORE_HEADER, "Hit@5"), rows)
    for score in guided:
        other = best[passes_at(score, single)]
        text = f"{score.row.planner} with MASPRM over {other.row.planner} with the ORM"
        page.claims.append(compared(text, NEW, score, other))
    keep_rows(lab, page.name, [single, *guided, *passes])
    return page


if __name__ == "__main__":
    command(run, "frontier")
