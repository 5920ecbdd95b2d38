"""The figures of a report."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from search.compare.reliability import Bin
from search.report.report_data import SettingReport
from search.results.intervals import wilson
from search.results.outcomes import Outcome
from search.results.plots import (
    COLORS,
    FAINT,
    HEIGHT,
    INK,
    NO_CRITIC,
    PAPER,
    WIDTH,
    add_legend,
    dress,
    figure_class,
    legend_height,
    plain_log_ticks,
    plot_text,
    tradeoff_figure,
)
from search.results.summary import CurvePoint, ResultRow, anytime_curve

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

_RANKS = (1, 2, 3, 5, 8, 10)


def figures_of(report: SettingReport) -> dict[str, Callable[[], Figure]]:
    """Return, by figure name, the function that draws the figure."""
    rows = [row for row in report.comparison.rows if row.drawable]
    found: dict[str, Callable[[], Figure]] = {}
    if rows:
        found["accuracy-tokens"] = lambda: tradeoff_figure(rows)
        found["accuracy-calls"] = lambda: tradeoff_figure(rows, cost="agent_calls")
    curves = {row.label: anytime_curve(_of(report, row)) for row in rows}
    curves = {label: curve for label, curve in curves.items() if curve}
    if curves:
        found["anytime"] = lambda: _anytime_figure(curves)
    ranked = [row for row in rows if 5 in row.hits]
    if ranked:
        found["hits"] = lambda: _hits_figure({row.label: _of(report, row) for row in ranked})
    if report.calibration:
        found["calibration"] = lambda: _calibration_figure(report.calibration, report.agents)
    return found


def _of(report: SettingReport, row: ResultRow) -> list[Outcome]:
    named = [one for one in report.comparison.outcomes if (one.planner, one.critic) == (row.planner, row.critic)]
    return [one for one in named if one.correct is not None]


def _looks() -> Iterator[dict[str, Any]]:
    """Yield the color and line style of successive curves."""
    return ({"color": color, "linestyle": style} for style in cycle(("-", "--", ":", "-.")) for color in COLORS)


def _figure(lines: int, height: float = HEIGHT) -> Figure:
    """Return an empty figure with space for a legend of ``lines`` lines."""
    return figure_class()(figsize=(WIDTH, height + legend_height(lines)), dpi=200, layout="constrained")


def _anytime_figure(curves: Mapping[str, Sequence[CurvePoint]]) -> Figure:
    figure = _figure(len(curves))
    axes, handles = figure.subplots(), []
    for (label, curve), look in zip(curves.items(), _looks(), strict=False):
        spent = [point.tokens for point in curve]
        handles += axes.plot(spent, [100 * point.hit for point in curve], lw=1.8, label=plot_text(label), **look)
        low, high = ([100 * end for end in ends] for ends in zip(*(point.interval for point in curve), strict=True))
        axes.fill_between(spent, low, high, color=look["color"], alpha=0.15, lw=0)
    dress(axes, "generated tokens per problem", "Hit@1 (%) if stopped there")
    spent = [point.tokens for curve in curves.values() for point in curve]
    axes.set_xscale("log")
    plain_log_ticks(axes, min(spent), max(spent))
    add_legend(figure, handles)
    return figure


def _hits_figure(groups: Mapping[str, Sequence[Outcome]]) -> Figure:
    figure = _figure(len(groups))
    axes, handles = figure.subplots(), []
    for (label, group), look in zip(groups.items(), _looks(), strict=False):
        hits = [100 * sum(one.hit(k) for one in group) / len(group) for k in _RANKS]
        handles += axes.plot(_RANKS, hits, marker="o", ms=5, label=plot_text(label), **look)
    dress(axes, "k", "Hit@k (%)")
    axes.set_xticks(_RANKS)
    add_legend(figure, handles)
    return figure


def _calibration_figure(rows: Mapping[str, Mapping[int, Sequence[Bin]]], agents: Mapping[str, Sequence[str]]) -> Figure:
    speakers = list(dict.fromkeys(agents[label][index] for label, groups in rows.items() for index in sorted(groups)))
    looks = dict(zip(speakers, cycle(_looks()), strict=False))
    figure = _figure(len(speakers), 2.4 * len(rows))
    handles: dict[str, Artist] = {}
    diagonal: list[Artist] = []
    for axes, (label, groups) in zip(figure.subplots(len(rows), squeeze=False).flat, rows.items(), strict=True):
        # A value is the expected terminal reward, which is -1 or 1.
        diagonal = axes.plot([-1, 1], [0, 100], ":", color=NO_CRITIC, lw=1.2, label="calibrated")
        for place, (index, bins) in enumerate(groups.items()):
            right, speaker = [100 * one.right for one in bins], agents[label][index]
            name = f"after {plot_text(speaker)}"
            # Agents have bins at similar values; without an offset, their intervals would cover each other.
            at = [one.value + 0.012 * (place - (len(groups) - 1) / 2) for one in bins]
            [handles[speaker]] = axes.plot(at, right, marker="o", ms=4, label=name, **looks[speaker])
            low, high = zip(*(wilson([one.right] * one.states) for one in bins), strict=True)
            bars = {"color": looks[speaker]["color"], "lw": 1.6, "alpha": 0.4}
            axes.vlines(at, [100 * end for end in low], [100 * end for end in high], **bars)
        dress(axes, "value", "right answers below (%)", label)
    add_legend(figure, [handles[speaker] for speaker in speakers] + diagonal)
    return figure


_DARK = {
    COLORS[0].lower(): ("blue", "#4da3e8"),
    COLORS[1].lower(): ("orange", "#ff8a4a"),
    COLORS[2].lower(): ("green", "#35c79b"),
    COLORS[5].lower(): ("sky", "#a6d8ff"),
    INK: ("ink", "#e6eaf0"),
    FAINT: ("faint", "#2c3541"),
    PAPER: ("paper", "#1a2028"),
    NO_CRITIC: ("dim", "#94a1b2"),
}
"""Figure colors with a dark-mode variant: name and dark color."""


def svg(figure: Figure) -> str:
    """Return a figure as an SVG picture that follows the reader's color scheme."""
    out = io.StringIO()
    figure.savefig(out, format="svg")
    text = out.getvalue()
    for color, (name, _) in _DARK.items():
        text = text.replace(color, f"var(--{name})")
    light = "".join(f"--{name}:{color};" for color, (name, _) in _DARK.items())
    dark = "".join(f"--{name}:{color};" for name, color in _DARK.values())
    style = f"<style>:root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}</style>"
    return text.replace("<defs>", f"{style}<defs>", 1)


def data_url(figure: Figure) -> str:
    """Return the `svg` of a figure as a data URL."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg(figure).encode()).decode()
