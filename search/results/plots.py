"""Plots of tables: accuracy against cost, with the rows that no cheaper row outperforms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle, pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mas_gym.errors import ConfigError, need
from mas_gym.internal.text import one_line
from mas_gym.internal.whole_files import whole_file
from search.results.intervals import Interval
from search.results.summary import ResultRow
from search.results.table_formats import marked_problems

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray


# The color-blind safe palette of Okabe and Ito (2008), darkest contrast first.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_COSTS = {"tokens": "generated tokens", "agent_calls": "agent calls"}
_MARKERS = ("o", "s", "^", "D", "P", "v", "X", "p", "h", "d")
"""Filled markers of similar size; similar ones are far apart. The first is for rows without a critic."""
INK, FAINT, PAPER, NO_CRITIC = "#22262b", "#d9dde2", "#ffffff", "#5a626c"
WIDTH, HEIGHT = 4.8, 3.6
"""Figure size in inches without the legend; 9-point text stays readable in one column of a paper."""
_LONGEST = 48
MOST_NAMED = 8
"""Maximum number of rows with the critic in their labels; with more rows, a legend below the plot lists the critics."""
_STEP = 5.0
"""Distance in points between intervals that would cover each other."""
_RINGS, _ANGLES = (7.0, 13.0, 20.0, 28.0, 38.0, 50.0, 64.0, 80.0), 16
"""Distances in points, and number of directions, at which a label is tried."""
_SIDES = {"left": 0.0, "right": 1.0, "center": 0.5}
_LEADER = 14.0
"""Distance in points from which a line connects a label with its point."""


def plot_text(text: str) -> str:
    r"""Return a user's text for a figure: one line of bounded length, escaped so that matplotlib finds no math markup.

    >>> plot_text("cost$^2$")
    'cost\\$^2\\$'
    """
    line = one_line(text)
    shown = line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]}...{line[-_LONGEST // 2 + 3 :]}"
    return shown.replace("$", r"\$")


def tradeoff_figure(rows: Sequence[ResultRow], title: str = "", cost: str = "tokens") -> Figure:
    """Draw Hit@1 with its 95% interval against the cost per problem; colors show searches, markers show critics.

    Each point is labeled. A line that ends in a marker shows that search's accuracy with fewer tokens. The dotted line
    is the Pareto frontier: the rows that no other row outperforms at the same or lower cost. Intervals that would cover
    each other are moved apart.

    Raises:
        ConfigError: No row has a finished search with token counts.
        MissingDependencyError: matplotlib is not installed.
    """
    make = figure_class()
    drawn = [row for row in rows if not math.isnan(row.tokens.mean)]
    if not drawn:
        raise ConfigError(
            "expected a row with at least one finished search and its token counts, got none; nothing to plot"
        )
    colors = dict(zip(dict.fromkeys(row.planner for row in drawn), cycle((*COLORS, INK, NO_CRITIC)), strict=False))
    critics = dict(zip(dict.fromkeys(["", *(row.critic for row in drawn)]), cycle(_MARKERS), strict=False))
    best = frontier(drawn, cost)
    dotted, curves = 1 < len(best) < len(drawn), cost == "tokens" and any(row.curve for row in drawn)
    whole = len(drawn) <= MOST_NAMED
    handles = [] if whole else _critic_handles(critics)
    columns = min(3, len(handles))
    figure = make(figsize=(WIDTH, HEIGHT + legend_height(-(-len(handles) // 3))), dpi=200, layout="constrained")
    axes = figure.subplots()
    dress(axes, f"{_COSTS[cost]} per problem", "Hit@1 (%)", title)
    costs = [row.cost(cost).mean for row in drawn]
    if min(costs) > 0 and max(costs) / min(costs) > 3:
        axes.set_xscale("log")
        plain_log_ticks(axes, min(costs), max(costs))
        # Labels need room on the right.
        axes.set_xlim(right=2.2 * max(costs))
    else:
        axes.set_xlim(right=max(costs) + 0.4 * (max(costs) - min(costs) or max(costs) or 1.0))
    said = _line_notes(dotted, curves, marked_problems(drawn))
    axes.set_xlabel(f"{axes.get_xlabel()}\n", color=INK)
    axes.annotate(said, (0.5, 0), (0, -37), "axes fraction", "offset points", ha="center", color=NO_CRITIC, fontsize=8)
    if dotted:
        spent = [row.cost(cost).mean for row in best]
        axes.plot(spent, [100 * row.hits[1].mean for row in best], ":", color=NO_CRITIC, linewidth=1.2, zorder=1)
    for row in drawn:
        if row.curve and cost == "tokens":
            stops, hits = zip(*(point[:2] for point in row.curve), strict=True)
            axes.plot(stops, [100 * hit for hit in hits], color=colors[row.planner], linewidth=1.3, alpha=0.6, zorder=2)
    if handles:
        add_legend(figure, handles, columns)
    ends = [end for row in drawn for end in row.interval]
    span = max(ends) - min(ends) or 0.1
    axes.set_ylim(100 * (min(ends) - 0.06 * span), 100 * (max(ends) + 0.06 * span))
    figure.draw_without_rendering()
    points = [(row.cost(cost).mean, 100 * row.hits[1].mean) for row in drawn]
    shifts = _apart(figure, axes, points, [row.interval for row in drawn])
    for row, point, shift in zip(drawn, points, shifts, strict=True):
        _draw_row(figure, axes, row, point, shift, colors[row.planner], critics[row.critic])
    texts = [plot_text(row.label if whole else row.planner) for row in drawn]
    _label(figure, axes, points, shifts, texts, [colors[row.planner] for row in drawn])
    return figure


def frontier(rows: Sequence[ResultRow], cost: str = "tokens") -> list[ResultRow]:
    """Return the rows with a higher Hit@1 than every row of equal or lower cost, by increasing cost."""
    best: list[ResultRow] = []
    for row in sorted(rows, key=lambda row: (row.cost(cost).mean, -row.hits[1].mean)):
        if not best or row.hits[1].mean > best[-1].hits[1].mean:
            best.append(row)
    return best


def save_tradeoff(rows: Sequence[ResultRow], path: Path, title: str = "") -> Path:
    """Write `tradeoff_figure` to a file in the format of its suffix (png, svg, pdf); return the path."""
    return save_figure(tradeoff_figure(rows, title), path)


def figure_class() -> type[Figure]:
    """Return matplotlib's figure class, which needs no display.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    found: type[Figure] = need("matplotlib.figure", "a plot", "plot").Figure
    return found


