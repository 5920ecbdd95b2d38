"""Comparison tables of stored runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Protocol

from mas_gym.errors import ConfigError
from mas_gym.internal.json_types import JSONObject
from search.prices import Prices
from search.results.outcomes import Outcome
from search.results.run_info import RunInfo, is_recorded
from search.results.summary import find_row, summarise
from search.results.table import Comparison
from search.usage import Usage


class StoredRuns(Protocol):
    """The part of a run store that comparisons read."""

    path: Path

    def find(self, run: str | None = None) -> RunInfo:
        """Return a run by its name, its digest or the beginning of its digest."""

    def runs(self) -> list[RunInfo]:
        """Return all runs, oldest first."""

    def outcomes(
        self,
        run: str | None = None,
        planner: str = "",
        critic: str = "",
        grading: str | None = None,
        cost: Callable[[Usage], float] | None = None,
    ) -> Iterator[Outcome]:
        """Read the outcomes of a run's searches, under the names of its planner and critic."""


_ROW = ("planner", "critic", "seed")
_RECORDED_ROW = (*_ROW, "mas", "policy")


@dataclass(frozen=True)
class Setting:
    """Comparable runs, which differ only in planner, critic and seed; imported runs may also differ in agents.

    Attributes:
        title: Short description of the shared settings.
        runs: The runs, oldest first.
        labels: For each run, planner and critic in tables.
    """

    title: str
    runs: tuple[RunInfo, ...]
    labels: tuple[tuple[str, str], ...]


def settings(runs: Iterable[RunInfo]) -> list[Setting]:
    """Group runs by shared settings, largest group first."""
    groups: dict[str, list[RunInfo]] = {}
    for run in runs:
        row = _RECORDED_ROW if is_recorded(run.config) else _ROW
        shared = {name: value for name, value in run.config.items() if name not in row}
        key = json.dumps([shared, run.facts.get("task"), run.facts.get("split")], sort_keys=True, default=str)
        groups.setdefault(key, []).append(run)
    found = [Setting(_title(group[0]), tuple(group), tuple(_labels(group))) for group in groups.values()]
    return sorted(found, key=lambda setting: -sum(run.searches for run in setting.runs))


def _title(run: RunInfo) -> str:
    if is_recorded(run.config):
        return "recorded transcripts"
    policy, task = run.config["policy"]["name"], run.facts.get("task") or "own problems"
    return (
        f"{task} {run.facts.get('split') or ''}".strip()
        + f", {run.system}, policy {policy}"
        + (", true reward" if run.config["training"] else "")
    )


def _labels(runs: Sequence[RunInfo]) -> list[tuple[str, str]]:
    """Return the planner and critic of each run, with part of a digest if different rows would have the same name."""
    keys = [json.dumps([run.config["planner"], run.config["critic"]], sort_keys=True) for run in runs]
    names = {key: (_name(run, "planner"), _name(run, "critic")) for key, run in zip(keys, runs, strict=True)}
    marks = {key: run.run[:6] for key, run in zip(reversed(keys), reversed(runs), strict=True)}
    common = Counter(names.values())
    return [
        names[key] if common[names[key]] == 1 else (f"{names[key][0]} [{marks[key]}]", names[key][1]) for key in keys
    ]


def _name(run: RunInfo, part: str) -> str:
    if part == "planner":
        return str(run.facts["planner"])
    critic: JSONObject | None = run.config["critic"]
    return str(critic["name"]) if critic else ""


def cost_of(run: RunInfo, prices: Prices | None) -> Callable[[Usage], float] | None:
    """Return a function that computes the USD cost of a stored run's searches; None without prices.

    Raises:
        MASGymError: As for `search.Prices.rate`, when a search is priced.
    """
    if prices is None:
        return None

    def cost(usage: Usage) -> float:
        # A critic without forwards costs nothing.
        critic = run.config["critic"]["name"] if usage.reward_calls else None
        return prices.rate(run.config["policy"]["name"], critic).usd(usage)

    return cost


def stored_comparison(
    store: StoredRuns,
    runs: str | Iterable[str] = (),
    baseline: str = "",
    grading: str | None = None,
    prices: Prices | None = None,
) -> Comparison:
    """Return the table of stored runs; see `Store.compare`."""
    chosen = [store.find(run) for run in ([runs] if isinstance(runs, str) else runs)] or store.runs()
    groups = settings(chosen)
    if len(groups) != 1:
        listed = "; ".join(f"{group.title}: {', '.join(run.run[:8] for run in group.runs)}" for group in groups)
        raise ConfigError(
            f"expected runs that differ only in planner, critic and seed, got {len(groups)} settings "
            f"({listed or 'no run'}); choose runs with the same settings with runs=[...]"
        )
    setting = groups[0]
    outcomes = [
        outcome
        for run, (planner, critic) in zip(setting.runs, setting.labels, strict=True)
        for outcome in store.outcomes(run.run, planner, critic, grading, cost_of(run, prices))
    ]
    return table_of(store, setting, outcomes, baseline)


def table_of(store: StoredRuns, setting: Setting, outcomes: Sequence[Outcome], baseline: str = "") -> Comparison:
    """Return the table of one setting, with rows by increasing cost."""
    rows = tuple(sorted(summarise(outcomes), key=lambda row: (isnan(row.tokens.mean), row.tokens.mean)))
    name = find_row(rows, baseline).label if rows else ""
    seeds = sorted({run.config["seed"] for run in setting.runs})
    facts = {"store": store.path.name, "seeds": seeds, "baseline": name}
    return Comparison(rows, tuple(outcomes), name, setting.title, facts)
