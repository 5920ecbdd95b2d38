"""The tables of a store file, and the checksums of runs and searches."""

from __future__ import annotations

import marshal
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from hashlib import blake2b
from itertools import groupby
from operator import itemgetter
from typing import Any

from mas_gym.errors import StoreError
from mas_gym.internal.database import Format

TABLES = """
CREATE TABLE runs (
    run TEXT PRIMARY KEY,           -- digest of config
    name TEXT UNIQUE,               -- given by the user, or NULL
    config TEXT NOT NULL,           -- JSON: all that determines the results
    facts TEXT NOT NULL,            -- JSON: versions, task, first start, number of problems, what was spent
    searches INTEGER NOT NULL,      -- how many it holds, failed ones included
    failed INTEGER NOT NULL,
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
    critic_tokens INTEGER NOT NULL,
    critic_prompt_tokens INTEGER NOT NULL,
    unread_verdicts INTEGER NOT NULL,
    grader_tokens INTEGER NOT NULL,
    grader_prompt_tokens INTEGER NOT NULL,
    unrecorded INTEGER NOT NULL,    -- messages asked for beyond those of a recorded run
    seconds REAL NOT NULL,          -- wall clock, like ``finished``: not part of the result
    arms TEXT NOT NULL,             -- JSON: what each arm contributed, as lists of the fields of search.ArmUsage
    finished TEXT NOT NULL,
    metadata TEXT,                  -- JSON: the problem's
    candidates INTEGER NOT NULL,    -- how many were ranked
    hit_rank INTEGER,               -- rank of the first that is correct
    curve TEXT NOT NULL,            -- JSON: tokens spent at each change of the answer, and whether that is correct
    content BLOB NOT NULL,          -- digest of its rows in nodes, candidates, moments and requests
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
    arm TEXT,                       -- the model that wrote the message; NULL for a policy with one model
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
CREATE TABLE gradings (
    grading TEXT PRIMARY KEY,       -- digest of identity
    label TEXT NOT NULL,
    identity TEXT NOT NULL,         -- JSON: the grader and its references
    made TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE grades (
    search INTEGER NOT NULL REFERENCES searches,
    grading TEXT NOT NULL REFERENCES gradings,
    nodes TEXT NOT NULL,            -- JSON: node, answer, correct and reason; the chosen candidate's first
    checksum BLOB NOT NULL,         -- digest of the row
    PRIMARY KEY (search, grading)
) WITHOUT ROWID;
CREATE TABLE requests (             -- what programs asked for the messages of chosen paths
    search INTEGER NOT NULL REFERENCES searches,
    node INTEGER NOT NULL,          -- the reply
    messages TEXT NOT NULL,         -- JSON: role and id of the text of each message
    PRIMARY KEY (search, node)
) WITHOUT ROWID;
"""
CONTENT = {"nodes": "node", "candidates": "rank", "moments": "step", "requests": "node"}
"""The tables with a search's content, in digest order, and the sort column of each."""


class Damage(Exception):
    """A stored row is corrupt: it does not match its checksum, or cannot be read."""


def digest(*parts: str) -> bytes:
    """Return a 16-byte digest of texts, the same on every machine."""
    state = blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        state.update(f"{len(data)}|".encode() + data)
    return state.digest()


Content = list[list[tuple[Any, ...]]]
"""A search's rows in each table of `CONTENT`."""


def checksum(rows: tuple[Any, ...] | Content) -> bytes:
    """Return the digest of rows (values and types) as returned by SQLite."""
    # Version 2 has neither references nor interned texts, so equal rows have equal bytes.
    return blake2b(marshal.dumps(rows, 2), digest_size=16).digest()


def contents_of(connection: sqlite3.Connection, searches: Sequence[int]) -> list[Content]:
    """Return the content of several searches, in their order."""
    marks = ", ".join("?" * len(searches))
    found: dict[int, Content] = {search: [[] for _ in CONTENT] for search in searches}
    for place, (table, order) in enumerate(CONTENT.items()):
        query = f"SELECT * FROM {table} WHERE search IN ({marks}) ORDER BY search, {order}"
        for search, rows in groupby(connection.execute(query, searches), itemgetter(0)):
            found[search][place] = list(rows)
    return list(found.values())


@cache
def row_checksum(table: str) -> str:
    """Return the SQL expression of a row's checksum, which applies `checksum` to the other columns."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(TABLES)
        names = [column[0] for column in connection.execute(f"SELECT * FROM {table}").description]
    return f"checksum({', '.join(names[:-1])})"


def seal(connection: sqlite3.Connection, table: str, column: str, key: int | str) -> None:
    """Write the checksum of a row; call it after writing the other columns."""
    connection.execute(f"UPDATE {table} SET checksum = {row_checksum(table)} WHERE {column} = ?", (key,))


FORMAT = Format(
    name="store",
    application=0x4D415347,
    schema=10,
    tables=TABLES,
    error=StoreError,
    origin="a run with --store FILE or store=FILE writes one",
    functions={"checksum": lambda *row: checksum(row)},
)


explained = FORMAT.explained
