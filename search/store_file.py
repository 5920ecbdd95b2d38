"""The store's file: its schema, how it is opened and locked, and what its faults mean."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import IO

from mas_gym.errors import StoreError

SCHEMA = 1
APPLICATION = 0x4D415347
"""SQLite's application id of our files, ``MASG``."""

BUSY_SECONDS = 30.0

TABLES = """
CREATE TABLE runs (
    run TEXT PRIMARY KEY,           -- fingerprint of config
    name TEXT UNIQUE,               -- given by the user, or NULL
    config TEXT NOT NULL,           -- JSON: all that determines the results
    facts TEXT NOT NULL             -- JSON: versions, task, time of the first start, problems wanted, money
) WITHOUT ROWID;
CREATE TABLE texts (
    id BLOB PRIMARY KEY,            -- fingerprint of the text
    text NOT NULL                   -- TEXT; BLOB (UTF-8 with surrogates passed) where TEXT cannot hold it
) WITHOUT ROWID;
CREATE TABLE searches (
    id INTEGER PRIMARY KEY,         -- fingerprint of run and problem
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
    finished TEXT NOT NULL
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
"""
PARTS = ("nodes", "candidates", "moments")


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into ours.

    Raises:
        StoreError: With the reason and the remedy. What was committed before is safe.
    """
    try:
        yield
    except sqlite3.Error as error:
        text = str(error)
        if "full" in text:
            remedy = "the disk is full; free some space and run the same command again: finished searches are kept"
        elif "locked" in text or "busy" in text:
            remedy = f"another process held it for over {BUSY_SECONDS:g} seconds; try again when it is done"
        elif "readonly" in text or "unable to open" in text:
            remedy = "check that its folder exists and that both may be written"
        elif "not a database" in text or "malformed" in text:
            remedy = "it is damaged or no SQLite file; use another path, or recover it with sqlite3's .recover"
        else:
            remedy = "use another path if this goes on"
        raise StoreError(f"store {path}: {text}; {remedy}") from error


def connect(path: Path, *, create: bool) -> sqlite3.Connection:
    """Open a store's file, making its tables if it is new.

    Raises:
        StoreError: It does not exist (unless it may be created), is no store, or has another schema.
    """
    if not create and not path.is_file():
        raise StoreError(f"store {path}: no such file; make one with search.run(..., store={str(path)!r})")
    with explained(path):
        connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        with explained(path):
            _prepare(connection, path, create)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path, create: bool) -> None:
    # In one transaction: another process may be making the tables between two looks.
    connection.execute("BEGIN")
    ready = _check(connection, path)
    connection.execute("COMMIT")
    if not ready:
        if not create:
            raise StoreError(f"store {path}: an empty file; make a store with search.run(..., store={str(path)!r})")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("BEGIN IMMEDIATE")
        # Another process may have made the tables while this one waited.
        if not _check(connection, path):
            for statement in TABLES.split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id={APPLICATION}")
            connection.execute(f"PRAGMA user_version={SCHEMA}")
        connection.execute("COMMIT")
    # In WAL mode this survives the death of the process at any moment; only a power cut can lose the last commits.
    connection.execute("PRAGMA synchronous=NORMAL")


def _check(connection: sqlite3.Connection, path: Path) -> bool:
    """Return whether the tables are there."""
    [application] = connection.execute("PRAGMA application_id").fetchone()
    [version] = connection.execute("PRAGMA user_version").fetchone()
    [tables] = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application != APPLICATION:
        if tables:
            raise StoreError(f"store {path}: an SQLite file of another program; use another path")
        return False
    if version != SCHEMA:
        raise StoreError(
            f"store {path}: expected schema {SCHEMA}, got {version}; read it with the version that wrote it, "
            "or start a new store"
        )
    return True


def fingerprint(*parts: str) -> bytes:
    """Return 16 bytes that tell texts apart, equal on every machine."""
    state = blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        state.update(f"{len(data)}|".encode() + data)
    return state.digest()


class RunLock:
    """Keeps two processes from writing the same run; the system releases it when its process dies."""

    def __init__(self, path: Path, run: str) -> None:
        """Take the lock.

        Raises:
            StoreError: Another process, or another run of this one, has it.
        """
        # One byte per run in a file beside the store: closing a second handle of the store itself
        # would drop SQLite's own locks.
        self._file: IO[bytes] = open(f"{path}-lock", "a+b")  # noqa: SIM115 - held until close
        self._offset = int(run[:12], 16)
        self._key = (os.path.realpath(path), run)
        if self._key in _HELD or not _lock(self._file, self._offset):
            self._file.close()
            raise StoreError(
                f"store {path}: another process is writing this run (the same planner, seed and settings); "
                "wait for it, or use another store"
            )
        _HELD.add(self._key)

    def close(self) -> None:
        """Let the lock go."""
        if not self._file.closed:
            _HELD.discard(self._key)
            self._file.close()


# The system's locks hold between processes; within this one, this set does.
_HELD: set[tuple[str, str]] = set()


def _lock(file: IO[bytes], offset: int) -> bool:
    try:
        if os.name == "nt":
            import msvcrt

            file.seek(offset)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
        else:
            import fcntl

            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
    except OSError:
        return False
    return True
