"""An open store, for reading and for export as Parquet or a Hugging Face dataset.

A store contains any number of runs. A run is one `search.run` call, identified by
everything that determines its results; repeating the call resumes it. Each search
is written in one transaction when it ends, so the process may be killed at any time.
Each search has a checksum: corrupt searches are reported, and all others can be read.

    with open_store("runs.db") as store:
        for run in store.runs():
            for plan in store.plans(run.run):
                plan.tree
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mas_gym.errors import ConfigError, StoreError, UnknownNameError, is_number, shown
from mas_gym.internal.database import transaction
from mas_gym.internal.json_types import JSONObject
from mas_gym.systems.dynamics import Dynamics
from mas_gym.tasks.base import Problem, Same, rule_of, same_rule
from search.costs import Usage
from search.plan import Plan
from search.results.outcomes import Outcome, outcomes_of
from search.results.run_info import RunInfo, one_setting
from search.store.exports import preferences, to_dataset, write_parquet
from search.store.search_rows import (
    Columns,
    Document,
    Row,
    document_of,
    plan_of,
    problem_of,
    read_columns,
    read_run,
    rows_of,
    search_id,
    searches_of,
    snapshot,
    usage_of_row,
)
from search.store.stored_grades import Regraded, find_grading, graded_outcome, grades_of, regraded
from search.store.table_schema import FORMAT, Damage, explained

if TYPE_CHECKING:
    from search.prices import Prices, PricesSource
    from search.results.table import Comparison

logger = logging.getLogger("search.store")
T = TypeVar("T")

_SQLITE = b"SQLite format 3\0"
_DOCUMENTS_AT_ONCE = 20
"""Number of searches to read at once with documents; small batches reduce garbage collection."""
_ROWS_AT_ONCE = 200
"""Number of searches to read at once without documents."""


class Store:
    """An open store, usable as a context manager. It can be read while another process writes.

    The methods that read a run take its name or digest, as `find` does. They raise `StoreError` if there is no such run
    or grading and, after all other searches have been read, if searches are corrupt; the message lists these.

    Attributes:
        path: The file.
        damaged: Errors of the runs omitted by the last call of `runs`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open a store.

        Raises:
            StoreError: The file is missing, has another format or schema, or cannot be read.
        """
        self.path = Path(path)
        self.damaged: list[str] = []
        self._connection = FORMAT.connect(self.path, create=False)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._connection.close()

    def runs(self) -> list[RunInfo]:
        """Return the runs, oldest first; runs with corrupt rows are omitted with a warning and listed in `damaged`.

        Raises:
            StoreError: All runs are corrupt.
        """
        found: list[RunInfo] = []
        self.damaged = []
        with explained(self.path):
            with transaction(self._connection, "DEFERRED"):
                held = {run for (run,) in self._connection.execute("SELECT DISTINCT run FROM searches").fetchall()}
                listed = {run for (run,) in self._connection.execute("SELECT run FROM runs").fetchall()}
            for run in listed:
                try:
                    with snapshot(self._connection):
                        info = read_run(self._connection, run)
                except Damage as damage:
                    self.damaged.append(f"the run {run!a} is damaged: {damage}")
                    continue
                found += [info] if info is not None else []
            self.damaged += [f"the run {run!a} is damaged: its row is missing" for run in held - listed]
        for text in self.damaged:
            logger.warning("store %s: %s", self.path, text)
        if self.damaged and not found:
            raise StoreError(
                f"store {self.path}: no run can be read: {self.damaged[0]}; recover the file with sqlite3's .recover, "
                "or use another path"
            )
        return sorted(found, key=lambda info: (str(info.facts["started"]), info.run))

    def find(self, run: str | None = None) -> RunInfo:
        """Return one run.

        Args:
            run: Its name, its digest or the beginning of its digest, in this order of precedence; None if the store
                contains only one run.

        Raises:
            StoreError: No run or more than one run matches.
        """
        runs = self.runs()
        exact = [info for info in runs if run is not None and run in (info.name, info.run)]
        named = [info for info in exact if info.name == run]
        found = named or exact or [info for info in runs if run is None or info.run.startswith(run)]
        if len(found) == 1:
            return found[0]
        known = "; ".join(f"{info.name or info.run[:8]}: {info.label}" for info in runs) or "none"
        what = "one run" if run is None else f"one run {run!r}"
        raise StoreError(f"store {self.path}: expected {what}, found {len(found)}; its runs: {known}")

    def plans(
        self, run: str | None = None, *, trees: bool = True, failed: bool = False, grading: str | None = None
    ) -> Iterator[Plan]:
        """Read the searches of one run, in order of problem id.

        Args:
            run: The run.
            trees: Rebuild trees and candidates; without them, reading is many times faster.
            failed: Also yield the searches that failed.
            grading: Label or digest of a grading (`regraded`) to use for the plans.
        """
        return (plan for _, plan in self.searches(run, trees=trees, failed=failed, grading=grading))

    def searches(
        self, run: str | None = None, *, trees: bool = True, failed: bool = False, grading: str | None = None
    ) -> Iterator[tuple[Problem, Plan]]:
        """Read the searches of one run with their problems; arguments as for `plans`."""
        info = self.find(run)
        dynamics = Dynamics(info.mas) if trees else None
        digest = None if grading is None else find_grading(self._connection, info.run, grading).grading

        def read(columns: Columns) -> Iterator[tuple[Problem, Plan]]:
            grades = {} if digest is None else grades_of(self._connection, columns["id"], digest)
            for row in rows_of(columns):
                yield problem_of(row), plan_of(row, dynamics, grades.get(row["id"]))

        for problem, plan in self._batches(info, read, document=trees):
            if failed or plan.error is None:
                yield problem, plan

    def outcomes(
        self,
        run: str | None = None,
        planner: str = "",
        critic: str = "",
        grading: str | None = None,
        prices: Prices | None = None,
    ) -> Iterator[Outcome]:
        """Read the outcomes of one run's searches, including failed ones, in order of problem id.

        The outcomes equal those of the plans, but trees are read only if a grading is given.

        Args:
            run: The run.
            planner: The planner's name in the outcomes.
            critic: The critic's name in the outcomes.
            grading: As for `plans`.
            prices: Prices of the models, for the cost of each search in USD.

        Raises:
            MASGymError: As for `search.Prices.rate`, when a search is priced.
        """
        info = self.find(run)
        digest = None if grading is None else find_grading(self._connection, info.run, grading).grading

        def read(columns: Columns) -> Iterable[tuple[Outcome, Usage | None]]:
            found = outcomes_of(columns, planner, critic, info.config["seed"])
            if digest is not None:
                grades = grades_of(self._connection, columns["id"], digest)
                rows = zip(found, rows_of(columns), strict=True)
                found = [graded_outcome(one, row, grades.get(row["id"])) for one, row in rows]
            return zip(found, repeat(None) if prices is None else map(usage_of_row, rows_of(columns)), strict=False)

        # A pricing error does not mean that the data is corrupt.
        for outcome, usage in self._batches(info, read, document=digest is not None):
            if prices is not None and usage is not None:
                # A critic without forwards costs nothing.
                critic_name = info.config["critic"]["name"] if usage.reward_calls else None
                rate = prices.rate(info.config["policy"]["name"], critic_name)
                outcome = outcome._replace(usd=rate.usd(usage))
            yield outcome

    def rows(self, run: str | None = None) -> Iterator[Row]:
        """Read one run's rows of the table ``searches``, including failed searches."""
        return self._batches(self.find(run), rows_of)

    def documents(self, run: str | None = None) -> Iterator[tuple[Problem, Document]]:
        """Read problems and documents of one run's searches, without rebuilding the trees."""

        def read(columns: Columns) -> Iterator[tuple[Problem, Document]]:
            return ((problem_of(row), document_of(row)) for row in rows_of(columns) if row["error"] is None)

        return self._batches(self.find(run), read, document=True)

    def message_seeds(self, run: str | None = None) -> Iterator[tuple[str, list[int | None]]]:
        """Read each search's problem and, by node, the seed of the message, None if it has none."""
        return ((problem.id, found.tree["seed"]) for problem, found in self.documents(run) if found.tree is not None)

    def problems(self, run: str | None = None) -> Iterator[Problem]:
        """Read the problems of one run's searches, including failed ones."""
        return self._batches(self.find(run), lambda columns: map(problem_of, rows_of(columns)))

    def regraded(self, run: str | None = None) -> list[Regraded]:
        """Return the grades of one run and those of each of its gradings (`mas-gym regrade`), oldest first."""
        with explained(self.path):
            return regraded(self._connection, self.find(run))

    def search(self, problem_id: str, run: str | None = None) -> tuple[Problem, Plan]:
        """Read the search of one problem, with the problem.

        Raises:
            UnknownNameError: The run has no search of the problem.
        """
        info = self.find(run)
        try:
            with explained(self.path), snapshot(self._connection):
                found = read_columns(self._connection, [search_id(info.run, problem_id)], document=True)
                for row in rows_of(found):
                    return problem_of(row), plan_of(row, Dynamics(info.mas))
        except Damage as damage:
            raise self._damaged([f"{problem_id!a} ({damage})"]) from damage
        raise UnknownNameError(f"store {self.path}: the run {info.label} has no search for problem {problem_id!r}")

    def _batches(self, info: RunInfo, read: Callable[[Columns], Iterable[T]], *, document: bool = False) -> Iterator[T]:
        """Read every intact search of a run in batches; read batches with corrupt searches one search at a time.

        Raises:
            StoreError: Searches are corrupt; raised at the end, with their names.
        """
        lost, size = [], _DOCUMENTS_AT_ONCE if document else _ROWS_AT_ONCE
        with explained(self.path):
            with transaction(self._connection, "DEFERRED"):
                names, wrong = searches_of(self._connection, info.run)
            keys = list(names)
            waiting = [keys[start : start + size] for start in range(0, len(keys), size)][::-1]
            while waiting:
                some = waiting.pop()
                try:
                    with snapshot(self._connection):
                        columns = read_columns(self._connection, some, document=document)
                        if len(columns["id"]) < len(some):
                            raise Damage("its row is missing")
                        items = list(read(columns))
                except Damage as damage:
                    if len(some) > 1:
                        waiting += [[key] for key in reversed(some)]
                    else:
                        lost.append(f"{names[some[0]]!a} ({damage})")
                    continue
                yield from items
        if lost or wrong:
            raise self._damaged(lost, wrong)

    def _damaged(self, lost: list[str], wrong: str = "") -> StoreError:
        shown = ", ".join(lost[:10]) + (f" and {len(lost) - 10} more" if len(lost) > 10 else "")
        what = f"searches are damaged: {shown}" if lost else f"searches are lost: {wrong}"
        return StoreError(
            f"store {self.path}: {what}; the others are readable; run the same command again to replace these"
        )

    def preferences(
        self, run: str | None = None, *, least: float = 0.5, same: str | Same | None = None
    ) -> list[JSONObject]:
        """Return preferences between an agent's messages for the same prompt, in the columns of TRL's ``DPOTrainer``.

        Each state of a training run with a sufficient difference between the best and the worst message gives one row.
        TRL's ``RewardTrainer`` accepts the same rows.

        Args:
            run: The run; must be a training run, with values from the true reward.
            least: Minimum difference between the two messages' mean rewards, in ``(0, 2]``.
            same: Defines which messages are duplicates, of which only one is compared: a rule of `mas_gym.tasks.base`
                or a function ``same(a, b)``; None: the rule of the run's task, as in `rewardmodels.collect`.

        Returns:
            Rows with ``agent``, ``prompt`` (the chat sent to the agent), ``chosen`` and ``rejected`` (the assistant's
            message, also as a chat), ``margin`` and ``problem``.

        Raises:
            ConfigError: ``least`` is out of its range.
            StoreError: The run is not a training run, or is a run of a program, for which prompts are not stored.
        """
        if not is_number(least) or not 0 < least <= 2:
            raise ConfigError(f"least: expected a number above 0 and at most 2, got {shown(least)}")
        info = self.find(run)
        mas = info.mas
        if not info.config["training"]:
            raise StoreError(
                f"store {self.path}: expected a training run, got {info.label}; make one with mas-gym rollouts, or "
                "search.run(..., training=True)"
            )
        if mas.external:
            raise StoreError(
                f"store {self.path}: expected a run of a MAS, got a run of the program {mas.name} (prompts not stored)"
            )
        rule = same_rule(rule_of(str(info.facts.get("task"))) if same is None else same)
        rows = []
        for plan in self.plans(info.run):
            if plan.tree is not None:
                rows += [{**row, "problem": plan.problem_id} for row in preferences(plan.tree, mas, least, rule)]
        return rows

    def compare(
        self,
        runs: str | Iterable[str] = (),
        baseline: str = "",
        grading: str | None = None,
        prices: PricesSource | None = None,
    ) -> Comparison:
        """Return the `search.Comparison` of stored runs: a row per planner and critic, averaged over seeds.

        Args:
            runs: One or more runs; all by default.
            baseline: The row to compare the others with, by its label or its planner; the first by default.
            grading: A grading of these runs (`regraded`) instead of the runs' grades.
            prices: Prices of the models, as for `search.run`; they add the column USD.

        Raises:
            UnknownNameError: A model has no price.
            ConfigError: There is no such row, or the runs differ in more than planner, critic and seed.
        """
        from search.results.table import table_of

        known = None
        if prices is not None:
            # Only priced tables need the YAML parser.
            from search.prices import as_prices

            known = as_prices(prices)
        chosen = [self.find(run) for run in ([runs] if isinstance(runs, str) else runs)]
        setting = one_setting(chosen or self.runs())
        outcomes = [
            outcome
            for run, (planner, critic) in zip(setting.runs, setting.labels, strict=True)
            for outcome in self.outcomes(run.run, planner, critic, grading, known)
        ]
        return table_of(self.path, setting, outcomes, baseline)

    def export(self, path: str | os.PathLike[str], run: str | None = None) -> int:
        """Write the nodes of one run's trees as a Parquet file and return the number of nodes.

        The file is written next to ``path`` and renamed when it is complete; after an error there is no file.

        Raises:
            MissingDependencyError: pyarrow is not installed.
        """
        info = self.find(run)
        return write_parquet(self.documents(info.run), info, Path(path))

    def dataset(self, run: str | None = None) -> Any:
        """Return the nodes of one run's trees as a ``datasets.Dataset``.

        Raises:
            MissingDependencyError: datasets is not installed.
        """
        info = self.find(run)
        return to_dataset(self.documents(info.run), info)


def is_database(path: Path) -> bool:
    """Return whether a path is an SQLite file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_SQLITE)) == _SQLITE


def open_store(path: str | os.PathLike[str]) -> Store:
    """Open a store for reading.

    Raises:
        StoreError: The file does not exist, or is not a store with a supported schema.
    """
    return Store(path)
