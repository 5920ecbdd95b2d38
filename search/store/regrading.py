"""Regrading of stored searches without model calls. The new grades are stored in addition to those of the run.

A grading is the result of `regrade` with one grader: the grader's identity and, for each search, the grade of the final
message of each candidate and of each point of the anytime curve. The grades of the run itself never change, and
resuming a run ignores gradings. If a search is repeated, its grades in all gradings are deleted.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from mas_gym.errors import MASGymError, StoreError
from mas_gym.internal.database import transaction
from mas_gym.internal.identity import digest_of, identity_of
from mas_gym.tasks.base import Grade, Grader, Problem
from search.plan import Plan
from search.results.outcomes import Outcome
from search.results.run_info import RunInfo
from search.store.row_conversion import Row, document_of, read_columns, rows_of, searches_of, snapshot
from search.store.row_conversion import problem_of as stored_problem
from search.store.table_schema import FORMAT, Damage, checksum, explained

_BATCH = 500


class Grading(NamedTuple):
    """One grading of a run.

    Attributes:
        grading: The digest of the grader's identity.
        label: The display name of the grading, such as ``"my.py:grade"``.
        made: Time of the grading, in ISO format.
        searches: Number of the run's searches that the grading covers.
    """

    grading: str
    label: str
    made: str
    searches: int


class Change(NamedTuple):
    """A search with a changed chosen answer or grade."""

    problem_id: str
    answer: str | None
    correct: bool
    new_answer: str | None
    new_correct: bool


class Regrade(NamedTuple):
    """The result of regrading a run.

    Attributes:
        run: The run.
        grading: The digest that identifies the stored grades.
        searches: Number of graded searches.
        before: Number of these that were correct in the run.
        after: Number of these that are correct now.
        changes: The changed searches, by problem id.
        failed: The reason for each search that could not be graded, by problem id.
    """

    run: RunInfo
    grading: str
    searches: int
    before: int
    after: int
    changes: tuple[Change, ...]
    failed: Mapping[str, str]


Grades = Mapping[int | None, tuple[str | None, bool]]
"""The answer in a node's message and whether it is right, by node; the chosen candidate comes first."""
Node = tuple[int, str | None, bool, str]
"""A node with the answer in its message, whether it is correct, and the reason."""


def regrade(
    path: str | Path,
    run: RunInfo,
    grader: Grader,
    label: str,
    *,
    problem_of: Callable[[Problem], Problem | None] = lambda problem: problem,
    references: object = None,
    listen: Callable[[int], None] = lambda done: None,
) -> Regrade:
    """Regrade every finished search of a run.

    Args:
        path: The store.
        run: The run.
        grader: Grades the messages.
        label: The name of the grading.
        problem_of: Returns the problem to grade with, such as one with a corrected answer; None omits the search.
        references: The data that determines ``problem_of``, for the identity of the grading.
        listen: Called with the number of searches graded so far.

    Raises:
        IdentityError: The grader has no identity.
        StoreError: The store cannot be written, or searches are corrupt; the other searches are graded.
    """
    identity = json.dumps(identity_of([grader, references]), sort_keys=True)
    grading = digest_of(identity)
    read = run.mas.final_text
    found: list[Change] = []
    failed: dict[str, str] = {}
    lost: list[str] = []
    with explained(Path(path)), closing(FORMAT.connect(Path(path), create=True)) as connection:
        keys, wrong = searches_of(connection, run.run)
        with transaction(connection):
            row = (grading, label, identity, datetime.now(UTC).isoformat(timespec="seconds"))
            connection.execute("INSERT OR REPLACE INTO gradings VALUES (?, ?, ?, ?)", row)
        named = [(key, ascii(problem)) for key, problem in keys.items()]
        for start in range(0, len(named), _BATCH):
            rows = []
            # Grade outside of a transaction, because a grader may be slow and would block other writers.
            for key, name in named[start : start + _BATCH]:
                try:
                    graded = _graded(connection, key, grader, problem_of, read)
                except Damage as damage:
                    lost.append(f"{name} ({damage})")
                except MASGymError as error:
                    failed[name] = f"{type(error).__name__}: {error}"
                else:
                    if graded is not None:
                        text = json.dumps(graded[1])
                        rows.append((key, grading, text, checksum(key, grading, text)))
                        found.append(graded[0])
            with transaction(connection):
                connection.executemany("INSERT OR REPLACE INTO grades VALUES (?, ?, ?, ?)", rows)
            listen(len(found))
    if lost or wrong:
        raise StoreError(
            f"store {path}: damaged searches were not graded: {', '.join(lost[:10]) or wrong}; graded {len(found):,} "
            "searches"
        )
    before, after = (sum(bool(change[place]) for change in found) for place in (2, 4))
    return Regrade(run, grading, len(found), before, after, tuple(c for c in found if c[1:3] != c[3:]), failed)


def _graded(
    connection: sqlite3.Connection,
    key: int,
    grader: Grader,
    problem_of: Callable[[Problem], Problem | None],
    read: Callable[[str], str],
) -> tuple[Change, list[Node]] | None:
    """Grade one search; return None if it failed or is omitted."""
    with snapshot(connection):
        rows = rows_of(read_columns(connection, [key], document=True))
        if not rows:
            raise Damage("its row is missing")
        [row] = rows
        if row["error"] is not None:
            return None
        stored, content = stored_problem(row), document_of(row)
    problem = problem_of(stored)
    if problem is None:
        return None
    tree = content.tree or {}
    # The chosen candidate comes first.
    nodes = [one.node for one in content.candidates] + [point.node for point in content.anytime]
    wanted = dict.fromkeys(node for node in nodes if node is not None)
    grades: dict[str, Grade] = {}
    graded: list[Node] = []
    for node in wanted:
        text = read(tree["texts"][tree["text"][node - 1]] if node else "")
        if text not in grades:
            grades[text] = grader.grade(problem, text)
        grade = grades[text]
        graded.append((node, grade.extracted, bool(grade.correct), grade.reason))
    best = graded[0] if content.candidates else (0, None, False, "")
    return Change(stored.id, row["answer"], bool(row["correct"]), best[1], best[2]), graded


