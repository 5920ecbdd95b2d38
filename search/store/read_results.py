"""The results of stored searches for tables, read without the trees; each equals that of the plan in the store."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import repeat

from search.results.outcomes import Outcome
from search.store.search_rows import Columns


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
