"""Redraws the main tables' pictures from the figures on their pages, without repeating the searches.

``python -m benchmarks.paper.redraw`` reads each ``main.md`` under ``benchmarks/pages`` and writes ``main.png`` next to
it, with the function that a run uses. The tables do not contain Hit@1 at smaller costs, so redrawn pictures have no
curves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.paper.main import pictured
from search.results.intervals import Interval
from search.results.plots import save_tradeoff
from search.results.summary import ResultRow, Spread

PAGES = Path(__file__).resolve().parents[1] / "pages"
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_NOTHING = Spread(math.nan, None)


def rows_of(page: str) -> Iterator[ResultRow]:
    """Yield the rows of a page's first table, with the figures that a picture needs."""
    for line in re.findall(r"^\| Search .*\n\|-.*\n((?:\|.*\n)+)", page, re.M)[0].splitlines():
        planner, critic, hit, interval, _, _, tokens, calls, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        low, high = map(float, _NUMBER.findall(interval))
        yield ResultRow(
            planner=planner,
            critic="" if critic == "\N{EN DASH}" else critic,
            seeds=(),
            searches=1,
            hits={1: Spread(_mean(hit) / 100, None)},
            interval=Interval(low / 100, high / 100),
            tokens=Spread(_mean(tokens), None),
            agent_calls=Spread(_mean(calls), None),
            reward_calls=_NOTHING,
            critic_tokens=_NOTHING,
            grader_tokens=_NOTHING,
            seconds=_NOTHING,
            failures={},
            shares={},
        )


def _mean(cell: str) -> float:
    return float(_NUMBER.findall(cell.replace(",", ""))[0])


def main() -> None:
    """Draw."""
    for page in sorted(PAGES.rglob("main.md")):
        print(save_tradeoff(pictured(rows_of(page.read_text("utf-8"))), page.with_name("main.png")))


if __name__ == "__main__":
    main()
