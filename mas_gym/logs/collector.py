"""Parts of transcripts that may be anywhere in the files, kept in a temporary file until all files are read."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing

from mas_gym.internal.json_types import JSONObject


class Collector:
    """Groups parts by key."""

    def __init__(self) -> None:
        """Open a temporary file, which is deleted when it is closed."""
        self._connection = sqlite3.connect("")
        self._connection.execute("CREATE TABLE parts (key TEXT, place TEXT, part TEXT)")

    def add(self, place: str, parts: Iterable[tuple[str, object]]) -> None:
        """Store the parts of a row, each with its key."""
        lines = [(key, place, json.dumps(part, default=str)) for key, part in parts]
        self._connection.executemany("INSERT INTO parts VALUES (?, ?, ?)", lines)

    def groups(self) -> Iterator[tuple[str, str, list[JSONObject]]]:
        """Yield each key with the place of its first part and its parts, in order of appearance; close the file."""
        with closing(self._connection) as connection:
            connection.execute("CREATE INDEX of_key ON parts (key)")
            keys = connection.execute("SELECT key, min(rowid) AS first FROM parts GROUP BY key ORDER BY first")
            for key, _ in keys:
                rows = connection.execute(
                    "SELECT place, part FROM parts WHERE key = ? ORDER BY rowid", (key,)
                ).fetchall()
                yield rows[0][0], key, [json.loads(part) for _, part in rows]
