"""Plots: accuracy against cost as in the paper's first figure, curves with intervals, blame matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mas_gym.errors import ConfigError, need
from search.compare.outcomes import ResultRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The colour-blind safe palette of Okabe and Ito (2008), darkest contrast first.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_COSTS = {"tokens": "generated tokens", "agent_calls": "agent calls"}
_NO_CRITIC = "#555555"
_MARKERS = ("o", "s", "^", "D", "P", "v", "X", "*", "<", ">")
INK, _FAINT = "#22262b", "#d9dde2"


def tradeoff_figure(rows: Sequence[ResultRow], title: str = "", cost: str = "tokens") -> Figure:
    """Draw Hit@1 with its 95% interval against the cost per problem; colour is critic, marker search method.

    A line that ends in a marker shows what that search would have reached with fewer tokens. The dotted line is the
    frontier: the rows that no other row beats at the same cost or less.

    Args:
        rows: From `search.compare.summarise`.
        title: Title of the figure.
        cost: ``"tokens"`` or ``"agent_calls"``.

    Raises:
        ConfigError: No row has a finished search.
        MissingDependencyError: matplotlib is not installed.
    """
    make = figure_class()
    drawn = [row for row in rows if not math.isnan(row.tokens.mean)]
    if not drawn:
        raise ConfigError("expected at least one search that ended, got none; there is nothing to plot")
    figure = make(figsize=(7.2, 4.4), dpi=200, layout="constrained")
    axes = figure.subplots()
    colours = _assign([row.critic for row in drawn if row.critic], COLOURS) | {"": _NO_CRITIC}
    markers = _assign([row.planner for row in drawn], _MARKERS)
    best = frontier(drawn, cost)
    if 1 < len(best) < len(drawn):
        spent = [getattr(row, cost).mean for row in best]
        axes.plot(spent, [100 * row.hits[1].mean for row in best], ":", color=_NO_CRITIC, linewidth=1.2, zorder=1)
    for row in drawn:
        _draw_row(axes, row, cost, colours[row.critic], markers[row.planner])
    _dress(axes, drawn, cost, title)
    _legend(axes, colours, markers, list(dict.fromkeys(row.critic for row in drawn)))
    return figure


def frontier(rows: Sequence[ResultRow], cost: str = "tokens") -> list[ResultRow]:
    """Return the rows with a higher Hit@1 than every row that costs no more, by growing cost."""
    best: list[ResultRow] = []
    for row in sorted(rows, key=lambda row: (getattr(row, cost).mean, -row.hits[1].mean)):
        if not best or row.hits[1].mean > best[-1].hits[1].mean:
            best.append(row)
    return best


def save_tradeoff(rows: Sequence[ResultRow], path: Path, title: str = "") -> Path:
    """Write `tradeoff_figure` to a file whose suffix names the format (png, svg, pdf); return the path."""
    return save_figure(tradeoff_figure(rows, title), path)


def figure_class() -> type[Figure]:
    """Return matplotlib's figure, which needs no display.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    found: type[Figure] = need("matplotlib.figure", "a plot", "plot").Figure
    return found


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure; return the path.

    Raises:
        ConfigError: The path's suffix names no format.
    """
    kinds = figure.canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in kinds:
        raise ConfigError(
            f"{path}: expected a name that ends in one of {', '.join(sorted(kinds))}; try {path.stem}.png"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _assign(names: Sequence[str], looks: Sequence[str]) -> dict[str, str]:
    return {name: looks[i % len(looks)] for i, name in enumerate(dict.fromkeys(names))}


def _draw_row(axes: Any, row: ResultRow, cost: str, colour: str, marker: str) -> None:
    if row.curve and cost == "tokens":
        stops, hits = zip(*row.curve, strict=True)
        axes.plot(stops, [100 * hit for hit in hits], color=colour, linewidth=1.4, alpha=0.55, zorder=2)
    hit = 100 * row.hits[1].mean
    below, above = (abs(100 * end - hit) for end in row.interval)
    # Wide, pale bars stay readable when methods with equal budgets overlap.
    spent = getattr(row, cost).mean
    axes.errorbar(spent, hit, yerr=[[below], [above]], fmt="none", ecolor=colour, elinewidth=3, alpha=0.35)
    axes.plot(spent, hit, marker, color=colour, ms=9, mec="white", mew=1.2, zorder=3)


def _dress(axes: Any, rows: Sequence[ResultRow], cost: str, title: str) -> None:
    costs = [getattr(row, cost).mean for row in rows]
    if min(costs) > 0 and max(costs) / min(costs) > 3:
        axes.set_xscale("log")
        plain_log_ticks(axes, min(costs), max(costs))
    axes.set_xlabel(f"{_COSTS[cost]} per problem", color=INK)
    axes.set_ylabel("Hit@1 (%)", color=INK)
    if title:
        axes.set_title(title, loc="left", color=INK, fontsize=11, fontweight="bold")
    axes.grid(True, which="major", color=_FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)
    axes.tick_params(colors=INK, length=0, labelsize=9)


def plain_log_ticks(axes: Any, low: float, high: float) -> None:
    """Label a logarithmic axis from a little below ``low`` to a little above ``high`` with whole numbers."""
    from matplotlib.ticker import FixedLocator, NullLocator

    low, high = low / 1.3, high * 1.3
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low < 1000 else (1,)
    ticks = [m * 10.0**p for p in powers for m in steps if low <= m * 10.0**p <= high]
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{tick:,.0f}" if tick >= 1 else f"{tick:g}" for tick in ticks])


def _legend(axes: Any, colours: dict[str, str], markers: dict[str, str], critics: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    shape: dict[str, Any] = {"linestyle": "none", "markersize": 8, "markeredgecolor": "white"}
    blank: dict[str, Any] = {"linestyle": "none", "marker": ""}
    handles = [
        Line2D([], [], label="search", **blank),
        *(Line2D([], [], marker=look, color=INK, label=name, **shape) for name, look in markers.items()),
        Line2D([], [], label="", **blank),
        Line2D([], [], label="critic", **blank),
        *(Line2D([], [], marker="o", color=colours[name], label=name or "none", **shape) for name in critics),
    ]
    legend = axes.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, labelcolor=INK, fontsize=9
    )
    for text in legend.get_texts():
        if text.get_text() in ("search", "critic"):
            text.set_fontweight("bold")
            text.set_x(-33)


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
