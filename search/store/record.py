"""A run's place in a store, for writing: what identifies it, and one writer per run across processes and handles."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import IO, Any

import mas_gym
from mas_gym.errors import DataError, IdentityError, StoreError
from mas_gym.internal.database import transaction
from mas_gym.internal.identity import digest_of, identity_of
from mas_gym.policies.meters import money_of
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.graph import MAS
from mas_gym.tasks.base import Problem
from mas_gym.tasks.sequences import ProblemTask, ProceduralTask
from search.plan import Plan
from search.planners.registry import planner_spec
from search.results.run_info import RunInfo
from search.setup import SampleRecord, Setup
from search.store.file import FORMAT, Damage, digest, explained, seal
from search.store.rows import Reader, Writer, metadata_text, read_run, search_id
from search.store.store import Store
from search.usage import Usage

FORM = 2
"""The form of a run's config. In form 1, planners, policies and critics stated only a part of their identity."""

_FOLLOWING = {"place", "places", "values"}
_TOLD = 4
"""Most differences that are listed between a run and the stored one of the same name."""


def run_config(setup: Setup, problems: Iterable[Problem], policy: Any) -> dict[str, Any]:
    """Return all that determines a run's results, JSON-able.

    Raises:
        IdentityError: The planner, the policy, the critic or the task cannot state its identity.
    """
    program = {} if setup.program is None else {"program": _stated("program", setup.program)}
    return program | {
        "schema": FORM,
        "planner": _stated("planner", setup.planner),
        "mas": setup.dynamics.mas.to_dict(),
        "policy": engine_identity("policy", policy),
        "critic": None if setup.critic is None else engine_identity("critic", setup.critic),
        "seed": setup.seed,
        "training": setup.training,
        "sampling": dataclasses.asdict(setup.sampling),
        "budget": setup.budget.to_dict(),
        "grading": _grading(problems),
    }


def engine_identity(role: str, engine: Any) -> dict[str, Any]:
    """Return the name and the identity of a policy or critic.

    Raises:
        IdentityError: It cannot state its identity.
    """
    stated = getattr(engine, "identity", None)
    # Another process that holds the engine has already computed its identity.
    identity = _stated(role, engine) if stated is None or callable(stated) else stated
    return {"name": engine.name, "identity": identity}


def _grading(problems: Iterable[Problem]) -> Any:
    """Return how problems are graded, and nothing about which problems they are."""
    if isinstance(problems, ProblemTask | ProceduralTask):
        return _stated("task", problems.identity())
    if callable(getattr(problems, "identity", None)):
        return _stated("task", problems)
    if hasattr(problems, "grade") and hasattr(problems, "extract"):
        # A user's own task: its attributes include its problems, so only a digest is stored.
        return {"task": digest_of(_stated("task", problems))}
    return "strict"


def _stated(role: str, part: object) -> Any:
    try:
        return identity_of(part)
    except IdentityError as error:
        raise IdentityError(
            f"a run with store= needs to know what determines the results of its {role}: {error}"
        ) from (error)


