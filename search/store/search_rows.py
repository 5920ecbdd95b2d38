"""Writing and reading of searches: each is a row of outcome columns, with its tree as a compressed JSON document."""

from __future__ import annotations

import json
import re
import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from operator import lt
from time import time
from types import NoneType
from typing import Any, NamedTuple

from mas_gym.errors import ConfigError, MASGymError, is_number, shown
from mas_gym.internal.database import is_damage, transaction
from mas_gym.internal.json_types import JSONObject
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.prompts import ChatMessage
from mas_gym.systems.state import MASState
from mas_gym.tasks.base import Problem
from search.costs import AMOUNTS, TagUsage, Usage
from search.plan import AnytimePoint, Candidate, Plan
from search.results.run_info import RunInfo
from search.store.table_schema import ESCAPE, ROW, ROW_TYPES, Damage, as_text, checksum, digest, from_text
from search.tree import SCHEMA as TREE_SCHEMA
from search.tree import Tree

Seeds = Mapping[tuple[bytes, str], int]
"""The seed of each message, by the digest of its state and by its text."""

Columns = Mapping[str, Sequence[Any]]
"""The columns of ``searches`` for some searches; the documents only if they were requested."""
Row = dict[str, Any]
"""A row of ``searches`` by column."""
Grades = Mapping[int | None, tuple[str | None, bool]]
"""The answer in a node's message and whether it is right, by node; the chosen candidate comes first."""

_TEXTS = ("problem", "question", "reference", "answer", "error", "stopped")
_NODES: dict[str, set[type]] = {
    "parent": {int}, "speaker": {int}, "visits": {int}, "total": {int, float}, "value": {int, float, NoneType},
    "tokens": {int}, "logprob": {int, float, NoneType}, "seed": {int, NoneType}, "tag": {str},
}  # fmt: skip
"""The types in the columns of a stored tree with an entry per node; ``tag`` is missing for a search without tags."""
_MESSAGES: dict[str, set[type]] = {"text": {int}, "recipients": {list}}
"""The columns with an entry per node except the root."""
_LISTS: dict[str, set[type]] = {"texts": {str}, "truncated": {int}, "terminal": {int}}


class StoredCandidate(NamedTuple):
    """A candidate as stored."""

    node: int
    score: float | None
    answer: str | None
    correct: bool | None


class Document(NamedTuple):
    """The document of a search.

    Attributes:
        tree: The columns of `search.Tree.to_dict` without the root, and ``speaker``, ``seed`` and ``terminal`` (the
            terminal nodes); None if the search failed without a tree.
        candidates: The candidates, the chosen one first.
        anytime: The anytime curve, without the states.
        requests: For a program, role and text of the prompt of each message of the chosen path, by node.
    """

    tree: JSONObject | None
    candidates: Sequence[StoredCandidate]
    anytime: Sequence[AnytimePoint]
    requests: Mapping[int, Sequence[tuple[str, str]]]


def search_id(run: str, problem_id: str) -> int:
    """Return the key of a search, which is the same in every store."""
    return int.from_bytes(digest(run, problem_id)[:8], "big") >> 1


def usage_of_row(row: Row) -> Usage:
    """Return the cost of a search from its row of ``searches``."""
    return Usage(**{name: row[name] for name in AMOUNTS}, tags=row["tags"])


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


# ------------------------------------------------------------------ writing


def write_search(connection: sqlite3.Connection, run: str, problem: Problem, plan: Plan, seeds: Seeds) -> None:
    """Store a plan with its tree, replacing an earlier plan of the same problem.

    This changes the number of searches in the run's row, so the caller must then call `seal_run`.
    """
    key = search_id(run, problem.id)
    old, failed = connection.execute("SELECT count(*), count(error) FROM searches WHERE id = ?", (key,)).fetchone()
    counts = (1 - old, int(plan.error is not None) - failed, run)
    connection.execute("UPDATE runs SET searches = searches + ?, failed = failed + ? WHERE run = ?", counts)
    connection.execute("DELETE FROM grades WHERE search = ?", (key,))
    document = _document(plan, seeds)
    ended = plan if plan.error is None else Plan(candidates=())
    ranks = [rank for rank, candidate in enumerate(ended.candidates, 1) if candidate.correct]
    row = {
        "id": key,
        "run": run,
        "problem": problem.id,
        "kind": problem.kind,
        "question": problem.question,
        "reference": problem.answer,
        "metadata": metadata_text(problem),
        "answer": plan.answer,
        "correct": None if plan.correct is None and plan.error is None else int(bool(plan.correct)),
        "stopped": plan.stopped,
        "error": plan.error,
        **plan.usage.to_dict(),
        "seconds": float(plan.usage.seconds),
        "tags": json.dumps(plan.usage.tags),
        "finished": round(time(), 3),
        "candidates": len(ended.candidates),
        "hit_rank": ranks[0] if ranks else None,
        "curve": json.dumps([[point.generated_tokens, bool(point.correct)] for point in ended.anytime]),
        "scored": int(plan.tree is not None and any(node.value is not None for node in plan.tree)),
        "content": digest(document),
    }
    row |= {name: as_text(row[name]) for name in _TEXTS if row[name] is not None}
    row["checksum"] = checksum(*(row[name] for name in ROW[:-1]))
    values = tuple(row[name] for name in ROW)
    connection.execute(f"INSERT OR REPLACE INTO searches VALUES ({', '.join('?' * len(values))})", values)
    connection.execute("INSERT OR REPLACE INTO documents VALUES (?, ?)", (key, zlib.compress(document.encode())))


