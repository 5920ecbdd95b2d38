"""The results of stored searches as tables and reports need them, read many searches at once and without their trees.

Each figure is the one of the plan that `Store.plans` would rebuild. What is read is checked like there: the row of a
search by its checksum; its candidates, curve and costs by the first digest in its ``parts``; the values in its tree
by the second. Texts, and what else there is, are only checked by what reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from search.results.outcomes import Outcome
from search.store.file import COSTS, USAGE, Damage, Parts
from search.usage import Usage

Grades = Mapping[int | None, tuple[str | None, bool]]
"""The answer in a node's message, and whether it is right, by node; the chosen candidate's is the first."""

Row = Mapping[str, Any]
"""A row of ``searches``."""


class TreeValues(NamedTuple):
    """The values in the tree of one search, by node: the root is the first, and parents come before children.

    Attributes:
        parents: Index of the parent; -1 for the root.
        speakers: Index of the agent that wrote the message.
        values: The value of the state; None if it has none.
        candidates: The node of each candidate, the chosen one first, and whether it is right.
    """

    parents: Sequence[int]
    speakers: Sequence[int]
    values: Sequence[float | None]
    candidates: Sequence[tuple[int, bool]]

    def path(self, node: int) -> list[int]:
        """Return the nodes from the first message to a node."""
        found = []
        while node > 0:
            found.append(node)
            node = self.parents[node]
        return found[::-1]


def outcomes(
    rows: Sequence[Row],
    parts: Sequence[Parts],
    names: tuple[str, str],
    seed: int,
    grades: Mapping[int, Grades],
) -> list[Outcome]:
    """Return the outcomes of searches.

    Args:
        rows: The rows of the searches.
        parts: Their other results, from `Reader.results`.
        names: Planner and critic.
        seed: The seed of their run.
        grades: By search, the grades that replace those of the run.
    """
    found = []
    for row, (candidates, moments, *costs) in zip(rows, parts, strict=True):
        right, graded, ended = bool(row["correct"]), grades.get(row["id"]), row["error"] is None
        ranked = [(node, correct) for _, _, node, correct in candidates] if ended else []
        curve = [(tokens, node, correct) for _, _, tokens, node, correct in moments] if ended else []
        if graded is not None:
            right = next(iter(graded.values()), (None, False))[1]
            ranked = [(node, graded[node][1] if node in graded else correct) for node, correct in ranked]
            curve = [(spent, node, graded[node][1] if node in graded else correct) for spent, node, correct in curve]
        spent = _spent(costs)
        found.append(
            Outcome(
                *names,
                seed,
                row["problem"],
                right and ended,
                next((rank for rank, (_, correct) in enumerate(ranked, 1) if correct), None),
                len(ranked),
                row["generated_tokens"],
                row["agent_calls"],
                row["reward_calls"],
                row["error"],
                tuple((tokens, bool(correct)) for tokens, _, correct in curve),
                row["seconds"],
                spent.get("critic_tokens", 0),
                spent.get("grader_tokens", 0),
            )
        )
    return found


def usages(rows: Sequence[Row], parts: Sequence[Parts]) -> list[Usage]:
    """Return the costs of searches; arguments as for `outcomes`."""
    return [
        Usage(**{name: row[name] for name in USAGE}, **_spent(costs))
        for row, (_, _, *costs) in zip(rows, parts, strict=True)
    ]


def _spent(costs: Sequence[Sequence[tuple[Any, ...]]]) -> dict[str, int]:
    return {
        column: number
        for columns, part in zip(COSTS.values(), costs, strict=True)
        for line in part
        for column, number in zip(columns, line[1:], strict=True)
    }


def outcome_of_row(row: Row, seed: int) -> Outcome:
    """Return the part of an outcome that is in the row of a search: without candidates, curve and judges' tokens."""
    costs = {name: row[name] for name in ("agent_calls", "reward_calls", "error", "seconds")}
    right = bool(row["correct"]) and row["error"] is None
    return Outcome("", "", seed, row["problem"], right, tokens=row["generated_tokens"], **costs)


def tree_values(
    rows: Sequence[Row], parts: Sequence[Parts], trees: Sequence[list[tuple[Any, ...]]]
) -> list[TreeValues]:
    """Return the values in the trees of searches, which are empty for those that failed.

    Args:
        rows: The rows of the searches.
        parts: Their other results, from `Reader.results`.
        trees: The values in their trees, from `Reader.values`.
    """
    found = []
    for row, (candidates, *_), nodes in zip(rows, parts, trees, strict=True):
        if row["error"] is not None:
            nodes, candidates = [], []
        for _, _, place, *_ in candidates:
            if not 0 <= place < len(nodes):
                raise Damage(f"node {place} is not in its tree")
        found.append(
            TreeValues(
                [node[2] for node in nodes],
                [node[3] for node in nodes],
                [node[4] for node in nodes],
                [(candidate[2], bool(candidate[3])) for candidate in candidates],
            )
        )
    return found
