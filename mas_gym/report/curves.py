"""Plots of shares: curves with intervals, side by side, and blame matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mas_gym.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Series(NamedTuple):
    """One curve.

    Attributes:
        name: Label in the legend.
        x: Positions of the points.
        y: Shares in ``[0, 1]``.
        intervals: Lower and upper bound of each point.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    intervals: Sequence[Sequence[float]]


def save_curves(panels: Mapping[str, Sequence[Series]], x_label: str, path: Path) -> Path:
    """Draw panels side by side, in percent over a logarithmic axis; return the path.

    Args:
        panels: Label of the vertical axis to curves; a curve keeps its colour in all panels.
        x_label: Label of the horizontal axis.
        path: Its suffix names the format.

    Raises:
        ConfigError: There is nothing to draw, or the suffix names no format.
        MissingDependencyError: matplotlib is not installed.
    """
    from search.compare.plots import COLOURS, INK, figure_class, plain_log_ticks, save_figure

    if not panels or not all(any(series.x for series in curves) for curves in panels.values()):
        raise ConfigError("expected at least one point in each panel, got none; there is nothing to plot")
    figure = figure_class()(figsize=(4.4 * len(panels), 3.6), dpi=200, layout="constrained")
    names = list(dict.fromkeys(series.name for curves in panels.values() for series in curves))
    for axes, (label, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for series in curves:
            colour = COLOURS[names.index(series.name) % len(COLOURS)]
            y = [100 * share for share in series.y]
            ends = [[abs(100 * end - at) for end in pair] for pair, at in zip(series.intervals, y, strict=True)]
            bars: Any = list(zip(*ends, strict=True))
            axes.errorbar(series.x, y, yerr=bars, color=colour, marker="o", ms=5, lw=1.6, elinewidth=1, capsize=2)
        axes.set_xscale("log")
        places = [place for series in curves for place in series.x]
        plain_log_ticks(axes, min(places), max(places))
        axes.set_xlabel(x_label, color=INK)
        axes.set_ylabel(label, color=INK)
        axes.grid(True, which="major", alpha=0.3)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.axes[0].legend(names, frameon=False, labelcolor=INK, fontsize=9)
    return save_figure(figure, path)


def save_matrices(matrices: Mapping[str, Sequence[Sequence[float]]], names: Sequence[str], path: Path) -> Path:
    """Draw square matrices of shares, whose rows sum to one, side by side; return the path.

    Args:
        matrices: Title to rows: for each agent that erred, the share of the blame each agent got.
        names: The agents, in order.
        path: Its suffix names the format.

    Raises:
        ConfigError: There is nothing to draw, a matrix does not fit the names, or the suffix names no format.
        MissingDependencyError: matplotlib is not installed.
    """
    from search.compare.plots import INK, figure_class, save_figure

    if not matrices or any({len(names)} != {len(rows), *map(len, rows)} for rows in matrices.values()):
        raise ConfigError(f"expected matrices of {len(names)} by {len(names)} shares, one row and column per agent")
    figure: Figure = figure_class()(figsize=(3.3 * len(matrices) + 0.6, 3.4), dpi=200, layout="constrained")
    panels = figure.subplots(1, len(matrices), squeeze=False, sharey=True)[0]
    for axes, (title, rows) in zip(panels, matrices.items(), strict=True):
        axes.imshow([list(row) for row in rows], cmap="Blues", vmin=0, vmax=1)
        for i, row in enumerate(rows):
            for j, share in enumerate(row):
                colour = "white" if share > 0.5 else INK
                axes.text(j, i, f"{100 * share:.0f}", ha="center", va="center", color=colour, fontsize=9)
        axes.set_title(title, fontsize=10, color=INK)
        axes.set_xticks(range(len(names)), list(names), rotation=45, ha="right", fontsize=8)
        axes.set_yticks(range(len(names)), list(names), fontsize=8)
        axes.set_xlabel("blamed", color=INK)
        axes.tick_params(length=0)
    panels[0].set_ylabel("erred first", color=INK)
    return save_figure(figure, path)
