"""HTML pages of a run store: the index of runs, and the problems of one or two rows.

A row combines the seeds of a planner and a critic. The pages are plain HTML without scripts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, urlencode

from mas_gym.tasks.base import Problem
from search.pages.templates import render
from search.results.intervals import paired_difference
from search.results.outcomes import Outcome
from search.results.summary import ResultRow
from search.results.table_formats import (
    COLUMNS,
    PROBLEM_MARKS,
    TextTable,
    gap_cells,
    marked_problems,
    table_cells,
    verdict,
)

if TYPE_CHECKING:
    from search.store.stored_grades import Regraded

PAGE = 100
"""Problems on one page."""
SHOWN = ("all", "differing", "wrong", "failed")
_QUESTION, _REFERENCE, _ANSWER, _ERROR = 240, 60, 24, 400
"""Maximum numbers of characters shown."""
_FIGURES = ("Hit@1", "95% interval", "TOK", "AC", "RC")
_LEGEND = (
    ("Hit@1", "share of problems whose chosen answer is right, in %"),
    ("95% interval", "interval of Hit@1 over problems"),
    ("TOK", "generated tokens per problem"),
    ("AC", "agent calls per problem"),
    ("RC", "reward calls per problem; each is one critic forward pass"),
)


@dataclass(frozen=True)
class StoredRow:
    """A row of the index.

    Attributes:
        key: Identifier of the row in links.
        setting: The setting shared with comparable rows.
        result: The row's numbers.
        runs: Run key by seed.
        outcomes: Outcomes by problem id and seed; needed by the problems page.
        problems: Problems by id; also needed by the problems page.
    """

    key: str
    setting: str
    result: ResultRow
    runs: Mapping[int, str]
    outcomes: Mapping[str, Mapping[int, Outcome]] = field(default_factory=dict)
    problems: Mapping[str, Problem] = field(default_factory=dict)


class ListingQuery(NamedTuple):
    """The selection shown on the problems page.

    Attributes:
        rows: One row, or two to compare.
        shown: The problem filter, one of `SHOWN`.
        query: Show only problems with this text in their id or question.
        page: Page number, from 0; each page has `PAGE` problems.
    """

    rows: tuple[StoredRow, ...]
    shown: str = "all"
    query: str = ""
    page: int = 0

    def text(self, problem: str, name: str) -> str:
        """Return a problem's ``question`` or ``answer``; if the rows have different ones, both."""
        found = (getattr(row.problems[problem], name) for row in self.rows if problem in row.problems)
        return " / ".join(dict.fromkeys(found))

    def fields(self) -> dict[str, str]:
        """Return the fields of the page's address."""
        fields = dict(zip("ab", (row.key for row in self.rows), strict=False))
        return fields | {"show": self.shown, "q": self.query, "page": str(self.page)}

    def link(self, **changes: object) -> str:
        """Return the URL of this page with some choices changed."""
        fields = self._replace(**changes).fields()  # type: ignore[arg-type]
        return "/problems?" + urlencode({name: text for name, text in fields.items() if text}, errors="replace")


def index_page(
    title: str,
    rows: Sequence[StoredRow],
    faults: Sequence[str] = (),
    drawn: bool = False,
    regraded: Sequence[Regraded] = (),
) -> str:
    """Return the page that lists all rows, regraded runs, and the errors of runs that could not be read.

    If ``drawn``, it shows a plot, at ``/plot/ROW``, for each setting in which several rows have token counts.
    """
    settings: dict[str, list[StoredRow]] = {}
    for row in rows:
        settings.setdefault(row.setting, []).append(row)
    return render(
        "index.html",
        title=title,
        faults=faults,
        groups=[_group(setting, group, drawn) for setting, group in settings.items()],
        tables=regrade_tables(regraded),
        legend=_LEGEND,
        rows=len(rows),
    )


def regrade_tables(lines: Sequence[Regraded]) -> list[TextTable]:
    """Return the table of regraded runs, if there are any."""
    head = ("Run", "Graded again by", "Searches", "Hit@1 before", "Hit@1 now")
    rows = [
        (
            *(one.run, one.label, f"{one.searches:,}"),
            f"{100 * one.before / one.known:.1f}" if one.known else "\N{EN DASH}",
            f"{100 * one.after / one.searches:.1f}",
        )
        for one in lines
    ]
    return [TextTable(head, rows, "Regraded runs")] if rows else []


def _figures(rows: Sequence[StoredRow]) -> list[dict[str, str]]:
    """Return the cells of each row by column."""
    return [dict(zip(COLUMNS, line, strict=True)) for line in table_cells([row.result for row in rows])]


