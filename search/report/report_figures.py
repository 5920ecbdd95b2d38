"""The figures of a report."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from search.compare.reliability import Bin
from search.report.report_data import SettingReport
from search.results.intervals import wilson
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
from search.results.summary import HIT_RANKS, ResultRow

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure


def figures_of(report: SettingReport) -> dict[str, Figure]:
    """Return the figures by name."""
    rows = [row for row in report.comparison.rows if row.drawable]
    found: dict[str, Figure] = {}
    if rows:
        found["accuracy-tokens"] = tradeoff_figure(rows)
        found["accuracy-calls"] = tradeoff_figure(rows, cost="agent_calls")
    curved = [row for row in rows if row.curve]
    if curved:
        found["anytime"] = _anytime_figure(curved)
    ranked = [row for row in rows if len(row.hits) > 1]
    if ranked:
        found["hits"] = _hits_figure(ranked)
    if report.calibration:
        found["calibration"] = _calibration_figure(report.calibration, report.agents)
    return found


def _looks() -> Iterator[dict[str, Any]]:
    """Yield the color and line style of successive curves."""
    return ({"color": color, "linestyle": style} for style in cycle(("-", "--", ":", "-.")) for color in COLORS)


def _figure(lines: int, height: float = HEIGHT) -> Figure:
    """Return an empty figure with space for a legend of ``lines`` lines."""
    return figure_class()(figsize=(WIDTH, height + legend_height(lines)), dpi=200, layout="constrained")


def _anytime_figure(rows: Sequence[ResultRow]) -> Figure:
    figure = _figure(len(rows))
    axes, handles = figure.subplots(), []
    for row, look in zip(rows, _looks(), strict=False):
        spent, hits = [point.tokens for point in row.curve], [100 * point.hit for point in row.curve]
        handles += axes.plot(spent, hits, lw=1.8, label=plot_text(row.label), **look)
        low, high = ([100 * end for end in ends] for ends in zip(*(point.interval for point in row.curve), strict=True))
        axes.fill_between(spent, low, high, color=look["color"], alpha=0.15, lw=0)
    dress(axes, "generated tokens per problem", "Hit@1 (%) if stopped there")
    spent = [point.tokens for row in rows for point in row.curve]
    axes.set_xscale("log")
    plain_log_ticks(axes, min(spent), max(spent))
    add_legend(figure, handles)
    return figure


def _hits_figure(rows: Sequence[ResultRow]) -> Figure:
    figure = _figure(len(rows))
    axes, handles = figure.subplots(), []
    for row, look in zip(rows, _looks(), strict=False):
        hits = [100 * spread.mean for spread in row.hits.values()]
        handles += axes.plot(list(row.hits), hits, marker="o", ms=5, label=plot_text(row.label), **look)
    dress(axes, "k", "Hit@k (%)")
    axes.set_xticks(HIT_RANKS)
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
