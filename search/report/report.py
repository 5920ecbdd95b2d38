"""``mas-gym report``: the contents of a run store as one self-contained HTML page with figures."""

from __future__ import annotations

import base64
import io
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mas_gym.errors import ConfigError, need
from mas_gym.internal.text import by_cause
from search.compare import Comparison
from search.compare.blame import Falls
from search.compare.reliability import CONFIDENT, Bin, ScoredStates
from search.prices import Prices
from search.report.canary_panel import canary_panel
from search.report.listing import regrade_table, report_page
from search.results.intervals import wilson
from search.results.outcomes import Outcome
from search.results.plots import (
    COLOURS,
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
    save_figure,
    tradeoff_figure,
)
from search.results.stored_tables import Setting, cost_of, settings, table_of
from search.results.summary import ResultRow, anytime_curve
from search.results.table_formats import html_table

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

    from search import Store
    from search.results.summary import CurvePoint
    from search.store.regrading import Regraded

_RANKS = (1, 2, 3, 5, 8, 10)
_MOST_AGENTS = 12
"""Maximum number of agents in a blame table; with more agents, only those blamed are shown."""


@dataclass
class SettingReport:
    """The report data of one setting's runs.

    Attributes:
        setting: The runs.
        comparison: Comparison table of the runs.
        calibration: For each row with values, bins by the last agent.
        blamed: Number of wrong answers by blamed agent, or "nobody", for each row whose critic values are stored.
        agents: Names of the agents, for each row.
        regraded: The regraded runs, by grading.
    """

    setting: Setting
    comparison: Comparison
    calibration: dict[str, dict[int, list[Bin]]] = field(default_factory=dict)
    blamed: dict[str, Mapping[str, int]] = field(default_factory=dict)
    agents: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    regraded: tuple[Regraded, ...] = ()


def read_reports(
    store: Store, runs: Iterable[str] = (), baseline: str = "", prices: Prices | None = None
) -> list[SettingReport]:
    """Read the data of one report per setting; each search is read once.

    Args:
        store: The store.
        runs: Which runs, as in `Store.find`; all by default.
        baseline: The row to compare the others with, in each setting that has it.
        prices: Prices of the models, which add the column USD.

    Raises:
        UnknownNameError: A model has no price.
        ConfigError: There are no runs, or no row matches the baseline.
        StoreError: Searches are corrupt, or there is no such run.
    """
    found = [store.find(run) for run in runs] or store.runs()
    if not found:
        raise ConfigError(f"store {store.path}: expected at least one run, got none; write some with --store")
    reports = [_read(store, setting, baseline, prices) for setting in settings(found)]
    rows = [row for report in reports for row in report.comparison.rows]
    if baseline and not any(baseline in (row.label, row.planner) for row in rows):
        labels = ", ".join(dict.fromkeys(repr(row.label) for row in rows)) or "no rows, because no search has ended"
        raise ConfigError(f"baseline: expected one of {labels}, got {baseline!r}")
    return reports


def _read(store: Store, setting: Setting, baseline: str, prices: Prices | None) -> SettingReport:
    outcomes: list[Outcome] = []
    states: dict[str, ScoredStates] = {}
    blamed: dict[str, Counter[str]] = {}
    agents: dict[str, tuple[str, ...]] = {}
    for run, (planner, critic) in zip(setting.runs, setting.labels, strict=True):
        label = f"{planner} + {critic}" if critic else planner
        agents[label] = tuple(agent.name for agent in run.mas.agents)
        if not store.has_values(run.run):
            outcomes += store.outcomes(run.run, planner, critic, cost=cost_of(run, prices))
            continue
        of_row, falls = states.setdefault(label, ScoredStates()), Falls()
        for outcome, tree in store.values(run.run, planner, critic, cost_of(run, prices)):
            outcomes.append(outcome)
            of_row.add_tree(tree)
            falls.add(tree, outcome.correct)
        blamed.setdefault(label, Counter()).update(falls.counts(agents[label]))
    known = any(baseline in (f"{one.planner} + {one.critic}", one.planner) for one in outcomes)
    return SettingReport(
        setting,
        table_of(store.path, setting, outcomes, baseline if known else ""),
        {label: bins for label, of_row in states.items() if (bins := of_row.bins())},
        {label: counts for label, counts in blamed.items() if counts},
        agents,
        tuple(line for run in setting.runs for line in store.regraded(run.run)),
    )