def run_facts(setup: Setup, problems: Iterable[Problem]) -> dict[str, Any]:
    """Return what does not determine a run's results."""
    return {
        "mas_gym": mas_gym.__version__,
        "planner": planner_spec(setup.planner),
        "task": getattr(problems, "name", None),
        "split": getattr(problems, "split", None),
        "problems": len(problems) if isinstance(problems, Sized) else None,
        "started": datetime.now(UTC).isoformat(),
    }


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return what differs between two configs, ``"planner.fields.width was 1, now 8"``.

    >>> differences({"program": {"files": {"agents.py": "1f"}}}, {"program": {"files": {"agents.py": "2e"}}})
    ["the program's file agents.py changed"]
    """
    found = list(_unequal(dict(old), dict(new), ()))
    # The places of code in a changed file, and the values of its variables, usually follow from the change.
    edited = {path[0] for path, *_ in found if "files" in path}
    kept = [entry for entry in found if not (entry[0][0] in edited and _FOLLOWING & set(entry[0]))]
    return list(dict.fromkeys(_told(*entry) for entry in kept))


def _unequal(old: Any, new: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict) and path != ("mas",):
        for key in dict.fromkeys((*new, *old)):
            yield from _unequal(old.get(key), new.get(key), (*path, key))
    elif old != new:
        yield path, old, new


def _told(path: tuple[str, ...], old: Any, new: Any) -> str:
    for kind, noun in (("files", "file"), ("packages", "package"), ("values", "variable")):
        if kind in path[1:-1]:
            what = f"the {path[0]}'s {noun} {path[path.index(kind) + 1]}"
            if kind == "files" and old is not None and new is not None:
                return f"{what} changed"
            return f"{what} was {_brief(old)}, now {_brief(new)}"
    return f"{'.'.join(path)} was {_brief(old)}, now {_brief(new)}"


def _brief(value: object) -> str:
    text = "absent" if value is None else ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _named_alike(old: RunInfo, config: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    """Whether a stored run has the planner, critic, seed, policy, system and task of another one, by their names."""

    def names(config: Mapping[str, Any], facts: Mapping[str, Any]) -> list[Any]:
        parts = [(config.get(key) or {}).get("name") for key in ("policy", "critic", "mas")]
        settings = [config.get(key) for key in ("schema", "seed", "training")]
        return [*parts, *settings, *(facts.get(key) for key in ("planner", "task", "split"))]

    return names(old.config, old.facts) == names(config, facts)


def continues(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether a config of an earlier form may be of the same run: all that it states is the same."""
    if old.get("schema") == new["schema"]:
        return False
    same = all(old.get(key) == new[key] for key in ("mas", "seed", "training", "sampling", "budget"))
    was, now = _part(old.get("planner")), _part(new["planner"])
    planner = was["class"].rpartition(".")[2] == str(now.get("class")).rpartition(".")[2] and all(
        now.get("fields", {}).get(key, value) == value for key, value in was["settings"].items()
    )
    names = [[_part(config.get(key)).get("name") for key in ("policy", "critic")] for config in (old, new)]
    return same and planner and names[0] == names[1]


def _part(value: Any) -> dict[str, Any]:
    return {"class": "", "settings": {}} | value if isinstance(value, dict) else {}


# POSIX systems that emulate flock by record locks (NFS) drop them when any handle of the file is closed,
# so this process never opens a lock file that it holds.
_HELD: set[str] = set()


class RunLock:
    """Keeps a second writer out of a run; the system releases it when its process dies.

    The lock is an exclusive `flock` on a separate file for the run next to the store, which belongs to
    this handle: closing other handles, in this process or in another, leaves it in place. On Windows
    it is a lock on the file's first byte, with the same property, and the empty file stays behind.
    """

    def __init__(self, path: Path, run: str) -> None:
        """Take the lock.

        Raises:
            StoreError: Another writer has it.
        """
        self._path = f"{os.path.realpath(path)}-lock-{run[:16]}"
        self._owner = os.getpid()
        file = None if self._path in _HELD else _locked(self._path)
        if file is None:
            raise StoreError(
                f"store {path}: another process is writing this run (the same planner, seed and settings); "
                "wait for it, or use another store"
            )
        self._file = file
        _HELD.add(self._path)

    def close(self) -> None:
        """Release the lock; safe to call twice. In a forked child this closes the child's handle alone."""
        if self._file.closed:
            return
        if os.getpid() == self._owner:
            # Before unlocking, so that a process waiting for this file finds it deleted and creates another.
            with suppress(OSError):
                os.unlink(self._path)
            _unlock(self._file)
            _HELD.discard(self._path)
        self._file.close()


def _locked(path: str) -> IO[bytes] | None:
    """Open and lock a file; None if another handle has the lock."""
    while True:
        try:
            file = open(path, "a+b")  # noqa: SIM115 - held until the lock is released
        except OSError as error:
            raise StoreError(f"store lock {path}: {error.strerror}; check that its folder may be written") from error
        if not _lock(file):
            file.close()
            return None
        # The last owner may have deleted the file after we opened it.
        with suppress(OSError):
            if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                return file
        file.close()


