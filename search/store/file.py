"""The store's file: its tables and the digests that guard its rows."""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from functools import cache
from hashlib import blake2b
from itertools import islice
from types import NoneType
from typing import Any, NamedTuple

from mas_gym.errors import StoreError
from mas_gym.internal.database import Format
from search.usage import Usage

TABLES = """
CREATE TABLE runs (
    run TEXT PRIMARY KEY,           -- digest of config
    name TEXT UNIQUE,               -- given by the user, or NULL
    config TEXT NOT NULL,           -- JSON: all that determines the results
    facts TEXT NOT NULL,            -- JSON: versions, task, first start, number of problems, what was spent
    held BLOB,                      -- number of its searches and of failed ones, and XOR of their checksums
    checksum BLOB                   -- digest of the row
) WITHOUT ROWID;
CREATE TABLE texts (
    id BLOB PRIMARY KEY,            -- digest of the text
    text NOT NULL                   -- TEXT; BLOB (UTF-8 with surrogates passed) if TEXT cannot hold it
) WITHOUT ROWID;
CREATE TABLE searches (
    id INTEGER PRIMARY KEY,         -- digest of run and problem
    run TEXT NOT NULL REFERENCES runs,
    problem TEXT NOT NULL,
    question BLOB NOT NULL REFERENCES texts,
    reference BLOB NOT NULL REFERENCES texts,
    kind TEXT NOT NULL,
    answer BLOB REFERENCES texts,
    correct INTEGER NOT NULL,
    stopped TEXT,
    error TEXT,
    agent_calls INTEGER NOT NULL,
    generated_tokens INTEGER NOT NULL,
    reward_calls INTEGER NOT NULL,
    reward_hits INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    dropped_tokens INTEGER NOT NULL,
    seconds REAL NOT NULL,          -- wall clock, like the next column: not part of the result
    finished TEXT NOT NULL,
    metadata TEXT,                  -- JSON: the problem's
    parts BLOB,                     -- three digests of its rows in other tables
    checksum BLOB                   -- digest of the row
);
CREATE INDEX searches_of_run ON searches (run, problem);
CREATE TABLE nodes (
    search INTEGER NOT NULL REFERENCES searches,
    node INTEGER NOT NULL,          -- 0 is the root; parents come before children
    parent INTEGER NOT NULL,
    speaker INTEGER NOT NULL,
    recipients TEXT NOT NULL,       -- node indices with commas
    text BLOB REFERENCES texts,     -- NULL at the root
    terminal INTEGER NOT NULL,
    visits INTEGER NOT NULL,        -- N
    total REAL NOT NULL,            -- W
    q REAL,                         -- W / N, NULL if N is 0
    value REAL,
    tokens INTEGER NOT NULL,
    logprob REAL,
    finish TEXT NOT NULL,
    seed INTEGER,
    PRIMARY KEY (search, node)
) WITHOUT ROWID;
CREATE TABLE candidates (
    search INTEGER NOT NULL REFERENCES searches,
    rank INTEGER NOT NULL,          -- from 1
    node INTEGER NOT NULL,
    score REAL,
    answer BLOB REFERENCES texts,
    correct INTEGER NOT NULL,
    PRIMARY KEY (search, rank)
) WITHOUT ROWID;
CREATE TABLE moments (
    search INTEGER NOT NULL REFERENCES searches,
    step INTEGER NOT NULL,
    agent_calls INTEGER NOT NULL,
    generated_tokens INTEGER NOT NULL,
    node INTEGER,
    answer BLOB REFERENCES texts,
    correct INTEGER,
    PRIMARY KEY (search, step)
) WITHOUT ROWID;
CREATE TABLE critic_costs (         -- of searches whose critic cost more than its forwards
    search INTEGER PRIMARY KEY REFERENCES searches,
    critic_tokens INTEGER NOT NULL,
    critic_prompt_tokens INTEGER NOT NULL,
    unread_verdicts INTEGER NOT NULL,
    checksum BLOB NOT NULL          -- digest of the row
);
"""
GRADER_COSTS = """
CREATE TABLE grader_costs (         -- of searches whose answers a judge graded
    search INTEGER PRIMARY KEY REFERENCES searches,
    grader_tokens INTEGER NOT NULL,
    grader_prompt_tokens INTEGER NOT NULL,
    checksum BLOB NOT NULL          -- digest of the row
);
"""
GRADINGS = """
CREATE TABLE gradings (
    grading TEXT PRIMARY KEY,       -- digest of identity
    label TEXT NOT NULL,
    identity TEXT NOT NULL,         -- JSON: the grader and its references
    made TEXT NOT NULL,
    checksum BLOB NOT NULL          -- digest of the row
) WITHOUT ROWID;
CREATE TABLE grades (
    search INTEGER NOT NULL REFERENCES searches,
    grading TEXT NOT NULL REFERENCES gradings,
    nodes TEXT NOT NULL,            -- JSON: node, answer, correct and reason; the chosen candidate's first
    checksum BLOB NOT NULL,         -- digest of the row
    PRIMARY KEY (search, grading)
) WITHOUT ROWID;
"""
REQUESTS = """
CREATE TABLE requests (             -- what programs asked for the messages of chosen paths
    search INTEGER NOT NULL REFERENCES searches,
    node INTEGER NOT NULL,          -- the reply
    messages TEXT NOT NULL,         -- JSON: role and id of the text of each message
    PRIMARY KEY (search, node)
) WITHOUT ROWID;
"""
TABLES += GRADINGS.lstrip() + GRADER_COSTS.lstrip() + REQUESTS.lstrip()
COSTS = {
    "critic_costs": ("critic_tokens", "critic_prompt_tokens", "unread_verdicts"),
    "grader_costs": ("grader_tokens", "grader_prompt_tokens"),
}
"""The tables with costs that most searches do not have, and their columns."""
USAGE = tuple(field.name for field in fields(Usage) if not any(field.name in names for names in COSTS.values()))
"""The costs in the row of a search."""
RESULTS = {
    "candidates": ("rank", "node", "correct"),
    "moments": ("step", "generated_tokens", "node", "correct"),
    **COSTS,
}
"""What a table of results needs beside a search's row: columns by table, the first of which orders the rows."""
VALUES = {"nodes": ("node", "parent", "speaker", "value")}
"""What a report needs of a search's tree, likewise."""
OTHERS = {
    "nodes": (
        "node", "recipients", "text", "terminal", "visits", "total", "q", "tokens", "logprob", "finish", "seed",
    ),
    "candidates": ("rank", "score", "answer"),
    "moments": ("step", "agent_calls", "answer"),
    "requests": ("node", "messages"),
}  # fmt: skip
"""What else there is of a search, likewise."""
PARTS = dict.fromkeys((*RESULTS, *VALUES, *OTHERS))
"""The tables that hold parts of a search."""


