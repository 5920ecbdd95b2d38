"""The contents of a report, read from a run store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mas_gym.errors import ConfigError
from search.compare import Comparison
from search.compare.reliability import Bin, tree_states, value_bins
from search.prices import Prices
from search.report.log_report import LogOverview
from search.results.outcomes import Outcome
from search.results.run_info import Setting, is_recorded, settings
from search.results.table import table_of

if TYPE_CHECKING:
    from search import Store
    from search.store.stored_grades import Regraded


@dataclass(frozen=True)
class SettingReport:
    """The report data of one setting's runs.

    Attributes:
        setting: The runs.
        comparison: Comparison table of the runs.
        calibration: Calibration bins by the agent that wrote the last message, for each row that has critic values.
        agents: Names of the agents, for each row.
        regraded: The regraded runs, by grading.
        logs: The contents of the imported runs, for each row.
    """

    setting: Setting
    comparison: Comparison
    calibration: Mapping[str, Mapping[int, list[Bin]]]
    agents: Mapping[str, tuple[str, ...]]
    regraded: tuple[Regraded, ...]
    logs: Mapping[str, LogOverview]


def read_reports(
    store: Store, runs: Iterable[str] = (), baseline: str = "", prices: Prices | None = None
) -> list[SettingReport]:
    """Read the data of one report per setting.

    Args:
        store: The store.
        runs: The runs, as arguments of `Store.find`; all by default.
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
        labels = ", ".join(dict.fromkeys(repr(row.label) for row in rows)) or "none, because no search has ended"
        raise ConfigError(f"baseline: expected the label of one row ({labels}), got {baseline!r}")
    return reports


def _read(store: Store, setting: Setting, baseline: str, prices: Prices | None) -> SettingReport:
    outcomes: list[Outcome] = []
    scored: dict[str, list[str]] = {}
    agents: dict[str, tuple[str, ...]] = {}
    logs: dict[str, LogOverview] = {}
    for run, (planner, critic) in zip(setting.runs, setting.labels, strict=True):
        label = f"{planner} + {critic}" if critic else planner
        agents[label] = tuple(agent.name for agent in run.mas.agents)
        outcomes += store.outcomes(run.run, planner, critic, prices=prices)
        if is_recorded(run.config):
            logs[label] = LogOverview(agents[label], store.plans(run.run))
        if run.critic or label in logs:
            scored.setdefault(label, []).append(run.run)
    bins = {
        label: value_bins(
            state for run in runs for _, document in store.documents(run) for state in tree_states(document)
        )
        for label, runs in scored.items()
    }
    known = any(baseline in (one.label, one.planner) for one in outcomes)
    return SettingReport(
        setting,
        table_of(store.path, setting, outcomes, baseline if known else ""),
        {label: found for label, found in bins.items() if found},
        agents,
        tuple(line for run in setting.runs for line in store.regraded(run.run)),
        logs,
    )
