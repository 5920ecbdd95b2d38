"""The results of stored searches for tables, read without the trees; each equals that of the plan in the store."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from itertools import repeat

from search.results.outcomes import Outcome, Totals
from search.store.search_rows import Columns
from search.store.table_schema import CHECKSUM, from_text
from search.usage import Usage

_SUMMED = (
    *("agent_calls", "generated_tokens", "reward_calls", "prompt_tokens", "cached_tokens"),
    *("critic_tokens", "grader_tokens", "seconds"),
)

_DAMAGED = (
    f"checksum IS NOT {CHECKSUM} OR typeof(correct) NOT IN ('integer', 'null') OR typeof(finished) != 'real' "
    "OR typeof(seconds) != 'real'"
)


def outcomes_of(columns: Columns, planner: str, critic: str, seed: int) -> Iterable[Outcome]:
    """Return the outcomes of searches from their columns, with the names of their planner and critic."""
    graded = zip(columns["correct"], columns["error"], strict=True)
    found = {
        **columns,
        "planner": repeat(planner),
        "critic": repeat(critic),
        "seed": repeat(seed),
        "problem_id": columns["problem"],
        "correct": [None if correct is None else bool(correct) and error is None for correct, error in graded],
        "tokens": columns["generated_tokens"],
        # One document is parsed faster than many.
        "anytime": [tuple(map(tuple, curve)) for curve in json.loads(f"[{','.join(columns['curve'])}]")],
        "order_varied": repeat(False),
        "usd": repeat(None),
        "cut": [tokens > 0 for tokens in columns["dropped_tokens"]],
    }
    return map(Outcome._make, zip(*(found[name] for name in Outcome._fields), strict=False))


def totals(connection: sqlite3.Connection, run: str) -> Totals | None:
    """Return the sums over the searches of a run; None if a search is corrupt."""
    kinds = {name: "REAL" if name == "seconds" else "INTEGER" for name in _SUMMED}
    sums = ", ".join(f"CAST(total({name}) FILTER (WHERE error IS NULL) AS {kind})" for name, kind in kinds.items())
    query = f"SELECT total({_DAMAGED}), count(error), total(generated_tokens), {sums} FROM searches"
    damaged, failed, tokens, *costs = connection.execute(f"{query} WHERE run = ?", (run,)).fetchone()
    if damaged:
        return None
    failures: dict[str, int] = {}
    if failed:
        query = "SELECT error, count(*) FROM searches WHERE run = ? AND error IS NOT NULL GROUP BY error"
        found = connection.execute(f"{query} ORDER BY min(problem)", (run,))
        failures = {from_text(error): number for error, number in found}
    names = "problem, CASE WHEN error IS NULL THEN correct ELSE 0 END, finished, seconds"
    grades: list[tuple[str, bool | None]] = []
    spans: list[tuple[float, float]] = []
    query = f"SELECT {names} FROM searches WHERE run = ? ORDER BY problem"
    for problem, correct, finished, seconds in connection.execute(query, (run,)):
        grades.append((from_text(problem), None if correct is None else correct == 1))
        spans.append((finished, seconds))
    return Totals(grades, failures, Usage(**dict(zip(kinds, costs, strict=True))), int(tokens), spans)
