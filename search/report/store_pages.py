"""HTML pages of a run store: the index of runs, and the problems of one or two rows.

A row combines the seeds of a planner and a critic. The pages are plain HTML without scripts.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, urlencode

if TYPE_CHECKING:
    from search.results.summary import ResultRow
    from search.store.regrading import Regraded

from search.pages.tree_page import PAGE

SHOWN = ("all", "differing", "wrong", "failed")
_REFRESH = '<meta http-equiv="refresh" content="1">'
_QUESTION = 240
_SCROLLS = "tabindex=0 role=region"
"""Attributes of elements wider than a small window; they need focus to be scrollable by keyboard."""
_FIGURES = ("Hit@1", "95% interval", "TOK", "AC", "RC")
_LEGEND = (
    ("Hit@1", "share of problems whose chosen answer is right, in %"),
    ("95% interval", "interval of Hit@1 over problems"),
    ("TOK", "generated tokens per problem"),
    ("AC", "agent calls per problem"),
    ("RC", "reward calls per problem; each is one critic forward pass"),
)


class Cell(NamedTuple):
    """The outcome of one search: right, wrong, or failed with an error."""

    answer: str | None
    correct: bool
    error: str | None


@dataclass(frozen=True)
class StoredRow:
    """A row of the index.

    Attributes:
        key: Identifier of the row in links.
        setting: The setting shared with comparable rows.
        result: The row's numbers.
        runs: Run key by seed.
        cells: Outcomes by problem id and seed; needed by the problems page.
        questions: Beginning of each question by problem id; also needed by the problems page.
    """

    key: str
    setting: str
    result: ResultRow
    runs: Mapping[int, str]
    cells: Mapping[str, Mapping[int, Cell]] = field(default_factory=dict)
    questions: Mapping[str, str] = field(default_factory=dict)


class ListingQuery(NamedTuple):
    """The selection shown on the problems page.

    Attributes:
        first: The row.
        second: A row to compare with it, or None.
        shown: The problem filter, one of `SHOWN`.
        query: Show only problems with this text in their id or question.
        page: Page number, from 0; each page has `PAGE` problems.
    """

    first: StoredRow
    second: StoredRow | None = None
    shown: str = "all"
    query: str = ""
    page: int = 0

    @property
    def rows(self) -> list[StoredRow]:
        """The rows shown."""
        return [self.first] if self.second is None else [self.first, self.second]

    def question(self, problem: str) -> str:
        """Return the beginning of a problem's question; if the rows have different questions, both."""
        return " / ".join(dict.fromkeys(row.questions.get(problem, "") for row in self.rows if problem in row.cells))

    def link(self, **changes: object) -> str:
        """Return the URL of this page with some choices changed."""
        other = self._replace(**changes)  # type: ignore[arg-type]
        fields = {"a": other.first.key, "b": other.second.key if other.second else "", "show": other.shown}
        fields |= {"q": other.query, "page": str(other.page)}
        return "/problems?" + urlencode({name: text for name, text in fields.items() if text}, errors="replace")


def index_page(
    title: str,
    rows: Sequence[StoredRow],
    faults: Sequence[str] = (),
    unread: int = 0,
    drawn: bool = False,
    regraded: Sequence[Regraded] = (),
) -> str:
    """Return the page that lists all rows.

    Args:
        title: The page's heading.
        rows: The rows.
        faults: Error messages of runs that could not be read.
        unread: Number of runs not read yet; if positive, the page reloads itself.
        drawn: Whether to show a plot, at ``/plot/ROW``, for each setting in which several rows have token counts.
        regraded: The regraded runs.
    """
    parts = [f"<p class=failed>{escape(fault)}</p>" for fault in faults]
    groups: dict[str, list[StoredRow]] = {}
    for row in rows:
        groups.setdefault(row.setting, []).append(row)
    for setting, group in groups.items():
        parts.append(f"<section {_SCROLLS} aria-label=Runs><h2>{escape(setting)}</h2>{_index_table(group)}")
        if drawn and sum(row.result.tokens.mean > 0 for row in group) > 1:
            caption = "Accuracy against generated tokens."
            picture = f'<img src="/plot/{quote(group[0].key)}" alt="{caption}">'
            parts.append(f"<figure>{picture}<figcaption>{caption}</figcaption></figure>")
        parts.append("</section>")
    parts.append(regrade_table(regraded))
    legend = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in _LEGEND)
    parts.append(f"<dl>{legend}</dl>")
    parts.append(f"<p>{len(rows)} rows{f'; reading {unread} more runs' if unread else ''}</p>")
    return _document(title, "".join(parts), _REFRESH if unread else "", "'self'")


