"""The description of a run in its store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mas_gym.internal.json_types import JSONMapping
from mas_gym.systems.graph import MAS
from search.usage import Usage

RECORDED = "recorded"
"""Class of the planner in the config of an imported run."""


def is_recorded(config: JSONMapping) -> bool:
    """Whether a run was imported, by its config."""
    planner = config.get("planner")
    return isinstance(planner, Mapping) and planner.get("class") == RECORDED


@dataclass(frozen=True)
class RunInfo:
    """A run in a store.

    Attributes:
        run: The digest of its config, 32 hexadecimal digits.
        name: Its name; None if it was given none.
        config: What determines its results: planner, MAS, policy, critic, seed, sampling, budget, grading.
        facts: What does not: versions, task, when it was first started, how many ``problems`` it searches (None if
            unknown), what was ``spent`` on it, and the ``money`` spent, if the policy has a price.
        searches: How many searches it holds, failed ones included.
        failed: How many of them failed.
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

        return load_mas(self.config["mas"])

    @property
    def spent(self) -> Usage:
        """What was spent on it, failed and dropped searches included; seconds are wall-clock time."""
        return Usage(**self.facts.get("spent", {}))

    @property
    def label(self) -> str:
        """Planner, critic and seed in a few words."""
        critic = self.config["critic"]["name"] if self.config["critic"] else ""
        return f"{self.facts['planner']}{' + ' + critic if critic else ''}, seed {self.config['seed']}"