def _document(plan: Plan, seeds: Seeds) -> str:
    tree: JSONObject | None = None
    if plan.tree is not None:
        states = plan.tree.states
        tree = plan.tree.to_dict()
        del tree["root"], tree["schema"]
        tree["speaker"] = [state.speaker for state in states]
        tree["terminal"] = [node for node in range(len(states)) if plan.tree.is_terminal(node)]
        tree["seed"] = [state.parent and seeds.get((state.parent.digest, state.text)) for state in states]
    texts: dict[str, int] = {}
    requests = {
        node: [[message.role, texts.setdefault(message.content, len(texts))] for message in messages]
        for node, messages in sorted(plan.requests.items())
    }
    return json.dumps(
        {
            "tree": tree,
            "candidates": [(one.node, one.score, one.answer, one.correct) for one in plan.candidates],
            "anytime": [(p.agent_calls, p.generated_tokens, p.node, p.answer, p.correct) for p in plan.anytime],
            "requests": requests,
            "prompts": list(texts),
        }
    )


# ------------------------------------------------------------------ reading


@contextmanager
def snapshot(connection: sqlite3.Connection) -> Iterator[None]:
    """Make all reads in this context see one state of the file.

    Raises:
        Damage: The data is corrupt.
    """
    try:
        with transaction(connection, "DEFERRED"):
            yield
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if is_damage(error):
            raise Damage(str(error)) from error
        raise
    except (MASGymError, *_INVALID) as error:
        raise Damage(f"its rows are not a valid search: {error}") from error


_INVALID = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError, zlib.error)
"""Errors from reading values with wrong types."""


def searches_of(connection: sqlite3.Connection, run: str) -> tuple[dict[int, str], str]:
    """Return the names of a run's searches by key, ordered by problem id, and a message if some are lost.

    The names are used only in messages and have no checksum.
    """
    query = "SELECT id, problem FROM searches WHERE run = ? ORDER BY problem"
    found = dict(connection.execute(query, (run,)).fetchall())
    [wanted] = connection.execute("SELECT searches FROM runs WHERE run = ?", (run,)).fetchone() or [len(found)]
    return found, "" if wanted == len(found) else f"expected {wanted} searches, found {len(found)}"


def read_columns(connection: sqlite3.Connection, searches: Sequence[int], *, document: bool = False) -> Columns:
    """Return the columns of ``searches`` for some searches, in the order of their keys; a missing row is left out.

    Args:
        connection: The store.
        searches: The keys.
        document: Whether to read the documents too.

    Raises:
        Damage: A row does not match its checksum, or has values of wrong types.
    """
    names = (*ROW, "document") if document else ROW
    tables = "searches LEFT JOIN documents ON search = id" if document else "searches"
    query = f"SELECT {', '.join(names)} FROM {tables} WHERE id IN ({', '.join('?' * len(searches))})"
    read = {values[0]: values for values in connection.execute(query, searches)}
    rows = [read[search] for search in searches if search in read]
    if any(checksum(*values[:_CHECKED]) != values[_CHECKED] for values in rows):
        raise Damage("its row does not match its checksum")
    found: dict[str, Sequence[Any]] = dict.fromkeys(names, ())
    found |= zip(names, zip(*rows, strict=True), strict=False)
    for name, types in ROW_TYPES.items():
        if not types.issuperset(map(type, found[name])):
            raise Damage(f"{name}: expected another type")
    for name in _TEXTS:
        if ESCAPE in "".join(filter(None, found[name])):
            found[name] = [text and from_text(text) for text in found[name]]
    if not all(map(_CURVE.fullmatch, found["curve"])):
        raise Damage("its curve has values of wrong types")
    tags = (_checked_entries("tags", json.loads(text), _TAGS) if text != "[]" else () for text in found["tags"])
    found["tags"] = [tuple(map(TagUsage._make, entries)) for entries in tags]
    return found