def regrade_table(lines: Sequence[Regraded]) -> str:
    """Return the table of regraded runs; empty if there are none."""
    if not lines:
        return ""
    head = ("Run", "Graded again by", "Searches", "Hit@1 before", "Hit@1 now")

    def cell(name: str, text: str) -> str:
        return f'<td data-name="{name}">{escape(text)}</td>'

    rows = [
        (one.run, one.label, f"{one.searches:,}", *(f"{100 * n / one.searches:.1f}" for n in (one.before, one.after)))
        for one in lines
    ]
    body = "".join("<tr>" + "".join(map(cell, head, row)) + "</tr>" for row in rows)
    names = "".join(f"<th>{name}</th>" for name in head)
    return f"<table class=regraded><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>"


def _figures(rows: Sequence[StoredRow]) -> list[dict[str, str]]:
    """Return the cells of each row by column. The search package is imported only when a page is shown."""
    from search.results.table_formats import COLUMNS, table_cells

    return [dict(zip(COLUMNS, line, strict=True)) for line in table_cells([row.result for row in rows])]


def _index_table(group: Sequence[StoredRow]) -> str:
    from search.results.table_formats import PROBLEM_MARKS, marked_problems

    head = ("A", "B", "Search", "Critic", "Seeds", "Problems", *_FIGURES, "Failed")
    marked = marked_problems([row.result for row in group])
    lines = []
    for place, (row, shown) in enumerate(zip(group, _figures(group), strict=True)):
        link = f'<a href="{escape(ListingQuery(row).link())}">{escape(shown["Search"])}</a>'
        picks = [_radio(name, row, place == chosen) for name, chosen in (("a", 0), ("b", min(1, len(group) - 1)))]
        seeds = ", ".join(map(str, row.result.seeds))
        figures = [shown[name] for name in (*_FIGURES, "Failed")]
        problems = shown["Problems"] if marked else f"{row.result.problems:,}"
        texts = [*picks, link, *map(escape, (shown["Critic"], seeds, problems, *figures))]
        labelled = zip(head, texts, strict=True)
        lines.append("<tr>" + "".join(f'<td data-name="{name}">{text}</td>' for name, text in labelled) + "</tr>")
    names = "".join(f"<th>{name}</th>" for name in head)
    return (
        f'<form action="/problems"><table class=rows><thead><tr>{names}</tr></thead><tbody>{"".join(lines)}</tbody>'
        f"</table>{f'<p>{PROBLEM_MARKS}</p>' if marked else ''}<p><button>Compare A with B</button></p></form>"
    )


def _radio(name: str, row: StoredRow, chosen: bool) -> str:
    title = f"{row.result.label} as {name.upper()}"
    mark = " checked" if chosen else ""
    return f'<input type=radio name={name} value="{escape(row.key)}" aria-label="{escape(title)}"{mark}>'


