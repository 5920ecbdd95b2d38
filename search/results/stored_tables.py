"""Comparison tables of stored runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path

from mas_gym.errors import ConfigError
from mas_gym.internal.json_types import JSONObject
from search.prices import Prices
from search.results.outcomes import Outcome
from search.results.run_info import RunInfo, is_recorded
from search.results.summary import find_row, summarize
from search.results.table import Comparison
from search.usage import Usage

_ROW = ("planner", "critic", "seed")
_RECORDED_ROW = (*_ROW, "mas", "policy")


@dataclass(frozen=True)
class Setting:
    """Comparable runs, which differ only in planner, critic and seed; imported runs may also differ in agents.

    Attributes:
        title: Short description of the shared settings.
        runs: The runs, oldest first.
        labels: Planner and critic of each run, as named in tables.
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


def one_setting(runs: Iterable[RunInfo]) -> Setting:
    """Return the setting that all runs share.

    Raises:
        ConfigError: There are no runs, or they differ in more than planner, critic and seed.
    """
    groups = settings(runs)
    if len(groups) != 1:
        listed = "; ".join(f"{group.title}: {', '.join(run.run[:8] for run in group.runs)}" for group in groups)
        raise ConfigError(
            f"expected runs that differ only in planner, critic and seed, got runs of {len(groups)} settings "
            f"({listed or 'no run'}); choose runs of one setting with runs=[...]"
        )
    return groups[0]


def table_of(store: Path, setting: Setting, outcomes: Sequence[Outcome], baseline: str = "") -> Comparison:
    """Return the table of one setting of a store, with rows by increasing cost."""
    rows = tuple(sorted(summarize(outcomes), key=lambda row: (isnan(row.tokens.mean), row.tokens.mean)))
    name = find_row(rows, baseline).label if rows else ""
    seeds = sorted({run.config["seed"] for run in setting.runs})
    facts = {"store": store.name, "seeds": seeds, "baseline": name}
    return Comparison(rows, tuple(outcomes), name, setting.title, facts)