def write_report(
    store: Store | None,
    path: Path,
    *,
    runs: Iterable[str] = (),
    baseline: str = "",
    figures: Path | None = None,
    prices: Prices | None = None,
    service_log: Path | None = None,
) -> list[SettingReport]:
    """Write a store's report as a self-contained HTML page; return its data.

    Args:
        store: The store; None for a page about a service alone.
        path: The page.
        runs: As for `read_reports`.
        baseline: As for `read_reports`.
        figures: Folder for the figures as PNG files; None for none.
        prices: As for `read_reports`.
        service_log: A log of ``mas-gym serve`` with canary requests, which adds a panel (`search.report.canary_panel`).

    Raises:
        DataError: The log contains no canary request.
        UnknownNameError: As for `read_reports`.
        ConfigError: As for `read_reports`.
        MissingDependencyError: matplotlib is not installed.
        StoreError: As for `read_reports`.
    """
    parts = [] if service_log is None else [canary_panel(service_log)]
    reports = [] if store is None else read_reports(store, runs, baseline, prices)
    for number, report in enumerate(reports, 1):
        drawn = report_figures(report)
        if figures is not None:
            figures.mkdir(parents=True, exist_ok=True)
            for name, draw in drawn.items():
                save_figure(draw(), figures / (f"{name}.png" if len(reports) == 1 else f"{number}-{name}.png"))
        parts.append(_section(report, {name: data_url(draw()) for name, draw in drawn.items()}))
    path.parent.mkdir(parents=True, exist_ok=True)
    source = store.path if store is not None else service_log
    assert source is not None, "expected a store or a log"
    path.write_text(report_page(source.name, parts), encoding="utf-8")
    return reports


def write_tensorboard(reports: Sequence[SettingReport], folder: Path) -> None:
    """Write reports for TensorBoard: the figures as images, and a run per row with scalars.

    The scalars are Hit@k, the costs, and Hit@1 over generated tokens (as steps).

    Raises:
        MissingDependencyError: TensorBoard or matplotlib is not installed.
    """
    summary = need("tensorboard.summary", "TensorBoard")
    for number, report in enumerate(reports, 1):
        _write_images(report, folder / f"{number} figures")
        for row in report.comparison.rows:
            writer = summary.Writer(str(folder / f"{number} {row.label}".replace("/", "_")))
            for k, spread in row.hits.items():
                writer.add_scalar(f"hit@{k}", spread.mean, 0)
            for name in ("tokens", "agent_calls", "reward_calls"):
                writer.add_scalar(name, row.cost(name).mean, 0)
            for tokens, hit in row.curve:
                writer.add_scalar("hit@1 over tokens", hit, round(tokens))
            writer.close()


def _write_images(report: SettingReport, folder: Path) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    for name, draw in report_figures(report).items():
        figure, out = draw(), io.BytesIO()
        figure.savefig(out, format="png")
        width, height = (round(side * figure.dpi) for side in figure.get_size_inches())
        image = Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=out.getvalue())
        writer.add_event(
            Event(step=0, wall_time=time.time(), summary=Summary(value=[Summary.Value(tag=name, image=image)]))
        )
    writer.close()


def report_figures(report: SettingReport) -> dict[str, Callable[[], Figure]]:
    """Return a function that draws each figure, by name."""
    rows = [row for row in report.comparison.rows if row.tokens.mean > 0]
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
    return [one for one in report.comparison.outcomes if (one.planner, one.critic) == (row.planner, row.critic)]


def _looks() -> Iterator[dict[str, Any]]:
    """Yield the colour and line style of successive curves."""
    return ({"color": colour, "linestyle": style} for style in cycle(("-", "--", ":", "-.")) for colour in COLOURS)


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
    for axes, (label, groups) in zip(figure.subplots(len(rows), squeeze=False).flat, rows.items(), strict=True):
        for index, bins in groups.items():
            right, speaker = [100 * one.right for one in bins], agents[label][index]
            name = f"after {plot_text(speaker)}"
            [handles[speaker]] = axes.plot(
                [one.value for one in bins], right, marker="o", ms=4, label=name, **looks[speaker]
            )
        dress(axes, "value", "right answers below (%)", label)
    add_legend(figure, [handles[speaker] for speaker in speakers])
    return figure


_DARK = {
    COLOURS[0].lower(): ("blue", "#4da3e8"),
    COLOURS[5].lower(): ("sky", "#a6d8ff"),
    INK: ("ink", "#e6eaf0"),
    FAINT: ("faint", "#2c3541"),
    PAPER: ("paper", "#1a2028"),
    NO_CRITIC: ("dim", "#94a1b2"),
}
"""Figure colours with a dark-mode variant: name and dark colour."""


