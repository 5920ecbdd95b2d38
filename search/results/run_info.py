"""The description of a run in its store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mas_gym.internal.json_types import JSONMapping
from mas_gym.systems.graph import MAS
from search.usage import Usage

RECORDED = "recorded"
"""Planner class in the config of an imported run."""


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
    def label(self) -> str:
        """Short label with planner, critic and seed."""
        critic = self.config["critic"]["name"] if self.config["critic"] else ""
        return f"{self.facts['planner']}{' + ' + critic if critic else ''}, seed {self.config['seed']}"
