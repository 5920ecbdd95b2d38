"""The description of a run in its store, and groups of comparable runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mas_gym.errors import ConfigError
from mas_gym.internal.json_types import JSONMapping
from mas_gym.systems.graph import MAS
from search.costs import Usage

RECORDED = "recorded"
"""Planner class in the config of an imported run."""
_ROW = ("planner", "critic", "seed")
_RECORDED_ROW = (*_ROW, "mas", "policy")


def is_recorded(config: JSONMapping) -> bool:
    """Return whether a run with this config was imported."""
    planner = config.get("planner")
    return isinstance(planner, Mapping) and planner.get("class") == RECORDED


@dataclass(frozen=True)
class RunInfo:
    """A run in a store.

    Attributes:
        run: The digest of its config, 32 hexadecimal digits.
        name: The run's name, or None.
        config: The settings that determine its results: planner, MAS, policy, critic, seed, sampling, budget, grading.
        facts: Other facts: versions, task, time of the first start, the number of ``problems`` (None if unknown), the
            usage ``spent``, and the ``money`` spent, if the policy has a price.
        searches: Number of stored searches, including failed ones.
        failed: Number of failed searches.
    """

    run: str
    name: str | None
    config: JSONMapping
    facts: JSONMapping
    searches: int
    failed: int

    @property
    def mas(self) -> MAS:
        """The system that was searched."""
        from mas_gym.systems.loading import load_mas

        # A store comes from anybody, so its config never carries policies.
        return load_mas({key: value for key, value in self.config["mas"].items() if key != "policies"})

    @property
    def system(self) -> str:
        """The name of the system, without loading it."""
        return str(self.config["mas"]["name"])

    @property
    def spent(self) -> Usage:
        """The run's cost, including failed and dropped searches; seconds are wall-clock time."""
        return Usage(**self.facts.get("spent", {}))

    @property
    def critic(self) -> str:
        """The name of the critic, ``""`` for none."""
        return str(self.config["critic"]["name"]) if self.config["critic"] else ""

    @property
    def label(self) -> str:
        """Short label with planner, critic and seed."""
        return f"{self.facts['planner']}{' + ' + self.critic if self.critic else ''}, seed {self.config['seed']}"


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
    names = {key: (str(run.facts["planner"]), run.critic) for key, run in zip(keys, runs, strict=True)}
    marks = {key: run.run[:6] for key, run in zip(reversed(keys), reversed(runs), strict=True)}
    common = Counter(names.values())
    return [
        names[key] if common[names[key]] == 1 else (f"{names[key][0]} [{marks[key]}]", names[key][1]) for key in keys
    ]


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