def check_figure_path(path: Path) -> None:
    """Raise `ConfigError` if matplotlib cannot write a file with this suffix."""
    kinds = figure_class()().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in kinds:
        raise ConfigError(
            f"plot {path}: expected a name that ends in one of {', '.join(sorted(kinds))}; try {path.stem}.png"
        )


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure; return the path. Raises `ConfigError` for an unknown suffix."""
    check_figure_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as part:
        figure.savefig(part)
    return path


def _draw_row(
    figure: Figure, axes: Axes, row: ResultRow, point: tuple[float, float], shift: float, color: str, marker: str
) -> None:
    from matplotlib.transforms import ScaledTranslation

    moved = axes.transData + ScaledTranslation(shift / 72, 0, figure.dpi_scale_trans)
    look: dict[str, Any] = {"color": color, "transform": moved}
    low, high = (100 * end for end in row.interval)
    axes.plot([point[0]] * 2, [low, high], linewidth=2.2, alpha=0.45, solid_capstyle="butt", zorder=2.5, **look)
    axes.plot(*point, marker=marker, ms=6.5, mec=PAPER, mew=0.8, zorder=3, **look)


def _apart(
    figure: Figure, axes: Axes, points: Sequence[tuple[float, float]], intervals: Sequence[Interval]
) -> list[float]:
    """Return the horizontal offset of each row in points, such that no interval covers another."""
    at = axes.transData.transform(points)[:, 0] * 72 / figure.dpi
    shifts: list[float] = [0.0] * len(points)
    done: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: (at[i], -points[i][1])):
        near = [
            float(at[j]) + shifts[j]
            for j in done
            if intervals[i].low <= intervals[j].high and intervals[j].low <= intervals[i].high
        ]
        tried = (sign * step * _STEP for step in range(len(points) + 1) for sign in (1, -1))
        shifts[i] = next(move for move in tried if all(abs(at[i] + move - x) >= _STEP - 1e-6 for x in near))
        done.append(i)
    return shifts


def _label(
    figure: Figure,
    axes: Axes,
    points: Sequence[tuple[float, float]],
    shifts: Sequence[float],
    texts: Sequence[str],
    colors: Sequence[str],
) -> None:
    """Write each text near its point, where it covers no other text and few lines."""
    from matplotlib.transforms import Bbox, ScaledTranslation

    scale = figure.dpi / 72
    places = axes.transData.transform(points) + [(shift * scale, 0.0) for shift in shifts]
    taken = [Bbox.from_extents(*(place - 4 * scale), *(place + 4 * scale)) for place in places]
    lines = np.concatenate([_dense(line.get_transform().transform(line.get_xydata())) for line in axes.lines])
    frame = axes.get_window_extent()
    look: dict[str, Any] = {"fontsize": 8, "va": "center", "textcoords": "offset points", "annotation_clip": False}
    for point, place, shift, text, color in zip(points, places, shifts, texts, colors, strict=True):
        moved = axes.transData + ScaledTranslation(shift / 72, 0, figure.dpi_scale_trans)
        shown = axes.annotate(text, point, (0, 0), xycoords=moved, color=color, zorder=4, **look)
        size = shown.get_window_extent()
        tried = []
        for ring, turn in product(_RINGS, range(_ANGLES)):
            dx, dy = ring * math.cos(2 * math.pi * turn / _ANGLES), ring * math.sin(2 * math.pi * turn / _ANGLES)
            side = "left" if dx > 1 else "right" if dx < -1 else "center"
            left = place[0] + dx * scale - _SIDES[side] * size.width
            box = Bbox.from_bounds(left, place[1] + dy * scale - size.height / 2, size.width, size.height)
            outside = box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1
            crossed = np.all((lines > box.min) & (lines < box.max), axis=1).sum()
            cost = ring + 1.5 * crossed + 60 * box.count_overlaps(taken) + 200 * outside
            tried.append((cost, turn, dx, dy, side, box))
        _, _, dx, dy, side, box = min(tried, key=lambda one: one[:2])
        shown.update({"horizontalalignment": side})
        shown.set_position((dx, dy))
        shown.set_in_layout(False)
        taken.append(box)
        if math.hypot(dx, dy) >= _LEADER:
            arrow = {"arrowstyle": "-", "color": color, "lw": 0.6, "alpha": 0.7, "shrinkA": 0, "shrinkB": 3}
            leader = axes.annotate("", point, (dx, dy), xycoords=moved, textcoords="offset points", arrowprops=arrow)
            leader.set_in_layout(False)


def _dense(path: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return points on a path, at most about 4 pixels apart."""
    steps = [max(2, int(np.hypot(*(b - a)) / 4)) for a, b in pairwise(path)]
    return np.concatenate([path, *(np.linspace(a, b, n) for (a, b), n in zip(pairwise(path), steps, strict=True))])


