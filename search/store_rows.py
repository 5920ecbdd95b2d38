"""Plans as rows and back."""

from __future__ import annotations

import math
import sqlite3
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

from mas_gym.dynamics import Dynamics
from mas_gym.errors import MASGymError, StoreError
from mas_gym.state import Action
from mas_gym.tasks.base import Problem
from search.plan import AnytimePoint, Candidate, Plan, Usage
from search.protocol import Proposal
from search.store_file import PARTS, fingerprint
from search.tree import Tree

Seeds = Mapping[tuple[bytes, str], int]
"""The seed of each message, by the digest of the state in which it was said and its text."""

_USAGE = [field.name for field in fields(Usage)]
_NAN = math.nan


def search_id(run: str, problem_id: str) -> int:
    """Return the key of a search, the same in every store."""
    return int.from_bytes(fingerprint(run, problem_id)[:8], "big") >> 1


class Writer:
    """Writes the rows of one search; to be used inside a transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        """Write through a connection."""
        self._connection = connection

    def text(self, text: str | None) -> bytes | None:
        """Store a text once and return its key."""
        if text is None:
            return None
        key = fingerprint(text)
        self._connection.execute("INSERT OR IGNORE INTO texts VALUES (?, ?)", (key, _storable(text)))
        return key

    def search(self, run: str, problem: Problem, plan: Plan, seeds: Seeds) -> None:
        """Store a plan with its tree, in place of an earlier one of the same problem."""
        key = search_id(run, problem.id)
        for table in PARTS:
            self._connection.execute(f"DELETE FROM {table} WHERE search = ?", (key,))
        row = {
            "id": key,
            "run": run,
            "problem": _storable(problem.id),
            "question": self.text(problem.question),
            "reference": self.text(problem.answer),
            "kind": problem.kind,
            "answer": self.text(plan.answer),
            "correct": int(bool(plan.correct)),
            "stopped": plan.stopped,
            "error": None if plan.error is None else _storable(plan.error),
            **{name: getattr(plan.usage, name) for name in _USAGE},
            "finished": datetime.now(UTC).isoformat(timespec="milliseconds"),
        }
        marks = ", ".join("?" * len(row))
        self._connection.execute(
            f"INSERT OR REPLACE INTO searches ({', '.join(row)}) VALUES ({marks})", tuple(row.values())
        )
        if plan.tree is not None:
            self._many("nodes", self._nodes(key, plan.tree, seeds))
        self._many("candidates", (self._candidate(key, rank, c) for rank, c in enumerate(plan.candidates, 1)))
        self._many("moments", (self._moment(key, step, m) for step, m in enumerate(plan.anytime)))

    def _many(self, table: str, rows: Iterable[tuple[Any, ...]]) -> None:
        iterator = iter(rows)
        first = next(iterator, None)
        if first is not None:
            marks = ", ".join("?" * len(first))
            statement = f"INSERT INTO {table} VALUES ({marks})"
            self._connection.execute(statement, first)
            self._connection.executemany(statement, iterator)

    def _nodes(self, key: int, tree: Tree, seeds: Seeds) -> Iterator[tuple[Any, ...]]:
        for node in tree:
            state = node.state
            said = state.parent is not None and node.id > 0
            yield (
                key,
                node.id,
                node.parent,
                state.speaker,
                ",".join(map(str, state.recipients)),
                self.text(state.text) if said else None,
                int(tree.is_terminal(node.id)),
                node.visits,
                node.total,
                node.q,
                node.value,
                node.tokens,
                node.logprob,
                node.finish_reason,
                seeds.get((state.parent.digest, state.text)) if said and state.parent is not None else None,
            )

    def _candidate(self, key: int, rank: int, candidate: Candidate) -> tuple[Any, ...]:
        return key, rank, candidate.node, candidate.score, self.text(candidate.answer), int(bool(candidate.correct))

    def _moment(self, key: int, step: int, moment: AnytimePoint) -> tuple[Any, ...]:
        answer = self.text(moment.answer)
        return key, step, moment.agent_calls, moment.generated_tokens, moment.node, answer, moment.correct


class Reader:
    """Reads searches back as plans."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        """Read through a connection."""
        self._connection = connection

    def text(self, key: bytes | None) -> str | None:
        """Return the text with this key."""
        if key is None:
            return None
        row = self._connection.execute("SELECT text FROM texts WHERE id = ?", (key,)).fetchone()
        if row is None:
            raise StoreError("a text is missing from the store: it is damaged; recover it with sqlite3's .recover")
        return readable(row[0])

    def rows(self, run: str, problem_id: str | None = None) -> Iterator[dict[str, Any]]:
        """Return the rows of ``searches``, by problem, texts resolved."""
        where, given = "run = ?", [run]
        if problem_id is not None:
            where, given = "id = ?", [search_id(run, problem_id)]  # type: ignore[list-item]
        cursor = self._connection.execute(f"SELECT * FROM searches WHERE {where} ORDER BY problem", given)
        names = [column[0] for column in cursor.description]
        for values in cursor:
            row = dict(zip(names, values, strict=True))
            for name in ("question", "reference", "answer"):
                row[name] = self.text(row[name])
            row["problem"] = readable(row["problem"])
            row["error"] = None if row["error"] is None else readable(row["error"])
            yield row

    def plan(self, row: Mapping[str, Any], dynamics: Dynamics | None) -> Plan:
        """Return the plan of a row; without dynamics, the one without tree and candidates."""
        tree = self.tree(row, dynamics) if dynamics is not None and row["error"] is None else None
        return Plan(
            candidates=tuple(self._candidates(row["id"], tree)) if tree is not None else (),
            tree=tree,
            anytime=tuple(self._moments(row["id"], tree)) if tree is not None else (),
            problem_id=row["problem"],
            answer=row["answer"],
            correct=bool(row["correct"]),
            usage=Usage(**{name: row[name] for name in _USAGE}),
            stopped=row["stopped"],
            error=row["error"],
        )

    def tree(self, row: Mapping[str, Any], dynamics: Dynamics) -> Tree:
        """Rebuild a tree, replaying every transition.

        Raises:
            StoreError: The rows are no tree of this system.
        """
        tree = Tree(dynamics.initial_state(row["question"]))
        query = (
            "SELECT parent, recipients, t.text, visits, total, value, tokens, logprob, finish "
            "FROM nodes n LEFT JOIN texts t ON t.id = n.text WHERE search = ? ORDER BY node"
        )
        values: list[float | None] = []
        try:
            for index, stored in enumerate(self._connection.execute(query, (row["id"],))):
                parent, recipients, text, visits, total, value, tokens, logprob, finish = stored
                if index:
                    proposal = Proposal(Action("", 0), tokens, logprob, finish)
                    routed = tuple(map(int, recipients.split(","))) if recipients else ()
                    tree.grow(parent, readable(text), routed, proposal, dynamics)
                tree.visits[-1], tree.totals[-1] = visits, total
                values.append(value)
        except (MASGymError, IndexError, TypeError, ValueError) as error:
            raise StoreError(
                f"search of {row['problem']!r}: its rows are no tree of MAS {dynamics.mas.name!r}: {error}"
            ) from error
        tree.values[:] = array("d", (_NAN if value is None else value for value in values))
        return tree

    def _candidates(self, key: int, tree: Tree) -> Iterator[Candidate]:
        query = "SELECT node, score, answer, correct FROM candidates WHERE search = ? ORDER BY rank"
        for node, score, answer, correct in self._connection.execute(query, (key,)):
            yield Candidate(tree.states[node], score, node, self.text(answer), bool(correct))

    def _moments(self, key: int, tree: Tree) -> Iterator[AnytimePoint]:
        query = (
            "SELECT agent_calls, generated_tokens, node, answer, correct FROM moments WHERE search = ? ORDER BY step"
        )
        for calls, tokens, node, answer, correct in self._connection.execute(query, (key,)):
            state = None if node is None else tree.states[node]
            yield AnytimePoint(
                calls, tokens, state, node, self.text(answer), None if correct is None else bool(correct)
            )


def _storable(text: str) -> str | bytes:
    """Return what SQLite can hold: the text, or its bytes where it has lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return text


def readable(stored: str | bytes) -> str:
    """Return the text that was stored."""
    return stored.decode("utf-8", "surrogatepass") if isinstance(stored, bytes) else stored
