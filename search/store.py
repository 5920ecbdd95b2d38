"""The run store: one SQLite file with every finished search, its tree, texts, seeds and settings.

A store holds any number of runs. A run is what one `search.run` call does, told
apart by everything that determines its results; calling it again with the same
settings goes on where it stopped. Each search is written in one transaction when
it ends, so that a process may die at any moment.

    with open_store("runs.db") as store:
        for run in store.runs():
            for plan in store.plans(run.run):
                plan.tree
"""

from __future__ import annotations

import dataclasses
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mas_gym.dynamics import Dynamics
from mas_gym.errors import DataError, StoreError, UnknownNameError
from mas_gym.graph import MAS
from mas_gym.policies.meter import money_of
from mas_gym.tasks.base import Problem
from search.plan import Plan
from search.store_file import SCHEMA, RunLock, connect, explained, fingerprint
from search.store_rows import Reader, Writer

if TYPE_CHECKING:
    from search.engine.active import Made, Setup


@dataclass(frozen=True)
class RunInfo:
    """A run in a store.

    Attributes:
        run: Its fingerprint.
        name: The name that it was given; None if none.
        config: All that determines its results: planner, MAS, policy, critic, seed, sampling, budget, grading.
        facts: What does not: versions, task, when it was first started, how many ``problems`` it is to search (None if
            unknown), and the ``money`` spent, if the policy has a price.
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
    def label(self) -> str:
        """Planner, critic and seed in a few words."""
        critic = self.config["critic"]["name"] if self.config["critic"] else ""
        return f"{self.facts['planner']}{' + ' + critic if critic else ''}, seed {self.config['seed']}"


class Store:
    """An open store; a context manager. Reading while another process writes is fine."""

    def __init__(self, path: str | os.PathLike[str], *, create: bool = False) -> None:
        """Open a store.

        Args:
            path: The file.
            create: Make it if it is not there.

        Raises:
            StoreError: There is none, it is of another kind or schema, or it cannot be read.
        """
        self.path = Path(path)
        self._connection = connect(self.path, create=create)
        self._reader = Reader(self._connection)

    def __enter__(self) -> Store:
        """Return the store."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the file."""
        self.close()

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._connection.close()

    def runs(self) -> list[RunInfo]:
        """Return the runs, oldest first."""
        query = (
            "SELECT r.run, name, config, facts, count(s.id), count(s.error) FROM runs r "
            "LEFT JOIN searches s ON s.run = r.run GROUP BY r.run"
        )
        with explained(self.path):
            rows = self._connection.execute(query).fetchall()
        runs = [RunInfo(run, name, json.loads(c), json.loads(f), n, failed) for run, name, c, f, n, failed in rows]
        return sorted(runs, key=lambda info: (info.facts["started"], info.run))

    def find(self, run: str | None = None) -> RunInfo:
        """Return one run.

        Args:
            run: Its name, its fingerprint or the beginning of it; None if the store holds only one.

        Raises:
            StoreError: No run, or more than one, is meant.
        """
        runs = self.runs()
        found = [info for info in runs if run is None or info.name == run or info.run.startswith(run)]
        if len(found) == 1:
            return found[0]
        known = "; ".join(f"{info.name or info.run[:8]}: {info.label}" for info in runs) or "none"
        what = "one run" if run is None else f"one run {run!r}"
        raise StoreError(f"store {self.path}: expected {what}, found {len(found)}; its runs are {known}")

    def plans(self, run: str | None = None, *, trees: bool = True, failed: bool = False) -> Iterator[Plan]:
        """Read the searches of one run, in order of problem id.

        Args:
            run: As in `find`.
            trees: Rebuild trees and candidates; without them reading is many times faster.
            failed: Also give the searches that failed.

        Raises:
            StoreError: As in `find`, or the store is damaged.
        """
        for row, plan in self._read(self.find(run), trees):
            if failed or row["error"] is None:
                yield plan

    def spans(self, run: str | None = None) -> list[tuple[float, float]]:
        """Return from when to when each search of one run was at work, failed ones too, in Unix time, by start."""
        with explained(self.path):
            query = "SELECT finished, seconds FROM searches WHERE run = ?"
            rows = self._connection.execute(query, (self.find(run).run,)).fetchall()
        ends = [(datetime.fromisoformat(finished).timestamp(), seconds) for finished, seconds in rows]
        return sorted((end - seconds, end) for end, seconds in ends)

    def problems(self, run: str | None = None) -> Iterator[Problem]:
        """Read the problems of one run, with their reference answers, in order of id."""
        with explained(self.path):
            for row in self._reader.rows(self.find(run).run):
                yield Problem(row["problem"], row["question"], row["reference"], row["kind"])

    def search(self, problem_id: str, run: str | None = None) -> tuple[Problem, Plan]:
        """Read the search of one problem, with the problem.

        Raises:
            UnknownNameError: The run has not searched it.
            StoreError: As in `find`, or the store is damaged.
        """
        info = self.find(run)
        with explained(self.path):
            row = next(self._reader.rows(info.run, problem_id), None)
            if row is None:
                raise UnknownNameError(f"store {self.path}: the run {info.label} has no search of {problem_id!r}")
            problem = Problem(row["problem"], row["question"], row["reference"], row["kind"])
            return problem, self._reader.plan(row, Dynamics(info.mas))

    def _read(self, info: RunInfo, trees: bool) -> Iterator[tuple[dict[str, Any], Plan]]:
        dynamics = Dynamics(info.mas) if trees else None
        with explained(self.path):
            for row in self._reader.rows(info.run):
                yield row, self._reader.plan(row, dynamics)

    def export(self, path: str | os.PathLike[str], run: str | None = None) -> int:
        """Write the nodes of one run's trees as a Parquet file and return how many there are.

        The file is made beside ``path`` and renamed when it is whole.

        Raises:
            MissingDependencyError: Without pyarrow.
            StoreError: As in `find`.
        """
        from search.export import write_parquet

        info = self.find(run)
        with explained(self.path):
            return write_parquet(self._connection, info, Path(path))

    def dataset(self, run: str | None = None) -> Any:
        """Return the nodes of one run's trees as a ``datasets.Dataset``.

        Raises:
            MissingDependencyError: Without datasets.
            StoreError: As in `find`.
        """
        from search.export import to_dataset

        info = self.find(run)
        with explained(self.path):
            return to_dataset(self._connection, info)


