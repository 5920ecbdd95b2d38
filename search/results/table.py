"""The result of a comparison."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mas_gym.errors import ConfigError, MissingDependencyError
from mas_gym.internal.json_types import JSONMapping
from mas_gym.internal.text import one_line
from search.results import plots, table_formats
from search.results.intervals import Difference
from search.results.outcomes import Outcome
from search.results.summary import ResultRow, find_row, hit_differences

if TYPE_CHECKING:
    import pandas


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
        return table_formats.markdown_document(self.rows, self.title, self.baseline)

    def to_latex(self) -> str:
        """Return the table and the paired differences in LaTeX, with labels, for the package booktabs."""
        return table_formats.to_latex(self.rows, self.title, self.baseline)

    def to_csv(self) -> str:
        """Return the table as CSV with a header; shares are in ``[0, 1]``."""
        return table_formats.to_csv(self.rows)

    def to_json(self) -> str:
        """Return rows, per-problem shares, differences and facts as one JSON document."""
        return table_formats.to_json(self.rows, self.meta, self.baseline)

    def to_pandas(self) -> pandas.DataFrame:
        """Return a data frame with one line per row, its difference from the baseline and the interval.

        Raises:
            MissingDependencyError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise MissingDependencyError("to_pandas needs pandas; install it with: pip install pandas") from error
        gaps = self.differences()
        lines = []
        for row in self.rows:
            gap = gaps.get(row.label)
            names = ("difference", "difference_low", "difference_high", "verdict")
            shown = (*gap[:3], gap.verdict) if gap else (None,) * 4
            lines.append({**row.to_dict(), **dict(zip(names, shown, strict=True))})
        return pandas.DataFrame(lines)

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw accuracy against tokens, with the Pareto frontier, to a file (png, svg, pdf).

        Raises:
            ConfigError: The file suffix is not a known format, or no search has ended.
            MissingDependencyError: matplotlib is not installed.
        """
        return plots.save_tradeoff(self.rows, Path(path), self.title)

    def show(self, width: int = _WIDTH) -> object:
        """Return the whole result as a rich renderable."""
        return table_formats.report(self.rows, self.title, width, self.baseline)

    def __str__(self) -> str:
        """Return what ``print`` shows."""
        from rich.console import Console

        # In a notebook, rich would display the table instead of writing it to the file.
        console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, force_jupyter=False)
        console.print(self.show())
        lines = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
        if self.calibrated:
            lines.append(calibrated_on(self.calibrated[0].problems))
        for part in self.calibrated:
            size = f"{part.setting}={part.size}" if part.setting else "no size to change"
            lines.append(f"{one_line(part.label)}: {size}, {spent_text(part.spent)} per problem in calibration")
        return "\n".join(lines)

    def __repr__(self) -> str:
        """Return one line: each row's label and Hit@1."""
        rows = "; ".join(f"{one_line(row.label)} {100 * row.hits[1].mean:.1f}" for row in self.rows)
        return f"<Comparison of {len(self.rows)} rows: {rows}>"

    def _repr_html_(self) -> str:
        return table_formats.to_html(self.rows, self.title, self.baseline)


def spent_text(spent: float) -> str:
    """Return a cost per problem with one decimal place, or with three significant digits if it is below 1."""
    return f"{spent:,.1f}" if spent >= 1 or not spent else f"{spent:.3g}"


def calibrated_on(problems: int) -> str:
    """Return a line with the number of calibration problems, and a warning if it is small."""
    few = f"; with fewer than {CALIBRATION_PROBLEMS} the costs are uncertain" if problems < CALIBRATION_PROBLEMS else ""
    return f"sizes chosen on {problems} problems{few}"
