"""The grades of gradings (`search.store.regrading`), which stores hold in addition to those of their runs."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mas_gym.errors import StoreError
from search.results.outcomes import Outcome
from search.results.run_info import RunInfo
from search.store.search_rows import Grades, Row, document_of, first_grade
from search.store.table_schema import Damage, checksum, digest

Node = tuple[int, str | None, bool, str]
"""A node with the answer in its message, whether it is correct, and the reason."""


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


class Regraded(NamedTuple):
    """A run's grades and those of one grading; the numbers are those of `search.store.regrading.Regrade`.

    Attributes:
        run: The run's planner, critic and seed.
        label: The grading's name.
    """

    run: str
    label: str
    searches: int
    known: int
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
        known, before, after = 0, 0, 0
        for correct, *row in connection.execute(query, (run.run, grading.grading)):
            if not _whole(row):
                raise StoreError(f"the grades by {grading.label!a} are damaged; grade again with: mas-gym regrade")
            first = next(iter(_nodes(row[2])), None)
            known, before = known + (correct is not None), before + bool(correct)
            after += first is not None and bool(first[2])
        found.append(Regraded(run.label, grading.label, grading.searches, known, before, after))
    return found


def gradings(connection: sqlite3.Connection, run: str) -> list[Grading]:
    """Return the gradings of a run, oldest first."""
    query = (
        "SELECT g.grading, g.label, g.identity, g.made, count(*) FROM gradings g "
        "JOIN grades USING (grading) JOIN searches s ON s.id = grades.search WHERE s.run = ? GROUP BY g.grading"
    )
    found = []
    for key, label, identity, made, count in connection.execute(query, (run,)):
        if digest(identity).hex() != key or not isinstance(label, str) or not isinstance(made, str):
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


def graded_outcome(outcome: Outcome, row: Row, grades: Grades | None) -> Outcome:
    """Return an outcome with other grades; unchanged if there are none, or if the search failed."""
    if grades is None or outcome.error is not None:
        return outcome
    content, (answer, correct) = document_of(row, grades), first_grade(grades)
    ranks = (rank for rank, one in enumerate(content.candidates, 1) if one.correct)
    curve = tuple((point.generated_tokens, bool(point.correct)) for point in content.anytime)
    return outcome._replace(answer=answer, correct=correct, hit_rank=next(ranks, None), anytime=curve)


def _nodes(text: str) -> Iterable[Node]:
    return ((node, answer, correct, reason) for node, answer, correct, reason in json.loads(text))


def _whole(row: Sequence[object]) -> bool:
    return bool(checksum(*row[:-1]) == row[-1])
