"""The results of stored searches for tables and reports, read in batches and without rebuilding the trees.

Each value equals that in the plan that `Store.plans` would return. The row of a search contains everything that a
table needs; grades and tree values also need its document. All data is verified by its checksum.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from search.results.outcomes import Outcome, RunSums
from search.store.row_conversion import Document, Row, usage_of_row
from search.store.table_schema import CHECKSUM, from_text
from search.usage import AMOUNTS, Usage

Grades = Mapping[int | None, tuple[str | None, bool]]
"""The answer in a node's message and whether it is right, by node; the chosen candidate comes first."""


class TreeValues(NamedTuple):
    """The values in the tree of one search, by node; the root is first, and parents precede children.

    Attributes:
        parents: Index of the parent; -1 for the root.
        speakers: Index of the agent that wrote the message.
        values: The value of the state; None if the state has no value.
        candidates: The node of each candidate, the chosen one first, and whether it is right.
    """

    parents: Sequence[int]
    speakers: Sequence[int]
    values: Sequence[float | None]
    candidates: Sequence[tuple[int, bool]]


def outcome_of_row(row: Row, names: tuple[str, str], seed: int) -> Outcome:
    """Return the outcome of a search from its row, with the names of its planner and critic."""
    return Outcome(
        *names,
        seed,
        row["problem"],
        bool(row["correct"]) and row["error"] is None,
        row["hit_rank"],
        row["candidates"],
        row["generated_tokens"],
        row["agent_calls"],
        row["reward_calls"],
        row["error"],
        row["curve"],
        row["seconds"],
        row["critic_tokens"],
        row["grader_tokens"],
        unrecorded=row["unrecorded"],
        stopped=row["stopped"],
        arms=usage_of_row(row).arms if row["arms"] else (),
        cut=row["dropped_tokens"] > 0,
    )


def graded_outcome(outcome: Outcome, content: Document, grades: Grades | None) -> Outcome:
    """Return an outcome with other grades; unchanged if there are none, or if the search failed."""
    if grades is None or outcome.error is not None:
        return outcome

    def correct(node: int | None, before: bool | None) -> bool:
        return grades[node][1] if node in grades else bool(before)

    ranks = [rank for rank, one in enumerate(content.candidates, 1) if correct(one.node, one.correct)]
    return replace(
        outcome,
        correct=next(iter(grades.values()), (None, False))[1],
        hit_rank=next(iter(ranks), None),
        anytime=tuple((point.generated_tokens, correct(point.node, point.correct)) for point in content.anytime),
    )


def tree_values(row: Row, content: Document) -> TreeValues:
    """Return the values in the tree of a search; empty if it failed."""
    tree = content.tree
    if row["error"] is not None or tree is None:
        return TreeValues((), (), (), ())
    candidates = [(one.node, one.correct) for one in content.candidates]
    return TreeValues(tuple(tree["parent"]), tuple(tree["speaker"]), tuple(tree["value"]), candidates)


class Totals(NamedTuple):
    """Sums over all searches of a run.

    Attributes:
        right: Number of searches with a right answer.
        tokens: Generated tokens, including those of failed searches.
        sound: The cost of the successful searches.
        reasons: Number of failed searches by error.
        active: Seconds with at least one search in progress, including failed ones.
        last: End time of the last search, in Unix time; None if there is no search.
    """

    right: int
    tokens: int
    sound: Usage
    reasons: Mapping[str, int]
    active: float
    last: float | None


_SPANS = """
SELECT ended - seconds AS started, ended
FROM (SELECT 86400 * (julianday(finished) - 2440587.5) AS ended, seconds FROM searches WHERE run = ?) ORDER BY started
"""
"""The start and end of each search in Unix time, which began on Julian day 2440587.5."""


def totals(connection: sqlite3.Connection, run: str) -> Totals | None:
    """Return the sums over the searches of a run; None if a search is corrupt."""
    found = _sums(connection, run)
    return None if found is None else Totals(*found, *_active(connection.execute(_SPANS, (run,))))


def run_sums(connection: sqlite3.Connection, run: str, seed: int) -> RunSums | None:
    """Return the sums over a run's searches, as shown in its table row; None if a search is corrupt."""
    found = _sums(connection, run)
    if found is None:
        return None
    query = "SELECT problem, correct AND error IS NULL FROM searches WHERE run = ? ORDER BY problem"
    right = [(from_text(problem), bool(correct)) for problem, correct in connection.execute(query, (run,))]
    return RunSums(seed, right, found[3], found[2])


def _sums(connection: sqlite3.Connection, run: str) -> tuple[int, int, Usage, dict[str, int]] | None:
    """Return the first fields of `Totals`; None if a search is corrupt."""
    sums = ", ".join(f"total({name}) FILTER (WHERE error IS NULL)" for name in AMOUNTS)
    query = (
        f"SELECT total(checksum IS NOT {CHECKSUM}), count(error), "
        f"total(correct AND error IS NULL), total(generated_tokens), {sums} FROM searches WHERE run = ?"
    )
    damaged, failed, right, tokens, *costs = connection.execute(query, (run,)).fetchone()
    if damaged:
        return None
    costs = {name: cost if name == "seconds" else int(cost) for name, cost in zip(AMOUNTS, costs, strict=True)}
    reasons = {}
    if failed:
        query = "SELECT error, count(*) FROM searches WHERE run = ? AND error IS NOT NULL GROUP BY error"
        found = connection.execute(f"{query} ORDER BY min(problem)", (run,))
        reasons = {from_text(error): number for error, number in found}
    return int(right), int(tokens), Usage(**costs), reasons


def _active(spans: Iterable[tuple[float, float]]) -> tuple[float, float | None]:
    """Return the length of the union of spans (pairs of start and end, sorted by start) and the latest end."""
    length, last = 0.0, -math.inf
    for start, end in spans:
        if end > last:
            length += end - max(start, last)
            last = end
    return length, None if last == -math.inf else last