if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[bytes]) -> bool:
        file.seek(0)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def _unlock(file: IO[bytes]) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _lock(file: IO[bytes]) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def _unlock(file: IO[bytes]) -> None:
        # Closing is not enough: a forked child may still have the handle.
        fcntl.flock(file, fcntl.LOCK_UN)


logger = logging.getLogger("search.store")


class RunRecord:
    """One run's place in a store, for writing; other writers are kept out of it.

    Attributes:
        spent: What earlier processes have spent on this run, dropped searches included; seconds are wall-clock time.
    """

    def __init__(
        self, path: Path, config: Mapping[str, Any], facts: Mapping[str, Any], name: str | None, policy: object = None
    ) -> None:
        """Open the store, and start or resume the run.

        Args:
            path: The file.
            config: All that determines the run's results.
            facts: What does not.
            name: What to call the run.
            policy: The policy whose cost in money is recorded for this run, if its engines have a price.

        Raises:
            StoreError: The store cannot be written, the run is being written by another process, or the name and the
                settings do not belong together.
        """
        text = json.dumps(config, sort_keys=True)
        self.path, self.run = path, digest(text).hex()
        self._connection = FORMAT.connect(path, create=True)
        self._reader, self._writer = Reader(self._connection), Writer(self._connection)
        self._dynamics = Dynamics(_mas_of(config))
        try:
            self._lock = RunLock(path, self.run)
        except BaseException:
            self._connection.close()
            raise
        try:
            with explained(path), transaction(self._connection):
                self._start(name, config, text, facts)
            self._policy, self._paid, self._money = policy, money_of(policy) or 0.0, self._facts.get("money", 0.0)
            self.spent = Usage(**self._facts.get("spent", {}))
        except BaseException:
            self.close()
            raise
        self._fresh, self._opened = Usage(), perf_counter()

    def _start(self, name: str | None, config: Mapping[str, Any], text: str, facts: Mapping[str, Any]) -> None:
        """Create the run's row, or read it and bring it up to date."""
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
                f"use run_name={found.name!r}, or none"
            )
        self._facts: dict[str, Any] = dict(facts if found is None else found.facts)
        # Resuming with more problems raises the number to search.
        wanted = max(facts.get("problems") or 0, self._facts.get("problems") or 0) or None
        if found is not None and (wrong := self._reader.searches(self.run)[1]):
            logger.warning("store %s: %s; those that were lost are run again", self.path, wrong)
            self._connection.execute("REINDEX searches")
        # The table itself, which a damaged index does not hide.
        count = "(SELECT count({}) FROM searches NOT INDEXED WHERE run = ?1)"
        self._connection.execute(
            f"UPDATE runs SET searches = {count.format('*')}, failed = {count.format('error')} WHERE run = ?1",
            (self.run,),
        )
        self._note(problems=wanted)

    def _known(self) -> RunInfo | None:
        """Return the run's row; None if there is none, or if it is damaged and must be rewritten."""
        try:
            return read_run(self._connection, self.run)
        except Damage as damage:
            logger.warning("store %s: the facts of this run are damaged (%s) and are written anew", self.path, damage)
            return None

    def _check_name(self, name: str | None, config: Mapping[str, Any]) -> None:
        row = self._connection.execute("SELECT run FROM runs WHERE name = ?", (name,)).fetchone()
        if row is None or row[0] == self.run:
            return
        try:
            old = read_run(self._connection, row[0])
        except Damage as damage:
            raise StoreError(f"store {self.path}: the run {name!r} is damaged ({damage}); use another name") from damage
        assert old is not None
        if old.config.get("schema") != config.get("schema"):
            raise StoreError(
                f"store {self.path}: the run {name!r} was made with an earlier form of identity, which does not state "
                "all that determines its results; it stays readable under this name: start anew under another one"
            )
        changed = "; ".join(differences(old.config, config))
        raise StoreError(
            f"store {self.path}: the run {name!r} was made with other settings: {changed}; "
            "use the same settings, another name, or another store"
        )

    def _announce(self, config: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Name the runs that this one would have resumed but for its form of identity, or for some of its parts."""
        if "schema" not in config:
            return
        alike: list[tuple[int, str, RunInfo, list[str]]] = []
        for (run,) in self._connection.execute("SELECT run FROM runs").fetchall():
            try:
                info = read_run(self._connection, run)
            except Damage:
                continue
            if info is not None and continues(info.config, config):
                logger.warning(
                    "store %s: the run %s (%s) was made with an earlier form of identity of its planner, policy and "
                    "critic; it stays readable, and this run starts anew",
                    self.path,
                    ascii(info.name or run[:8]),
                    ascii(info.label),
                )
            elif info is not None and _named_alike(info, config, facts):
                changed = differences(info.config, config)
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

    def _note(self, **facts: Any) -> None:
        """Write the run's row."""
        self._facts = self._facts | facts
        row = (json.dumps(self._facts, sort_keys=True), self.run)
        self._connection.execute("UPDATE runs SET facts = ? WHERE run = ?", row)
        seal(self._connection, "runs", "run", self.run)

    def load(self, problem: Problem) -> Plan | None:
        """Return the finished search of a problem; None if there is none, if it failed, or if it is damaged.

        Raises:
            DataError: It was made for another question.
            ConfigError: The problem's metadata is not JSON-able.
        """
        metadata_text(problem)
        try:
            with explained(self.path), self._reader.snapshot():
                row = self._reader.row(search_id(self.run, problem.id))
                if row is None or row["error"] is not None:
                    return None
                plan = self._reader.plan(row, self._dynamics)
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

    def save(self, problem: Problem, plan: Plan, made: Mapping[tuple[bytes, str], SampleRecord]) -> None:
        """Write a search that has ended, and what it cost, in one transaction."""
        seeds = {key: entry.seed for key, entry in made.items() if entry.seed is not None}
        before, mark = (self._fresh, self._facts), None
        try:
            with explained(self.path), transaction(self._connection):
                mark = self._writer.search(self.run, problem, plan, seeds)
                self._spend(plan.usage)
        except BaseException:
            # Ctrl-C can come right after the commit.
            with suppress(sqlite3.Error):
                key = (search_id(self.run, problem.id),)
                found = self._connection.execute("SELECT checksum FROM searches WHERE id = ?", key).fetchone()
                if mark is None or found != (mark,):
                    self._fresh, self._facts = before
            raise

    def save_all(self, searches: Iterable[tuple[Problem, Plan]]) -> None:
        """Write searches that the run does not have, at no cost, in one transaction."""
        with explained(self.path), transaction(self._connection):
            for problem, plan in searches:
                self._writer.search(self.run, problem, plan, {})
            self._note()

    def spend(self, usage: Usage) -> None:
        """Add the cost of searches that are dropped at a stop, and thus not saved."""
        try:
            with explained(self.path), transaction(self._connection):
                self._spend(usage)
        except StoreError as error:
            # The run is ending, perhaps because of this error.
            logger.warning("the cost of dropped searches is not counted: %s", error)

    def _spend(self, usage: Usage) -> None:
        self._fresh += usage
        total = replace(self.spent + self._fresh, seconds=self.spent.seconds + perf_counter() - self._opened)
        # This includes the cost so far of open requests, which servers do not refund.
        money = money_of(self._policy)
        paid = {} if money is None else {"money": self._money + money - self._paid}
        self._note(spent=asdict(total), **paid)

    def close(self) -> None:
        """Close the file and release the run; safe to call twice."""
        self._connection.close()
        self._lock.close()


def open_record(
    store: Store | str | os.PathLike[str], setup: Setup, problems: Iterable[Problem], policy: Any, name: str | None
) -> RunRecord:
    """Open the place of a run in a store; see `search.run`.

    Raises:
        IdentityError: A part of the run cannot state its identity.
        StoreError: As for `RunRecord`.
    """
    path = store.path if isinstance(store, Store) else Path(store)
    return RunRecord(path, run_config(setup, problems, policy), run_facts(setup, problems), name, policy)


def _mas_of(config: Mapping[str, Any]) -> MAS:
    from mas_gym.systems.loading import load_mas

    return load_mas(MappingProxyType(dict(config["mas"])))