_TYPES = {"TEXT": (str,), "INTEGER": (int,), "REAL": (float,), "BLOB": (bytes,), "": (str, bytes)}
_MAYBE_BYTES = {("searches", "problem"), ("searches", "error")}
"""Columns of text that hold bytes if the text has lone surrogates."""


class Damage(Exception):
    """A stored row is not what was written."""


def check_types(table: str, row: Sequence[Any]) -> None:
    """Check that every value of a row has the type of its column; SQLite itself accepts any.

    Raises:
        Damage: A value has another type.
    """
    wrong = _mistyped(table, *map(type, row))
    if wrong is not None:
        raise Damage(wrong)


@cache
def _mistyped(table: str, *found: type) -> str | None:
    for (column, types), kind in zip(_columns()[table].items(), found, strict=False):
        if kind not in types:
            return _wrong_type(table, column, types, {kind})
    return None


def _wrong_type(table: str, column: str, types: Iterable[type], found: Iterable[type]) -> str:
    expected, got = (" or ".join(sorted(kind.__name__ for kind in kinds)) for kinds in (types, found))
    return f"{table}.{column} is not what was written: expected {expected}, got {got}"


@cache
def _columns() -> dict[str, dict[str, frozenset[type]]]:
    """Return the columns of each table with the types of their values, as `TABLES` declares them."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(TABLES)
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {
            table: {
                name: _types_of(table, name, kind, required=bool(not_null or key))
                for _, name, kind, not_null, _, key in connection.execute(f"PRAGMA table_info({table})")
            }
            for table in tables
        }


def _types_of(table: str, column: str, kind: str, *, required: bool) -> frozenset[type]:
    also = {bytes} if (table, column) in _MAYBE_BYTES else set()
    return frozenset({*_TYPES[kind], *also, *(() if required else (NoneType,))})


def digest(*parts: str) -> bytes:
    """Return a 16-byte digest of texts, the same on every machine."""
    state = blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        state.update(f"{len(data)}|".encode() + data)
    return state.digest()


def checksum(rows: Sequence[Any]) -> bytes:
    """Return the digest of rows as SQLite gives them back."""
    return blake2b(ascii(rows).encode(), digest_size=16).digest()


Parts = list[list[tuple[Any, ...]]]
"""The rows of a search in each table of `RESULTS`, `VALUES` or `OTHERS`, in order: the search, then those columns."""


def part_rows(
    connection: sqlite3.Connection, tables: Mapping[str, Sequence[str]], searches: Sequence[int]
) -> list[tuple[Parts, bytes]]:
    """Return the parts of several searches in `RESULTS`, `VALUES` or `OTHERS`, each with its digest, in their order.

    Raises:
        Damage: A value has another type than its column.
    """
    marks = ", ".join("?" * len(searches))
    found: dict[int, Parts] = {search: [[] for _ in tables] for search in searches}
    for place, (table, columns) in enumerate(tables.items()):
        names = ", ".join(columns)
        query = f"SELECT search, {names} FROM {table} WHERE search IN ({marks}) ORDER BY search, {columns[0]}"
        for row in connection.execute(query, searches):
            found[row[0]][place].append(row)
    return [(parts, _digest_of(tables, parts)) for parts in found.values()]


def _digest_of(tables: Mapping[str, Sequence[str]], parts: Parts) -> bytes:
    """Return the digest of a search's rows: columns in binary form, because it guards a million rows in a few seconds.

    Raises:
        Damage: A value has another type than its column.
    """
    packed: list[bytes] = []
    for (table, names), rows in zip(tables.items(), parts, strict=True):
        packed.append(b"%d|" % len(rows))
        types = _columns()[table]
        for name, values in zip(names, islice(zip(*rows, strict=True), 1, None), strict=False):
            kinds, column = set(map(type, values)), list(values)
            if not kinds <= types[name]:
                raise Damage(_wrong_type(table, name, types[name], kinds))
            if NoneType in kinds:
                packed.append(bytes(value is None for value in values))
                column = [value for value in values if value is not None]
            code = "q" if int in kinds else "d" if float in kinds else ""
            packed.append(struct.pack(f"<{len(column)}{code}", *column) if code else ascii(column).encode())
    return blake2b(b"".join(packed), digest_size=16).digest()


def cost_rows(connection: sqlite3.Connection, search: int) -> dict[str, tuple[Any, ...]]:
    """Return a search's row in each of `COSTS` that has one, all columns."""
    found: dict[str, tuple[Any, ...]] = {}
    for table in COSTS:
        row = connection.execute(f"SELECT * FROM {table} WHERE search = ?", (search,)).fetchone()
        found |= {table: row} if row is not None else {}
    return found


