"""Plots of tables: accuracy against cost, with the rows that no cheaper row outperforms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from mas_gym.errors import ConfigError, need
from mas_gym.internal.text import one_line
from mas_gym.internal.whole_files import whole_file
from search.results.summary import ResultRow
from search.results.table_formats import marked_problems

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Look = TypeVar("Look")
Marker: TypeAlias = str | tuple[int, int, int]


# The color-blind safe palette of Okabe and Ito (2008), darkest contrast first.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_COSTS = {"tokens": "generated tokens", "agent_calls": "agent calls"}
_MARKERS: tuple[Marker, ...] = (
    *("o", "s", "^", "D", "P", "v", "X", "*", "<", ">", "d", "p", "h"),
    *((4, 1, 0), (6, 1, 0), (4, 1, 45)),
)
"""Filled markers of matplotlib, then stars with four and six rays; similar markers are far apart."""
INK, FAINT, PAPER, NO_CRITIC = "#22262b", "#d9dde2", "#ffffff", "#5a626c"
WIDTH, HEIGHT = 4.8, 3.2
"""Figure size in inches without the legend; 10-point text stays readable at a width of 350 pixels on a phone."""
_LONGEST = 48


def plot_text(text: str) -> str:
    r"""Return a user's text for a figure: one line of bounded length, escaped so that matplotlib finds no math markup.

    >>> plot_text("cost$^2$")
    'cost\\$^2\\$'
    """
    line = one_line(text)
    shown = line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]}...{line[-_LONGEST // 2 + 3 :]}"
    return shown.replace("$", r"\$")


def tradeoff_figure(rows: Sequence[ResultRow], title: str = "", cost: str = "tokens") -> Figure:
    """Draw Hit@1 with its 95% interval against the cost per problem; colors show critics, markers show search methods.

    A line that ends in a marker shows that search's accuracy with fewer tokens. The dotted line is the Pareto frontier:
    the rows that no other row outperforms at the same or lower cost.

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
    colours = _assign([row.critic for row in drawn if row.critic], COLOURS) | {"": NO_CRITIC}
    markers = _assign([row.planner for row in drawn], _MARKERS)
    best = frontier(drawn, cost)
    dotted, curves = 1 < len(best) < len(drawn), cost == "tokens" and any(row.curve for row in drawn)
    # Draw smaller markers above larger ones, so that critics with equal results stay visible.
    named = list(dict.fromkeys(row.critic for row in drawn if row.critic))
    sizes = {"": 9.0} if any(not row.critic for row in drawn) else {}
    sizes |= {name: 13 - 7 * place / (len(named) - 1) if len(named) > 1 else 9.0 for place, name in enumerate(named)}
    lines = _lines(dotted, curves, marked_problems(drawn))
    handles, columns = _legend_handles(colours, markers, sizes, lines)
    figure = make(figsize=(WIDTH, HEIGHT + legend_height(len(handles) // columns)), dpi=200, layout="constrained")
    axes = figure.subplots()
    if dotted:
        spent = [row.cost(cost).mean for row in best]
        axes.plot(spent, [100 * row.hits[1].mean for row in best], ":", color=NO_CRITIC, linewidth=1.2, zorder=1)
    for row in sorted(drawn, key=lambda row: -sizes[row.critic]):
        _draw_row(axes, row, cost, colours[row.critic], markers[row.planner], sizes[row.critic])
    dress(axes, f"{_COSTS[cost]} per problem", "Hit@1 (%)", title)
    costs = [row.cost(cost).mean for row in drawn]
    if min(costs) > 0 and max(costs) / min(costs) > 3:
        axes.set_xscale("log")
        plain_log_ticks(axes, min(costs), max(costs))
    add_legend(figure, handles, columns)
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


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure; return the path.

    Raises:
        ConfigError: The path's suffix is not a known format.
    """
    kinds = figure.canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in kinds:
        raise ConfigError(
            f"{path}: expected a name that ends in one of {', '.join(sorted(kinds))}; try {path.stem}.png"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as part:
        figure.savefig(part)
    return path


def _assign(names: Sequence[str], looks: Sequence[Look]) -> dict[str, Look]:
    return {name: looks[i % len(looks)] for i, name in enumerate(dict.fromkeys(names))}


def _draw_row(axes: Axes, row: ResultRow, cost: str, colour: str, marker: Marker, size: float) -> None:
    if row.curve and cost == "tokens":
        stops, hits = zip(*row.curve, strict=True)
        axes.plot(stops, [100 * hit for hit in hits], color=colour, linewidth=1.4, alpha=0.55, zorder=2)
    hit = 100 * row.hits[1].mean
    below, above = (abs(100 * end - hit) for end in row.interval)
    # Wide, pale bars stay readable if methods with equal budgets overlap.
    spent = row.cost(cost).mean
    axes.errorbar(spent, hit, yerr=[[below], [above]], fmt="none", ecolor=colour, elinewidth=3, alpha=0.35)
    axes.plot(spent, hit, marker=marker, color=colour, ms=size, mec=PAPER, mew=0.8, zorder=3)


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
    axes.tick_params(colors=INK, length=0, labelsize=10)


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
    look: dict[str, Any] = {"frameon": False, "labelcolor": INK, "fontsize": 10, "labelspacing": 0.25}
    legend = figure.legend(handles=handles, loc="outside lower left", ncols=columns, **look)
    for text in legend.get_texts():
        if text.get_text() in _HEADINGS:
            text.set_fontweight("bold")


_HEADINGS = ("Search", "Critic", "Lines")
_TWO_COLUMNS = 48
"""Maximum total characters of two legend columns."""


def _legend_handles(
    colours: dict[str, str], markers: dict[str, Marker], sizes: dict[str, float], lines: Mapping[str, dict[str, Any]]
) -> tuple[list[Artist], int]:
    """Return the legend entries (searches, then critics and line styles) and the number of columns."""
    from matplotlib.lines import Line2D

    def entry(label: str, **look: Any) -> Artist:
        return Line2D([], [], label=label, **({"linestyle": "none"} | look))

    shape: dict[str, Any] = {"markeredgecolor": PAPER}
    first = [entry(_HEADINGS[0])]
    first += [entry(plot_text(name), marker=look, color=INK, markersize=8, **shape) for name, look in markers.items()]
    second = []
    if list(sizes) != [""]:
        second = [entry(_HEADINGS[1])]
        second += [
            entry(plot_text(name) or "none", marker="o", color=colours[name], markersize=size, **shape)
            for name, size in sizes.items()
        ]
    second += [entry(_HEADINGS[2]), *(entry(label, color=NO_CRITIC, **look) for label, look in lines.items())]
    if sum(max(len(str(one.get_label())) for one in block) for block in (first, second)) > _TWO_COLUMNS:
        return [*first, *second], 1
    short = min(first, second, key=len)
    short += [entry("") for _ in range(abs(len(first) - len(second)))]
    return [*first, *second], 2


def _lines(dotted: bool, curves: bool, marked: bool) -> dict[str, dict[str, object]]:
    """Return the legend labels and styles of the lines."""
    found: dict[str, dict[str, Any]] = {"95% interval": {"linestyle": "-", "linewidth": 3, "alpha": 0.35}}
    if curves:
        found["search if stopped earlier"] = {"linestyle": "-", "linewidth": 1.4, "alpha": 0.55}
    if dotted:
        found["best at its cost or less"] = {"linestyle": ":", "linewidth": 1.2}
    if marked:
        found["rows of different problems"] = {}
    return found
