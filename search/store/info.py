"""What a store knows of its runs."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mas_gym.graph import MAS
from search.plan import Usage
from search.store.file import Damage, Held, check_types, checksum, digest


@dataclass(frozen=True)
class RunInfo:
    """A run in a store.

    Attributes:
        run: The digest of its config, 32 hexadecimal digits.
        name: Its name; None if it was given none.
        config: What determines its results: planner, MAS, policy, critic, seed, sampling, budget, grading.
        facts: What does not: versions, task, when it was first started, how many ``problems`` it is to search (None if
            unknown), what was ``spent`` on it, and the ``money`` spent, if the policy has a price.
        searches: How many searches it holds, failed ones included.
        failed: How many of them failed.
    """

    run: str
    name: str | None
    config: Mapping[str, Any]
    facts: Mapping[str, Any]
    searches: int
    failed: int

    @property
    def mas(self) -> MAS:
        """The system that was searched."""
        from mas_gym.loading import load_mas

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


def read_run(connection: sqlite3.Connection, run: str) -> RunInfo | None:
    """Read a run's row; None if there is none.

    Raises:
        Damage: It is not what was written.
    """
    values = connection.execute("SELECT * FROM runs WHERE run = ?", (run,)).fetchone()
    if values is None:
        return None
    check_types("runs", values)
    run, name, config, facts, *seals = values
    if digest(config).hex() != run:
        raise Damage("its config is not what was written")
    if seals and checksum(values[:-1]) != seals[-1]:
        raise Damage("its row is not what was written")
    if seals:
        held = Held.unpack(seals[0])
    else:
        query = "SELECT count(*), count(error) FROM searches WHERE run = ?"
        held = Held(*connection.execute(query, (run,)).fetchone())
    try:
        read = json.loads(facts)
        info = RunInfo(run, name, json.loads(config), read, held.searches, held.failed)
        # What everything that lists runs goes by.
        _ = (info.label, info.spent, str(read["started"]))
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise Damage(f"its facts cannot be read: {error}") from error
    return info
