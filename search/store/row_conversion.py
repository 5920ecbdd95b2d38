"""Conversion of runs and searches to rows of the store and back."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, NamedTuple

from mas_gym.errors import ConfigError, MASGymError, is_number, shown
from mas_gym.internal.database import is_damage, transaction
from mas_gym.internal.json_types import JSONObject
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.prompts import ChatMessage
from mas_gym.systems.state import MASState
from mas_gym.tasks.base import Problem
from search.plan import AnytimePoint, Candidate, Plan
from search.results.run_info import RunInfo
from search.store.table_schema import CONTENT, Content, Damage, checksum, contents_of, digest, seal
from search.tree import SCHEMA as TREE_SCHEMA
from search.tree import Tree
from search.usage import AMOUNTS, Usage

Seeds = Mapping[tuple[bytes, str], int]
"""The seed of each message, by the digest of its state and by its text."""

_TEXTS = ("question", "reference", "answer")
_TEXTS_AT_ONCE = 1000


class NodeRow(NamedTuple):
    """A row of ``nodes`` with its text resolved."""

    search: int
    node: int
    parent: int
    speaker: int
    recipients: str
    text: str | None
    terminal: int
    visits: int
    total: float
    q: float | None
    value: float | None
    tokens: int
    logprob: float | None
    finish: str
    seed: int | None
    arm: str | None


class CandidateRow(NamedTuple):
    """A row of ``candidates`` with its answer resolved."""

    search: int
    rank: int
    node: int
    score: float | None
    answer: str | None
    correct: int


def search_id(run: str, problem_id: str) -> int:
    """Return the key of a search, which is the same in every store."""
    return int.from_bytes(digest(run, problem_id)[:8], "big") >> 1


def usage_of_row(row: Mapping[str, Any]) -> Usage:
    """Return the cost of a search from its row of ``searches``."""
    return Usage(**{name: row[name] for name in AMOUNTS}, arms=json.loads(row["arms"]))


def metadata_text(problem: Problem) -> str:
    """Return a problem's metadata as JSON.

    Raises:
        ConfigError: The metadata is not JSON-serializable.
    """
    try:
        return json.dumps(dict(problem.metadata), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"problem {problem.id!r}: expected JSON-serializable metadata ({error}); remove the metadata that "
            "is not serializable, or run without a store"
        ) from error


class Writer:
    """Writes the rows of one search, inside a transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        """Write through a connection."""
        self._connection = connection

    def text(self, text: str | None) -> bytes | None:
        """Store a text once and return its key."""
        if text is None:
            return None
        key = digest(text)
        # This repairs a corrupt text.
        self._connection.execute(
            "INSERT INTO texts VALUES (?, ?) "
            "ON CONFLICT DO UPDATE SET text = excluded.text WHERE text IS NOT excluded.text",
            (key, _storable(text)),
        )
        return key

    def search(self, run: str, problem: Problem, plan: Plan, seeds: Seeds) -> bytes:
        """Store a plan with its tree, replacing an earlier plan of the same problem, and return its checksum.

        This changes the number of searches in the run's row, so the caller must write the row's checksum with `seal`.
        """
        key = search_id(run, problem.id)
        query = "SELECT count(*), count(error) FROM searches WHERE id = ?"
        old, failed = self._connection.execute(query, (key,)).fetchone()
        query = "UPDATE runs SET searches = searches + ?, failed = failed + ? WHERE run = ?"
        self._connection.execute(query, (1 - old, int(plan.error is not None) - failed, run))
        for table in (*CONTENT, "grades"):
            self._connection.execute(f"DELETE FROM {table} WHERE search = ?", (key,))
        if plan.tree is not None:
            self._many("nodes", self._nodes(key, plan.tree, seeds))
        self._many("candidates", (self._candidate(key, rank, c) for rank, c in enumerate(plan.candidates, 1)))
        self._many("moments", (self._moment(key, step, m) for step, m in enumerate(plan.anytime)))
        self._many("requests", (self._request(key, *request) for request in sorted(plan.requests.items())))
        [content] = contents_of(self._connection, [key])
        ended = plan if plan.error is None else Plan(candidates=())
        ranks = [rank for rank, candidate in enumerate(ended.candidates, 1) if candidate.correct]
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
            **asdict(plan.usage),
            "arms": json.dumps(plan.usage.arms),
            "finished": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "metadata": metadata_text(problem),
            "candidates": len(ended.candidates),
            "hit_rank": next(iter(ranks), None),
            "curve": json.dumps([[point.generated_tokens, bool(point.correct)] for point in ended.anytime]),
            "content": checksum(content),
        }
        marks = ", ".join("?" * len(row))
        self._connection.execute(
            f"INSERT OR REPLACE INTO searches ({', '.join(row)}) VALUES ({marks})", tuple(row.values())
        )
        seal(self._connection, "searches", "id", key)
        [mark] = self._connection.execute("SELECT checksum FROM searches WHERE id = ?", (key,)).fetchone()
        return bytes(mark)

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
                node.arm or None,
            )

    def _candidate(self, key: int, rank: int, candidate: Candidate) -> tuple[Any, ...]:
        return key, rank, candidate.node, candidate.score, self.text(candidate.answer), int(bool(candidate.correct))

    def _request(self, key: int, node: int, messages: Sequence[ChatMessage]) -> tuple[Any, ...]:
        texts = [(message.role, self.text(message.content)) for message in messages]
        return key, node, json.dumps([[role, text.hex()] for role, text in texts if text is not None])

    def _moment(self, key: int, step: int, moment: AnytimePoint) -> tuple[Any, ...]:
        answer = self.text(moment.answer)
        return key, step, moment.agent_calls, moment.generated_tokens, moment.node, answer, moment.correct