class Held(NamedTuple):
    """A summary of the searches that a run holds; it changes whenever one is added, lost or damaged."""

    searches: int = 0
    failed: int = 0
    marks: int = 0

    @classmethod
    def of(cls, connection: sqlite3.Connection, run: str) -> Held:
        """Return what the store has of a run."""
        # The table itself, which a damaged index does not hide.
        query = "SELECT checksum, error IS NOT NULL FROM searches NOT INDEXED WHERE run = ?"
        return cls.of_rows(connection.execute(query, (run,)))

    @classmethod
    def of_rows(cls, rows: Iterable[tuple[bytes | None, int]]) -> Held:
        """Combine checksums of searches and whether they failed."""
        searches, errors, marks = 0, 0, 0
        for mark, failed in rows:
            searches, errors, marks = searches + 1, errors + failed, marks ^ _bits(mark)
        return cls(searches, errors, marks)

    def changed(self, mark: bytes | None, failed: int, by: int) -> Held:
        """Add a search (``by`` is 1), or take it away (-1)."""
        return Held(self.searches + by, self.failed + by * failed, self.marks ^ _bits(mark))

    def pack(self) -> bytes:
        """Return the stored form."""
        return self.searches.to_bytes(8, "big") + self.failed.to_bytes(8, "big") + self.marks.to_bytes(16, "big")

    @classmethod
    def unpack(cls, stored: bytes) -> Held:
        """Read `pack` back."""
        return cls(*(int.from_bytes(part, "big") for part in (stored[:8], stored[8:16], stored[16:])))


def _bits(mark: bytes | None) -> int:
    # A checksum of another type is damage; without it the searches held are not the same as written.
    return int.from_bytes(mark, "big") if isinstance(mark, bytes) else 0


def seal_search(connection: sqlite3.Connection, search: int) -> bytes:
    """Write the digests of a search after its rows, and return its checksum."""
    parts = b"".join(part_rows(connection, tables, [search])[0][1] for tables in (RESULTS, VALUES, OTHERS))
    connection.execute("UPDATE searches SET parts = ?, checksum = NULL WHERE id = ?", (parts, search))
    row = _written(connection.execute("SELECT * FROM searches WHERE id = ?", (search,)))
    # The checksum is the last column, and covers all others.
    mark = checksum(row[:-1])
    connection.execute("UPDATE searches SET checksum = ? WHERE id = ?", (mark, search))
    return mark


def _written(cursor: sqlite3.Cursor) -> tuple[Any, ...]:
    row: tuple[Any, ...] | None = cursor.fetchone()
    if row is None:
        raise sqlite3.DatabaseError("malformed: a row that was just written is not there")
    return row


def seal_run(connection: sqlite3.Connection, run: str, held: Held) -> None:
    """Write what a run holds, and the digest of its row."""
    connection.execute("UPDATE runs SET held = ? WHERE run = ?", (held.pack(), run))
    row = _written(connection.execute("SELECT * FROM runs WHERE run = ?", (run,)))
    connection.execute("UPDATE runs SET checksum = ? WHERE run = ?", (checksum(row[:-1]), run))


FORMAT = Format(
    name="store",
    application=0x4D415347,
    schema=6,
    tables=TABLES,
    error=StoreError,
    origin="a run with --store FILE or store=FILE writes one",
)


@cache
def empty_pages() -> int:
    """Return the number of pages of a store without runs."""
    with closing(sqlite3.connect(":memory:")) as connection:
        for statement in TABLES.split(";\n"):
            connection.execute(statement)
        pages: int = connection.execute("PRAGMA page_count").fetchone()[0]
        return pages


explained = FORMAT.explained
