"""The result of a comparison."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mas_gym.errors import ConfigError, need
from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.internal.text import one_line
from search.pages.templates import render
from search.results.intervals import Difference
from search.results.outcomes import Outcome
from search.results.plots import save_tradeoff
from search.results.run_info import Setting
from search.results.summary import SCHEMA, ResultRow, find_row, hit_differences, summarize
from search.results.table_formats import (
    ARM_TITLE,
    best_hit,
    latex_table,
    markdown_document,
    printed,
    report,
    text_tables,
)

if TYPE_CHECKING:
    import pandas
    from rich.console import RenderableType


CALIBRATION_PROBLEMS = 30
"""Default number of calibration problems; with fewer, tables and `Comparison` show a warning."""
_WIDTH = 120


class CalibratedSize(NamedTuple):
    """The calibrated size of a planner, and its cost on the calibration problems.

    Attributes:
        label: Label of the row.
        setting: The changed setting; ``""`` for a planner without a size setting.
        size: The setting's value.
        spent: Tokens, calls or USD per problem.
        problems: The number of calibration problems.
    """

    label: str
    setting: str
    size: int
    spent: float
    problems: int

    def __str__(self) -> str:
        """Return one line: the label, the size and the cost."""
        size = f"{self.setting}={self.size}" if self.setting else "no size to change"
        spent = f"{self.spent:,.1f}" if self.spent >= 1 or not self.spent else f"{self.spent:.3g}"
        return f"{one_line(self.label)}: {size}, {spent} per problem in calibration"


@dataclass(frozen=True, repr=False)
class Comparison:
    """The result of `compare`: one row per planner and critic.

    ``print(table)`` shows rows, intervals, differences and failures.

    Attributes:
        rows: The rows, in the order of planners and critics.
        outcomes: The outcomes of all searches.
        baseline: The label of the row to compare the others with.
        title: The line above the table.
        meta: JSON-serializable facts about the run.
        calibrated: With ``match``, the size of each planner and its cost on the calibration problems.
    """

    rows: tuple[ResultRow, ...]
    outcomes: tuple[Outcome, ...] = ()
    baseline: str = ""
    title: str = ""
    meta: JSONMapping = field(default_factory=dict)
    calibrated: tuple[CalibratedSize, ...] = ()

    def differences(self) -> dict[str, Difference]:
        """Return, by label, the Hit@1 of every row but the baseline minus the baseline's, paired by problem."""
        return {row.label: gap for row, _, gap in hit_differences(self.rows, self.baseline)} if self.rows else {}

    def __getitem__(self, label: str) -> ResultRow:
        """Return the row with a label such as ``"mcts:10,3 + masprm"``, or the only row of a planner."""
        if not self.rows:
            raise ConfigError("the comparison has no rows, because no search has ended")
        return find_row(self.rows, label)

    def to_markdown(self) -> str:
        """Return the table and the paired differences as GitHub Markdown."""
        return markdown_document(text_tables(self.rows, self.title, self.baseline))

    def to_latex(self) -> str:
        """Return the table and the paired differences in LaTeX, with labels, for the package booktabs."""
        first, *more = text_tables(self.rows, self.title, self.baseline)
        hit, best = first.head.index("Hit@1"), best_hit(self.rows)
        bold = [(place, hit) for place, row in enumerate(self.rows) if row.hits[1].mean == best]
        label = re.sub(r"\W+", "-", self.title.casefold(), flags=re.ASCII).strip("-") or "results"
        parts = [latex_table(first, label, bold)]
        parts += [latex_table(one, f"{label}-{'arms' if one.title == ARM_TITLE else 'differences'}") for one in more]
        return "\n".join(parts)

    def to_csv(self) -> str:
        """Return the table as CSV with a header; shares are in ``[0, 1]``."""
        flat = [row.to_dict() for row in self.rows]
        for line in flat:
            line["seeds"] = " ".join(map(str, line["seeds"]))
            line |= {name: json.dumps(line[name]) for name in ("arms", "failures")}
        out = io.StringIO()
        if flat:
            writer = csv.DictWriter(out, flat[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(flat)
        return out.getvalue()

    def to_json(self) -> str:
        """Return rows, per-problem shares, differences and facts as one JSON document of schema `SCHEMA`."""
        document = {
            "schema": SCHEMA,
            "meta": dict(self.meta),
            "rows": [
                {**_finite(row.to_dict()), "shares": row.shares, "curve": [point[:2] for point in row.curve]}
                for row in self.rows
            ],
            "differences": [
                {"of": a.label, "to": b.label, **gap._asdict(), "verdict": gap.verdict}
                for a, b, gap in (hit_differences(self.rows, self.baseline) if self.rows else ())
            ],
        }
        return json.dumps(document, indent=2, allow_nan=False) + "\n"

    def to_pandas(self) -> pandas.DataFrame:
        """Return a data frame with one line per row, its difference from the baseline and the interval.

        Raises:
            MissingDependencyError: pandas is not installed.
        """
        frame: type[pandas.DataFrame] = need("pandas", "to_pandas", "data").DataFrame
        gaps = self.differences()
        lines = []
        for row in self.rows:
            gap = gaps.get(row.label)
            names = ("difference", "difference_low", "difference_high", "verdict")
            shown = (*gap[:3], gap.verdict) if gap else (None,) * 4
            lines.append({**row.to_dict(), **dict(zip(names, shown, strict=True))})
        return frame(lines)

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw accuracy against tokens, with the Pareto frontier, to a file (png, svg, pdf).

        Raises:
            ConfigError: The file suffix is not a known format, or no search has ended.
            MissingDependencyError: matplotlib is not installed.
        """
        return save_tradeoff(self.rows, Path(path), self.title)

    def show(self, width: int = _WIDTH) -> RenderableType:
        """Return the whole result as a rich renderable."""
        return report(self.rows, self.title, width, self.baseline)

    def __str__(self) -> str:
        """Return what ``print`` shows."""
        lines = [printed(self.show(), _WIDTH)]
        if self.calibrated:
            lines.append(calibrated_on(self.calibrated[0].problems))
        return "\n".join([*lines, *map(str, self.calibrated)])

    def __repr__(self) -> str:
        """Return one line: each row's label and Hit@1."""
        rows = "; ".join(f"{one_line(row.label)} {100 * row.hits[1].mean:.1f}" for row in self.rows)
        return f"<Comparison of {len(self.rows)} rows: {rows}>"

    def _repr_html_(self) -> str:
        return render("tables.html", tables=text_tables(self.rows, self.title, self.baseline))


def _finite(flat: JSONObject) -> JSONObject:
    return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in flat.items()}


def table_of(store: Path, setting: Setting, outcomes: Sequence[Outcome], baseline: str = "") -> Comparison:
    """Return the table of one setting of a store, with rows by increasing cost."""
    rows = tuple(sorted(summarize(outcomes), key=lambda row: (math.isnan(row.tokens.mean), row.tokens.mean)))
    name = find_row(rows, baseline).label if rows else ""
    seeds = sorted({run.config["seed"] for run in setting.runs})
    facts = {"store": store.name, "seeds": seeds, "baseline": name}
    return Comparison(rows, tuple(outcomes), name, setting.title, facts)


def calibrated_on(problems: int) -> str:
    """Return a line with the number of calibration problems, and a warning if it is small."""
    few = f"; with fewer than {CALIBRATION_PROBLEMS} the costs are uncertain" if problems < CALIBRATION_PROBLEMS else ""
    return f"sizes chosen on {problems} problems{few}"