class Reader:
    """Reads searches, each in one snapshot, and verifies their checksums.

    Unreadable or changed rows raise `Damage`.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        """Read through a connection."""
        self._connection = connection

    def searches(self, run: str) -> tuple[dict[int, str | bytes], str]:
        """Return the keys and names of a run's searches by problem id, and a message if some are corrupt.

        The names are used only in messages and have no checksum.
        """
        query = "SELECT id, problem FROM searches WHERE run = ? ORDER BY problem"
        found: dict[int, str | bytes] = dict(self._connection.execute(query, (run,)).fetchall())
        return found, self.lost(run, len(found))

    def lost(self, run: str, found: int) -> str:
        """Return a message if a run's number of searches differs from the number found, else ``""``."""
        [wanted] = self._connection.execute("SELECT searches FROM runs WHERE run = ?", (run,)).fetchone() or [found]
        return "" if wanted == found else f"expected {wanted} searches, found {found}"

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Make all reads in this context see one state of the file.

        Raises:
            Damage: The data is corrupt.
        """
        try:
            with transaction(self._connection, "DEFERRED"):
                yield
        except (sqlite3.Error, UnicodeDecodeError) as error:
            if is_damage(error):
                raise Damage(str(error)) from error
            raise
        except (MASGymError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
            raise Damage(f"its rows are not a valid search: {error}") from error

    def row(self, search: int) -> dict[str, Any] | None:
        """Return a row of ``searches`` with its texts resolved; None if there is none."""
        return next(iter(self.rows([search])), None)

    def rows(self, searches: Sequence[int], *, texts: bool = True) -> list[dict[str, Any]]:
        """Return the existing rows of ``searches`` in the order of their keys.

        Args:
            searches: The keys.
            texts: Whether to resolve the question, the reference and the answer.
        """
        marks = ", ".join("?" * len(searches))
        cursor = self._connection.execute(f"SELECT * FROM searches WHERE id IN ({marks})", searches)
        names = [column[0] for column in cursor.description]
        read = {values[0]: _checked_row(names, values) for values in cursor}
        found = [read[search] for search in searches if search in read]
        if texts:
            known = self._known_texts({row[name] for row in found for name in _TEXTS})
            for row in found:
                row |= {name: known[row[name]] for name in _TEXTS}
        return found

    def problem(self, row: Mapping[str, Any]) -> Problem:
        """Return the problem of a row."""
        metadata = json.loads(row["metadata"]) if row["metadata"] is not None else {}
        return Problem(row["problem"], row["question"], row["reference"], row["kind"], metadata)

    def plan(self, row: Mapping[str, Any], dynamics: Dynamics | None) -> Plan:
        """Return the plan of a row; without dynamics, it has no tree and no candidates."""
        tree: Tree | None = None
        candidates: tuple[Candidate, ...] = ()
        moments: tuple[AnytimePoint, ...] = ()
        requests: dict[int, tuple[ChatMessage, ...]] = {}
        if dynamics is not None and row["error"] is None:
            nodes, found, curve, asked = self.parts(row)
            tree = _tree(row["question"], nodes, dynamics)
            candidates = tuple(_candidate(tree, entry) for entry in found)
            moments = tuple(_moment(tree, *entry[2:]) for entry in curve)
            requests = dict(self._request(*request[1:]) for request in asked)
        return Plan(
            candidates=candidates,
            tree=tree,
            anytime=moments,
            problem_id=row["problem"],
            answer=row["answer"],
            correct=bool(row["correct"]),
            usage=usage_of_row(row),
            stopped=row["stopped"],
            error=row["error"],
            mas=None if dynamics is None else dynamics.mas,
            requests=requests,
        )

    def _request(self, node: int, messages: str) -> tuple[int, tuple[ChatMessage, ...]]:
        asked = [(role, bytes.fromhex(text)) for role, text in json.loads(messages)]
        texts = self._known_texts({text for _, text in asked})
        return node, tuple(ChatMessage(role, texts[text] or "") for role, text in asked)

    def parts(
        self, row: Mapping[str, Any]
    ) -> tuple[list[NodeRow], list[CandidateRow], list[tuple[Any, ...]], list[tuple[Any, ...]]]:
        """Return a search's nodes, candidates and curve points with texts resolved, and its rows of ``requests``."""
        [[nodes, candidates, moments, requests]] = self.content([row])
        texts = self._known_texts(
            {*(node[5] for node in nodes), *(line[4] for line in candidates), *(point[5] for point in moments)}
        )
        return (
            [NodeRow._make((*node[:5], texts[node[5]], *node[6:])) for node in nodes],
            [CandidateRow._make((*line[:4], texts[line[4]], line[5])) for line in candidates],
            [(*point[:5], texts[point[5]], point[6]) for point in moments],
            requests,
        )

    def content(self, rows: Sequence[Mapping[str, Any]]) -> list[Content]:
        """Return the verified content of rows of ``searches``."""
        found = contents_of(self._connection, [row["id"] for row in rows])
        if any(checksum(content) != row["content"] for row, content in zip(rows, found, strict=True)):
            raise Damage("its tree, candidates, curve or requests do not match their checksum")
        return found

    def _known_texts(self, keys: Iterable[bytes | None]) -> dict[bytes | None, str | None]:
        """Return texts by key; the key None has the text None."""
        wanted = [key for key in keys if key is not None]
        found: dict[bytes | None, str | None] = {None: None}
        for start in range(0, len(wanted), _TEXTS_AT_ONCE):
            some = wanted[start : start + _TEXTS_AT_ONCE]
            query = f"SELECT id, text FROM texts WHERE id IN ({', '.join('?' * len(some))})"
            found |= {key: _checked(key, text) for key, text in self._connection.execute(query, some)}
        if len(found) <= len(wanted):
            raise Damage("one of its texts is missing")
        return found


