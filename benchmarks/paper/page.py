"""One table as one Markdown page: the paper's figures, the measured figures, their uncertainty, and a discussion."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mas_gym.internal.whole_files import write_file
from search.results.intervals import Difference, bootstrap, paired_difference
from search.results.table_formats import gap_cells

REASONS = "## Discussion"
"""Text below this heading is written by hand and kept when the page is regenerated."""

NEW = "not compared"
"""Shown instead of the paper's figure if the paper makes no such comparison."""

COMPARABLE = 1.5
"""Largest ratio of tokens at which two searches are still compared."""

TRAINED_ONCE = (
    "Each critic was trained once, so the intervals do not include the variation between training runs unless the page "
    "states otherwise."
)

_FIGURE = re.compile(r"[+-]\d+\.\d")
_INTERVAL = re.compile(r"\d (?:to|\N{EN DASH}) -?\d+\.\d")
_OPEN = "Nothing is written here yet.\n"


class Claim(NamedTuple):
    """A difference that the paper claims, measured here.

    Attributes:
        text: The claim that one quantity is larger than another.
        paper: The paper's figures, in points.
        here: The difference here, in shares.
        tokens: Tokens per problem of the two sides; None if the claim does not compare two searches.
    """

    text: str
    paper: str
    here: Difference
    tokens: tuple[float, float] | None = None

    @property
    def verdict(self) -> str:
        """The verdict of the interval on the claim: its sign, and its size if the paper has several figures."""
        if self.tokens is not None and max(self.tokens) > COMPARABLE * min(self.tokens):
            return f"no comparison: {max(self.tokens) / min(self.tokens):.1f} times the tokens"
        lowest, highest = self.paper_range
        if not self.here.significant:
            return "undecided"
        if self.here.low <= highest and self.here.high >= lowest:
            return "holds"
        if self.here.low > highest:
            return "beyond"
        return "below" if self.here.low > 0 else "**contrary**"

    @property
    def paper_range(self) -> tuple[float, float]:
        """Smallest and largest of the paper's figures, in shares; all above zero if it has fewer than two."""
        figures = [float(figure) / 100 for figure in _FIGURE.findall(self.paper)]
        return (min(figures), max(figures)) if len(figures) > 1 else (0.0, math.inf)


def claim(
    text: str,
    paper: str,
    better: Mapping[str, float],
    worse: Mapping[str, float],
    tokens: tuple[float, float] | None = None,
) -> Claim:
    """Compare two accuracies, each a share per problem, with a paired interval."""
    return Claim(text, paper, paired_difference(better, worse), tokens)


def claim_of(
    text: str, paper: str, columns: Sequence[Mapping[str, float]], statistic: Callable[[np.ndarray], np.ndarray]
) -> Claim:
    """Measure a statistic of several accuracies' means with a bootstrap interval over their common problems.

    Args:
        text: The claim that the statistic is positive.
        paper: The paper's figure.
        columns: Problem id to share, one mapping per accuracy.
        statistic: From means, shape (..., columns), to numbers, shape (...).
    """
    common = sorted(set.intersection(*(set(column) for column in columns)))
    table = np.array([[column[key] for column in columns] for key in common])
    interval = bootstrap(len(common), lambda counts: statistic(counts @ table / len(common)))
    return Claim(text, paper, Difference(float(statistic(table.mean(0))), *interval, len(common)))


@dataclass
class Page:
    """A page under construction.

    Attributes:
        name: Of the module and the file.
        title: Heading.
        asks: The subject and the finding of the paper's table.
        split: The split of the measured problems: ``"test"``, or ``"dev"`` where something is chosen.
        blocks: Markdown, in order.
        claims: The paper's differences, measured.
        files: Pictures in the page's folder: a function that writes the file, by name.
        data: JSON-able figures behind the page.
        variation: Whether the intervals include the variation between training runs.
    """

    name: str
    title: str
    asks: str = ""
    split: str = "test"
    blocks: list[str] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    files: dict[str, Callable[[Path], object]] = field(default_factory=dict)
    data: dict[str, object] = field(default_factory=dict)
    variation: str = TRAINED_ONCE

    def table(self, header: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> None:
        """Add a table; the first ``left`` columns are text, the others figures."""
        self.blocks.append(markdown_table(header, rows, left))

    def text(self, text: str) -> None:
        self.blocks.append(text.strip() + "\n")

    def picture(self, file: str, alt: str, write: Callable[[Path], object]) -> None:
        self.files[file] = write
        self.blocks.append(f"![{alt}]({file})\n")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * left + "---:|" * (len(header) - left)]
    lines += ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def span(low: float, high: float) -> str:
    return f"{100 * low:.1f} to {100 * high:.1f}"


def write_page(page: Page, folder: Path, command: str, facts: Sequence[str]) -> Path:
    """Write a page and its pictures; reasons written by hand into an earlier version are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{page.name}.md"
    for name, write in page.files.items():
        write(folder / name)
    parts = [f"# {page.title}\n", page.asks.strip() + "\n", f"```console\n{command}\n```\n"]
    parts += ["\n".join(f"- {fact}" for fact in facts) + "\n", *page.blocks]
    if page.claims:
        rows = sum(len(_INTERVAL.findall(block)) for block in page.blocks)
        parts += ["## Differences\n", _claims(page.claims, rows, page.variation)]
    parts.append(f"{REASONS}\n\n{_kept(path)}")
    write_file(path, "\n".join(parts))
    return path


def _claims(claims: Sequence[Claim], others: int, variation: str) -> str:
    rows = [(one.text, one.paper, *gap_cells(one.here), one.verdict, one.here.problems) for one in claims]
    header = ("difference, in points", "paper", "here", "95% interval", "verdict", "problems")
    count = len(claims) + others
    note = (
        "\nPaired intervals over problems, seeds averaged per problem. `undecided`: the interval includes zero. "
        "`holds`: the interval overlaps the paper's range, or is positive if the paper has no range. `beyond`: the "
        "interval is above the range. `below`: it is positive and below the range. `contrary`: it is negative and "
        f"below the range. `no comparison`: one side uses more than {COMPARABLE} times the tokens of the other.\n"
        f"\nThis page has {count} intervals at the 95% level, so about {max(1, round(count / 20))} of them can be "
        f"expected to miss the true value. {variation}\n"
    )
    return markdown_table(header, rows) + note


def _kept(path: Path) -> str:
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    _, found, rest = before.partition(REASONS)
    return rest.strip() + "\n" if found and rest.strip() else _OPEN
