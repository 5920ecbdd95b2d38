"""The single-agent baseline: one agent that answers alone compared with the system, with and without search."""

from __future__ import annotations

from benchmarks.paper.lab import MCTS, ORM, SCORE_HEADER, Lab, Recipe, Score, command, keep_rows, row_of, score_cells
from benchmarks.paper.page import NEW, Page
from benchmarks.paper.published import MAIN, ORDER, SINGLE_AGENT, lead, shown
from benchmarks.paper.rivals import compared, passes_at, rivals

ALONE = Recipe("orm", "bce", rollouts="mcts:20,20")
"""MCTS(40,3) draws three answers per problem from one agent; 20 children give as many leaves as a tree of RPSV."""

ASKS = f"""
This page compares the system of the main table with a single agent that answers the question directly. The paper states
that its comparison ignores tokens. Here, best-of-N is used to compare the two at equal tokens. The single agent has its
own ORM, trained on the same number of problems as the system's ORM. {ORDER}
"""


def run(lab: Lab) -> Page:
    page = Page("single", "One agent against the system", ASKS)
    masprm = lab.critic(lab.home)
    guided = lab.measure(
        lab.home, [row_of("single"), row_of("sbs:5,3", masprm, "MASPRM"), row_of(MCTS, masprm, "MASPRM")]
    )
    equal = rivals(lab, lab.home, guided[2], guided[0], orm=lab.critic(lab.home, ORM))
    team = [*guided, equal.best]
    lone = lab.home._replace(mas="single")
    [one] = lab.measure(lone, [row_of("single")])
    judge = lab.critic(lone, ALONE)
    sizes = [passes_at(score, one) for score in team]
    specs = list(dict.fromkeys(f"bon:{size}" for size in sizes if size > 1))
    found = dict(
        zip(specs, lab.measure(lone, [row_of(spec, judge, "ORM of one agent") for spec in specs]), strict=True)
    )
    rows: list[tuple[str, Score]] = [("one agent", score) for score in (one, *found.values())]
    rows += [(lab.home.mas, score) for score in (*team, equal.likelihood)]
    page.table(
        ("system", "search", *SCORE_HEADER), [(name, score.row.label, *score_cells(score)) for name, score in rows], 2
    )
    page.claims = [
        compared("a single pass of the system over one agent", shown(MAIN["single", ""], SINGLE_AGENT), team[0], one),
        *(
            compared(
                f"{score.row.planner}+MASPRM over one agent",
                shown(MAIN[score.row.planner, "MASPRM-7B"], SINGLE_AGENT),
                score,
                one,
            )
            for score in guided[1:]
        ),
        *(
            compared(f"{score.row.label} over bon:{size} of one agent, equal tokens", NEW, score, found[f"bon:{size}"])
            for score, size in zip(team, sizes, strict=True)
            if size > 1
        ),
        *equal.claims(lead(MCTS, "MASPRM", "PL")),
    ]
    keep_rows(lab, page.name, [score for _, score in rows])
    return page


if __name__ == "__main__":
    command(run, "single")
