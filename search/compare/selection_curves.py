"""Accuracy of selection among the samples of a recorded run, by number of samples."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mas_gym.errors import ConfigError, DataError
from mas_gym.internal.json_types import JSONObject
from mas_gym.internal.text import one_line
from mas_gym.tasks.base import Problem
from search.compare.comparison_runs import named_critics
from search.plan import Plan
from search.planners import BestOfN, SelfConsistency
from search.protocol import Critic, Planner
from search.results.accuracy_at_k import SelectionCurve, selection_curve
from search.results.table_formats import TextTable, gap_cells, interval_cell, percent_cell, printed, shown_tables
from search.runs import load_spec, start
from search.store import Recorded
from search.store.recorded_runs import as_recorded

if TYPE_CHECKING:
    from rich.console import RenderableType

SIZES = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Default sample counts of curves; counts up to the maximum per question are used."""
_WIDTH = 120


@dataclass(frozen=True)
class Selection:
    """Accuracy of selection among recorded samples, by number of samples; ``print(selection)`` shows them.

    The curves are the majority vote, the best sample according to each critic, and the upper bound, which is right if
    any sample is right.
    """

    curves: tuple[SelectionCurve, ...]
    questions: int

    def __getitem__(self, label: str) -> SelectionCurve:
        """Return a curve by its label: ``"majority"``, ``"any"``, or ``"best + CRITIC"``."""
        for curve in self.curves:
            if label == curve.label:
                return curve
        known = ", ".join(repr(curve.label) for curve in self.curves)
        raise ConfigError(f"expected the label of one curve ({known}), got {label!r}")

    def table(self) -> TextTable:
        """Return the table as text, with a line per rule and number of samples; empty columns are omitted."""
        head = ("Choice", "k", "Accuracy", "95% interval", "Against majority", "TOK", "Fewer than k")
        lines = []
        for curve in self.curves:
            for point in curve.points:
                gap = curve.difference(self.curves[0], point.k) if curve.rule == "best" else None
                lines.append(
                    (
                        one_line(curve.label),
                        f"{point.k:,}",
                        percent_cell(point.accuracy),
                        interval_cell(point.interval),
                        "" if gap is None else "{} ({})".format(*gap_cells(gap)),
                        f"{point.tokens:,.0f}",
                        percent_cell(point.bounded) if point.bounded else "",
                    )
                )
        kept = [column for column in zip(head, *lines, strict=True) if not {*column[1:]} <= {"", "0"}]
        head, *lines = zip(*kept, strict=True)
        return TextTable(head, lines, note=self._caption([column[0] for column in kept]))

    def to_dicts(self) -> list[JSONObject]:
        """Return one JSON-serializable mapping per rule, critic and number of samples."""
        return [
            {"rule": curve.rule, "critic": curve.critic, **point._asdict(), "interval": [*point.interval]}
            for curve in self.curves
            for point in curve.points
        ]

    def show(self) -> RenderableType:
        """Return the table and its caption as a rich renderable."""
        return shown_tables([self.table()])

    def __str__(self) -> str:
        return printed(self.show(), _WIDTH)

    def _caption(self, columns: Sequence[str]) -> str:
        meanings = {
            "TOK": " TOK: recorded tokens of the k samples.",
            "Fewer than k": " Fewer than k: % of questions with fewer than k samples, which are all drawn.",
        }
        return (
            f"{self.questions:,} questions. Accuracy of choosing among k recorded samples, in %: exact means over all "
            "draws of k, with 95% intervals over questions."
            + "".join(meaning for name, meaning in meanings.items() if name in columns)
        )


def select(
    recorded: Recorded | str | os.PathLike[str],
    critics: str | Critic | Mapping[str, Critic] | Iterable[str | Critic] = (),
    *,
    ks: Sequence[int] = (),
    problems: Iterable[Problem] | None = None,
    concurrency: int = 64,
) -> Selection:
    """Return the accuracy of choosing among ``k`` samples by majority vote and by each critic, with the upper bound.

    Each sample is scored once. The mean over all draws of ``k`` samples is computed exactly
    (`search.results.accuracy_at_k`), so no seed is needed.

    Args:
        recorded: The run, or the store that contains it.
        critics: Critics or their names, or a mapping from custom names.
        ks: Numbers of samples; by default 1, 2, 3, 5, 10 and so on, up to the maximum per question.
        problems: A subset of the run's problems; all by default.
        concurrency: Maximum number of open searches.

    Raises:
        ConfigError: A critic cannot score the run, or compares samples with each other (its values would depend on the
            draw), or a ``k`` is not a positive integer.
        DataError: The run is opened with ``distinct``, so its messages are not independent samples.
        MASGymError: A run ended early, for example because a critic's engine is unavailable.
    """
    source = as_recorded(recorded)
    if source.distinct:
        raise DataError(
            "expected a run with all its samples, got one opened with distinct=True; open it with distinct=False"
        )
    items = list(source if problems is None else problems)
    most = max(source.tree(one).episodes for one in items)
    loaded = named_critics(critics)
    for name, (_, critic) in loaded.items():
        if critic.reads_peers:
            raise ConfigError(
                f"critic {name!r} compares samples with one another, so a single sample has no fixed value; "
                "use search.compare with bon:K and several seeds"
            )
    spec = load_spec(items, recorded=source, concurrency=concurrency, seed=0)
    sizes = list(ks) or [*(k for k in SIZES if k < most), most]

    def found(planner: Planner, critic: Critic | None = None) -> list[Plan]:
        return list(start(replace(spec, planner=planner, critic=critic)))

    plain = found(SelfConsistency(most))
    curves = [selection_curve(plain, "majority", sizes)]
    for name, (_, critic) in loaded.items():
        curves.append(selection_curve(found(BestOfN(most), critic), "best", sizes, name))
    return Selection((*curves, selection_curve(plain, "any", sizes)), len(items))
