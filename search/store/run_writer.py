"""Resumes runs: loads finished searches from a store and writes new ones."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import MappingProxyType

from mas_gym.errors import DataError, StoreError
from mas_gym.internal.database import transaction
from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.policies.usage_meters import Meter, money_of
from mas_gym.systems.dynamics import Dynamics
from mas_gym.tasks.base import Problem
from search.costs import Usage
from search.models.base import SampleOrigin
from search.plan import Plan
from search.results.run_info import RunInfo
from search.setup import Setup
from search.store.run_identity import config_differences, named_alike, run_config, run_facts
from search.store.run_lock import run_lock
from search.store.search_rows import (
    metadata_text,
    plan_of,
    read_columns,
    read_run,
    rows_of,
    seal_run,
    search_id,
    searches_of,
    snapshot,
    write_search,
)
from search.store.table_schema import FORMAT, Damage, digest, explained

logger = logging.getLogger("search.store")

Origins = Mapping[tuple[bytes, str], SampleOrigin]
"""The origin of each message, by the digest of its state and by its text."""

_TOLD = 4
"""Maximum number of differences listed between a run and a stored one."""


class RunWriter:
    """A run in a store, opened for exclusive writing.

    Attributes:
        earlier: The run's cost in earlier processes, including dropped searches; seconds are wall-clock time.
    """

    def __init__(
        self,
        path: Path,
        config: JSONMapping,
        facts: JSONMapping,
        name: str | None,
        meters: Mapping[str, Meter] = MappingProxyType({}),
    ) -> None:
        """Open the store, and start or resume the run.

        Args:
            path: The file.
            config: As returned by `run_config`.
            facts: As returned by `run_facts`.
            name: Name of the run, or None.
            meters: The policy's meters. Their monetary cost is recorded for this run, if they have a price.

        Raises:
            StoreError: The store cannot be written, another process is writing the run, or the name belongs to a run
                with different settings.
        """
        text = json.dumps(config, sort_keys=True)
        self.path, self.run = path, digest(text).hex()
        self._dynamics = Dynamics(RunInfo(self.run, name, config, facts, 0, 0).mas)
        with ExitStack() as opened:
            self._connection = opened.enter_context(closing(FORMAT.connect(path, create=True)))
            opened.enter_context(run_lock(path, self.run))
            with explained(path), transaction(self._connection):
                self._start(name, config, text, facts)
            self._meters, self._paid, self._money = meters, money_of(meters) or 0.0, self._facts.get("money", 0.0)
            self.earlier = Usage(**self._facts.get("spent", {}))
            self._files = opened.pop_all()
        self._fresh, self._opened = Usage(), perf_counter()

    def _start(self, name: str | None, config: JSONMapping, text: str, facts: JSONMapping) -> None:
        self._check_name(name, config)
        found = self._known()
        if found is None:
            self._announce(config, facts)
            row = (self.run, name, text, json.dumps(facts, sort_keys=True))
            self._connection.execute("INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, 0, 0, NULL)", row)
        elif name is not None and found.name is None:
            self._connection.execute("UPDATE runs SET name = ? WHERE run = ?", (name, self.run))
        elif name is not None and found.name != name:
            raise StoreError(
                f"store {self.path}: the run with these settings is named {found.name!r}, got {name!r}; "
                f"use run_name={found.name!r}, or no run_name"
            )
        self._facts: JSONObject = dict(facts if found is None else found.facts)
        # Resuming with more problems increases the number of problems.
        wanted = max(facts.get("problems") or 0, self._facts.get("problems") or 0) or None
        if found is not None and (wrong := searches_of(self._connection, self.run)[1]):
            logger.warning("store %s: %s; the lost searches run again", self.path, wrong)
            self._connection.execute("REINDEX searches")
        # Read the table itself, because a corrupt index may miss rows.
        count = "(SELECT count({}) FROM searches NOT INDEXED WHERE run = ?1)"
        self._connection.execute(
            f"UPDATE runs SET searches = {count.format('*')}, failed = {count.format('error')} WHERE run = ?1",
            (self.run,),
        )
        self._note(problems=wanted)

    def _known(self) -> RunInfo | None:
        """Return the run's row; None if it is missing, or corrupt and must be rewritten."""
        try:
            return read_run(self._connection, self.run)
        except Damage as damage:
            logger.warning("store %s: the facts of this run are damaged (%s) and are rewritten", self.path, damage)
            return None

    def _check_name(self, name: str | None, config: JSONMapping) -> None:
        row = self._connection.execute("SELECT run FROM runs WHERE name = ?", (name,)).fetchone()
        if row is None or row[0] == self.run:
            return
        try:
            old = read_run(self._connection, row[0])
        except Damage as damage:
            raise StoreError(f"store {self.path}: the run {name!r} is damaged ({damage}); use another name") from damage
        assert old is not None
        changed = "; ".join(config_differences(old.config, config))
        raise StoreError(
            f"store {self.path}: the run {name!r} has different settings: {changed}; "
            "use the same settings, another name, or another store"
        )

    def _announce(self, config: JSONMapping, facts: JSONMapping) -> None:
        """Warn, with the reason, if a stored run of the same planner, critic, policy and task is not resumed."""
        alike: list[tuple[int, str, RunInfo, list[str]]] = []
        for (run,) in self._connection.execute("SELECT run FROM runs").fetchall():
            try:
                info = read_run(self._connection, run)
            except Damage:
                continue
            if info is not None and named_alike(info, config, facts):
                changed = config_differences(info.config, config)
                alike.append((len(changed), run, info, changed))
        if alike:
            _, run, info, changed = min(alike, key=lambda entry: entry[:2])
            more = f"; and {len(changed) - _TOLD} more" if len(changed) > _TOLD else ""
            logger.warning(
                "store %s: this run does not resume the stored run %s (%s), because %s%s",
                self.path,
                ascii(info.name or run[:8]),
                ascii(info.label),
                "; ".join(changed[:_TOLD]),
                more,
            )

    def _note(self, **facts: object) -> None:
        self._facts = self._facts | facts
        row = (json.dumps(self._facts, sort_keys=True), self.run)
        self._connection.execute("UPDATE runs SET facts = ? WHERE run = ?", row)
        seal_run(self._connection, self.run)

    def load(self, problem: Problem) -> Plan | None:
        """Return the finished search of a problem; None if it is missing, failed or corrupt.

        Raises:
            DataError: The stored search has another question.
            ConfigError: The problem's metadata is not JSON-serializable.
        """
        metadata_text(problem)
        try:
            with explained(self.path), snapshot(self._connection):
                found = read_columns(self._connection, [search_id(self.run, problem.id)], document=True)
                row = next(iter(rows_of(found)), None)
                if row is None or row["error"] is not None:
                    return None
                plan = plan_of(row, self._dynamics)
        except Damage as damage:
            logger.warning(
                "store %s: the search of %s is damaged (%s) and is run again", self.path, ascii(problem.id), damage
            )
            return None
        if (row["question"], row["reference"], row["kind"]) != (problem.question, problem.answer, problem.kind):
            raise DataError(
                f"store {self.path}: the problem {problem.id!r} has changed since it was searched; "
                "use the same data, or another store"
            )
        return plan

    def save(self, searches: Iterable[tuple[Problem, Plan, Origins]], cost: Usage | None = None) -> None:
        """Write finished searches in one transaction, with what they cost this run; None for imported ones."""
        with explained(self.path), transaction(self._connection):
            for problem, plan, origins in searches:
                seeds = {key: origin.seed for key, origin in origins.items() if origin.seed is not None}
                write_search(self._connection, self.run, problem, plan, seeds)
            if cost is None:
                self._note()
                return
            fresh = self._spend(cost)
        # Ctrl-C may come before this line: the caller then has not counted the cost either, and adds it at the end.
        self._fresh = fresh

    def spend(self, usage: Usage) -> None:
        """Add the cost of dropped searches, which are not saved."""
        try:
            with explained(self.path), transaction(self._connection):
                self._fresh = self._spend(usage)
        except StoreError as error:
            # The run is ending, possibly because of this error.
            logger.warning("the cost of dropped searches is not counted: %s", error)

    def _spend(self, usage: Usage) -> Usage:
        """Write the run's cost with that of another search; return the cost in this process."""
        fresh = self._fresh + usage
        total = replace(self.earlier + fresh, seconds=self.earlier.seconds + perf_counter() - self._opened)
        # This includes the cost so far of open requests, because servers do not refund it.
        money = money_of(self._meters)
        paid = {} if money is None else {"money": self._money + money - self._paid}
        self._note(spent=total.to_dict(), **paid)
        return fresh

    def close(self) -> None:
        """Close the file and release the run; safe to call twice."""
        self._connection.close()
        self._files.close()


def open_run_writer(setup: Setup) -> RunWriter | None:
    """Open a run in its store for writing; None for a run without a store.

    Raises:
        IdentityError: A part of the run has no identity.
        StoreError: As for `RunWriter`.
    """
    if setup.store is None:
        return None
    return RunWriter(Path(setup.store), run_config(setup), run_facts(setup), setup.run_name, setup.policy.meters)
