"""Regrading of stored searches without model calls. The new grades are stored in addition to those of the run.

A grading is the result of `regrade` with one grader: the grader's identity and, for each search, the grade of the final
message of each candidate and of each point of the anytime curve. The grades of the run itself never change, and
resuming a run ignores gradings. If a search is repeated, its grades in all gradings are deleted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from mas_gym.errors import MASGymError, StoreError
from mas_gym.internal.database import transaction
from mas_gym.internal.identity import identity_of
from mas_gym.tasks.base import Grade, Grader, Problem
from search.results.run_info import RunInfo
from search.store.search_rows import Document, search_id
from search.store.store import Store
from search.store.stored_grades import Node
from search.store.table_schema import FORMAT, checksum, digest, explained

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
) -> Regrade:
    """Regrade every finished search of a run.

    Args:
        path: The store.
        run: The run.
        grader: Grades the messages.
        label: The name of the grading.
        problem_of: Returns the problem to grade with, such as one with a corrected answer; None omits the search.
        references: The data that determines ``problem_of``, for the identity of the grading.

    Raises:
        IdentityError: The grader has no identity.
        StoreError: The store cannot be written, or searches are corrupt; the other searches are graded.
    """
    identity = json.dumps(identity_of([grader, references]), sort_keys=True)
    grading = digest(identity).hex()
    found: list[Change] = []
    failed: dict[str, str] = {}
    damage: StoreError | None = None
    with Store(path) as store, closing(FORMAT.connect(store.path, create=True)) as connection, explained(store.path):
        with transaction(connection):
            row = (grading, label, identity, datetime.now(UTC).isoformat(timespec="seconds"))
            connection.execute("INSERT OR REPLACE INTO gradings VALUES (?, ?, ?, ?)", row)
        searches = store.documents(run.run)
        while damage is None:
            batch: list[tuple[Problem, Document]] = []
            try:
                batch.extend(islice(searches, _BATCH))
            except StoreError as error:
                damage = error
            if not batch and damage is None:
                break
            rows = []
            # Grade outside of a transaction, because a grader may be slow and would block other writers.
            for stored, content in batch:
                problem = problem_of(stored)
                if problem is None:
                    continue
                try:
                    nodes = _graded(problem, content, grader, run.mas.final_text)
                except MASGymError as error:
                    failed[ascii(stored.id)] = f"{type(error).__name__}: {error}"
                    continue
                key, text = search_id(run.run, stored.id), json.dumps(nodes)
                rows.append((key, grading, text, checksum(key, grading, text)))
                _, answer, correct, _ = nodes[0]
                found.append(Change(stored.id, *content.candidates[0][2:], answer, correct))
            with transaction(connection):
                connection.executemany("INSERT OR REPLACE INTO grades VALUES (?, ?, ?, ?)", rows)
    if damage is not None:
        raise StoreError(f"{damage}; graded {len(found):,} searches") from damage
    changed = tuple(one for one in found if (one.answer, one.correct) != (one.new_answer, one.new_correct))
    known = [one.correct for one in found if one.correct is not None]
    after = sum(one.new_correct for one in found)
    return Regrade(run, grading, len(found), len(known), sum(known), after, changed, failed)


def _graded(problem: Problem, content: Document, grader: Grader, read: Callable[[str], str]) -> list[Node]:
    """Grade the nodes of candidates and curve, the chosen candidate first."""
    tree = content.tree or {}
    nodes = [one.node for one in content.candidates] + [point.node for point in content.anytime]
    grades: dict[str, Grade] = {}
    graded: list[Node] = []
    for node in dict.fromkeys(node for node in nodes if node is not None):
        # A final message without a legal recipient is no answer (`search.grading.ProblemGrader.key`).
        text = read(tree["texts"][tree["text"][node - 1]]) if node and tree["recipients"][node - 1] else ""
        if text not in grades:
            grades[text] = grader.grade(problem, text)
        grade = grades[text]
        graded.append((node, grade.extracted, bool(grade.correct), grade.reason))
    return graded
