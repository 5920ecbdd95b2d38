"""Regrading of stored searches without model calls. The new grades are stored in addition to those of the run.

A grading is the result of `regrade` with one grader: the grader's identity and, for each search, the grade of the final
message of each candidate and of each point of the anytime curve. The grades of the run itself never change, and
resuming a run ignores gradings. If a search is repeated, its grades in all gradings are deleted.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from mas_gym.errors import MASGymError, StoreError
from mas_gym.internal.database import transaction
from mas_gym.internal.identity import identity_of
from mas_gym.tasks.base import Grade, Grader, Problem
from search.results.run_info import RunInfo
from search.store.row_conversion import document_of, read_columns, rows_of, searches_of, snapshot
from search.store.row_conversion import problem_of as stored_problem
from search.store.stored_grades import Node
from search.store.table_schema import FORMAT, Damage, checksum, digest, explained

_BATCH = 500


class Change(NamedTuple):
    """A search with a changed chosen answer or grade."""

    problem_id: str
    answer: str | None
    correct: bool | None
    new_answer: str | None
    new_correct: bool


class Regrade(NamedTuple):
    """The result of regrading a run.

    Attributes:
        run: The run.
        grading: The digest that identifies the stored grades.
        searches: Number of graded searches.
        known: Number of these with a known outcome in the run.
        before: Number of these that were correct in the run.
        after: Number of these that are correct now.
        changes: The changed searches, by problem id.
        failed: The reason for each search that could not be graded, by problem id.
    """

    run: RunInfo
    grading: str
    searches: int
    known: int
    before: int
    after: int
    changes: tuple[Change, ...]
    failed: Mapping[str, str]


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
    grading = digest(identity).hex()
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
    changed = tuple(one for one in found if (one.answer, one.correct) != (one.new_answer, one.new_correct))
    known = [one.correct for one in found if one.correct is not None]
    after = sum(one.new_correct for one in found)
    return Regrade(run, grading, len(found), len(known), sum(known), after, changed, failed)


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
    before = None if row["correct"] is None else bool(row["correct"])
    return Change(stored.id, row["answer"], before, best[1], best[2]), graded