def rows_of(columns: Columns) -> list[Row]:
    """Return columns as rows."""
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


_CHECKED = len(ROW) - 1
_CURVE = re.compile(r"\[(\[[0-9]+, (true|false)\](, )?)*\]")
_TAGS: Sequence[set[type]] = ({str}, {int}, {int}, {int}, {int}, {int})
_CANDIDATES: Sequence[set[type]] = [{int}, {int, float, NoneType}, {str, NoneType}, {bool, NoneType}]
_POINTS: Sequence[set[type]] = [{int}, {int}, {int, NoneType}, {str, NoneType}, {bool, NoneType}]


def _checked_entries(name: str, entries: object, types: Sequence[set[type]]) -> list[Any]:
    """Return a list of lists if the types of their values fit. Raises `Damage`."""
    _check_column(name, entries, {list})
    assert isinstance(entries, list)
    if {len(entry) for entry in entries} - {len(types)}:
        raise Damage(f"its document has wrong values in the column {name}")
    for allowed, column in zip(types, zip(*entries, strict=True), strict=False):
        _check_column(name, list(column), allowed)
    return entries


def _check_column(name: str, column: object, types: set[type], length: int | None = None) -> None:
    if not isinstance(column, list) or length not in (None, len(column)) or not types.issuperset(map(type, column)):
        raise Damage(f"its document has wrong values in the column {name}")


def problem_of(row: Row) -> Problem:
    """Return the problem of a row. Raises `Damage`."""
    metadata = json.loads(row["metadata"])
    if not isinstance(metadata, dict):
        raise Damage("expected a JSON object as the problem's metadata")
    return Problem(row["problem"], row["question"], row["reference"], row["kind"], metadata)


MOST_BYTES = 1 << 30
"""Size limit of a search's decompressed document; a small file from another person may expand a thousandfold."""


def document_of(row: Row, grades: Grades | None = None) -> Document:
    """Return the document of a row that was read with it, with other grades if they are given.

    Raises:
        Damage: The document is longer than `MOST_BYTES`, does not match its checksum, or has values of wrong types.
    """
    try:
        reader = zlib.decompressobj()
        text = reader.decompress(row["document"], MOST_BYTES).decode()
        if reader.unconsumed_tail:
            raise Damage(f"its tree, candidates, curve and requests take more than {MOST_BYTES >> 20} MiB")
    except (zlib.error, UnicodeDecodeError, TypeError):
        text = ""
    if digest(text) != row["content"]:
        raise Damage("its tree, candidates, curve or requests do not match their checksum")
    found = json.loads(text)
    tree, prompts = found["tree"], found["prompts"]
    nodes = 0 if tree is None else _checked_tree(tree)
    candidates = _checked_entries("candidates", found["candidates"], _CANDIDATES)
    anytime = _checked_entries("anytime", found["anytime"], _POINTS)
    places = [entry[0] for entry in candidates] + [entry[2] for entry in anytime if entry[2] is not None]
    wrong = [place for place in places if not 0 <= place < nodes]
    if wrong:
        raise Damage(f"its tree has no node {wrong[0]}")
    _check_column("prompts", prompts, {str})
    requests = {
        int(node): [(role, prompts[place]) for role, place in _checked_entries("requests", messages, [{str}, {int}])]
        for node, messages in found["requests"].items()
    }
    ends = list(map(StoredCandidate._make, candidates))
    points = [AnytimePoint(calls, tokens, None, *point) for calls, tokens, *point in anytime]
    if grades:
        new: Any = {node: {"answer": answer, "correct": correct} for node, (answer, correct) in grades.items()}
        ends = [one._replace(**new.get(one.node, {})) for one in ends]
        points = [one._replace(**new.get(one.node, {})) for one in points]
    return Document(tree, ends, points, requests)


def first_grade(grades: Grades) -> tuple[str | None, bool]:
    """Return the grade of the chosen candidate."""
    return next(iter(grades.values()), (None, False))


