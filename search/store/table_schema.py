"""The tables of a store file, and the checksums of their rows."""

from __future__ import annotations

import marshal
import re
from hashlib import blake2b, sha256
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
CREATE TABLE searches (
    id INTEGER PRIMARY KEY,         -- digest of run and problem
    run TEXT NOT NULL REFERENCES runs,
    problem TEXT NOT NULL,
    correct INTEGER,                -- NULL if not known
    candidates INTEGER NOT NULL,    -- how many were ranked
    hit_rank INTEGER,               -- rank of the first that is correct
    agent_calls INTEGER NOT NULL,
    generated_tokens INTEGER NOT NULL,
    reward_calls INTEGER NOT NULL,
    reward_hits INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    dropped_tokens INTEGER NOT NULL,
    reasoning_only INTEGER NOT NULL,
    critic_tokens INTEGER NOT NULL,
    critic_prompt_tokens INTEGER NOT NULL,
    unread_verdicts INTEGER NOT NULL,
    grader_tokens INTEGER NOT NULL,
    grader_prompt_tokens INTEGER NOT NULL,
    unrecorded INTEGER NOT NULL,    -- messages asked for beyond those of a recorded run
    seconds REAL NOT NULL,          -- wall clock, like ``finished``: not part of the result
    finished REAL NOT NULL,         -- the end, in Unix time
    stopped TEXT,                   -- reason for stopping early
    error TEXT,
    tags TEXT NOT NULL,             -- JSON: the usage by tag, as lists of the fields of search.TagUsage
    curve TEXT NOT NULL,            -- JSON: tokens spent at each change of the answer, and whether that is correct
    scored INTEGER NOT NULL,        -- whether a state of the tree has a value
    kind TEXT NOT NULL,             -- of the problem, like the following
    question TEXT NOT NULL,
    reference TEXT NOT NULL,
    metadata TEXT NOT NULL,         -- JSON
    answer TEXT,
    content BLOB NOT NULL,          -- digest of the document
    checksum BLOB NOT NULL          -- digest of the columns before
);
CREATE INDEX searches_of_run ON searches (run, problem);
CREATE TABLE documents (            -- apart from the rows, which tables read without the trees
    search INTEGER PRIMARY KEY REFERENCES searches,
    document BLOB NOT NULL          -- zlib-compressed JSON: tree, candidates, curve and requests
);
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
"""


_TYPES = {"INTEGER": int, "REAL": float, "TEXT": str, "BLOB": bytes}

ROW_TYPES = {
    name: frozenset((_TYPES[kind],) if required else (_TYPES[kind], type(None)))
    for name, kind, required in re.findall(
        r"^    (\w+) ([A-Z]+)( NOT NULL| PRIMARY KEY)?",
        TABLES.partition("TABLE searches (")[2].partition("\n)")[0],
        re.MULTILINE,
    )
}
"""The columns of ``searches``, with the types of their values; the last one is the checksum of the others."""

ROW = tuple(ROW_TYPES)

CHECKSUM = f"checksum({', '.join(ROW[:-1])})"
"""The SQL expression of the checksum of a row of ``searches``."""


class Damage(Exception):
    """A stored row is corrupt: it does not match its checksum, or cannot be read."""


def digest(*parts: str) -> bytes:
    """Return a 16-byte digest of texts, the same on every machine."""
    state = blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        state.update(f"{len(data)}|".encode() + data)
    return state.digest()


def checksum(*row: Any) -> bytes:
    """Return the digest of a row's values and types as returned by SQLite."""
    # Version 2 has neither references nor interned texts, so equal rows have equal bytes. Processors compute SHA-256.
    return sha256(marshal.dumps(row, 2)).digest()[:16]


def as_text(text: str) -> str:
    """Return a text that SQLite can store: each lone surrogate is written as `ESCAPE` and four hexadecimal digits."""
    return _UNSTORABLE.sub(lambda found: f"{ESCAPE}{ord(found[0]):04x}", text)


def from_text(stored: str) -> str:
    """Return the text that `as_text` wrote. Raises `ValueError`, or `TypeError` if the value is not a text."""
    return _STORED.sub(lambda found: chr(int(found[1], 16)), stored) if ESCAPE in stored else stored


ESCAPE = "\x1a"
_UNSTORABLE = re.compile(f"[\ud800-\udfff{ESCAPE}]")
_STORED = re.compile(f"{ESCAPE}([0-9a-f]{{4}})")

FORMAT = Format(
    name="store",
    application=0x4D415347,
    schema=15,
    tables=TABLES,
    error=StoreError,
    origin="a run with --store FILE or store=FILE writes one",
    functions={"checksum": checksum},
)


explained = FORMAT.explained