def open_store(path: str | os.PathLike[str]) -> Store:
    """Open a store for reading.

    Raises:
        StoreError: There is no file, or it is no store of this schema.
    """
    return Store(path)


class RunRecord:
    """One run's place in a store, for writing; other processes are kept out of it."""

    def __init__(
        self, path: Path, config: Mapping[str, Any], facts: Mapping[str, Any], name: str | None, policy: object = None
    ) -> None:
        """Open the store, and start the run or take it up again.

        Args:
            path: The file.
            config: All that determines the run's results.
            facts: What does not.
            name: What to call the run.
            policy: Whose money, where its engines have a price, is spent on this run from now on.

        Raises:
            StoreError: The store cannot be written, the run is being written by another process, or the name
                belongs to a run with other settings.
        """
        text = json.dumps(config, sort_keys=True)
        self.path, self.run = path, fingerprint(text).hex()
        self._connection = connect(path, create=True)
        self._reader, self._writer = Reader(self._connection), Writer(self._connection)
        self._dynamics = Dynamics(_mas_of(config))
        try:
            self._lock = RunLock(path, self.run)
        except BaseException:
            self._connection.close()
            raise
        try:
            with explained(path), _transaction(self._connection):
                self._check_name(name, config)
                row = (self.run, name, text, json.dumps(facts, sort_keys=True))
                self._connection.execute("INSERT OR IGNORE INTO runs VALUES (?, ?, ?, ?)", row)
                self._take_up(facts.get("problems"))
        except BaseException:
            self.close()
            raise
        self._policy, self._paid = policy, money_of(policy)
        self._spent = self._facts.get("money", 0.0)

    def _take_up(self, problems: int | None) -> None:
        """Read the run's facts; a run that is taken up with more problems is to search that many."""
        [text] = self._connection.execute("SELECT facts FROM runs WHERE run = ?", (self.run,)).fetchone()
        self._facts: dict[str, Any] = json.loads(text)
        if problems is not None and problems > (self._facts.get("problems") or 0):
            self._note(problems=problems)

    def _note(self, **facts: Any) -> None:
        self._facts |= facts
        row = (json.dumps(self._facts, sort_keys=True), self.run)
        self._connection.execute("UPDATE runs SET facts = ? WHERE run = ?", row)

    def _check_name(self, name: str | None, config: Mapping[str, Any]) -> None:
        if name is None:
            return
        row = self._connection.execute("SELECT run, config FROM runs WHERE name = ?", (name,)).fetchone()
        if row is not None and row[0] != self.run:
            old = json.loads(row[1])
            changed = [
                f"{key} was {_brief(old.get(key))}, now {_brief(v)}" for key, v in config.items() if old.get(key) != v
            ]
            raise StoreError(
                f"store {self.path}: the run {name!r} was made with other settings: {'; '.join(changed)}; "
                "use the same settings, another name, or another store"
            )

    def load(self, problem: Problem) -> Plan | None:
        """Return the finished search of a problem; None if there is none, or if it failed.

        Raises:
            DataError: It was made for another question.
        """
        with explained(self.path):
            row = next(self._reader.rows(self.run, problem.id), None)
            if row is None or row["error"] is not None:
                return None
            if row["question"] != problem.question or row["reference"] != problem.answer:
                raise DataError(
                    f"store {self.path}: the problem {problem.id!r} has changed since it was searched; "
                    "use the same data, or another store"
                )
            return self._reader.plan(row, self._dynamics)

    def save(self, problem: Problem, plan: Plan, made: Mapping[tuple[bytes, str], Made]) -> None:
        """Write a search that has ended, in one transaction."""
        seeds = {key: entry.seed for key, entry in made.items()}
        with explained(self.path), _transaction(self._connection):
            self._writer.search(self.run, problem, plan, seeds)
            # What open requests have cost by now is noted too: the servers will not give it back.
            if (money := money_of(self._policy)) is not None:
                self._note(money=self._spent + money - (self._paid or 0.0))

    def close(self) -> None:
        """Close the file and let other processes in; safe to call twice."""
        self._connection.close()
        self._lock.close()