def problems_page(title: str, choice: ListingQuery) -> str:
    """Return the page with the problems of one row, or of two rows side by side."""
    choice = choice._replace(shown=choice.shown if choice.shown in SHOWN else "all")
    problems = _problems(choice)
    last = max(0, (len(problems) - 1) // PAGE)
    choice = choice._replace(page=min(max(choice.page, 0), last))
    body = "".join(_line(problem, choice) for problem in problems[choice.page * PAGE :][:PAGE])
    names = "".join(f"<th>{escape(row.result.label)}</th>" for row in choice.rows)
    parts = [
        '<p><a href="/">All runs</a></p>',
        _summary(choice),
        _tabs(choice, last),
        _search_form(choice),
        f"<table class=problems><thead><tr><th>Problem</th>{names}</tr></thead><tbody>{body}</tbody></table>",
        f"<p>{len(problems):,} problems</p>",
    ]
    return _document(f"{title}: {' and '.join(row.result.label for row in choice.rows)}", "".join(parts))


def _summary(choice: ListingQuery) -> str:
    lines = []
    for row, shown in zip(choice.rows, _figures(choice.rows), strict=True):
        text = ", ".join(f"{name} {shown[name]}" for name in _FIGURES)
        lines.append(f"<p><b>{escape(row.result.label)}</b> {escape(text)}</p>")
    if choice.second is not None:
        first, second = choice.first.result, choice.second.result
        if first.shares.keys() & second.shares.keys():
            from search.results.intervals import paired_difference
            from search.results.table_formats import gap_cells, verdict

            gap = paired_difference(first.shares, second.shares)
            mean, span = gap_cells(gap)
            names = f"{first.label} minus {second.label}"
            lines.append(
                f"<p>Difference in Hit@1, {escape(names)}: <b>{mean}</b> points, paired 95% interval {span}, "
                f"{verdict(first, second, gap)}.</p>"
            )
    return "".join(lines)


def _search_form(choice: ListingQuery) -> str:
    keys = {"a": choice.first.key, "b": choice.second.key if choice.second else "", "show": choice.shown}
    hidden = "".join(f'<input type=hidden name={k} value="{escape(v)}">' for k, v in keys.items() if v)
    field = f'<input type=search name=q value="{escape(choice.query)}" aria-label="Text in question or id">'
    return f'<form action="/problems" class=search>{hidden}{field}<button>Search questions</button></form>'


def _problems(choice: ListingQuery) -> list[str]:
    known = sorted({problem for row in choice.rows for problem in row.cells}, key=_natural)
    text = choice.query.casefold()
    return [
        problem
        for problem in known
        if _wanted([list(row.cells.get(problem, {}).values()) for row in choice.rows], choice.shown)
        and (not text or text in problem.casefold() or text in choice.question(problem).casefold())
    ]


def _wanted(rows: Sequence[Sequence[Cell]], shown: str) -> bool:
    ended = [cell for row in rows for cell in row]
    if shown == "differing":
        return len({cell.correct for cell in ended}) > 1
    if shown == "wrong":
        return not any(cell.correct for cell in ended)
    return shown == "all" or any(cell.error is not None for cell in ended)


def _natural(problem: str) -> list[tuple[int, str]]:
    # int() rejects very long digit strings, so they are sorted as text.
    return [(int(part), "") if part.isdecimal() and len(part) < 20 else (-1, part) for part in problem.split("/")]


def _line(problem: str, choice: ListingQuery) -> str:
    question = choice.question(problem)
    shown = question if len(question) <= _QUESTION else question[: _QUESTION - 3] + "..."
    cells = "".join(f'<td data-name="{escape(row.result.label)}">{_outcomes(problem, row)}</td>' for row in choice.rows)
    return f"<tr><th><small>{escape(problem)}</small><br>{escape(shown)}</th>{cells}</tr>"


def _outcomes(problem: str, row: StoredRow) -> str:
    found = row.cells.get(problem, {})
    return "<br>".join(_outcome(problem, row.runs[seed], cell, seed, len(row.runs) > 1) for seed, cell in found.items())


def _outcome(problem: str, run: str, cell: Cell, seed: int, named: bool) -> str:
    of = f" <small>seed {seed}</small>" if named else ""
    if cell.error is not None:
        return f'<details class="failed"><summary>failed{of}</summary>{escape(cell.error[:400])}</details>'
    mark, name = ("\u2713", "right") if cell.correct else ("\u2717", "wrong")
    link = f"/tree/{quote(run, safe='')}?{urlencode({'problem': problem}, errors='replace')}"
    answer = "no answer" if cell.answer is None else cell.answer[:24]
    return f'<a class="{name}" href="{escape(link)}">{mark} {escape(answer)}</a>{of}'


def _tabs(choice: ListingQuery, last: int) -> str:
    # One run has one outcome per problem.
    single = sum(len(row.runs) for row in choice.rows) == 1
    shown = [name for name in SHOWN if not (single and name == "differing")]
    tabs = [_tab(name, choice.link(shown=name, page=0), name == choice.shown) for name in shown]
    if choice.page > 0:
        tabs.append(_tab("previous", choice.link(page=choice.page - 1), False))
    if choice.page < last:
        tabs.append(_tab("next", choice.link(page=choice.page + 1), False))
    return f"<nav>{''.join(tabs)}</nav>"


def _tab(name: str, link: str, here: bool) -> str:
    return f'<a href="{escape(link)}"{" aria-current=page" if here else ""}>{escape(name)}</a>'


def _document(title: str, body: str, head: str = "", images: str = "data:") -> str:
    style = (resources.files("search.pages") / "listing.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src {images}; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'self'"
    text = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">{head}'
        f"<title>{escape(title)}</title><style>{style}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>"
    )
    return text.encode("utf-8", "replace").decode("utf-8")


def report_page(title: str, sections: Iterable[str]) -> str:
    """Return a report page from sections of escaped HTML."""
    parts = (f"<section {_SCROLLS} aria-label=Results>{section}</section>" for section in sections)
    return _document(title, "\n<hr>\n".join(parts))