def _checked_row(names: Sequence[str], values: tuple[Any, ...]) -> dict[str, Any]:
    """Return a verified row of ``searches`` with unresolved texts."""
    if checksum(values[:-1]) != values[-1]:
        raise Damage("its row does not match its checksum")
    row = dict(zip(names, values, strict=True))
    row["problem"] = readable(row["problem"])
    row["error"] = None if row["error"] is None else readable(row["error"])
    datetime.fromisoformat(row["finished"])
    # SQLite stores any type in any column.
    for name in (*AMOUNTS, "correct", "candidates", "hit_rank"):
        if not is_number(row[name]) and (name, row[name]) != ("hit_rank", None):
            raise Damage(f"{name}: expected a number, got {shown(row[name])}")
    return row


def _checked(key: bytes, stored: str | bytes) -> str:
    if not isinstance(stored, str | bytes) or digest(text := readable(stored)) != key:
        raise Damage("one of its texts does not match its checksum")
    return text


def _tree(question: str, nodes: list[NodeRow], dynamics: Dynamics) -> Tree:
    """Rebuild a tree, replaying every transition."""
    places: dict[str, int] = {}
    columns: JSONObject = {
        "schema": TREE_SCHEMA,
        "root": dynamics.initial_state(question, nodes[1].speaker if len(nodes) > 1 else None).to_dict(),
        "parent": [node.parent for node in nodes],
        "text": [places.setdefault(node.text or "", len(places)) for node in nodes[1:]],
        "texts": list(places),
        "recipients": [recipients_of(node) for node in nodes[1:]],
        "visits": [node.visits for node in nodes],
        "total": [node.total for node in nodes],
        "value": [node.value for node in nodes],
        "tokens": [node.tokens for node in nodes],
        "logprob": [node.logprob for node in nodes],
        "truncated": [node.node for node in nodes if node.finish == "length"],
    }
    if any(node.arm for node in nodes):
        columns["arm"] = [node.arm or "" for node in nodes]
    return Tree.from_dict(columns, dynamics)


