"""SQLite files of MAS-Gym: create, recognize and open them, and explain their errors."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mas_gym.errors import MASGymError

BUSY_SECONDS = 30.0
_CACHE_KIB = 16_384


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
        name: The kind of file in error messages, such as ``"store"``.
        application: SQLite's application id for such files.
        schema: The current schema version, SQLite's user version.
        tables: The SQL statements that create the tables, each terminated by ``;`` and a line break.
        error: The error class for every problem with a file.
        origin: How such a file is created, for the error about a missing file.
        functions: Deterministic SQL functions with any number of arguments, by name.
    """

    name: str
    application: int
    schema: int
    tables: str
    error: type[MASGymError]
    origin: str
    functions: Mapping[str, Callable[..., str | bytes | float | None]] = field(default_factory=dict)

    @contextmanager
    def explained(self, path: Path) -> Iterator[None]:
        """Convert SQLite's errors to `error`, with the reason and a fix; earlier commits are kept."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError, OverflowError) as error:
            raise self.error(f"{self.name} {path}: {error}; {_remedy(error)}") from error

    def connect(self, path: Path, *, create: bool) -> sqlite3.Connection:
        """Open a file in autocommit mode; without ``create``, the file must exist, and may be in a read-only folder.

        Raises:
            MASGymError: The file is missing, is of another kind or schema, or cannot be opened. The class is `error`.
        """
        if not create and not path.is_file():
            raise self.error(f"{self.name} {path}: no such file; {self.origin}")
        with self.explained(path):
            try:
                return self._opened(str(path), path, create)
            except sqlite3.OperationalError as error:
                if create or error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
                    raise
                log = path.with_name(f"{path.name}-wal")
                if log.is_file() and log.stat().st_size:
                    raise self.error(
                        f"{self.name} {path}: its most recent data is in {log.name}, which can be read only in a "
                        "writable folder; copy both files to a writable folder"
                    ) from error
                # In a read-only folder, SQLite cannot create the files that it needs to share this one.
                return self._opened(f"{path.absolute().as_uri()}?mode=ro&immutable=1", path, create)

    def _opened(self, address: str, path: Path, create: bool) -> sqlite3.Connection:
        # SQLite serializes calls itself; a store may be opened on one thread and read on another.
        connection = sqlite3.connect(
            address, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False, uri=address != str(path)
        )
        try:
            if not create:
                # A run's searches lie on pages all over the file, and each is read several times.
                connection.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
            # Once, because a new function makes SQLite prepare every statement again.
            for name, function in self.functions.items():
                connection.create_function(name, -1, function, deterministic=True)
            self._prepare(connection, path, create)
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: sqlite3.Connection, path: Path, create: bool) -> None:
        connection.execute("PRAGMA trusted_schema=OFF")
        # One transaction: another process may be creating the tables between two reads.
        with transaction(connection, "DEFERRED"):
            version = self._version(connection, path)
        if version is None and not create:
            raise self.error(f"{self.name} {path}: expected a database, got an empty file; {self.origin}")
        if version is None:
            _write_ahead(connection)
            with transaction(connection):
                # Read the version again: another process may have created the tables while we waited for the lock.
                if self._version(connection, path) is None:
                    for statement in self.tables.split(";\n"):
                        connection.execute(statement)
                connection.execute(f"PRAGMA application_id={self.application}")
                connection.execute(f"PRAGMA user_version={self.schema}")
        # In WAL mode this survives a crash of the process at any time; only a power cut can lose the last commits.
        connection.execute("PRAGMA synchronous=NORMAL")

    def _version(self, connection: sqlite3.Connection, path: Path) -> int | None:
        """Return the file's schema version; None if the file has no tables yet."""
        application, version = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
        )
        [tables] = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        strange = connection.execute(_STRANGE).fetchone()
        if application != self.application:
            if tables:
                raise self.error(
                    f"{self.name} {path}: expected a MAS-Gym database, got one from another program; use another path"
                )
            return None
        if strange is not None:
            raise self.error(
                f"{self.name} {path}: expected plain tables, got {strange[0]!a}, which would run as code when the "
                "file is read; use a file from a source that you trust"
            )
        if version != self.schema:
            raise self.error(
                f"{self.name} {path}: expected schema {self.schema}, got {version}; read it with the MAS-Gym "
                "version that wrote it, or use another path"
            )
        return int(version)


_STRANGE = """
SELECT name FROM sqlite_master WHERE type NOT IN ('table', 'index') OR sql LIKE 'CREATE VIRTUAL%'
UNION ALL
SELECT t.name || '.' || c.name FROM sqlite_master t, pragma_table_xinfo(t.name) c WHERE t.type = 'table' AND c.hidden
"""
"""Views, triggers, virtual tables and computed columns."""


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Switch a new file to WAL mode, and wait while another process creates it, because SQLite does not wait."""
    end = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
            time.sleep(0.01)


@contextmanager
def transaction(connection: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    """Commit at the end; roll back on any error, Ctrl-C included."""
    try:
        # Inside the try block, because Ctrl-C during the wait for the lock is raised directly after this call.
        connection.execute(f"BEGIN {kind}")
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def copy_database(source: Path, target: Path) -> None:
    """Copy a database, including what another process has just written to it. Raises `sqlite3.Error`."""
    with closing(sqlite3.connect(source)) as read, closing(sqlite3.connect(target)) as written:
        read.backup(written)


def is_damage(error: Exception) -> bool:
    """Whether an SQLite error means that the file is damaged, rather than locked, read-only or on a full disk."""
    text = str(error)
    damaged = ("malformed", "not a database", "Could not decode", "no such", "disk I/O", "corrupt", "too big")
    return isinstance(error, UnicodeDecodeError) or any(sign in text for sign in damaged)


def _remedy(error: Exception) -> str:
    text = str(error)
    if isinstance(error, OverflowError):
        return "a number is too large to be stored"
    if "full" in text:
        return "the disk is full; free some space and run the same command again: finished searches are kept"
    if "locked" in text or "busy" in text:
        return f"another process locked it for over {BUSY_SECONDS:g} seconds; try again when that process has ended"
    if "readonly" in text or "unable to open" in text:
        return "check that its folder exists and that both are writable"
    if is_damage(error):
        return "it is damaged or not an SQLite file; use another path, or recover it with sqlite3's .recover"
    return "if this persists, use another path"