def _checked_tree(tree: JSONObject) -> int:
    """Check the types and lengths of a stored tree's columns, and return the number of nodes. Raises `Damage`."""
    nodes = len(tree["parent"])
    for name, types in _NODES.items():
        if name != "tag" or name in tree:
            _check_column(name, tree[name], types, nodes)
    for name, types in _MESSAGES.items():
        _check_column(name, tree[name], types, nodes - 1)
    for name, types in _LISTS.items():
        _check_column(name, tree[name], types)
    _check_column("recipients", list(chain.from_iterable(tree["recipients"])), {int})
    # Readers without a rebuilt tree follow these numbers.
    if min(tree["parent"], default=-1) < -1 or not all(map(lt, tree["parent"], range(nodes))):
        raise Damage("its tree has a node before its parent")
    if tree["text"] and not 0 <= min(tree["text"]) <= max(tree["text"]) < len(tree["texts"]):
        raise Damage("its tree has a message without a text")
    return nodes


def plan_of(row: Row, dynamics: Dynamics | None, grades: Grades | None = None) -> Plan:
    """Return the plan of a row, with other grades if they are given; without dynamics, without tree and candidates."""
    content = Document(None, (), (), {})
    tree: Tree | None = None
    if dynamics is not None and row["error"] is None:
        content = document_of(row, grades)
        if content.tree is None:
            raise Damage("its tree is missing")
        speakers = content.tree["speaker"]
        root = dynamics.initial_state(row["question"], speakers[1] if len(speakers) > 1 else None)
        tree = Tree.from_dict({**content.tree, "schema": TREE_SCHEMA, "root": root.to_dict()}, dynamics)
    states: Sequence[MASState] = () if tree is None else tree.states
    answer, correct = first_grade(grades) if grades is not None else (row["answer"], row["correct"])
    return Plan(
        candidates=tuple(Candidate(states[c.node], c.score, c.node, c.answer, c.correct) for c in content.candidates),
        tree=tree,
        anytime=tuple(
            point if point.node is None else point._replace(state=states[point.node]) for point in content.anytime
        ),
        problem_id=row["problem"],
        answer=answer,
        correct=None if correct is None else bool(correct),
        usage=usage_of_row(row),
        stopped=row["stopped"],
        error=row["error"],
        mas=None if dynamics is None else dynamics.mas,
        requests={
            node: tuple(ChatMessage(*message) for message in messages) for node, messages in content.requests.items()
        },
    )


# ------------------------------------------------------------------ runs

_CONFIG = {"planner": dict, "mas": dict, "policy": dict, "critic": dict | None, "seed": int, "training": bool}
_FACTS = {"planner": str, "task": str | None, "split": str | None, "problems": int | None, "started": str}


def seal_run(connection: sqlite3.Connection, run: str) -> None:
    """Write the checksum of a run's row; call it after writing the other columns."""
    names = "run, name, config, facts, searches, failed"
    connection.execute(f"UPDATE runs SET checksum = checksum({names}) WHERE run = ?", (run,))


def _check_run(info: RunInfo) -> None:
    """Raise an error unless the entries that tables and pages need are there and have their types."""
    for found, types in ((info.config, _CONFIG), (info.facts, _FACTS)):
        for key, kind in types.items():
            if not isinstance(found.get(key), kind):
                raise ValueError(f"{key}: expected another type, got {shown(found.get(key))}")
    named = [info.config["mas"], info.config["policy"], info.config["critic"] or {"name": ""}]
    if not all(isinstance(part["name"], str) for part in named) or not isinstance(info.name, str | None):
        raise ValueError("expected texts as names")
    if not all(is_number(amount) for name, amount in asdict(info.spent).items() if name in AMOUNTS):
        raise ValueError(f"spent: expected numbers, got {shown(info.facts['spent'])}")


def read_run(connection: sqlite3.Connection, run: str) -> RunInfo | None:
    """Read a run's row; None if there is none.

    Raises:
        Damage: The row is corrupt.
    """
    values = connection.execute("SELECT * FROM runs WHERE run = ?", (run,)).fetchone()
    if values is None:
        return None
    run, name, config, facts, searches, failed, mark = values
    if checksum(*values[:-1]) != mark:
        raise Damage("its row does not match its checksum")
    if digest(config).hex() != run:
        raise Damage("its config does not match its checksum")
    try:
        info = RunInfo(run, name, json.loads(config), json.loads(facts), searches, failed)
        _check_run(info)
    except _INVALID as error:
        raise Damage(f"its metadata cannot be read: {error}") from error
    return info
