"""The front page of a run store as plain HTML: runs as columns, problems as rows, with a link to every tree."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import NamedTuple
from urllib.parse import quote, urlencode

PAGE = 200
_REFRESH = '<meta http-equiv="refresh" content="1">'
SHOWN = ("all", "differing", "wrong", "failed")


class Cell(NamedTuple):
    """How one search ended: right, wrong, or failed with an error."""

    answer: str | None
    correct: bool
    error: str | None


@dataclass(frozen=True)
class Column:
    """One run.

    Attributes:
        key: Identifies the run in links.
        label: Its heading.
        facts: Its figures by name, such as Hit@1.
        cells: Outcome of each search, by problem id.
    """

    key: str
    label: str
    facts: Mapping[str, str]
    cells: Mapping[str, Cell]


def listing_page(
    title: str,
    columns: Sequence[Column],
    shown: str = "all",
    page: int = 0,
    faults: Sequence[str] = (),
    unread: int = 0,
) -> str:
    """Return the page.

    Args:
        title: Its heading.
        columns: The runs.
        shown: Which problems: one of `SHOWN`.
        page: Page number, from 0, of `PAGE` problems each.
        faults: Messages about runs that could not be read.
        unread: Number of runs not read yet; if positive, the page reloads itself.
    """
    shown = shown if shown in SHOWN else "all"
    problems = _problems(columns, shown)
    last = max(0, (len(problems) - 1) // PAGE)
    page = min(max(page, 0), last)
    style = (resources.files("mas_gym.report") / "listing.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    rows = "".join(_row(problem, columns) for problem in problems[page * PAGE : (page + 1) * PAGE])
    text = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">{_REFRESH if unread else ""}'
        f"<title>{escape(title)}</title><style>{style}</style></head><body><h1>{escape(title)}</h1>"
        f"{''.join(f'<p class=failed>{escape(fault)}</p>' for fault in faults)}{_tabs(shown, page, last)}"
        f"<table><thead>{_head(columns)}</thead><tbody>{rows}</tbody></table>"
        f"<p>{len(problems):,} problems{f'; reading {unread} more runs' if unread else ''}</p></body></html>"
    )
    return text.encode("utf-8", "replace").decode("utf-8")


def _problems(columns: Sequence[Column], shown: str) -> list[str]:
    known = sorted({problem for column in columns for problem in column.cells}, key=_natural)
    return [problem for problem in known if _wanted([c.cells.get(problem) for c in columns], shown)]


def _wanted(cells: Sequence[Cell | None], shown: str) -> bool:
    there = [cell for cell in cells if cell is not None]
    if shown == "differing":
        return len({cell.correct for cell in there}) > 1
    if shown == "wrong":
        return not any(cell.correct for cell in there)
    return shown == "all" or any(cell.error is not None for cell in there)


def _natural(problem: str) -> list[tuple[int, str]]:
    # int() refuses very long digit strings, so those sort as names.
    return [(int(part), "") if part.isdecimal() and len(part) < 20 else (-1, part) for part in problem.split("/")]


def _head(columns: Sequence[Column]) -> str:
    names = "".join(f"<th>{escape(column.label)}</th>" for column in columns)
    figures = [
        "<br>".join(f"{escape(name)} <b>{escape(value)}</b>" for name, value in column.facts.items())
        for column in columns
    ]
    return f"<tr><th>Problem</th>{names}</tr><tr><td></td>{''.join(f'<td>{text}</td>' for text in figures)}</tr>"


def _row(problem: str, columns: Sequence[Column]) -> str:
    cells = "".join(_cell(column, problem) for column in columns)
    return f"<tr><th>{escape(problem)}</th>{cells}</tr>"


def _cell(column: Column, problem: str) -> str:
    cell = column.cells.get(problem)
    if cell is None:
        return "<td></td>"
    if cell.error is not None:
        return f'<td class="failed" title="{escape(cell.error[:400])}">failed</td>'
    mark, name = ("✓", "right") if cell.correct else ("✗", "wrong")
    link = f"/tree/{quote(column.key, safe='')}?{urlencode({'problem': problem}, errors='replace')}"
    answer = "no answer" if cell.answer is None else cell.answer[:24]
    return f'<td class="{name}"><a href="{escape(link)}">{mark} {escape(answer)}</a></td>'


def _tabs(shown: str, page: int, last: int) -> str:
    tabs = [_tab(name, f"/?{urlencode({'show': name})}", name == shown) for name in SHOWN]
    if page > 0:
        tabs.append(_tab("previous", f"/?{urlencode({'show': shown, 'page': page - 1})}", False))
    if page < last:
        tabs.append(_tab("next", f"/?{urlencode({'show': shown, 'page': page + 1})}", False))
    return f"<nav>{''.join(tabs)}</nav>"


def _tab(name: str, link: str, here: bool) -> str:
    return f'<a href="{escape(link)}"{" aria-current=page" if here else ""}>{escape(name)}</a>'
