"""``mas-gym report``: the contents of a run store as one self-contained HTML page with figures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from mas_gym.internal.text import cut
from mas_gym.internal.whole_files import write_file
from search.pages.templates import render
from search.pages.tree_page import write_tree_page
from search.prices import Prices
from search.report.log_report import LONGEST, Failure
from search.report.report_data import SettingReport, read_reports
from search.report.report_figures import data_url, figures_of
from search.report.store_pages import regrade_tables
from search.results.intervals import wilson
from search.results.outcomes import Outcome
from search.results.plots import save_figure
from search.results.table_formats import TextTable, failure_tables, text_tables

if TYPE_CHECKING:
    from search import Store


def write_report(
    store: Store,
    path: Path,
    *,
    runs: Iterable[str] = (),
    baseline: str = "",
    figures: Path | None = None,
    prices: Prices | None = None,
) -> list[SettingReport]:
    """Write a store's report as a self-contained HTML page; return its data.

    The trees of a log's clearest failures are separate pages, in the folder ``NAME-trees`` next to the page. The
    figures are also written to a folder as PNG files, if it is given. Other arguments and errors are as for
    `read_reports`.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    sections = []
    reports = read_reports(store, runs, baseline, prices)
    trees = path.with_name(f"{path.stem}-trees")
    for number, report in enumerate(reports, 1):
        drawn = figures_of(report)
        if figures is not None:
            figures.mkdir(parents=True, exist_ok=True)
            for name, figure in drawn.items():
                save_figure(figure, figures / (f"{name}.png" if len(reports) == 1 else f"{number}-{name}.png"))
        pictures = {name: data_url(figure) for name, figure in drawn.items()}
        sections.append(_section(store, report, pictures, trees))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, render("report.html", title=store.path.name, sections=sections))
    return reports


_CAPTIONS = {
    "accuracy-tokens": "Accuracy against generated tokens.",
    "accuracy-calls": "Accuracy against agent calls.",
    "anytime": "Accuracy if every search had stopped at the same budget, with 95% bands over problems.",
    "hits": "Hit@k: a right answer among the first k candidates.",
    "calibration": "Calibration by agent: the share of right answers below states of similar value after the agent's "
    "messages, in bins of about the same number of states, with 95% intervals over states. A calibrated critic follows "
    "the dotted line; a useful critic rises from left to right after every agent.",
}


def _section(store: Store, report: SettingReport, pictures: Mapping[str, str], trees: Path) -> dict[str, object]:
    """Return the values of one section: tables, pictures, and the tables and failures of logs below the pictures."""
    found = report.comparison
    more = [table for label, log in report.logs.items() for table in log.tables(label)]
    more += _stop_table(found.outcomes) + regrade_tables(report.regraded) + failure_tables(found.rows)
    return {
        "tables": text_tables(found.rows, found.title, found.baseline),
        "pictures": [{"url": url, "caption": _CAPTIONS[name]} for name, url in pictures.items()],
        "more": more,
        "failures": _failures(store, report, trees),
    }


def _failures(store: Store, report: SettingReport, folder: Path) -> dict[str, list[Failure]]:
    """Return the clearest failures of each log, and write the trees of their questions into a folder."""
    found: dict[str, list[Failure]] = {}
    runs = {label: run.run for run, (label, _) in zip(report.setting.runs, report.setting.labels, strict=True)}
    for label, log in report.logs.items():
        for one in log.failures:
            problem, plan = store.search(one.problem, runs[label])
            lines = found.setdefault(label, [])
            page = folder / f"{runs[label][:8]}-{len(lines) + 1}.html"
            write_tree_page(plan, page, {"problem": problem.id, "planner": label}, problem.answer or None)
            address = quote(f"{folder.name}/{page.name}")
            lines.append(one._replace(question=cut(problem.question, LONGEST), reference=problem.answer, tree=address))
    return found


_CLAIM = re.compile(r"probability (\d\.\d+) above ")
"""Matches the probability in a stop reason of `search.planners.stop_rules.Confident`."""


def _stop_table(outcomes: Sequence[Outcome]) -> list[TextTable]:
    """Return a table of searches ended by stop rules, if any, to check whether thresholds still hold."""
    lines: list[tuple[str, ...]] = []
    groups: dict[str, list[Outcome]] = {}
    for one in outcomes:
        if one.error is None and one.correct is not None:
            groups.setdefault(one.label, []).append(one)
    for label, group in groups.items():
        settled = [one for one in group if (one.stopped or "").startswith(("settled", "majority settled"))]
        if not settled:
            continue
        stopped = {id(one) for one in settled}
        claims = [float(found[1]) for one in settled if (found := _CLAIM.search(one.stopped or ""))]
        expected = f"{100 * sum(claims) / len(claims):.1f}" if claims else ""
        for name, some in (("yes", settled), ("no", [one for one in group if id(one) not in stopped])):
            if some:
                right, span = sum(one.hit(1) for one in some), wilson([one.hit(1) for one in some])
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
    head = ("Search", "Settled early", "Searches", "Right, %", "Expected, %", "TOK")
    return [TextTable(head, lines, "Stop rules", note)]