class Regraded(NamedTuple):
    """A run's grades and those of one grading, over the searches covered by the grading.

    Attributes:
        run: The run's planner, critic and seed.
        label: The grading's name.
        searches: Number of searches that the grading covers.
        before: Number of these searches that were correct in the run.
        after: Number of these searches that are correct in the grading.
    """

    run: str
    label: str
    searches: int
    before: int
    after: int


def regraded(connection: sqlite3.Connection, run: RunInfo) -> list[Regraded]:
    """Return the old and the new grades of a run, one entry per grading, oldest first.

    Raises:
        StoreError: Grades are corrupt.
    """
    found = []
    query = (
        "SELECT s.correct, grades.* FROM grades JOIN searches s ON s.id = grades.search "
        "WHERE s.run = ? AND grades.grading = ?"
    )
    for grading in gradings(connection, run.run):
        before, after = 0, 0
        for correct, *row in connection.execute(query, (run.run, grading.grading)):
            if not _whole(row):
                raise StoreError(f"the grades by {grading.label!a} are damaged; grade again with: mas-gym regrade")
            first = next(iter(_nodes(row[2])), None)
            before, after = before + bool(correct), after + (first is not None and bool(first[2]))
        found.append(Regraded(run.label, grading.label, grading.searches, before, after))
    return found


def gradings(connection: sqlite3.Connection, run: str) -> list[Grading]:
    """Return the gradings of a run, oldest first."""
    query = (
        "SELECT g.grading, g.label, g.identity, g.made, count(*) FROM gradings g "
        "JOIN grades USING (grading) JOIN searches s ON s.id = grades.search WHERE s.run = ? GROUP BY g.grading"
    )
    found = []
    for key, label, identity, made, count in connection.execute(query, (run,)):
        if digest_of(identity) != key or not isinstance(label, str) or not isinstance(made, str):
            raise StoreError(f"the grading {key!a} is damaged; grade again with: mas-gym regrade")
        found.append(Grading(key, label, made, count))
    return sorted(found, key=lambda grading: (grading.made, grading.grading))


def find_grading(connection: sqlite3.Connection, run: str, name: str) -> Grading:
    """Return the latest grading of a run with this label or digest prefix.

    Raises:
        StoreError: There is no such grading.
    """
    known = gradings(connection, run)
    found = [grading for grading in known if name == grading.label or grading.grading.startswith(name)]
    if not found:
        labels = ", ".join(dict.fromkeys(grading.label for grading in known)) or "none; make one with: mas-gym regrade"
        raise StoreError(f"expected a grading of this run, got {name!r}; its gradings: {labels}")
    return found[-1]


def grades_of(connection: sqlite3.Connection, searches: Sequence[int], grading: str) -> dict[int, Grades]:
    """Return a grading's grades of the searches that it covers.

    Raises:
        Damage: The grades are corrupt.
    """
    marks = ", ".join("?" * len(searches))
    found: dict[int, Grades] = {}
    query = f"SELECT * FROM grades WHERE grading = ? AND search IN ({marks})"
    for row in connection.execute(query, (grading, *searches)):
        if not _whole(row):
            raise Damage("its grades do not match their checksum")
        found[row[0]] = {node: (answer, correct) for node, answer, correct, _ in _nodes(row[2])}
    return found


def apply_grades(plan: Plan, grades: Grades | None) -> Plan:
    """Return a plan with other grades; unchanged if ``grades`` is None."""
    if grades is None:
        return plan
    first = next(iter(grades.values()), (None, False))
    candidates = tuple(
        replace(c, answer=grades[c.node][0], correct=grades[c.node][1]) if c.node in grades else c
        for c in plan.candidates
    )
    anytime = tuple(
        point._replace(answer=grades[point.node][0], correct=grades[point.node][1]) if point.node in grades else point
        for point in plan.anytime
    )
    return replace(plan, answer=first[0], correct=first[1], candidates=candidates, anytime=anytime)


def graded_outcome(outcome: Outcome, row: Row, grades: Grades | None) -> Outcome:
    """Return an outcome with other grades; unchanged if there are none, or if the search failed."""
    if grades is None or outcome.error is not None:
        return outcome
    content = document_of(row)

    def correct(node: int | None, before: bool | None) -> bool:
        return grades[node][1] if node in grades else bool(before)

    ranks = [rank for rank, one in enumerate(content.candidates, 1) if correct(one.node, one.correct)]
    first = next(iter(grades.values()), (None, False))
    return outcome._replace(
        answer=first[0],
        correct=first[1],
        hit_rank=next(iter(ranks), None),
        anytime=tuple((point.generated_tokens, correct(point.node, point.correct)) for point in content.anytime),
    )


def _nodes(text: str) -> Iterable[Node]:
    return ((node, answer, correct, reason) for node, answer, correct, reason in json.loads(text))


def _whole(row: Sequence[object]) -> bool:
    return bool(checksum(*row[:-1]) == row[-1])