def _line_notes(dotted: bool, curves: bool, marked: bool) -> str:
    """Return the explanation of bars and lines."""
    said = ["bars: 95% intervals"]
    said += ["lines: if stopped earlier"] if curves else []
    said += ["dotted: best at its cost or less"] if dotted else []
    said += ["rows of different problems"] if marked else []
    return "; ".join(said)


def _critic_handles(critics: Mapping[str, str]) -> list[Artist]:
    from matplotlib.lines import Line2D

    look: dict[str, Any] = {"linestyle": "none", "color": INK, "markeredgecolor": PAPER, "markersize": 7}
    return [
        Line2D([], [], marker=marker, label=plot_text(name) or "no critic", **look) for name, marker in critics.items()
    ]


def dress(axes: Axes, x: str, y: str, title: str = "") -> None:
    """Style a panel: labels, a pale grid and no frame. The title may be a user's text."""
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    if title:
        axes.set_title(plot_text(title), loc="left", color=INK, fontsize=10, fontweight="bold")
    axes.grid(True, which="major", color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.tick_params(colors=INK, length=0, labelsize=9)


def plain_log_ticks(axes: Axes, low: float, high: float) -> None:
    """Label a logarithmic axis with plain numbers, from a little below ``low`` to a little above ``high``."""
    from matplotlib.ticker import FixedLocator, NullLocator

    low, high = low / 1.3, high * 1.3
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low < 1000 else (1,)
    ticks = [m * 10.0**p for p in powers for m in steps if low <= m * 10.0**p <= high]
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{tick:,.0f}" if tick >= 1 else f"{tick:g}" for tick in ticks])


def legend_height(lines: int) -> float:
    """Return the height in inches of a legend of ``lines`` lines below a figure."""
    return 0.2 * lines + 0.1


def add_legend(figure: Figure, handles: Sequence[Artist], columns: int = 1) -> None:
    """Put a legend below the panels."""
    look: dict[str, Any] = {"frameon": False, "labelcolor": INK, "fontsize": 9, "labelspacing": 0.25}
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, **look)