class _transaction:
    """Commit at the end, roll back on any error, Ctrl-C included."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None:
            self._connection.execute("COMMIT")
        elif self._connection.in_transaction:
            self._connection.execute("ROLLBACK")


def open_record(
    store: Store | str | os.PathLike[str], setup: Setup, problems: Iterable[Problem], policy: Any, name: str | None
) -> RunRecord:
    """Open the place of a run in a store; see `search.run`."""
    path = store.path if isinstance(store, Store) else Path(store)
    return RunRecord(path, run_config(setup, problems, policy), _facts(setup, problems), name, policy)


def run_config(setup: Setup, problems: Iterable[Problem], policy: Any) -> dict[str, Any]:
    """Return all that determines a run's results, JSON-able."""
    return {
        "schema": SCHEMA,
        "planner": _describe(setup.planner),
        "mas": setup.dynamics.mas.to_dict(),
        "policy": _identity(policy),
        "critic": None if setup.critic is None else _identity(setup.critic),
        "seed": setup.seed,
        "training": setup.training,
        "sampling": dataclasses.asdict(setup.sampling),
        "budget": dataclasses.asdict(setup.budget),
        "grading": getattr(problems, "grading", "strict"),
    }


def _describe(planner: object) -> dict[str, Any]:
    """Name a planner's class and its settings, in a form that is the same in every process."""
    kind = type(planner)
    if dataclasses.is_dataclass(planner):
        settings = {field.name: getattr(planner, field.name) for field in dataclasses.fields(planner)}
    else:
        settings = dict(getattr(planner, "__dict__", {}))
    plain = {key: value for key, value in settings.items() if isinstance(value, str | int | float | bool | None)}
    return {"class": f"{kind.__module__}.{kind.__qualname__}", "settings": plain}


def _identity(engine: Any) -> dict[str, Any]:
    return {"name": engine.name, "fingerprint": str(getattr(engine, "fingerprint", ""))}


def _facts(setup: Setup, problems: Iterable[Problem]) -> dict[str, Any]:
    from search.registry import planner_spec

    try:
        installed = version("mas-gym")
    except PackageNotFoundError:
        installed = "unknown"
    return {
        "mas_gym": installed,
        "planner": planner_spec(setup.planner),
        "task": getattr(problems, "name", None),
        "split": getattr(problems, "split", None),
        "problems": len(problems) if isinstance(problems, Sized) else None,
        "started": datetime.now(UTC).isoformat(),
    }


def _mas_of(config: Mapping[str, Any]) -> MAS:
    from mas_gym.loading import load_mas

    return load_mas(MappingProxyType(dict(config["mas"])))


def _brief(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 80 else text[:77] + "..."