def recipients_of(node: NodeRow) -> list[int]:
    """Return the graph nodes (agents or the sink) that received a node's message."""
    return [int(index) for index in node.recipients.split(",")] if node.recipients else []


def _state(tree: Tree, node: int) -> MASState:
    if not 0 <= node < len(tree):
        raise Damage(f"its tree has no node {node}")
    return tree.states[node]


def _candidate(tree: Tree, row: CandidateRow) -> Candidate:
    return Candidate(_state(tree, row.node), row.score, row.node, row.answer, bool(row.correct))


def _moment(
    tree: Tree, agent_calls: int, tokens: int, node: int | None, answer: str | None, correct: int | None
) -> AnytimePoint:
    state = None if node is None else _state(tree, node)
    return AnytimePoint(agent_calls, tokens, state, node, answer, None if correct is None else bool(correct))


def _storable(text: str) -> str | bytes:
    """Return a value that SQLite can store: the text, or its bytes if it has lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return text


def show_id(stored: object) -> str:
    """Return a stored id of any type as text for a message."""
    return ascii(stored.decode("utf-8", "replace") if isinstance(stored, bytes) else stored)


def readable(stored: str | bytes) -> str:
    """Return the text that was stored."""
    return stored.decode("utf-8", "surrogatepass") if isinstance(stored, bytes) else stored


def _check_run(info: RunInfo) -> None:
    """Raise an error unless the entries that tables and pages need are there and have their types."""
    config, facts = info.config, info.facts
    names = [config["policy"]["name"], config["mas"]["name"], facts["started"]]
    names += [config["critic"]["name"]] if config["critic"] else []
    if not all(isinstance(name, str) for name in names) or type(config["seed"]) is not int:
        raise ValueError("expected names, a time and an integer seed")
    if not all(is_number(amount) for name, amount in asdict(info.spent).items() if name in AMOUNTS):
        raise ValueError(f"spent: expected numbers, got {shown(facts['spent'])}")
    _ = info.label


def read_run(connection: sqlite3.Connection, run: str) -> RunInfo | None:
    """Read a run's row; None if there is none.

    Raises:
        Damage: The row is corrupt.
    """
    values = connection.execute("SELECT * FROM runs WHERE run = ?", (run,)).fetchone()
    if values is None:
        return None
    run, name, config, facts, searches, failed, mark = values
    if checksum(values[:-1]) != mark:
        raise Damage("its row does not match its checksum")
    if digest(config).hex() != run:
        raise Damage("its config does not match its checksum")
    try:
        read = json.loads(facts)
        info = RunInfo(run, name, json.loads(config), read, searches, failed)
        _check_run(info)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Damage(f"its metadata cannot be read: {error}") from error
    return info