def svg(figure: Figure) -> str:
    """Return a figure as an SVG picture that follows the reader's colour scheme."""
    out = io.StringIO()
    figure.savefig(out, format="svg")
    text = out.getvalue()
    for colour, (name, _) in _DARK.items():
        text = text.replace(colour, f"var(--{name})")
    light = "".join(f"--{name}:{colour};" for colour, (name, _) in _DARK.items())
    dark = "".join(f"--{name}:{colour};" for name, colour in _DARK.values())
    style = f"<style>:root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}</style>"
    return text.replace("<defs>", f"{style}<defs>", 1)


def data_url(figure: Figure) -> str:
    """Return a figure as `svg` in a data URL."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg(figure).encode()).decode()


_CAPTIONS = {
    "accuracy-tokens": "Accuracy against generated tokens.",
    "accuracy-calls": "Accuracy against agent calls.",
    "anytime": "Accuracy if every search had stopped at the same budget, with 95% bands over problems.",
    "hits": "Hit@k: a right answer among the first k candidates.",
    "calibration": "Calibration by agent: the share of right answers below states of similar value after the agent's "
    "messages, in bins of about equally many states. A useful critic rises from left to right after every agent.",
}


def _section(report: SettingReport, pictures: Mapping[str, str]) -> str:
    parts = [report.comparison._repr_html_()]
    for name, data in pictures.items():
        caption = escape(_CAPTIONS[name])
        parts.append(f'<figure><img src="{data}" alt="{caption}"><figcaption>{caption}</figcaption></figure>')
    if report.blamed:
        parts.append(_blame_table(report))
    parts += _stop_table(report.comparison.outcomes)
    parts.append(regrade_table(report.regraded))
    failures = [(row.label, reason, n) for row in report.comparison.rows for reason, n in by_cause(row.failures)]
    if failures:
        parts.append(html_table(("failed searches", "reason", "number"), failures))
    return "\n".join(parts)


_CLAIM = re.compile(r"probability (\d\.\d+) above ")
"""Matches the probability in a stop reason of `search.planners.stop_rules.Confident`."""


def _stop_table(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a table of searches ended by stop rules, if any, to check whether thresholds still hold."""
    lines: list[tuple[object, ...]] = []
    groups: dict[str, list[Outcome]] = {}
    for one in outcomes:
        if one.error is None:
            groups.setdefault(f"{one.planner} + {one.critic}" if one.critic else one.planner, []).append(one)
    for label, group in groups.items():
        settled = [one for one in group if (one.stopped or "").startswith(("settled", "majority settled"))]
        if not settled:
            continue
        stopped = {id(one) for one in settled}
        claims = [float(found[1]) for one in settled if (found := _CLAIM.search(one.stopped or ""))]
        expected = f"{100 * sum(claims) / len(claims):.1f}" if claims else ""
        for name, some in (("yes", settled), ("no", [one for one in group if id(one) not in stopped])):
            if some:
                right, span = sum(one.correct for one in some), wilson([one.correct for one in some])
                spent = sum(one.tokens for one in some) / len(some)
                hit = f"{100 * right / len(some):.1f} ({100 * span.low:.1f} to {100 * span.high:.1f})"
                share = f"{len(some):,} of {len(group):,}"
                lines.append((label, name, share, hit, expected if name == "yes" else "", f"{spent:,.1f}"))
    if not lines:
        return []
    note = (
        "Searches that a stop rule ended early. If the expected share of right answers is outside the interval, the "
        "threshold does not fit these problems; calibrate again."
    )
    head = ("search", "settled early", "searches", "right, %", "expected, %", "TOK")
    return [f"<p>{note}</p>" + html_table(head, lines)]


def _blame_table(report: SettingReport) -> str:
    spoke = ((report.agents[label], report.calibration.get(label, ())) for label in report.blamed)
    agents = list(dict.fromkeys(names[place] for names, places in spoke for place in places))
    if len(agents) > _MOST_AGENTS:
        blamed = set().union(*report.blamed.values())
        agents = [name for name in agents if name in blamed]
    names = [*agents, "nobody"]
    lines = [(label, *(str(found.get(name, 0)) for name in names)) for label, found in report.blamed.items()]
    note = (
        'Wrong answers by the agent whose message lowered the value most; "nobody" if no fall is clear '
        f"(confidence below {CONFIDENT:g}). To list the messages, run mas-gym blame."
    )
    return f"<p>{escape(note)}</p>" + html_table(("search", *names), lines)