def _group(setting: str, group: Sequence[StoredRow], drawn: bool) -> dict[str, object]:
    """Return the values of one table of the index."""
    marked = marked_problems([row.result for row in group])
    lines = []
    for row, shown in zip(group, _figures(group), strict=True):
        problems = shown["Problems"] if marked else f"{row.result.problems:,}"
        figures = [shown[name] for name in (*_FIGURES, "Failed")]
        lines.append(
            {
                "key": row.key,
                "label": row.result.label,
                "link": ListingQuery((row,)).link(),
                "search": shown["Search"],
                "cells": [shown["Critic"], ", ".join(map(str, row.result.seeds)), problems, *figures],
            }
        )
    pictured = drawn and sum(row.result.drawable for row in group) > 1
    return {
        "setting": setting,
        "head": ["Critic", "Seeds", "Problems", *_FIGURES, "Failed"],
        "lines": lines,
        "note": PROBLEM_MARKS if marked else "",
        "picture": f"/plot/{quote(group[0].key)}" if pictured else "",
    }


def problems_page(title: str, choice: ListingQuery) -> str:
    """Return the page with the problems of one row, or of two rows side by side."""
    choice = choice._replace(shown=choice.shown if choice.shown in SHOWN else "all")
    problems = _problems(choice)
    last = max(0, (len(problems) - 1) // PAGE)
    choice = choice._replace(page=min(max(choice.page, 0), last))
    labels = [row.result.label for row in choice.rows]
    return render(
        "problems.html",
        title=f"{title}: {' and '.join(labels)}",
        summary=[
            (row.result.label, ", ".join(f"{name} {shown[name]}" for name in _FIGURES))
            for row, shown in zip(choice.rows, _figures(choice.rows), strict=True)
        ],
        difference=_difference(choice),
        tabs=_tabs(choice, last),
        hidden=[(name, text) for name, text in choice.fields().items() if name not in ("q", "page")],
        query=choice.query,
        labels=labels,
        lines=[_line(problem, choice) for problem in problems[choice.page * PAGE :][:PAGE]],
        total=f"{len(problems):,}",
    )


def _difference(choice: ListingQuery) -> dict[str, str] | None:
    results = [row.result for row in choice.rows]
    if len(results) < 2 or not results[0].shares.keys() & results[1].shares.keys():
        return None
    first, second = results
    gap = paired_difference(first.shares, second.shares)
    mean, span = gap_cells(gap)
    names = f"{first.label} minus {second.label}"
    return {"names": names, "mean": mean, "interval": span, "verdict": verdict(first, second, gap)}


def _problems(choice: ListingQuery) -> list[str]:
    known = sorted({problem for row in choice.rows for problem in row.outcomes}, key=_natural)
    text = choice.query.casefold()
    return [
        problem
        for problem in known
        if _wanted([one for row in choice.rows for one in row.outcomes.get(problem, {}).values()], choice.shown)
        and (not text or text in problem.casefold() or text in choice.text(problem, "question").casefold())
    ]


def _wanted(outcomes: Sequence[Outcome], shown: str) -> bool:
    grades = {one.correct for one in outcomes} - {None}
    if shown == "differing":
        return len(grades) > 1
    if shown == "wrong":
        return grades == {False}
    return shown == "all" or any(one.error is not None for one in outcomes)


def _natural(problem: str) -> list[tuple[int, str]]:
    # int() rejects very long digit strings, so they are sorted as text.
    return [(int(part), "") if part.isdecimal() and len(part) < 20 else (-1, part) for part in problem.split("/")]


def _line(problem: str, choice: ListingQuery) -> dict[str, object]:
    return {
        "problem": problem,
        "question": _cut(choice.text(problem, "question"), _QUESTION),
        "reference": _cut(choice.text(problem, "answer"), _REFERENCE),
        "outcomes": [_cells(problem, row) for row in choice.rows],
    }


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _cells(problem: str, row: StoredRow) -> list[dict[str, object]]:
    query = urlencode({"problem": problem}, errors="replace")
    return [
        {
            "error": None if one.error is None else one.error[:_ERROR],
            "seed": seed if len(row.runs) > 1 else None,
            "grade": {True: "right", False: "wrong", None: "unknown"}[one.correct],
            "link": f"/tree/{quote(row.runs[seed], safe='')}?{query}",
            "answer": "no answer" if one.answer is None else one.answer[:_ANSWER],
        }
        for seed, one in row.outcomes.get(problem, {}).items()
    ]


def _tabs(choice: ListingQuery, last: int) -> list[dict[str, object]]:
    # One run has one outcome per problem.
    single = sum(len(row.runs) for row in choice.rows) == 1
    tabs = [(name, choice.link(shown=name, page=0)) for name in SHOWN if not (single and name == "differing")]
    tabs += [("previous", choice.link(page=choice.page - 1))] if choice.page > 0 else []
    tabs += [("next", choice.link(page=choice.page + 1))] if choice.page < last else []
    return [{"name": name, "link": link, "here": name == choice.shown} for name, link in tabs]
